"""The device thread, over a board that does what the test tells it to."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from calculet_core.batches import BatchProfile, KvLayout
from calculet_core.clock import MS, S
from calculet_core.jobs import (
    ChipTelemetry,
    Completion,
    DeviceCounters,
    EngineBank,
    Holdings,
    Job,
    JobHandle,
    JobKind,
    JobTimings,
    OutputStatus,
    ReturnCode,
)
from calculet_worker.actions import ConfigureDevice, ResetDevice, SubmitJob, UnconfigureDevice
from calculet_worker.events import (
    DeviceConfigured,
    DeviceReset,
    DeviceUnconfigured,
    JobCompleted,
    JobLost,
    JobRefused,
    JobSubmitted,
)
from calculet_worker.output.bf16 import narrow
from calculet_worker.shell.executor import Executor, SynchronousExecutor

DEADLINE_S = 10.0
PROFILE = BatchProfile("m", 1, 64, "int32", "float32", KvLayout("per_lane_contiguous", "bf16", 2))


HELD = Holdings(memory_used_bytes=42, pending=1, left=2)


class ScriptedBoard:
    """Answers with what it was given; `wait_any` returns what the test puts into `outcomes`."""

    def __init__(self) -> None:
        self.outcomes: queue.Queue[Any] = queue.Queue()
        self.submit_answer: ReturnCode | None = None
        self.code = ReturnCode.OK
        self.chips: tuple[ChipTelemetry, ...] | None = (ChipTelemetry(memory_used_bytes=30), ChipTelemetry(memory_used_bytes=12))
        self.waits = 0
        self.stuck: threading.Event | None = None
        self.entered = threading.Event()
        self.closed_on: str | None = None

    def submit(self, job: Job, engine: EngineBank) -> JobHandle | ReturnCode:
        return JobHandle(job.job_id, EngineBank.PING) if self.submit_answer is None else self.submit_answer

    def wait_any(self, timeout_ns: int) -> Any:
        self.waits += 1
        if self.stuck is not None:
            self.entered.set()
            self.stuck.wait()
        try:
            outcome = self.outcomes.get(timeout=timeout_ns / S)
        except queue.Empty:
            return ReturnCode.TIMEOUT
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def configure(self, package: Any, generation: int) -> ReturnCode:
        if isinstance(package, Exception):
            raise package
        return self.code

    def inspect(self) -> str:
        return "the inspection"

    def telemetry(self) -> tuple[ChipTelemetry, ...]:
        if self.chips is None:
            raise OSError("gone")
        return self.chips

    def counters(self) -> DeviceCounters:
        return DeviceCounters(pending=1, finished=9, left=2, resets=0)

    def reset_configuration(self) -> ReturnCode:
        return self.code

    def reset(self) -> ReturnCode:
        return self.code

    def close(self) -> None:
        self.closed_on = threading.current_thread().name


@pytest.fixture
def board() -> ScriptedBoard:
    return ScriptedBoard()


@pytest.fixture
def delivered() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def executor(board: ScriptedBoard, delivered: queue.Queue[Any]) -> Iterator[Executor]:
    executor = Executor(board, delivered.put)  # type: ignore[arg-type]
    yield executor
    if board.stuck is not None:
        board.stuck.set()
    assert executor.stop(DEADLINE_S)


def a_submission(job_id: int, in_ns: int = 60 * S) -> SubmitJob:
    job = Job(job_id, 1, JobKind.DECODE, PROFILE, None, None, None)
    return SubmitJob(job, EngineBank.AUTO, time.monotonic_ns() + in_ns)


def a_completion(job_id: int) -> Completion:
    return Completion(job_id, 1, OutputStatus.DONE, None, EngineBank.PING, JobTimings(), 0)


def test_a_completion_is_delivered(executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]) -> None:
    assert executor.submit(a_submission(7)) == JobSubmitted(7, EngineBank.PING)
    completion = a_completion(7)
    board.outcomes.put(completion)
    assert delivered.get(timeout=DEADLINE_S) == JobCompleted(completion)


def test_the_synchronous_reference_ends_every_job_before_it_returns(board: ScriptedBoard, delivered: queue.Queue[Any]) -> None:
    executor = SynchronousExecutor(board, delivered.put)  # type: ignore[arg-type]
    completion = a_completion(7)
    board.outcomes.put(completion)
    assert executor.submit(a_submission(7)) == JobSubmitted(7, EngineBank.PING)
    assert delivered.get_nowait() == JobCompleted(completion)
    assert executor.submit(a_submission(8, in_ns=0)) == JobSubmitted(8, EngineBank.PING)
    assert delivered.get_nowait() == JobLost(8, ReturnCode.TIMEOUT)
    board.submit_answer = ReturnCode.DEVICE_BUSY
    assert executor.submit(a_submission(9)) == JobRefused(9, ReturnCode.DEVICE_BUSY)
    executor.perform(ConfigureDevice(1, None))
    assert delivered.get_nowait() == DeviceConfigured(1, 0, "the inspection", before=HELD)
    assert executor.stop(DEADLINE_S) and board.closed_on == "MainThread"


def test_shortly_before_a_job_should_end_the_loop_is_woken_once_and_the_thread_sleeps_on(
    board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    rehearsals: queue.Queue[int] = queue.Queue()
    executor = Executor(board, delivered.put, lambda: rehearsals.put(time.monotonic_ns()))  # type: ignore[arg-type]
    early_ns = time.monotonic_ns() + 30 * MS
    executor.submit(replace(a_submission(1), rehearse_ns=early_ns))
    assert rehearsals.get(timeout=DEADLINE_S) >= early_ns
    completion = a_completion(1)
    board.outcomes.put(completion)
    assert delivered.get(timeout=DEADLINE_S) == JobCompleted(completion)
    executor.submit(replace(a_submission(2), rehearse_ns=time.monotonic_ns() + 60 * S))
    board.outcomes.put(a_completion(2))
    delivered.get(timeout=DEADLINE_S)
    executor.submit(a_submission(3))
    board.outcomes.put(a_completion(3))
    delivered.get(timeout=DEADLINE_S)
    assert executor.stop(DEADLINE_S) and rehearsals.empty(), "once for a job, and never for one that ended earlier"


def test_a_rehearsal_does_not_keep_a_lost_job_from_being_reported(board: ScriptedBoard, delivered: queue.Queue[Any]) -> None:
    executor = Executor(board, delivered.put)  # type: ignore[arg-type]
    executor.submit(replace(a_submission(1, in_ns=20 * MS), rehearse_ns=time.monotonic_ns() - 1))
    assert delivered.get(timeout=DEADLINE_S) == JobLost(1, 13)
    board.outcomes.put(a_completion(1))
    delivered.get(timeout=DEADLINE_S)
    assert executor.stop(DEADLINE_S)


def test_the_end_of_a_brief_job_is_found_at_once_and_the_device_thread_sleeps_on(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    for job_id in (1, 2):
        board.outcomes.put(completion := a_completion(job_id))
        assert executor.submit(replace(a_submission(job_id), brief=True)) == JobSubmitted(job_id, EngineBank.PING)
        assert executor.look() == JobCompleted(completion)
    assert (executor.look(), board.waits, delivered.empty()) == (None, 2, True)
    idle_ns = executor.busy_ns()
    assert executor.busy_ns() == idle_ns, "nothing is out any more"


def test_a_brief_job_that_has_not_ended_goes_to_the_device_thread(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    executor.submit(replace(a_submission(1), brief=True))
    assert executor.look() is None
    executor.submit(replace(a_submission(2), brief=True))
    assert executor.look() is None, "another is out, so the device thread is in the device"
    for job_id in (1, 2):
        board.outcomes.put(completion := a_completion(job_id))
        assert delivered.get(timeout=DEADLINE_S) == JobCompleted(completion)


def test_a_brief_job_is_not_taken_for_another_one_that_ends_late(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    board.outcomes.put(late := a_completion(9))
    executor.submit(replace(a_submission(1), brief=True))
    assert executor.look() == JobCompleted(late)
    board.outcomes.put(completion := a_completion(1))
    assert delivered.get(timeout=DEADLINE_S) == JobCompleted(completion)


@pytest.mark.parametrize("outcome", [ReturnCode.DEVICE_UNAVAILABLE, RuntimeError("gone")])
def test_a_brief_job_whose_device_fails_is_lost(executor: Executor, board: ScriptedBoard, outcome: Any) -> None:
    board.outcomes.put(outcome)
    executor.submit(replace(a_submission(1), brief=True))
    assert executor.look() == JobLost(1, outcome if isinstance(outcome, ReturnCode) else ReturnCode.OTHER)


def test_while_a_lost_job_may_still_end_no_job_is_brief(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    executor.submit(a_submission(1, in_ns=0))
    assert delivered.get(timeout=DEADLINE_S) == JobLost(1, ReturnCode.TIMEOUT)
    executor.submit(replace(a_submission(2), brief=True))
    assert executor.look() is None
    for job_id in (1, 2):
        board.outcomes.put(completion := a_completion(job_id))
        assert delivered.get(timeout=DEADLINE_S) == JobCompleted(completion)


def test_completions_may_come_in_any_order(executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]) -> None:
    executor.submit(a_submission(1))
    executor.submit(a_submission(2))
    board.outcomes.put(a_completion(2))
    board.outcomes.put(a_completion(1))
    assert [delivered.get(timeout=DEADLINE_S).completion.job_id for _ in range(2)] == [2, 1]


def test_a_refused_job_is_not_waited_for(executor: Executor, board: ScriptedBoard) -> None:
    board.submit_answer = ReturnCode.DEVICE_BUSY
    assert executor.submit(a_submission(1)) == JobRefused(1, 17)
    assert executor.stop(DEADLINE_S)
    assert board.waits == 0


def test_only_the_time_with_a_job_out_is_busy(executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]) -> None:
    assert executor.busy_ns() == 0
    start = time.monotonic_ns()
    executor.submit(a_submission(1))
    executor.submit(a_submission(2, in_ns=20 * MS))
    delivered.get(timeout=DEADLINE_S)
    assert executor.busy_ns() >= 20 * MS
    board.outcomes.put(a_completion(2))
    board.outcomes.put(a_completion(1))
    delivered.get(timeout=DEADLINE_S)
    delivered.get(timeout=DEADLINE_S)
    busy = executor.busy_ns()
    assert busy <= time.monotonic_ns() - start
    assert executor.busy_ns() == busy


def test_an_idle_thread_sleeps(executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]) -> None:
    executor.submit(a_submission(1))
    board.outcomes.put(a_completion(1))
    delivered.get(timeout=DEADLINE_S)
    executor.perform(UnconfigureDevice(1))
    delivered.get(timeout=DEADLINE_S)
    waits = board.waits
    executor.perform(UnconfigureDevice(1))
    delivered.get(timeout=DEADLINE_S)
    assert board.waits == waits


def test_a_job_past_its_deadline_is_lost_and_its_late_completion_still_comes_home(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    executor.submit(a_submission(1, in_ns=20 * MS))
    assert delivered.get(timeout=DEADLINE_S) == JobLost(1, 13)
    late = a_completion(1)
    board.outcomes.put(late)
    assert delivered.get(timeout=DEADLINE_S) == JobCompleted(late)


def test_only_the_job_whose_deadline_passed_is_lost(executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]) -> None:
    executor.submit(a_submission(1))
    executor.submit(a_submission(2, in_ns=20 * MS))
    assert delivered.get(timeout=DEADLINE_S) == JobLost(2, 13)
    board.outcomes.put(a_completion(1))
    assert isinstance(delivered.get(timeout=DEADLINE_S), JobCompleted)


@pytest.mark.parametrize("outcome", [ReturnCode.DEVICE_UNAVAILABLE, ReturnCode.OTHER, RuntimeError("a broken driver")])
def test_any_other_code_loses_what_is_out(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any], outcome: ReturnCode | Exception
) -> None:
    executor.submit(a_submission(1))
    executor.submit(a_submission(2))
    board.outcomes.put(outcome)
    rc = int(outcome) if isinstance(outcome, ReturnCode) else 255
    assert [delivered.get(timeout=DEADLINE_S) for _ in range(2)] == [JobLost(1, rc), JobLost(2, rc)]


def test_a_reset_does_not_wait_for_a_job_s_deadline(executor: Executor, delivered: queue.Queue[Any]) -> None:
    executor.submit(a_submission(1, in_ns=3600 * S))
    executor.perform(ResetDevice("test"))
    assert delivered.get(timeout=DEADLINE_S) == DeviceReset(0)


def test_configuring_brings_the_inspection_or_what_went_wrong(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    executor.perform(ConfigureDevice(3, None))
    assert delivered.get(timeout=DEADLINE_S) == DeviceConfigured(3, 0, "the inspection", before=HELD)
    executor.perform(ConfigureDevice(4, ValueError("no such file")))
    assert delivered.get(timeout=DEADLINE_S) == DeviceConfigured(4, 255, detail="ValueError: no such file", before=HELD)
    board.code = ReturnCode.INVALID_SHAPE
    executor.perform(ConfigureDevice(5, None))
    executor.perform(UnconfigureDevice(5))
    executor.perform(ResetDevice("test"))
    expected = [DeviceConfigured(5, 21, before=HELD), DeviceUnconfigured(5, 21, HELD), DeviceReset(21)]
    assert [delivered.get(timeout=DEADLINE_S) for _ in range(3)] == expected


def test_what_an_unconfigured_board_holds_is_read_or_it_is_said_why_not(
    executor: Executor, board: ScriptedBoard, delivered: queue.Queue[Any]
) -> None:
    board.chips = (ChipTelemetry(memory_used_bytes=30), ChipTelemetry())
    executor.perform(UnconfigureDevice(3))
    assert delivered.get(timeout=DEADLINE_S).after == Holdings(None, 1, 2), "a sum without a part is no sum"
    board.chips = None
    executor.perform(UnconfigureDevice(3))
    assert delivered.get(timeout=DEADLINE_S).after == Holdings(error="OSError: gone")


def test_the_device_is_closed_on_its_own_thread(executor: Executor, board: ScriptedBoard) -> None:
    assert executor.stop(DEADLINE_S)
    assert board.closed_on == "device"


def test_a_thread_that_is_stuck_in_the_device_does_not_hold_up_the_end(executor: Executor, board: ScriptedBoard) -> None:
    board.stuck = threading.Event()
    executor.submit(a_submission(1))
    assert board.entered.wait(DEADLINE_S)
    assert not executor.stop(0.05)
    assert board.closed_on is None


def test_bf16_logits_arrive_as_float32_in_a_buffer_of_their_lease(board: ScriptedBoard) -> None:
    arrived: queue.Queue[Any] = queue.Queue()
    executor = Executor(board, arrived.put)  # type: ignore[arg-type]
    numbers = np.array([[1.0, -2.5, 3.0], [0.5, 1e30, -1e-30]], np.float32)
    try:
        for job_id, buffer_id, rows in ((1, 7, 2), (2, 8, 2), (3, 7, 1)):
            executor.submit(a_submission(job_id))
            done = Completion(job_id, 1, OutputStatus.DONE, narrow(numbers[:rows] * job_id), EngineBank.PING, JobTimings(), buffer_id)
            board.outcomes.put(done)
            event = arrived.get(timeout=DEADLINE_S)
            assert isinstance(event, JobCompleted) and event.bf16_ns is not None and event.bf16_ns >= 0
            logits = event.completion.logits
            assert logits.dtype == np.float32 and np.allclose(logits, numbers[:rows] * job_id, rtol=2**-8)
            assert not logits.flags.writeable and event.completion.buffer_id == buffer_id
            if job_id == 1:
                first = logits
            elif job_id == 2:
                assert np.allclose(first, numbers, rtol=2**-8), "another lease's numbers are elsewhere"
    finally:
        executor.stop(DEADLINE_S)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_best_of_each_row_and_whether_it_is_finite_come_with_the_completion(board: ScriptedBoard, bf16: bool) -> None:
    arrived: queue.Queue[Any] = queue.Queue()
    executor = Executor(board, arrived.put)  # type: ignore[arg-type]
    numbers = np.array([[1.0, 4.0, 3.0], [9.0, -np.inf, 2.0], [np.nan, 1.0, 2.0]], np.float32)
    try:
        for job_id, logits in ((1, narrow(numbers) if bf16 else numbers), (2, None)):
            executor.submit(a_submission(job_id))
            board.outcomes.put(Completion(job_id, 1, OutputStatus.DONE, logits, EngineBank.PING, JobTimings(), 0))
            event = arrived.get(timeout=DEADLINE_S)
            assert isinstance(event, JobCompleted)
            if logits is None:
                assert event.facts is None
            else:
                assert event.facts is not None and event.facts.best[:2].tolist() == [1, 0]
                assert event.facts.finite.tolist() == [True, False, False]
    finally:
        executor.stop(DEADLINE_S)
