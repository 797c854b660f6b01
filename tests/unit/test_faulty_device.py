"""Faults on purpose: each shows what it should, drains the real job, is recorded, and fires by seed, site and ordinal alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from builders_device import Board, a_prompt, open_sim, quick_package, quick_reference

from calculet_core.clock import MS
from calculet_core.config import BoardConfig
from calculet_core.errors import ConfigError
from calculet_core.jobs import Completion, JobKind, OutputStatus, ReturnCode
from calculet_worker.device import open_device
from calculet_worker.device.faults import (
    AnyFault,
    Busy,
    CcuException,
    ConfigureRefused,
    FaultPlan,
    Hook,
    InfOutput,
    InvalidDtype,
    InvalidShape,
    NanOutput,
    OtherCode,
    Refusal,
    ReleaseRefused,
    ResetFails,
    Slow,
    StaleCompletion,
    Unavailable,
    WaitTimeout,
)
from calculet_worker.device.faulty import FaultyDevice
from calculet_worker.device.sim import SimDevice

PROMPT = a_prompt(5)


def a_board(*faults: AnyFault) -> tuple[Board, FaultyDevice]:
    device = FaultyDevice(open_sim(), FaultPlan(faults, seed=3))
    return Board(device, quick_package()).configure(), device


@pytest.mark.parametrize(
    ("fault", "code"),
    [(Busy(at=(1,)), 17), (Unavailable(at=(1,)), 18), (InvalidShape(at=(1,)), 21), (InvalidDtype(at=(1,)), 22), (OtherCode(at=(1,)), 255)],
)
def test_a_refused_submission_reaches_no_device(fault: Refusal, code: int) -> None:
    board, device = a_board(fault)  # type: ignore[arg-type]
    board.prefill(0, PROMPT)
    job = board.prefill_job(1, PROMPT)
    assert device.submit(job) == code
    assert device.counters().pending == 0
    assert board.run(job) is not None, "the same job is taken the next time"
    (firing,) = device.plan.firings
    assert (firing.fault, firing.site, firing.ordinal, firing.job_id) == (fault, (Hook.SUBMIT, JobKind.PREFILL), 1, job.job_id)


def test_a_ccu_exception_has_no_logits_and_its_buffer_is_given_back() -> None:
    board, device = a_board(CcuException(at=(0,)))
    board.submit(board.prefill_job(0, PROMPT))
    done = board.wait()
    assert (done.status, done.logits) == (OutputStatus.CCU_EXCEPTION, None)
    device.give_back(done)
    assert device.counters().left == 0


@pytest.mark.parametrize(("fault", "bad"), [(NanOutput(at=(0,), row=1), np.isnan), (InfOutput(at=(0,), row=1), np.isinf)])
def test_bad_numbers_are_in_one_row_and_not_in_the_devices_buffer(fault: AnyFault, bad: Any) -> None:
    board, device = a_board(msgspec.structs.replace(fault, job=JobKind.DECODE))
    tokens = {lane: board.prefill(lane, PROMPT) for lane in range(3)}
    board.submit(board.decode_job(tokens))
    done = board.wait()
    assert bad(done.logits).any(axis=1).tolist() == [False, True, False, False]
    device.give_back(done)
    board.device.release(0)
    assert board.generate(0, PROMPT, 4) == quick_reference(PROMPT, 4)


def test_a_wait_that_times_out_hides_the_job_until_the_reset() -> None:
    board, device = a_board(WaitTimeout(at=(0,), job=JobKind.PREFILL))
    board.submit(board.prefill_job(4, PROMPT))
    assert device.wait_any(20 * MS) == ReturnCode.TIMEOUT
    assert device.counters().pending == 1
    assert device.release(4) == ReturnCode.DEVICE_BUSY
    assert device.reset_configuration() == ReturnCode.DEVICE_BUSY
    assert device.reset() == ReturnCode.OK
    assert device.wait_any(1 * MS) == ReturnCode.TIMEOUT
    assert (device.counters().pending, device.counters().left) == (0, 0), "the real job was drained and given back"
    board.generation = 2
    assert board.configure().generate(0, PROMPT, 3) == quick_reference(PROMPT, 3)


def test_a_stale_completion_comes_after_reset_and_configuration() -> None:
    board, device = a_board(StaleCompletion(at=(0,), job=JobKind.PREFILL))
    job = board.prefill_job(0, PROMPT)
    board.submit(job)
    assert device.wait_any(20 * MS) == ReturnCode.TIMEOUT
    device.reset()
    assert device.wait_any(0) == ReturnCode.TIMEOUT
    board.generation = 2
    board.configure()
    late = board.wait()
    assert (late.job_id, late.generation, late.status) == (job.job_id, 1, OutputStatus.DONE)
    device.give_back(late)
    assert device.counters().left == 0
    assert board.generate(0, PROMPT, 3) == quick_reference(PROMPT, 3)


def test_a_slow_completion_comes_late_and_whole() -> None:
    board, device = a_board(Slow(at=(0,), delay_ms=30))
    started = time.monotonic_ns()
    board.submit(board.prefill_job(0, PROMPT))
    assert device.wait_any(1 * MS) == ReturnCode.TIMEOUT
    done = board.wait()
    assert time.monotonic_ns() - started >= 30 * MS
    assert [int(done.logits[0].argmax())] == quick_reference(PROMPT, 1)
    device.give_back(done)


def test_a_slow_job_does_not_hold_up_the_other() -> None:
    board, device = a_board(Slow(at=(0,), delay_ms=10_000))
    first, second = board.prefill_job(0, PROMPT), board.prefill_job(1, PROMPT)
    board.submit(first)
    board.submit(second)
    done = board.wait()
    assert done.job_id == second.job_id
    device.give_back(done)
    assert device.counters().pending == 1


def test_a_refused_release_leaves_the_lane_as_it_is() -> None:
    board, device = a_board(ReleaseRefused(at=(0,)))
    board.prefill(0, PROMPT)
    assert device.release(0) == ReturnCode.DEVICE_BUSY
    assert not device.can_allocate(8)
    assert device.release(0) == ReturnCode.OK
    assert device.can_allocate(8)


def test_a_configuration_and_a_reset_may_fail() -> None:
    device = FaultyDevice(open_sim(), FaultPlan([ConfigureRefused(at=(0,)), ResetFails(at=(0,))]))
    assert device.configure(quick_package(), 1) == ReturnCode.OTHER
    assert device.configure(quick_package(), 1) == ReturnCode.OK
    assert device.reset() == ReturnCode.DEVICE_UNAVAILABLE
    assert device.reset() == ReturnCode.OK


def test_closing_gives_back_what_nobody_saw() -> None:
    inner = open_sim()
    device = FaultyDevice(inner, FaultPlan([WaitTimeout(at=(0,))]))
    board = Board(device, quick_package()).configure()
    board.submit(board.prefill_job(0, PROMPT))
    assert device.wait_any(20 * MS) == ReturnCode.TIMEOUT
    device.close()
    assert inner.counters().left == 0


# ------------------------------------------------------------------------------------------------ when
def firings(plan: FaultPlan, hook: Hook, kind: JobKind | None, visits: int) -> list[int]:
    return [ordinal for ordinal in range(visits) if plan.visit(hook, kind) is not None]


def test_a_rate_is_the_share_of_visits_and_repeats_with_the_seed() -> None:
    found = firings(FaultPlan([Busy(rate=0.1)], seed=7), Hook.SUBMIT, JobKind.DECODE, 5000)
    assert 400 < len(found) < 600
    assert firings(FaultPlan([Busy(rate=0.1)], seed=7), Hook.SUBMIT, JobKind.DECODE, 5000) == found
    assert firings(FaultPlan([Busy(rate=0.1)], seed=8), Hook.SUBMIT, JobKind.DECODE, 5000) != found


def test_other_faults_and_other_sites_move_no_firing() -> None:
    alone = firings(FaultPlan([Busy(rate=0.1)], seed=7), Hook.SUBMIT, JobKind.DECODE, 1000)
    crowded, found = FaultPlan([Slow(rate=0.5, delay_ms=1), NanOutput(rate=0.5), Busy(rate=0.1)], seed=7), []
    for ordinal in range(1000):
        crowded.visit(Hook.COMPLETION, JobKind.DECODE)
        crowded.visit(Hook.SUBMIT, JobKind.PREFILL)
        if crowded.visit(Hook.SUBMIT, JobKind.DECODE) is not None:
            found.append(ordinal)
    assert found == alone


def test_a_fault_for_one_kind_of_job_leaves_the_other_alone() -> None:
    plan = FaultPlan([Busy(rate=1.0, job=JobKind.DECODE)])
    assert firings(plan, Hook.SUBMIT, JobKind.PREFILL, 100) == []
    assert firings(plan, Hook.SUBMIT, JobKind.DECODE, 100) == list(range(100))


# ------------------------------------------------------------------------------------------------ configuration
def a_config(faults: Any) -> BoardConfig:
    return BoardConfig(name="b0", device="sim", options={"seed": 4, "faults": faults})


def test_faults_need_the_fleets_word() -> None:
    with pytest.raises(ConfigError, match=r"board b0: \$\.options\.faults: the fleet does not allow faults"):
        open_device(a_config([{"fault": "busy", "at": [0]}]), fault_injection=False)
    device = open_device(a_config([{"fault": "busy", "at": [0]}]), fault_injection=True)
    assert isinstance(device, FaultyDevice) and device.plan.faults == [Busy(at=(0,))]


def test_a_board_that_asks_for_none_has_none() -> None:
    assert isinstance(open_device(BoardConfig(name="b0", device="sim"), fault_injection=True), SimDevice)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([{"fault": "bussy"}], r"faults\[0\]\.fault: Invalid value 'bussy'"),
        ([{"fault": "busy", "rate": 2}], r"faults\[0\]\.rate: Expected `float` <= 1.0"),
        ([{"fault": "busy"}, {"fault": "busy", "when": 3}], r"faults\[1\]: Object contains unknown field `when`"),
        ([{"fault": "slow"}], r"faults\[0\]: Object missing required field `delay_ms`"),
    ],
)
def test_a_wrong_fault_names_its_path(faults: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_device(a_config(faults), fault_injection=True)


def test_every_fault_can_be_written_in_a_configuration() -> None:
    for kind in get_args(AnyFault):
        more = {"delay_ms": 5} if kind is Slow else {}
        read = msgspec.convert({"fault": kind.__struct_config__.tag, "at": [2], **more}, AnyFault)  # type: ignore[arg-type]
        assert type(read) is kind and kind.__doc__


def test_a_completion_that_is_shown_is_the_devices_own_but_for_the_lie() -> None:
    board, device = a_board(NanOutput(at=(0,)))
    board.submit(board.prefill_job(0, PROMPT))
    done = board.wait()
    assert isinstance(done, Completion)
    assert msgspec.structs.replace(done, logits=None).timings.wait_ns is not None
    device.give_back(done)


def test_a_plan_is_armed_by_a_file_until_its_time_and_its_firings_are_written_down(tmp_path: Path) -> None:
    arm, log = tmp_path / "arm.json", tmp_path / "fired.jsonl"
    options = {"faults": [{"fault": "busy", "at": [0]}], "faults_arm": str(arm), "faults_log": str(log)}
    device = open_device(BoardConfig(name="board0", device="sim", options=options), fault_injection=True)
    assert isinstance(device, FaultyDevice)
    plan = device.plan
    assert plan.visit(Hook.SUBMIT, JobKind.DECODE, 7) is None, "not armed: not even counted"
    arm.write_text(json.dumps({"until_ns": time.monotonic_ns() - 1}))
    assert plan.visit(Hook.SUBMIT, JobKind.DECODE, 7) is None, "its time is over: a driver that died disarms"
    arm.write_text("half a li")
    assert plan.visit(Hook.SUBMIT, JobKind.DECODE, 7) is None
    arm.write_text(json.dumps({"until_ns": time.monotonic_ns() + 3600 * 10**9}))
    assert isinstance(plan.visit(Hook.SUBMIT, JobKind.DECODE, 8), Busy)
    assert plan.visit(Hook.SUBMIT, JobKind.DECODE, 9) is None
    (line,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (line["fault"], line["board"], line["hook"], line["ordinal"], line["job"]) == ("busy", "board0", "submit", 0, 8)
    device.close()
