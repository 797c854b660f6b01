"""Jobs in flight: buffers, banks, and what a completion means (scheduling §7.4, §14)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders_engine import VOCAB, a_profile, a_sequence

from calculet_core.config import ExecutorConfig
from calculet_core.faults import FaultKind
from calculet_core.jobs import Completion, EngineBank, Job, JobKind, JobTimings, OutputStatus
from calculet_worker.jobs.buffers import Buffers
from calculet_worker.jobs.completion import Faulty, Good, Stale, judge
from calculet_worker.jobs.durations import UNMEASURED_LIMIT_NS, Durations
from calculet_worker.jobs.inflight import Inflight, InflightJob
from calculet_worker.jobs.pingpong import PingPong
from calculet_worker.jobs.recovery import plan_for
from calculet_worker.output.sampling import row_facts
from calculet_worker.scheduling.arbiter import Turn

MS = 1_000_000


def an_entry(job_id: int = 1, members: tuple[int, ...] = (1, 2), want_logits: bool = True, generation: int = 1) -> InflightJob:
    job = Job(job_id, generation, JobKind.DECODE, a_profile(4), None, None, None, None, want_logits)
    return InflightJob(job, Turn.DECODE, [a_sequence(number) for number in members], None, EngineBank.AUTO, 0)


def a_completion(logits: Any, job_id: int = 1, generation: int = 1, status: OutputStatus = OutputStatus.DONE) -> Completion:
    return Completion(job_id, generation, status, logits, EngineBank.PING, JobTimings(), 0)


def rows(count: int, vocab: int = VOCAB) -> Any:
    return np.zeros((count, vocab), np.float32)


# ------------------------------------------------------------------------------------------------ completions
def test_a_good_completion_gives_one_row_for_each_sequence() -> None:
    verdict = judge(a_completion(rows(4)), an_entry(), VOCAB)
    assert isinstance(verdict, Good) and verdict.logits.shape == (2, VOCAB)


def test_a_job_nobody_waits_for_is_stale() -> None:
    assert isinstance(judge(a_completion(rows(2)), None, VOCAB), Stale)


def test_a_job_id_of_another_generation_is_stale() -> None:
    assert isinstance(judge(a_completion(rows(2), generation=2), an_entry(), VOCAB), Stale)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 1])
def test_a_number_that_is_none_condemns_the_batch(bad: float, row: int) -> None:
    logits = rows(2)
    logits[row, 7] = bad
    verdict = judge(a_completion(logits), an_entry(), VOCAB)
    assert isinstance(verdict, Faulty) and verdict.kind is FaultKind.BAD_NUMBERS and f"[{row}]" in verdict.detail


def test_bad_numbers_in_rows_without_a_sequence_mean_nothing() -> None:
    logits = rows(4)
    logits[3, 0] = np.nan
    assert isinstance(judge(a_completion(logits), an_entry(), VOCAB), Good)


@pytest.mark.parametrize(
    ("status", "kind"), [(OutputStatus.CCU_EXCEPTION, FaultKind.CCU_EXCEPTION), (OutputStatus.ABORTED, FaultKind.OTHER)]
)
def test_logits_of_a_bad_status_are_not_looked_at(status: OutputStatus, kind: FaultKind) -> None:
    verdict = judge(a_completion(rows(2), status=status), an_entry(), VOCAB)
    assert isinstance(verdict, Faulty) and verdict.kind is kind


@pytest.mark.parametrize("logits", [None, rows(1), rows(2, 8), np.zeros(VOCAB, np.float32)])
def test_logits_of_the_wrong_shape_fail_closed(logits: Any) -> None:
    verdict = judge(a_completion(logits), an_entry(), VOCAB)
    assert isinstance(verdict, Faulty) and verdict.kind is FaultKind.OTHER


def test_a_part_of_a_prompt_needs_no_logits() -> None:
    assert isinstance(judge(a_completion(None), an_entry(want_logits=False), VOCAB), Good)


# ------------------------------------------------------------------------------------------------ buffers
def test_two_jobs_never_share_arrays() -> None:
    buffers = Buffers(2, 4)
    first, second = buffers.lease(1), buffers.lease(2)
    assert first.token_ids is not second.token_ids and buffers.free == 0
    with pytest.raises(ValueError, match="no free output buffer"):
        buffers.lease(3)


def test_arrays_are_used_again_after_they_were_given_back() -> None:
    buffers = Buffers(2, 4)
    first = buffers.lease(1)
    buffers.give_back(1)
    assert buffers.lease(2) is first


def test_giving_back_twice_is_an_error() -> None:
    buffers = Buffers(2, 4)
    buffers.lease(1)
    buffers.give_back(1)
    with pytest.raises(ValueError, match="given back before"):
        buffers.give_back(1)


def test_a_quarantined_buffer_is_out_of_use_until_its_jobs_end_is_proven() -> None:
    buffers = Buffers(2, 4)
    lost = buffers.lease(1)
    buffers.quarantine(1)
    assert (buffers.leased, buffers.quarantined, buffers.free) == (0, 1, 1)
    assert buffers.lease(2) is not lost
    with pytest.raises(ValueError):
        buffers.quarantine(1)
    buffers.give_back(1)
    assert (buffers.quarantined, buffers.free) == (0, 1)


# ------------------------------------------------------------------------------------------------ in flight
@pytest.mark.parametrize(("wanted", "device", "outputs", "limit"), [(1, 2, 2, 1), (2, 2, 2, 2), (2, 1, 2, 1), (2, 2, 1, 1)])
def test_what_may_be_in_flight_is_the_least_of_configuration_device_and_buffers(wanted: int, device: int, outputs: int, limit: int) -> None:
    assert Inflight(ExecutorConfig(max_inflight=wanted), device, outputs, PingPong()).limit == limit


def test_two_jobs_use_two_banks() -> None:
    inflight = Inflight(ExecutorConfig(max_inflight=2), 2, 2, PingPong())
    banks = []
    for job_id in (1, 2):
        entry = an_entry(job_id, (job_id,))
        entry.bank = inflight.next_bank()
        banks.append(entry.bank)
        inflight.add(entry)
    assert banks == [EngineBank.PING, EngineBank.PONG] and not inflight.has_room
    inflight.pop(1)
    assert inflight.next_bank() is EngineBank.PING


def test_a_fixed_engine_takes_every_job() -> None:
    inflight = Inflight(ExecutorConfig(max_inflight=2, fixed_engine=True), 2, 2, PingPong())
    inflight.add(an_entry(1, (1,)))
    assert inflight.next_bank() is EngineBank.PING


def test_one_at_a_time_leaves_the_choice_to_the_device() -> None:
    assert Inflight(ExecutorConfig(), 2, 2, PingPong()).next_bank() is EngineBank.AUTO


def test_a_sequence_is_never_in_two_jobs() -> None:
    inflight = Inflight(ExecutorConfig(max_inflight=2), 2, 2, PingPong())
    inflight.add(an_entry(1, (1, 2)))
    with pytest.raises(ValueError, match="another job"):
        inflight.add(an_entry(2, (2, 3)))
    inflight.pop(1)
    inflight.add(an_entry(2, (2, 3)))


def test_degrading_affects_new_jobs_only() -> None:
    guard = PingPong()
    inflight = Inflight(ExecutorConfig(max_inflight=2), 2, 2, guard)
    inflight.add(an_entry(1, (1,)))
    inflight.add(an_entry(2, (2,)))
    guard.set(False)
    assert len(inflight) == 2 and not inflight.has_room
    inflight.pop(1)
    assert not inflight.has_room


# ------------------------------------------------------------------------------------------------ durations, plans
def test_a_time_limit_is_a_multiple_of_what_jobs_took_with_a_floor() -> None:
    durations = Durations(ExecutorConfig(job_timeout_factor=20, job_timeout_min_ms=5_000))
    assert durations.limit_ns(durations.decode_ns(4)) == UNMEASURED_LIMIT_NS
    durations.saw_decode(4, 10 * MS)
    assert durations.limit_ns(durations.decode_ns(4)) == 5_000 * MS
    durations.saw_decode(8, 1_000 * MS)
    assert durations.limit_ns(durations.decode_ns(8)) == 20_000 * MS
    durations.saw_prefill(100, 200 * MS)
    assert durations.prefill_ns(40_000) == 80_000 * MS


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_fault_has_a_plan_whose_error_clients_know(kind: FaultKind) -> None:
    plan = plan_for(kind, "why")
    assert plan.error().code != "internal_error"
    assert "why" in plan.error().message
    assert plan.wants_reset == (kind in {FaultKind.WAIT_TIMEOUT, FaultKind.DEVICE_UNAVAILABLE, FaultKind.CCU_EXCEPTION, FaultKind.RESIDUE})
    assert plan.condemns == (kind is FaultKind.OTHER)
    assert plan.bystander_error().retryable


def test_what_the_device_thread_found_is_believed_for_the_active_rows_alone() -> None:
    logits = rows(4)
    facts = row_facts(logits)
    facts.finite[3] = False
    entry = an_entry()
    active = len(entry.sequences)
    assert active < 4
    found = judge(a_completion(logits), entry, VOCAB, facts=facts)
    assert isinstance(found, Good) and found.best.tolist() == logits[:active].argmax(axis=1).tolist()
    facts.finite[0] = False
    found = judge(a_completion(logits), entry, VOCAB, facts=facts)
    assert isinstance(found, Faulty) and found.kind is FaultKind.BAD_NUMBERS and "rows [0]" in found.detail
