"""`calculet-perf faults` on real fleets: what is injected fires, and what must come of it does."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import BIN, Packages

from calculet_core.shell.journal import read_journal
from calculet_perf.faults import parse_catalogue
from calculet_perf.recovery import history

NAMES = [one.id for one in parse_catalogue((files("calculet_perf") / "scenarios" / "faults.yaml").read_bytes(), "faults").scenarios]
AT_A_TIME = 6
"""Most of a scenario is waiting: for starts, resets, heartbeats."""


def run(packages: Packages, out: Path, *arguments: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    package, second = packages.get("sim-batch", "--step-ms", "5"), packages.get("sim-b1", "--step-ms", "1", "--lanes", "16")
    where = ["--package", str(package), "--second", str(second), "--trust", str(packages.key.with_suffix(".pub")), "--out", str(out)]
    return subprocess.run([str(BIN / "calculet-perf"), "faults", *arguments, *where], capture_output=True, text=True, timeout=timeout_s)


def outcome(out: Path) -> dict[str, Any]:
    return json.loads((out / "faults.jsonl").read_text())


@pytest.fixture(scope="module")
def all_of_them(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]:
    """The whole list, some fleets at a time; scenarios wait for conditions, so that it takes as long as the machine needs."""
    out = tmp_path_factory.mktemp("faults")
    done = run(packages, out, "--jobs", str(AT_A_TIME), timeout_s=580)
    lines = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    return done, {line["scenario"]: line for line in lines}, out


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_ends_as_the_design_says(name: str, all_of_them: Any) -> None:
    done, found, _ = all_of_them
    assert name in found, done.stdout + done.stderr
    one = found[name]
    assert (one["valid"], one["as_expected"], one["fired"] >= one["planned"]) == (True, True, True), one
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_swaps_are_counted_from_the_journals_of_a_fleet(all_of_them: Any) -> None:
    """What M4 is judged by: the words are those that a supervisor really writes."""
    folder = all_of_them[2] / "load_while_ready" / "log"
    events = sorted((event for path in folder.glob("*.jsonl") for event in read_journal(path)), key=lambda event: event.t)
    found = history(events, None, None)
    assert (found.swaps.loads, found.swaps.rollbacks, found.swaps.refused, found.swaps.unfinished) == (1, 1, 0, [])
    assert (found.broken, found.deaths) == ([], [])
    assert {reset.kind for reset in found.resets} == {"reconfigure"}, "each board was configured anew, twice"


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
