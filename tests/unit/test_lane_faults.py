"""A device's fault that is one lane's: confined to it where the artifact proves that lanes fail alone, else the batch's (scheduling §7.4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders_engine import VOCAB, Driver, Fault, Told, a_case, a_manifest, a_package, a_profile, a_scheduler, a_sequence, text_of

from calculet_core import history
from calculet_core.artifact import LANE_FAULT_ISOLATION, Manifest, Proof
from calculet_core.clock import S
from calculet_core.errors import DeadlineExceeded
from calculet_core.faults import FAULT_POLICY, FaultKind
from calculet_core.history import check
from calculet_core.jobs import Completion, EngineBank, Job, JobKind, JobTimings, OutputStatus
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_worker.jobs.completion import Faulty, Good, Partial, judge
from calculet_worker.jobs.inflight import InflightJob
from calculet_worker.scheduling.arbiter import Turn

CCU = OutputStatus.CCU_EXCEPTION
UNKNOWN = KvSequenceState.UNKNOWN


def isolating(**fields: Any) -> Manifest:
    return a_manifest(abilities={LANE_FAULT_ISOLATION: Proof("C0", "the toy board's own tests")}, **fields)


def once(driver: Driver, fault: Fault, kind: JobKind, rows: int) -> Iterator[Fault | None]:
    """The fault befalls the first job of that kind with so many rows."""
    struck = False
    while True:
        assert driver.engine.serving is not None
        entry = list(driver.engine.serving.inflight._jobs.values())[-1]
        hit = not struck and entry.job.kind is kind and len(entry.sequences) == rows
        struck = struck or hit
        yield fault if hit else None


def a_batch(driver: Driver, fault: Fault, count: int = 4, **fields: Any) -> list[Told]:
    """So many requests that decode together; the first step of all of them is in flight, and the fault befalls it."""
    driver.faults = once(driver, fault, JobKind.DECODE, count)
    told = [driver.submit(number, max_new_tokens=12, **fields) for number in range(1, count + 1)]
    driver.until(lambda: driver.board.jobs[-1].kind is JobKind.DECODE and int(driver.board.jobs[-1].lane_valid.sum()) == count)
    return told


# ---------------------------------------------------------------- what a completion means
def verdict_on(
    logits: Any, status: OutputStatus = CCU, failed_rows: tuple[int, ...] | None = None, isolated: bool = True, rows: int = 3
) -> Any:
    job = Job(1, 1, JobKind.DECODE, a_profile(4), None, None, None)
    entry = InflightJob(job, Turn.DECODE, [a_sequence(number) for number in range(rows)], None, EngineBank.AUTO, 0)
    return judge(Completion(1, 1, status, logits, EngineBank.PING, JobTimings(), 0, failed_rows), entry, VOCAB, isolated)


def logits(*bad: int, rows: int = 3) -> Any:
    made = np.arange(rows * VOCAB, dtype=np.float32).reshape(rows, VOCAB)
    made[list(bad), 5] = np.nan
    return made


def test_rows_that_the_device_names_fail_and_the_others_keep_their_own_logits() -> None:
    found = verdict_on(logits(1), failed_rows=(1,))
    assert isinstance(found, Partial) and found.kind is FaultKind.CCU_EXCEPTION and "[1]" in found.detail
    assert ([seq.seq_id for seq in found.failed], [seq.seq_id for seq in found.others]) == ([1], [0, 2])
    assert found.logits[:, 0].tolist() == [0, 2 * VOCAB]


def test_bad_numbers_of_some_rows_are_those_rows_alone() -> None:
    found = verdict_on(logits(0, 2), OutputStatus.DONE)
    assert isinstance(found, Partial) and found.kind is FaultKind.BAD_NUMBERS
    assert [seq.seq_id for seq in found.others] == [1]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"logits": logits(1), "failed_rows": (1,), "isolated": False}, "nothing proves it"),
        ({"logits": logits(1), "status": OutputStatus.DONE, "isolated": False}, "nothing proves it"),
        ({"logits": logits()}, "the device does not say which"),
        ({"logits": logits(), "failed_rows": ()}, "it names none"),
        ({"logits": logits(), "failed_rows": (3,)}, "a row that the job does not have"),
        ({"logits": logits(), "failed_rows": (-1,)}, "a row that no job has"),
        ({"logits": logits(1, 2), "failed_rows": (1,)}, "another row is bad as well"),
        ({"logits": None, "failed_rows": (1,)}, "there are no logits of the others"),
        ({"logits": logits(rows=2), "failed_rows": (1,)}, "nor enough"),
        ({"logits": logits(), "failed_rows": (1,), "status": OutputStatus.ABORTED}, "that fault has no lane"),
        ({"logits": logits(0, 1, 2), "status": OutputStatus.DONE}, "every row is bad: so is the board"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_not_surely_a_lanes_is_the_batchs(given: dict[str, Any], why: str) -> None:
    found = verdict_on(**{"status": CCU, **given})
    assert isinstance(found, Faulty), why


def test_a_good_job_is_good() -> None:
    assert isinstance(verdict_on(logits(), OutputStatus.DONE), Good)
    assert {kind for kind, rule in FAULT_POLICY.items() if rule.confinable} == {FaultKind.CCU_EXCEPTION, FaultKind.BAD_NUMBERS}


# ---------------------------------------------------------------- what follows
@pytest.mark.parametrize("fault", [Fault(status=CCU, failed_rows=(2,)), Fault(bad_row=2)], ids=["ccu", "nan"])
def test_one_lanes_fault_fails_one_request_and_loses_one_lane(fault: Fault) -> None:
    driver = Driver(isolating()).ready()
    told = a_batch(driver, fault)
    lanes = driver.board.jobs[-1].lanes.tolist()
    driver.until(lambda: told[2].ended)
    code = FAULT_POLICY[FaultKind.BAD_NUMBERS if fault.bad_row else FaultKind.CCU_EXCEPTION].error_code
    assert told[2].error == code and driver.state == "READY" and driver.lanes(UNKNOWN) == 1
    assert driver.engine.serving is not None and driver.engine.serving.kv.lanes[lanes[2]].state is UNKNOWN
    waits = driver.submit(9)
    driver.until(lambda: all(one.ended for one in told))
    for number, one in enumerate(told, 1):
        if number != 3:
            assert one.text == text_of([number, 2, 3], 12), "the others lost nothing and repeated nothing"
    driver.until(lambda: waits.ended)
    assert waits.text == text_of([9, 2, 3], 4)
    used = {lane for job in driver.board.jobs[-8:] for lane in job.lanes.tolist()}
    assert lanes[2] not in used, "an Unknown lane is nobody's until its generation ends"
    (golden,) = driver.events_of(history.BOARD_GOLDEN)[1:]
    assert golden.data["passed"] and driver.engine.report(driver.now).fault is None
    driver.run(2 * S)
    assert check(driver.records, require_done=False) == [] and not driver.board.leased


def test_without_the_proof_the_whole_batch_fails_and_all_its_kv_is_unknown() -> None:
    driver = Driver().ready()
    told = a_batch(driver, Fault(status=CCU, failed_rows=(2,)))
    driver.until(lambda: all(one.ended for one in told))
    assert [one.error for one in told] == ["model_recovering"] * 4
    assert driver.state == "RECOVERING" and driver.lanes(UNKNOWN) == 4


def test_a_prompts_fault_is_its_lanes_alone() -> None:
    driver = Driver(isolating()).ready()
    running = driver.submit(1, max_new_tokens=30)
    driver.until(lambda: running.pieces)
    driver.faults = once(driver, Fault(status=CCU, failed_rows=(0,)), JobKind.PREFILL, 1)
    fails = driver.submit(2)
    driver.until(lambda: fails.ended)
    assert fails.error == "model_recovering" and driver.state == "READY" and driver.lanes(UNKNOWN) == 1
    driver.until(lambda: running.ended)
    assert running.text == text_of([1, 2, 3], 30)


def test_a_request_that_was_cancelled_in_the_step_that_failed_it_ends_once_and_its_lane_is_lost() -> None:
    driver = Driver(isolating()).ready()
    told = a_batch(driver, Fault(status=CCU, failed_rows=(1,)))
    driver.cancel(2)
    driver.until(lambda: driver.lanes(UNKNOWN))
    driver.until(lambda: all(one.ended for one in told if one is not told[1]))
    driver.run(2 * S)
    assert driver.engine.report(driver.now).cancelled == 1 and driver.lanes(UNKNOWN) == 1
    assert check(driver.records, require_done=False) == [] and driver.engine.load().cost == 0


def test_a_deadline_that_passed_in_the_step_that_failed_it_ends_it_once() -> None:
    driver = Driver(isolating()).ready()
    told = a_batch(driver, Fault(status=CCU, failed_rows=(0, 3)))
    late = driver.engine.attempts.registry.live()[0]
    driver.engine.attempts.fail(late, DeadlineExceeded("now"), driver.now, [])
    driver.until(lambda: all(one.ended for one in told[1:]))
    assert driver.lanes(UNKNOWN) == 2
    driver.run(2 * S)
    assert check(driver.records, require_done=False) == [] and driver.engine.load().cost == 0


def test_the_last_lane_that_is_lost_takes_the_board_with_it() -> None:
    driver = Driver(isolating(lanes=2, profiles=(1,))).ready()
    driver.faults = iter([Fault(status=CCU, failed_rows=(0,))])
    first = driver.submit(1)
    driver.until(lambda: first.ended)
    assert driver.state == "READY" and driver.lanes(UNKNOWN) == 1
    driver.until(lambda: len(driver.events_of(history.BOARD_GOLDEN)) == 2)
    driver.faults = iter([Fault(status=CCU, failed_rows=(0,))])
    second = driver.submit(2)
    driver.until(lambda: second.ended)
    report = driver.engine.report(driver.now)
    assert (report.state, report.fault, report.wants_reset) == ("RECOVERING", "ccu_exception", True)
    driver.grant()
    driver.until(lambda: driver.state == "READY")
    assert driver.lanes(UNKNOWN) == 0, "a new generation has all its lanes"


def test_a_board_that_can_no_longer_take_the_largest_request_recovers_instead_of_letting_it_wait_for_ever() -> None:
    scheduler = a_scheduler((1,), admission={"max_kv_tokens": 100})
    driver = Driver(isolating(lanes=4, profiles=(1,)), scheduler=scheduler).ready()
    driver.faults = iter([Fault(status=CCU, failed_rows=(0,))])
    told = driver.submit(1, max_new_tokens=50)
    driver.until(lambda: told.ended)
    assert driver.state == "RECOVERING", "53 of 100 tokens are lost; a request of 64 would never fit"


def test_golden_decides_about_a_board_one_of_whose_lanes_failed() -> None:
    manifest = isolating()
    driver = Driver(package=a_package(manifest, [a_case([1, 2, 3])])).ready()
    driver.faults = iter([Fault(status=CCU, failed_rows=(0,)), Fault(bad_row=0)])
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    driver.until(lambda: driver.state == "RECOVERING")
    assert driver.engine.report(driver.now).fault == "bad_numbers"


def test_a_load_whose_golden_loses_a_lane_fails() -> None:
    driver = Driver(isolating())
    driver.faults = iter([Fault(status=CCU, failed_rows=(0,))])
    driver.load()
    driver.until(lambda: driver.state == "FAILED")
    assert "golden" in (driver.engine.report(driver.now).command_error or "")
