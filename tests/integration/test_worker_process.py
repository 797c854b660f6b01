"""One real worker process on a simulated board; the test plays its supervisor and its routers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from builders_fleet import Packages, until
from builders_worker import DEADLINE_S, Peer, WorkerProcess, a_fleet, a_submit, spawn_worker

from calculet_core import wire
from calculet_core.history import ATTEMPT_DONE
from calculet_core.ids import request_id_text
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.journal import read_journal
from calculet_core.shell.telemetry import fetch_metrics
from calculet_core.trace import StepTrace

PROMPT = Prompt(text="Why is the sky blue?")


@pytest.fixture
def fleet(tmp_path: Path, packages: Packages) -> Fleet:
    package = packages.get("sim-batch")
    return a_fleet(tmp_path, package, packages.key.with_suffix(".pub"), router={"lease_interval_ms": 300})


@pytest.fixture
def start(fleet: Fleet) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(**options: Any) -> WorkerProcess:
        started.append(WorkerProcess(fleet, **options))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def pieces_of(router: Peer, request_id: int) -> list[wire.Piece]:
    """All pieces of a request up to its terminal; leases are sent meanwhile."""
    pieces: list[wire.Piece] = []

    def ended(message: Any) -> bool:
        if isinstance(message, wire.Tick):
            router.send(wire.Lease(request_id >> 32, message.epoch, message.seq))
            pieces.extend(piece for piece in message.pieces if piece.request_id == request_id)
        return bool(pieces) and (pieces[-1].finish is not None or pieces[-1].error is not None)

    router.until(ended)
    return pieces


def first_tokens(router: Peer, request_id: int) -> wire.Piece:
    found: list[wire.Piece] = []

    def seen(message: Any) -> bool:
        if isinstance(message, wire.Tick):
            found.extend(piece for piece in message.pieces if piece.request_id == request_id and piece.tokens)
        return bool(found)

    router.until(seen)
    return found[0]


def metric(fleet: Fleet, line: str) -> float | None:
    text = asyncio.run(fetch_metrics(fleet.metrics_socket("worker-board0"), DEADLINE_S)).decode()
    values = [float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line)]
    return values[0] if values else None


def test_a_model_is_loaded_and_answers_and_the_answer_is_the_same_alone_or_among_others(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    alone = a_submit(report, 1, PROMPT)
    router.send(alone)
    pieces = pieces_of(router, alone.request_id)
    assert sum(piece.tokens for piece in pieces) == 16
    assert pieces[-1].finish == "length"
    assert pieces[-1].usage is not None
    assert (pieces[-1].usage.prompt_tokens, pieces[-1].usage.completion_tokens) == (20, 16)
    for counter in (2, 3, 4):
        router.send(a_submit(report, counter, Prompt(text="Something else") if counter != 3 else PROMPT))
    among = pieces_of(router, a_submit(report, 3, PROMPT).request_id)
    assert "".join(piece.text for piece in among) == "".join(piece.text for piece in pieces)


def test_a_seed_gives_the_same_tokens_again(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    texts = []
    for counter, seed in enumerate((1, 1, 2), 1):
        submit = a_submit(report, counter, PROMPT, sampling=SamplingParams(temperature=5.0, seed=seed), want_token_ids=True)
        router.send(submit)
        texts.append([token for piece in pieces_of(router, submit.request_id) for token in piece.token_ids or ()])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_cancelled_request_frees_its_lane(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    submit = a_submit(report, 1, PROMPT, max_new_tokens=400)
    router.send(submit)
    first_tokens(router, submit.request_id)
    router.send(wire.Cancel(submit.request_id, submit.attempt, submit.epoch, "client"))
    ended = worker.report(lambda report: report.cancelled == 1 and report.active == 0)
    assert ended.kv_tokens_reserved == 0


def test_a_router_that_falls_silent_loses_its_requests(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    submit = a_submit(report, 1, PROMPT, max_new_tokens=400)
    router.send(submit)
    first_tokens(router, submit.request_id)
    router.socket.close()
    worker.report(lambda report: report.cancelled == 1 and report.active == 0)


def test_a_bad_request_fails_alone(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    bad, good = a_submit(report, 1, Prompt(token_ids=(10**6,))), a_submit(report, 2, PROMPT)
    router.send(bad)
    router.send(good)
    refused: list[wire.Refusal] = []
    router.until(lambda message: isinstance(message, wire.Tick) and (refused.extend(message.refused) or refused))  # type: ignore[func-returns-value]
    assert (refused[0].request_id, refused[0].error.code, refused[0].error.param) == (bad.request_id, "invalid_value", "prompt")
    assert not refused[0].retryable
    assert pieces_of(router, good.request_id)[-1].finish == "length"


def test_stop_strings_end_a_request_before_they_are_shown(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    whole = a_submit(report, 1, PROMPT)
    router.send(whole)
    text = "".join(piece.text for piece in pieces_of(router, whole.request_id))
    stop = text[5:7]
    short = a_submit(report, 2, PROMPT, stop=StopRules((stop,), (), True))
    router.send(short)
    pieces = pieces_of(router, short.request_id)
    assert "".join(piece.text for piece in pieces) == text.partition(stop)[0]
    assert pieces[-1].finish == "stop"


def test_term_drains_and_leaves_an_exit_class_and_no_socket(start: Callable[..., WorkerProcess], fleet: Fleet) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    submit = a_submit(report, 1, PROMPT, max_new_tokens=60)
    router.send(submit)
    first_tokens(router, submit.request_id)
    worker.process.send_signal(signal.SIGTERM)
    assert pieces_of(router, submit.request_id)[-1].finish == "length"
    ended = worker.exit()
    assert (ended["returncode"], ended["code"], ended["epoch"]) == (0, 0, report.epoch)
    left = {path.name for path in fleet.run_dir.iterdir()}
    assert left == {fleet.supervisor_socket.name, fleet.board_exit("board0").name}
    done = [event for event in read_journal(fleet.journal("worker-board0")) if event.event == ATTEMPT_DONE]
    assert [(event.request, event.data["outcome"]) for event in done] == [(submit.request_id, "completed")]


def test_a_hangup_ends_no_worker(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    submit = a_submit(report, 1, PROMPT, max_new_tokens=60)
    router.send(submit)
    first_tokens(router, submit.request_id)
    worker.process.send_signal(signal.SIGHUP)
    assert pieces_of(router, submit.request_id)[-1].finish == "length"
    assert worker.process.poll() is None


def test_a_second_signal_ends_at_once(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    submit = a_submit(report, 1, PROMPT, max_new_tokens=1_000)
    router.send(submit)
    first_tokens(router, submit.request_id)
    worker.process.send_signal(signal.SIGTERM)
    worker.report(lambda report: report.draining)
    worker.process.send_signal(signal.SIGINT)
    assert worker.exit(timeout_s=5.0)["returncode"] == 0


def test_a_board_has_one_worker_and_the_second_names_it(start: Callable[..., WorkerProcess], fleet: Fleet) -> None:
    worker = start()
    worker.report()
    second = spawn_worker(fleet, "board0")
    _, errors = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 75
    assert len(errors.splitlines()) == 1
    assert f"pid {worker.process.pid}" in errors
    assert worker.report().pid == worker.process.pid


def test_malformed_frames_are_counted_and_ignored(start: Callable[..., WorkerProcess], fleet: Fleet) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    router.send_raw(b"su", b"\xc1 not MessagePack")
    router.send_raw(b"??", b"")
    router.send_raw(b"one frame only")
    router.send(wire.WorkerHello("board0", 1, 1, 1, "", "toy", "READY"))
    worker.supervisor.send_raw(b"lm", b"\x80")
    submit = a_submit(report, 1, PROMPT)
    router.send(submit)
    assert pieces_of(router, submit.request_id)[-1].finish == "length"
    assert metric(fleet, 'calculet_worker_bad_messages_total{board="board0",reason="malformed"}') == 4
    assert metric(fleet, 'calculet_worker_bad_messages_total{board="board0",reason="unexpected"}') == 1


def test_metrics_tell_what_was_served(start: Callable[..., WorkerProcess], fleet: Fleet) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    submit = a_submit(report, 1, PROMPT)
    router.send(submit)
    pieces_of(router, submit.request_id)
    assert metric(fleet, 'calculet_worker_requests_total{board="board0",outcome="completed"}') == 1
    assert metric(fleet, 'calculet_worker_tokens_total{board="board0",kind="generated"}') == 16
    assert metric(fleet, 'calculet_worker_tokens_total{board="board0",kind="prompt"}') == 20
    assert metric(fleet, 'calculet_worker_model_state{board="board0",state="READY"}') == 1
    assert metric(fleet, 'calculet_worker_generation{board="board0"}') == 1
    assert metric(fleet, 'calculet_worker_kv_violations{board="board0"}') == 0
    assert (metric(fleet, 'calculet_worker_device_busy_seconds_total{board="board0"}') or 0) > 0


def test_a_worker_ends_with_its_keeper(start: Callable[..., WorkerProcess], fleet: Fleet) -> None:
    reading, writing = os.pipe()
    worker = start(death_fd=reading)
    os.close(reading)
    worker.load()
    os.close(writing)
    assert worker.exit(timeout_s=5.0)["returncode"] == 0
    assert not list(fleet.run_dir.glob("w-*.sock"))


def test_each_life_has_an_epoch_and_a_socket_of_its_own(start: Callable[..., WorkerProcess], fleet: Fleet) -> None:
    first = start()
    before = first.report()
    first.process.kill()
    first.close()
    after = start().report()
    assert (before.epoch, after.epoch) == (1, 2)
    assert before.endpoint != after.endpoint


def test_a_package_that_was_changed_is_refused_and_the_worker_lives(start: Callable[..., WorkerProcess], packages: Packages) -> None:
    worker = start()
    worker.report()
    worker.supervisor.send(wire.LoadModel(1, 1, "toy", "/nowhere", ""))
    refused = worker.report(lambda report: report.command_seq == 1 and report.command_error)
    assert "/nowhere" in (refused.command_error or "")
    worker.supervisor.send(wire.LoadModel(2, 2, "toy", str(packages.get("sim-batch")), "0" * 64))
    refused = worker.report(lambda report: report.command_seq == 2 and report.command_error)
    assert "digest" in (refused.command_error or "")
    assert worker.process.poll() is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trusted_keys": ["missing.pub"]}, "missing.pub"),
        ({"boards": [{"name": "board1", "device": "sim"}]}, "no board named 'board0' (boards: board1)"),
        ({"models": [{"alias": "toy", "package": "x", "scheduler": "scheduler.yaml"}]}, "scheduler.yaml"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_78(
    tmp_path: Path, packages: Packages, sections: dict[str, Any], message: str
) -> None:
    fleet = a_fleet(tmp_path, packages.get("sim-batch"), packages.key.with_suffix(".pub"), **sections)
    process = spawn_worker(fleet, "board0")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 78
    assert len(errors.splitlines()) == 1
    assert message in errors


def test_what_the_machine_lacks_is_one_line_and_75_and_no_bug(tmp_path: Path, packages: Packages) -> None:
    fleet = a_fleet(tmp_path, packages.get("sim-batch"), packages.key.with_suffix(".pub"))
    fleet.board_lock("board0").mkdir(parents=True)
    process = spawn_worker(fleet, "board0")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75
    assert "board0.lock: Is a directory" in errors and len(errors.splitlines()) == 1


def test_a_profile_that_the_manifest_does_not_have_stops_the_start(tmp_path: Path, packages: Packages) -> None:
    scheduler = tmp_path / "scheduler.yaml"
    scheduler.write_text('{"schema": "calculet-scheduler/v1", "model_alias": "toy", "batch": {"profiles": [1, 7]}}')
    package = packages.get("sim-batch")
    models = [{"alias": "toy", "package": str(package), "scheduler": "scheduler.yaml"}]
    fleet = a_fleet(tmp_path, package, packages.key.with_suffix(".pub"), models=models)
    process = spawn_worker(fleet, "board0")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 78
    assert "scheduler.yaml: $.batch.profiles[1]: B7 is not in manifest" in errors


def test_a_board_that_hangs_is_reset_by_permission_and_serves_as_a_new_generation(tmp_path: Path, packages: Packages) -> None:
    scheduler = {
        "schema": "calculet-scheduler/v1", "model_alias": "toy", "executor": {"job_timeout_min_ms": 200, "job_timeout_factor": 2.0},
    }  # fmt: skip
    (tmp_path / "scheduler.yaml").write_text(json.dumps(scheduler))
    package = packages.get("sim-batch")
    fleet = a_fleet(
        tmp_path, package, packages.key.with_suffix(".pub"), fault_injection=True,
        boards=[{"name": "board0", "device": "sim", "options": {"faults": [{"fault": "wait_timeout", "at": [100], "job": "decode"}]}}],
        models=[{"alias": "toy", "package": str(package), "scheduler": "scheduler.yaml"}],
    )  # fmt: skip
    worker = WorkerProcess(fleet)
    try:
        report = worker.load()
        router = worker.router(report.endpoint)
        lost = a_submit(report, 1, PROMPT, max_new_tokens=400)
        router.send(lost)
        ended = pieces_of(router, lost.request_id)[-1]
        assert ended.error is not None
        assert ended.error.code == "model_recovering"
        asking = worker.report(lambda report: report.wants_reset)
        assert (asking.state, asking.fault) == ("RECOVERING", "wait_timeout")
        worker.supervisor.send(wire.GrantReset(2, 2))
        report = worker.report(lambda report: report.state == "READY" and report.generation == 2)
        again = a_submit(report, 2, PROMPT)
        router.send(again)
        assert pieces_of(router, again.request_id)[-1].finish == "length"
        assert metric(fleet, 'calculet_worker_resets_total{board="board0"}') == 1
        assert metric(fleet, 'calculet_worker_fault_injection_armed{board="board0"}') == 1
    finally:
        worker.close()


# ------------------------------------------------------------------------------------------------ the step trace (acceptance §2.3, §4)
@pytest.mark.parametrize("logits", ["float32", "bfloat16"])
def test_the_step_trace_has_every_step_with_its_moments_in_order(tmp_path: Path, packages: Packages, logits: str) -> None:
    package = packages.get("sim-batch", "--logits", logits)
    fleet = a_fleet(tmp_path, package, packages.key.with_suffix(".pub"), trace={"steps": True})
    worker = WorkerProcess(fleet)
    try:
        report = worker.load()
        router = worker.router(report.endpoint)
        for counter in (1, 2):
            router.send(a_submit(report, counter, PROMPT, max_new_tokens=5))
        request_ids = [a_submit(report, counter, PROMPT).request_id for counter in (1, 2)]
        ended: set[int] = set()

        def note(message: Any) -> bool:
            if isinstance(message, wire.Tick):
                ended.update(piece.request_id for piece in message.pieces if piece.finish)
            return len(ended) == 2

        router.until(note)
        path = fleet.step_trace("board0")
        until(lambda: path.exists() and len(path.read_bytes().splitlines()) == 10, "ten steps written")
    finally:
        worker.close()
    steps = [msgspec.json.decode(line, type=StepTrace) for line in path.read_bytes().splitlines()]
    assert {step.request_id for step in steps} == {request_id_text(number) for number in request_ids}
    for number in request_ids:
        mine = [step for step in steps if step.request_id == request_id_text(number)]
        assert [(step.kind, step.step) for step in mine] == [("prefill", 0), *(("decode", index) for index in range(1, 5))]
        size = len(PROMPT.text or "")
        assert [(step.kv_before, step.kv_after) for step in mine] == [(0, size), *((size + i, size + i + 1) for i in range(4))]
    for step in steps:
        moments = msgspec.structs.astuple(step.at_ns)
        assert None not in moments and list(moments) == sorted(moments), step
        assert step.output_status == "done" and step.device_wait_ms and step.sampling_ms is not None
        assert (step.bf16_ms is None) == (logits == "float32") and (step.bf16_ms or 0.0) >= 0, step
        assert 1 <= step.batch.active <= step.batch.compiled


def test_without_the_switch_no_trace_is_written(fleet: Fleet, start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    report = worker.load()
    router = worker.router(report.endpoint)
    submit = a_submit(report, 1, PROMPT, max_new_tokens=3)
    router.send(submit)
    pieces_of(router, submit.request_id)
    assert not fleet.step_trace("board0").exists()


def test_nobody_spins_while_all_lanes_are_full_and_requests_wait(tmp_path: Path, packages: Packages) -> None:
    """By the CPU clock of the whole process: it waits for a slow device, for a lane, and for its next rehearsal asleep."""
    package = packages.get("sim-batch", "--step-ms", "60", "--lanes", "1")
    worker = WorkerProcess(a_fleet(tmp_path, package, packages.key.with_suffix(".pub"), router={"lease_interval_ms": 5_000}))
    try:
        report = worker.load()
        router = worker.router(report.endpoint)
        submits = [a_submit(report, counter, PROMPT, max_new_tokens=40) for counter in range(1, 13)]
        for submit in submits:
            router.send(submit)
        worker.report(lambda report: report.waiting == 11 and report.active == 1)
        first_tokens(router, submits[0].request_id)
        process, tokens = psutil.Process(worker.process.pid), 0
        before, start = process.cpu_times(), time.monotonic()

        def many_steps(message: Any) -> bool:
            nonlocal tokens
            if isinstance(message, wire.Tick):
                tokens += sum(piece.tokens for piece in message.pieces if piece.request_id == submits[0].request_id)
            return tokens >= 25

        router.until(many_steps)
        after, spent_s = process.cpu_times(), time.monotonic() - start
        assert (after.user + after.system) - (before.user + before.system) < 0.3 * spent_s and spent_s > 1
        assert worker.report().waiting == 11, "its lane was full all the time"
    finally:
        worker.close()
