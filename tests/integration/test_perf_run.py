"""`calculet-perf run` from manifest to folder: against a scripted foreign server, a real fleet, and servers that are gone or wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders_fleet import BIN, Fleet, Packages, free_port, until
from builders_mock_server import a_mock_server
from builders_perf import MANIFEST

from calculet_perf.joins import StepJoin
from calculet_perf.records import RequestRecord
from calculet_perf.runinfo import RunInfo
from calculet_perf.shell.loading import read_stage
from calculet_perf.shell.run_dir import RunReader

PASS, CORRECTNESS, INVALID, INFRASTRUCTURE = 0, 1, 2, 3
CELLS = [
    {"kind": "single", "prompts": [4], "outputs": [1, 6], "stream": [True, False], "requests": 3},
    {"kind": "closed", "concurrency": [3], "prompt": 4, "output": 5, "requests": 6},
    {"kind": "poisson", "qps": [20], "prompt": 4, "output": 3, "requests": 10},
    {"kind": "burst", "sizes": [3], "prompt": 4, "output": 3, "requests": 3},
]
LOOSE = {"rate_tolerance": 0.5, "burst_spread_ms": 5000, "idle_s": 0.1, "gap_s": 0.01, "golden": {"prompts": [3, 5], "output": 4}}
"""A loaded machine may be late; what it does is recorded all the same."""


def perf(*arguments: str | Path, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "calculet-perf"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def files(folder: Path, url: str, cells: list[dict[str, Any]] = CELLS, **changes: Any) -> Path:
    """A manifest and its matrix."""
    matrix = {"schema": "calculet-perf-matrix/v1", "name": "test", "cells": cells, **LOOSE, **changes.pop("matrix", {})}
    (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix))
    manifest = json.loads(json.dumps(MANIFEST))
    manifest["server"] = {"url": url, **changes.pop("server", {})}
    manifest |= {"warmup_requests": 2, "timeout_s": 30, **changes}
    (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    return folder / "manifest.yaml"


def records(out: Path, *, warmup: bool = False) -> list[RequestRecord]:
    return [record for record in RunReader(out).requests() if record.quality.warmup == warmup]


def info_of(out: Path) -> RunInfo:
    return RunReader(out).info


# ---------------------------------------------------------------- a foreign server, end to end
def test_a_foreign_server_is_measured_and_what_it_does_not_tell_is_null(tmp_path: Path) -> None:
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url)
        done = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest")
    assert done.returncode == PASS, done.stderr
    info, found = info_of(tmp_path / "run"), records(tmp_path / "run")
    assert (info.status, info.foreign, info.context_tokens, info.injector_armed) == ("complete", True, None, None)
    assert [one.passed for one in info.golden] == [True, True]
    assert info.notes == ["the server tells nothing of its boards: device.jsonl is empty"]
    assert {cut.what for cut in info.shortened} >= {
        "idle sampling",
        "warm-up of each shape",
        "samples of burst/b3/p4/o3/greedy/stream",
    }
    assert len(found) == 4 * 3 + 6 + 10 + 3
    assert all(record.ok and record.quality.clock_complete for record in found)
    for record in found:
        assert record.workload.prompt_tokens == 4
        assert record.workload.actual_output_tokens == record.workload.requested_output_tokens
        assert record.server_ms.queue is None
        assert record.model_generation is None
        assert (record.durations_ms.ttft is None) == (not record.workload.stream)
        several = (record.workload.actual_output_tokens or 0) > 1
        assert (record.durations_ms.tpot is not None) == (record.workload.stream and several)
    polled = [record for record in found if record.case.arrival == "poisson"]
    assert all(record.open_loop is not None and record.open_loop.send_delay_ms >= 0 for record in polled)
    assert [case.throttled for case in RunReader(tmp_path / "run").cases()] == [None] * 7
    assert not (tmp_path / "run" / "device.jsonl").exists()
    assert "prompt" not in (tmp_path / "run" / "requests.jsonl").read_text().replace("prompt_tokens", "")


def test_the_clock_of_records_is_that_of_the_server(tmp_path: Path) -> None:
    with a_mock_server(tmp_path, counts=True, gap_ms=5) as server:
        manifest = files(tmp_path, server.url, [{"kind": "single", "prompts": [4], "outputs": [8], "requests": 4}])
        done = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest", "--warmups", "0")
        sent = server.sent()
    assert done.returncode == PASS, done.stderr
    for record in records(tmp_path / "run"):
        writes = sent[record.request_id]["writes"]
        clock, chunks = record.client_ns, record.chunks
        assert chunks is not None
        assert (chunks.tokens, chunks.events, chunks.mismatch) == (8, 8, False)
        assert clock.first_token is not None and clock.last_token is not None and record.durations_ms.tpot is not None
        assert writes[0][0] < clock.first_token
        assert writes[-1][0] < clock.last_token
        server_tpot = (writes[-1][0] - writes[0][0]) / 7e6
        assert record.durations_ms.tpot == pytest.approx(server_tpot, abs=20), "as much as the machine is late"


# ---------------------------------------------------------------- exit codes
def test_a_server_that_is_not_there_is_infrastructure(tmp_path: Path) -> None:
    done = perf("run", files(tmp_path, f"http://127.0.0.1:{free_port()}"))
    assert done.returncode == INFRASTRUCTURE
    assert "the server cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_goes_away_ends_the_run_as_infrastructure(tmp_path: Path) -> None:
    cells = [{"kind": "closed", "concurrency": [2], "prompt": 4, "output": 400, "requests": 60}]
    with a_mock_server(tmp_path, gap_ms=1) as server:
        manifest = files(tmp_path, server.url, cells)
        command = [
            str(BIN / "calculet-perf"),
            "run",
            str(manifest),
            "--out",
            str(tmp_path / "run"),
            "--no-selftest",
            "--warmups",
            "0",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        until(lambda: len(server.log.read_text().splitlines()) > 10, "requests of the cell ended")
        server.stop()
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == INFRASTRUCTURE, stderr
    info = info_of(tmp_path / "run")
    assert (info.status, info.invalid[-1].code) == ("infrastructure_invalid", "unreachable")
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"software": {**MANIFEST["software"], "driver": "REQUIRED"}}, "$.software.driver: left at REQUIRED"),
        ({"matrix": "nowhere.yaml"}, "nowhere.yaml: No such file"),
        ({"server": {"url": "http://127.0.0.1:1", "api_key_env": "NO_SUCH_KEY"}}, "the environment has no NO_SUCH_KEY"),
        ({"purpose": 7}, "$.purpose"),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = files(tmp_path, "http://127.0.0.1:1")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    done = perf("run", path)
    assert done.returncode == INVALID
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_artifact_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    models = {"data": [{"id": "toy", "max_model_len": 99, "calculet": {"calbin_sha256": "b" * 64, "generations": {"board0": 42}}}]}
    with a_mock_server(tmp_path, models=models) as server:
        done = perf("run", files(tmp_path, server.url))
    assert done.returncode == INVALID
    assert "$.model.calbin_sha256: the manifest says aaaa" in done.stderr


def test_golden_that_fails_ends_the_run_before_anything_is_measured(tmp_path: Path) -> None:
    with a_mock_server(tmp_path, drift=True) as server:
        done = perf("run", files(tmp_path, server.url), "--out", tmp_path / "run", "--no-selftest")
    assert done.returncode == CORRECTNESS
    assert "golden failed before" in done.stderr
    assert info_of(tmp_path / "run").status == "golden_failed"
    assert records(tmp_path / "run") == []


def test_a_server_that_takes_no_token_ids_is_a_matter_of_the_matrix_and_not_a_wrong_answer(tmp_path: Path) -> None:
    cells = [{"kind": "single", "prompts": [4], "outputs": [4], "requests": 2}]
    with a_mock_server(tmp_path, text_only=True) as server:
        manifest = files(tmp_path, server.url, cells)
        for verb in (["run", manifest, "--out", tmp_path / "ids", "--no-selftest"], ["golden", manifest]):
            done = perf(*verb)
            assert done.returncode == INVALID, done.stderr
            assert "`corpus: {kind: text}` in the matrix" in done.stderr and "Traceback" not in done.stderr
        assert info_of(tmp_path / "ids").status == "configuration_invalid"
        manifest = files(tmp_path, server.url, cells, matrix={"corpus": {"kind": "text"}})
        assert perf("run", manifest, "--out", tmp_path / "text", "--no-selftest").returncode == PASS
        judged = perf("report", tmp_path / "text", "--no-pdf")
    assert judged.returncode == PASS, judged.stdout


def test_golden_is_recorded_and_checked_alone(tmp_path: Path) -> None:
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url)
        recorded = perf("golden", manifest, "--record", tmp_path / "golden.jsonl")
        assert recorded.returncode == PASS, recorded.stderr
        manifest = files(tmp_path, server.url, matrix={"golden": {"prompts": [3, 5], "output": 4, "file": "golden.jsonl"}})
        checked = perf("golden", manifest)
        assert (checked.returncode, "expectations from golden.jsonl" in checked.stdout) == (PASS, True)
    with a_mock_server(tmp_path, drift=True) as server:
        manifest = files(tmp_path, server.url, matrix={"golden": {"prompts": [3, 5], "output": 4, "file": "golden.jsonl"}})
        assert perf("golden", manifest).returncode == CORRECTNESS


# ---------------------------------------------------------------- interruption
def test_ctrl_c_keeps_what_is_done_and_resume_measures_the_rest(tmp_path: Path) -> None:
    cells = [{"kind": "single", "prompts": [4], "outputs": list(range(20, 28)), "requests": 4}]
    with a_mock_server(tmp_path, gap_ms=4) as server:
        manifest = files(tmp_path, server.url, cells)
        command = [
            str(BIN / "calculet-perf"),
            "run",
            str(manifest),
            "--out",
            str(tmp_path / "run"),
            "--no-selftest",
            "--warmups",
            "0",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        lines = tmp_path / "run" / "cases.jsonl"
        until(lambda: lines.exists() and len(lines.read_text().splitlines()) >= 2, "two cells done")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the client processes too
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == INFRASTRUCTURE, stderr
        assert "--resume" in stderr
        first = info_of(tmp_path / "run")
        assert (first.status, first.invalid[-1].code) == ("interrupted", "interrupted")
        again = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest", "--warmups", "0")
        assert again.returncode == INVALID
        assert "already holds a run" in again.stderr
        kept = {(case.case, case.start_ns) for case in RunReader(tmp_path / "run").cases()}
        done = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest", "--warmups", "0", "--resume")
    assert done.returncode == PASS, done.stderr
    info, cases = info_of(tmp_path / "run"), list(RunReader(tmp_path / "run").cases())
    assert (info.status, info.sessions, info.invalid) == ("complete", 2, [])
    assert len(cases) == 8
    assert kept <= {(case.case, case.start_ns) for case in cases}, "what was done was not measured again"
    per_cell = [record.case.id for record in records(tmp_path / "run")]
    assert {per_cell.count(case.case) for case in cases} == {4}, "and nothing is there twice"


def test_ctrl_c_during_the_self_test_is_an_interruption_too(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url, CELLS[:1])
        command = [str(BIN / "calculet-perf"), "run", str(manifest), "--out", str(out), "--warmups", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until(lambda: (out / "run.json").exists(), "the run has begun")
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == INFRASTRUCTURE, stderr
        assert "--resume" in stderr and "Traceback" not in stderr
        assert info_of(out).status == "interrupted"
        done = perf("run", manifest, "--out", out, "--no-selftest", "--warmups", "0", "--resume")
    assert done.returncode == PASS, done.stderr
    assert (info_of(out).status, info_of(out).invalid) == ("complete", [])


def test_a_run_of_another_plan_is_not_resumed(tmp_path: Path) -> None:
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url, CELLS[:1])
        assert perf("run", manifest, "--out", tmp_path / "run", "--no-selftest", "--only", "o1/").returncode == PASS
        done = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest", "--resume")
    assert done.returncode == INVALID
    assert "another plan" in done.stderr


# ---------------------------------------------------------------- plan, self-test, several processes
def test_a_dry_run_prints_the_plan_and_sends_nothing(tmp_path: Path) -> None:
    with a_mock_server(tmp_path) as server:
        done = perf("run", files(tmp_path, server.url), "--out", tmp_path / "run", "--dry-run")
        assert server.sent() == {}
    assert done.returncode == PASS
    assert "7 cells, 31 requests, about" in done.stdout
    assert "Shortened against the specification" in done.stdout
    assert not (tmp_path / "run").exists()


def test_several_client_processes_share_one_schedule(tmp_path: Path) -> None:
    cells = [
        {"kind": "poisson", "qps": [40], "prompt": 4, "output": 3, "requests": 30},
        {"kind": "closed", "concurrency": [5], "prompt": 4, "output": 3, "requests": 15},
    ]
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url, cells)
        done = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest", "--warmups", "0", "--processes", "2")
    assert done.returncode == PASS, done.stderr
    found = records(tmp_path / "run")
    assert sorted(record.case.index for record in found if record.case.arrival == "poisson") == list(range(30))
    assert len({record.request_id for record in found}) == 45
    edges = [(record.client_ns.request_start or 0, 1) for record in found if record.case.arrival == "closed"]
    edges += [(record.client_ns.response_end or 0, -1) for record in found if record.case.arrival == "closed"]
    level = peak = 0
    for _, step in sorted(edges):
        level += step
        peak = max(peak, level)
    assert peak <= 5


def test_the_client_tests_itself(tmp_path: Path) -> None:
    done = perf("selftest", "--rate", "20", "--seconds", "0.5", "--json")
    found = json.loads(done.stdout)
    assert found["requests"] == 40
    assert found["passed"] is (done.returncode == PASS)
    assert 0 < found["cpu_us_per_token"] < 2000
    assert found["added_p99_ms"] > 0


def test_a_manifest_is_filled_from_a_foreign_server(tmp_path: Path) -> None:
    with a_mock_server(tmp_path) as server:
        done = perf("manifest", "init", server.url, "--out", tmp_path / "m.yaml")
        assert done.returncode == PASS, done.stderr
        assert "left at REQUIRED: $.model.calbin_sha256, $.software.server_commit" in done.stderr
        refused = perf("run", tmp_path / "m.yaml")
        assert refused.returncode == INVALID
        done = perf("manifest", "init", server.url, "--foreign-null", "--out", tmp_path / "m.yaml")
    filled = yaml.safe_load((tmp_path / "m.yaml").read_text())
    assert (filled["model"]["alias"], filled["software"]["driver"]) == ("toy", None)
    assert filled["environment"]["rtt_ms"] > 0


def test_capacity_is_searched_and_a_bound_says_that_it_is_one(tmp_path: Path) -> None:
    spec = {"prompt": 4, "output": 2, "start_qps": 10, "factor": 2, "max_qps": 20, "screen_s": 1, "window_s": 1, "queue_growth": 50}
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url, matrix={"capacity": spec})
        done = perf("capacity", manifest, "--out", tmp_path / "found")
        assert done.returncode == PASS, done.stderr
        assert "stable up to 20.000 requests/s (shortened: windows of 1 s, not 1800 s); no rate up to max_qps" in done.stdout
        found = json.loads((tmp_path / "found" / "capacity.json").read_text())
        assert [window["trial"]["kind"] for window in found["windows"]] == ["screen", "screen", "window", "window"]
        assert {cut["what"] for cut in found["shortened"]} == {"idle sampling", "warm-up of each shape", "capacity window"}
        # An SLA that nothing can meet.
        manifest = files(tmp_path, server.url, matrix={"capacity": {**spec, "ttft_p99_ms": 0.01, "min_qps": 6}})
        done = perf("capacity", manifest, "--out", tmp_path / "none")
    assert done.returncode == 4
    assert "no rate was stable" in done.stderr


def test_a_search_for_capacity_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "found"
    spec = {"prompt": 4, "output": 2, "start_qps": 5, "factor": 2, "max_qps": 20, "screen_s": 1, "window_s": 1.5, "queue_growth": 50}
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url, matrix={"capacity": spec})
        command = [str(part) for part in (BIN / "calculet-perf", "capacity", manifest, "--out", out, "--idle", "0.1", "--warmups", "1")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        lines = out / "cases.jsonl"
        until(lambda: lines.exists() and len(lines.read_text().splitlines()) >= 1, "a window done")
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == INFRASTRUCTURE, stderr
        assert f"calculet-perf capacity ... --out {out} --resume" in stderr
        before = json.loads((out / "capacity.json").read_text())["windows"]
        other = perf(*command[1:], "--window", "3", "--resume")
        assert (other.returncode, "holds another search" in other.stderr) == (INVALID, True)
        done = perf(*command[1:], "--resume")
    assert done.returncode == PASS, done.stderr
    after = json.loads((out / "capacity.json").read_text())
    assert after["windows"][: len(before)] == before, "what was done stays"
    assert after["stable_qps"] == 20
    numbers = [window["trial"]["number"] for window in after["windows"]]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_shortened_stage_says_so_everywhere(tmp_path: Path) -> None:
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url)
        refused = perf("soak", manifest, "--stage", "dev")
        assert (refused.returncode, "needs --target-qps" in refused.stderr) == (INVALID, True)
        done = perf("soak", manifest, "--stage", "candidate", "--target-qps", "10", "--seconds", "6", "--out", tmp_path / "soak")
    assert done.returncode == PASS, done.stderr
    stage = json.loads((tmp_path / "soak" / "stage.json").read_text())
    assert (stage["stage"], stage["asked_s"], stage["load_share"]) == ("candidate", 28800, 1.0)
    assert 6 <= stage["done_s"] < 60
    shortened = {cut.what: (cut.asked, cut.done) for cut in info_of(tmp_path / "soak").shortened}
    assert shortened["stage candidate"] == (28800, 6)
    cases = list(RunReader(tmp_path / "soak").cases())
    assert [case.round for case in cases] == list(range(len(cases))), "one after the other"
    assert {record.case.class_name for record in records(tmp_path / "soak")} >= {"short"}


def test_a_stage_goes_on_after_ctrl_c_and_says_that_it_was_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "soak"
    options = ["--target-qps", "10", "--seconds", "8", "--out", out, "--idle", "0.1", "--warmups", "1"]
    with a_mock_server(tmp_path) as server:
        manifest = files(tmp_path, server.url)
        command = [str(part) for part in (BIN / "calculet-perf", "soak", manifest, "--stage", "dev", *options)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        lines = out / "cases.jsonl"
        until(lambda: lines.exists() and len(lines.read_text().splitlines()) >= 1, "a segment done")
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == INFRASTRUCTURE, stderr
        assert f"calculet-perf soak ... --out {out} --resume" in stderr
        left = json.loads((out / "stage.json").read_text())
        assert 0 < left["done_s"] < 8
        other = perf("soak", manifest, "--stage", "dev", *options[:2], "--seconds", "7", *options[4:], "--resume")
        assert (other.returncode, "holds a stage dev for 8 s" in other.stderr) == (INVALID, True)
        done = perf("soak", manifest, "--stage", "dev", *options, "--resume")
    assert done.returncode == PASS, done.stderr
    stage, info = read_stage(out / "stage.json"), info_of(out)
    assert stage is not None
    assert (info.status, info.sessions, stage.sessions) == ("complete", 2, 2)
    assert 8 <= stage.done_s < 60
    assert 0 < stage.longest_pause_s < 600
    assert any("interrupted and resumed once" in label for label in stage.labels())
    rounds = [case.round for case in RunReader(out).cases()]
    assert rounds == list(range(len(rounds))), "what was done was not done again"
    assert {record.case.round for record in records(out)} == set(rounds), "and nothing of an unfinished segment is left"


def test_a_dry_run_of_a_stage_prints_its_load(tmp_path: Path) -> None:
    with a_mock_server(tmp_path) as server:
        done = perf("soak", files(tmp_path, server.url), "--stage", "candidate", "--target-qps", "2", "--dry-run")
        assert server.sent() == {}
    assert done.returncode == PASS, done.stderr
    assert "stage candidate: 8 h 00 min of load" in done.stdout
    assert "70% of 128+32, 20% of 2048+128, 10% of 16384+256 tokens" in done.stdout
    assert "soak/candidate/burst/b16" in done.stdout


def test_an_api_key_comes_from_the_environment_and_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-1")
    with a_mock_server(tmp_path, key="sk-secret-1") as server:
        refused = perf("run", files(tmp_path, server.url, CELLS[:1]))
        assert (refused.returncode, "wants another API key (HTTP 401)" in refused.stderr) == (INVALID, True)
        init = perf("manifest", "init", server.url, "--api-key-env", "MY_KEY", "--out", tmp_path / "m.yaml")
        assert init.returncode == PASS, init.stderr
        manifest = files(tmp_path, server.url, CELLS[:1], server={"api_key_env": "MY_KEY"})
        done = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest")
    assert done.returncode == PASS, done.stderr
    written = [*(tmp_path / "run").iterdir(), tmp_path / "m.yaml"]
    assert len(written) > 5
    assert not any(b"sk-secret-1" in path.read_bytes() for path in written)


# ---------------------------------------------------------------- the real thing
def test_a_real_fleet_on_simulated_boards_is_measured(tmp_path: Path, packages: Packages) -> None:
    cells = [
        *CELLS, {"kind": "boundary", "prompt": "context", "refused_outputs": [2], "requests": 1},
        {"kind": "lanes", "profiles": [4, 5], "active": [2], "prompt": 4, "output": 12, "requests": 8},
    ]  # fmt: skip
    package = packages.get("sim-batch", "--step-ms", "1", "--context", "512")
    with Fleet(tmp_path / "fleet", package, packages.key.with_suffix(".pub"), trace={"steps": True}) as fleet:
        url = f"http://127.0.0.1:{fleet.port}"
        done = perf("manifest", "init", url, "--foreign-null", "--out", tmp_path / "filled.yaml")
        assert done.returncode == PASS, done.stderr
        filled = yaml.safe_load((tmp_path / "filled.yaml").read_text())
        assert len(filled["model"]["calbin_sha256"]) == 64
        told = {name: filled[name] for name in ("model", "software", "hardware")}
        manifest = files(tmp_path, url, cells, **told, matrix={"device_sample_s": 0.2})
        traces = tmp_path / "fleet" / "log" / "trace"
        done = perf("run", manifest, "--out", tmp_path / "run", "--no-selftest", "--trace", traces)
        assert done.returncode == PASS, done.stderr
        gone = perf("run", manifest, "--out", tmp_path / "other", "--dry-run", "--trace", tmp_path / "gone")
        assert gone.returncode == INVALID and "gone: no such folder" in gone.stderr
    info, found = info_of(tmp_path / "run"), records(tmp_path / "run")
    assert (info.status, info.foreign, info.context_tokens, info.injector_armed) == ("complete", False, 512, False)
    assert [one.case for one in info.not_applicable] == ["lanes/B5/a2/p4/o12/greedy/stream"]
    assert all(record.ok for record in found)
    join = StepJoin()
    for step in RunReader(tmp_path / "run").steps():
        join.add(step)
    joined = [join.apply(record) for record in found if not record.case.expect_refusal]
    assert all(record.quality.server_trace_joined for record in joined), "every measured request has all its steps"
    assert all(record.server_ms.sampling is not None and (record.runtime_ms.infer_prefill or 0) > 0 for record in joined)
    refused = [record for record in found if record.case.expect_refusal]
    assert [(record.result.http_status, record.result.error_code) for record in refused] == [(400, "context_length_exceeded")] * 3
    samples = list(RunReader(tmp_path / "run").device())
    assert {sample.board for sample in samples} == {"board0", "board1"}
    assert {sample.phase for sample in samples} >= {"idle", "measure", "after"}
    assert all(chip.temperature_c is not None for sample in samples for chip in sample.chips)
    assert all(sample.resources.device_busy_s is not None and sample.resources.cpu_s is not None for sample in samples)
    assert all((sample.resources.rss_bytes or 0) > 1e6 and (sample.resources.open_fds or 0) > 3 for sample in samples)
    assert {one.resource for one in info.returned} >= {"leased_buffers", "kv_used_tokens", "active_lanes"}
    assert all(one.returned for one in info.returned)
    lanes = [case for case in RunReader(tmp_path / "run").cases() if case.kind == "lanes"]
    assert [(case.active_lanes, case.concurrency) for case in lanes] == [(2, 4)]
    assert all(0 < (case.fill_ratio or 0) <= 1 for case in lanes)
