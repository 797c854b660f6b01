"""Deadlines of live requests, found without looking at the others."""

from __future__ import annotations

from builders_engine import a_sequence

from calculet_core.states.request import RequestState
from calculet_worker.scheduling.deadlines import SWEEP_AT_LEAST, Deadlines


def test_what_has_passed_is_named_once_and_in_order() -> None:
    deadlines = Deadlines()
    late, early, far = a_sequence(1, deadline_ns=20), a_sequence(2, deadline_ns=10), a_sequence(3, deadline_ns=99)
    for seq in (late, early, far):
        deadlines.add(seq)
    assert deadlines.next_ns() == 10
    assert deadlines.expired(9) == []
    assert deadlines.expired(20) == [early, late]
    assert deadlines.expired(20) == [] and deadlines.next_ns() == 99


def test_requests_that_have_ended_do_not_expire() -> None:
    deadlines = Deadlines()
    for number, state in enumerate((RequestState.FINISHING, RequestState.COMPLETED, RequestState.CANCELLED, RequestState.FAILED)):
        deadlines.add(a_sequence(number, deadline_ns=5, state=state))
    assert deadlines.next_ns() is None and deadlines.expired(10) == []


def test_ended_requests_with_far_deadlines_do_not_pile_up() -> None:
    deadlines = Deadlines()
    live = [a_sequence(number, deadline_ns=10_000) for number in range(10)]
    for seq in live:
        deadlines.add(seq)
    for number in range(5_000):
        deadlines.add(a_sequence(100 + number, deadline_ns=9_000, state=RequestState.COMPLETED))
    assert len(deadlines._heap) <= 2 * len(live) + SWEEP_AT_LEAST + 1
    assert deadlines.expired(10_000) == live
