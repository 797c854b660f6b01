"""A stage that swaps the model of a real fleet on simulated boards itself (M4): what it drives, writes, refuses and is judged by."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders_fleet import BIN, Fleet, Packages, until
from builders_perf import MANIFEST
from builders_swap import held

from calculet_core.shell.packages import read_package
from calculet_perf.shell.run_dir import RunReader
from calculet_perf.swapping import SwapCycle, driven

PASS, CORRECTNESS, INVALID, INFRASTRUCTURE = 0, 1, 2, 3
LOOSE = {"rate_tolerance": 0.9, "burst_spread_ms": 5000, "idle_s": 0.1, "gap_s": 0.01, "golden": {"prompts": [3, 5], "output": 4}}


@pytest.fixture(scope="module")
def home(packages: Packages) -> Path:
    return packages.get("sim-batch", "--step-ms", "1", "--context", "512")


@pytest.fixture(scope="module")
def other(packages: Packages) -> Path:
    """The same model, another artifact."""
    return packages.get("sim-batch", "--step-ms", "2", "--context", "512")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages, home: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("swaps") / "fleet", home, packages.key.with_suffix(".pub")) as fleet:
        yield fleet


def perf(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / "calculet-perf"), *map(str, arguments)], capture_output=True, text=True, timeout=170)


def manifest(folder: Path, fleet: Fleet, other: Path, **swaps: Any) -> Path:
    (folder / "matrix.yaml").write_text(yaml.safe_dump({"schema": "calculet-perf-matrix/v1", "name": "test", "cells": [
        {"kind": "single", "prompts": [4], "outputs": [2], "requests": 3}], **LOOSE}))  # fmt: skip
    fields = json.loads(json.dumps(MANIFEST))
    fields |= {"warmup_requests": 1, "timeout_s": 60, "server": {"url": f"http://127.0.0.1:{fleet.port}"}}
    fields["model"] = {"alias": "toy", "generation": None, "calbin_sha256": None}
    fields["software"] = dict.fromkeys(fields["software"])
    fields["hardware"] = dict.fromkeys(fields["hardware"])
    part = {"allow": True, "other": str(other), "cycles": 4, "unload_every": 3, **swaps}
    fields["fleet"] = {"config": str(fleet.config), "swaps": part}
    path = folder / "m.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def soak_options(out: Path, seconds: int) -> list[str]:
    load = ["--stage", "candidate", "--target-qps", "6", "--idle", "0.1", "--warmups", "1"]
    return [*load, "--seconds", str(seconds), "--out", str(out)]


def cycles(out: Path) -> list[SwapCycle]:
    return list(RunReader(out).swaps())


def test_a_stage_swaps_the_model_under_load_and_is_judged_by_it(fleet: Fleet, home: Path, other: Path, tmp_path: Path) -> None:
    first, second, out = read_package(home).digest, read_package(other).digest, tmp_path / "run"
    written = manifest(tmp_path, fleet, other)
    planned = perf("soak", written, *soak_options(out, 8), "--dry-run")
    assert planned.returncode == PASS, planned.stderr
    assert "4 cycles, one each 2 s (2 x swap, 1 x rollback, 1 x unload_load)" in planned.stdout
    assert "load/unload cycles" in planned.stdout
    assert not out.exists() and set(held(fleet).values()) == {first}, "a dry run changes nothing"
    done = perf("soak", written, *soak_options(out, 8))
    assert done.returncode == PASS, done.stdout + done.stderr
    assert set(held(fleet).values()) == {first}, "left as it was found"
    found = cycles(out)
    assert [cycle.why for cycle in found] == [None] * len(found)
    assert [cycle.kind for cycle in found[:3]] == ["swap", "rollback", "unload_load"]
    assert [cycle.under_load for cycle in found[:3]] == [True, True, False]
    assert [cycle.to_digest for cycle in found] == [(second, first)[number % 2] for number in range(len(found))]
    for cycle in found:
        assert {board.board for board in cycle.boards} == {"board0", "board1"}
        assert all((board.generation_after or 0) > (board.generation_before or 0) for board in cycle.boards)
        assert all((board.device_bytes_empty is not None) is (cycle.kind == "unload_load") for board in cycle.boards)
    summed = driven(found)
    assert summed is not None and (summed.rollbacks, summed.failed, summed.mixed) == (1, [], [])
    assert {item.board for item in summed.residue} == {"board0", "board1"}
    records = [record for record in RunReader(out).requests() if not record.quality.warmup]
    assert [record.result.error_code for record in records if not record.ok] == [], "nobody's request was lost to a swap"
    assert "swap" in {sample.phase for sample in RunReader(out).device()}
    cut = {item.what: (item.asked, item.done) for item in RunReader(out).info.shortened}
    assert cut["load/unload cycles"] == (100, 4)
    assert cut["stage candidate"][0] == 28800

    (tmp_path / "claim.yaml").write_text("schema: calculet-claim/v1\nclaim: multi_model\nsla: {reject_rate: 0.1}\n")
    judged = perf("report", out, "--claim-file", tmp_path / "claim.yaml", "--journal", fleet.folder / "log", "--no-pdf")
    report = json.loads((out / "report.json").read_text())
    checks = {check["check"]: check for check in report["verdict"]["checks"]}
    assert (judged.returncode, report["verdict"]["milestone"]) == (INFRASTRUCTURE, None), judged.stdout
    assert checks["model_swaps"]["result"] == "insufficient_evidence" and "100, 1 and 2 are needed" in checks["model_swaps"]["why"]
    assert checks["stage_length"]["result"] == "insufficient_evidence"
    assert (checks["promises"]["result"], checks["no_crosstalk"]["result"]) == ("pass", "pass"), checks
    assert "shortened: load/unload cycles, 4 of 100 cycles" in (out / "report.html").read_text()


def test_ctrl_c_in_a_swap_leaves_the_fleet_whole_and_resume_brings_it_home(fleet: Fleet, home: Path, other: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    written = manifest(tmp_path, fleet, other, cycles=2, unload_every=0, rollback_every=0)
    command = [str(BIN / "calculet-perf"), "soak", str(written), *soak_options(out, 5)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: read_package(other).digest in held(fleet).values(), "a board that has moved")
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == INFRASTRUCTURE, stderr
    assert "--resume" in stderr
    done = perf("soak", written, *soak_options(out, 5), "--resume")
    assert done.returncode == PASS, done.stdout + done.stderr
    assert set(held(fleet).values()) == {read_package(home).digest}
    whole = [cycle for cycle in cycles(out) if not cycle.interrupted]
    assert whole and [cycle.why for cycle in whole] == [None] * len(whole)
    assert [cycle.number for cycle in whole] == list(range(len(whole))), "what was interrupted was done again"


def test_without_the_switch_nothing_is_swapped(fleet: Fleet, home: Path, other: Path, tmp_path: Path) -> None:
    rollouts = json.loads(fleet.cli("rollouts", "--json").stdout)
    done = perf("soak", manifest(tmp_path, fleet, other, allow=False), *soak_options(tmp_path / "run", 1))
    assert done.returncode == PASS, done.stderr
    assert not (tmp_path / "run" / "swaps.jsonl").exists()
    assert json.loads(fleet.cli("rollouts", "--json").stdout) == rollouts


def test_what_cannot_be_swapped_is_refused_by_name_before_anything_is_done(fleet: Fleet, home: Path, other: Path, tmp_path: Path) -> None:
    gone = Fleet(tmp_path / "gone", home, fleet.folder / "no.pub")
    written = manifest(tmp_path, fleet, other)
    fields = yaml.safe_load(written.read_text())

    def refused(**part: Any) -> tuple[int, str]:
        changed = json.loads(json.dumps(fields))
        changed["fleet"] |= {key: value for key, value in part.items() if key == "config"}
        changed["fleet"]["swaps"] |= {key: value for key, value in part.items() if key != "config"}
        written.write_text(yaml.safe_dump(changed))
        done = perf("soak", written, *soak_options(tmp_path / "run", 2))
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    for part, code, words in (
        ({"other": str(tmp_path / "nowhere")}, INVALID, "$.fleet.swaps.other: "),
        ({"other": str(home)}, INVALID, "is what toy serves already"),
        ({"config": "no.yaml"}, INVALID, "$.fleet.config: "),
        ({"config": str(gone.config)}, INFRASTRUCTURE, "cannot be asked"),
        ({"allow": "yes"}, INVALID, "$.fleet.swaps.allow"),
    ):
        found = refused(**part)
        assert (found[0], words in found[1]) == (code, True), found
    assert not (tmp_path / "run").exists()
