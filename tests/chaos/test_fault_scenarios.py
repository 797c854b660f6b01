"""`calculet-perf faults` on real fleets: what is injected fires, and what must come of it does."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import BIN, Packages

from calculet_perf.faults import parse_catalogue

NAMES = [one.id for one in parse_catalogue((files("calculet_perf") / "scenarios" / "faults.yaml").read_bytes(), "faults").scenarios]
QUICK = ("submit_busy", "ccu_exception")
"""The others are long: all of them take some minutes."""


def run(packages: Packages, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = packages.get("sim-batch", "--step-ms", "5")
    where = ["--package", str(package), "--trust", str(packages.key.with_suffix(".pub")), "--out", str(out)]
    return subprocess.run([str(BIN / "calculet-perf"), "faults", *arguments, *where], capture_output=True, text=True, timeout=110)


def outcome(out: Path) -> dict[str, Any]:
    return json.loads((out / "faults.jsonl").read_text())


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_a_scenario_ends_as_the_design_says(packages: Packages, tmp_path: Path, name: str) -> None:
    done = run(packages, tmp_path, name)
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcome(tmp_path)
    assert (found["scenario"], found["valid"], found["as_expected"], found["fired"] >= found["planned"]) == (name, True, True, True)


def test_a_fault_that_never_fires_makes_its_scenario_invalid(packages: Packages, tmp_path: Path) -> None:
    catalogue = tmp_path / "mine.yaml"
    scenario = {
        "id": "never", "clause": "12.2", "injects": "nothing", "expected": "nothing", "recover_s": 3,
        "inject": [{"fault": "busy", "at": [100_000]}], "load": {"count": 2},
    }  # fmt: skip
    catalogue.write_text(json.dumps({"schema": "calculet-perf-faults/v1", "scenarios": [scenario]}))
    done = run(packages, tmp_path, "--catalogue", str(catalogue), "--json")
    assert done.returncode == 3, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["counts"] == {"as_expected": 0, "wrong": 0, "invalid": 1}
    assert "1 firings were planned, 0 fired" in answer["outcomes"][0]["reasons"][0] and "INVALID" in done.stderr
    assert outcome(tmp_path)["valid"] is False


def test_an_unknown_scenario_is_named(packages: Packages, tmp_path: Path) -> None:
    done = run(packages, tmp_path, "no_such_thing")
    assert done.returncode == 2
    assert "there is no scenario no_such_thing" in done.stderr
