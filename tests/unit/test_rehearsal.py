"""The stand-in whose ticks warm the processor: the real code, and nothing of it is seen."""

from __future__ import annotations

import pytest

from calculet_core.clock import MS
from calculet_worker.actions import SubmitJob
from calculet_worker.events import JobCompleted
from calculet_worker.rehearsal import CONTEXT, MAX_LANES, Rehearsal


@pytest.mark.parametrize(("lanes", "rows"), [(1, 1), (4, 4), (16, 16), (64, MAX_LANES), (0, 1)])
def test_it_decodes_full_steps_for_ever(lanes: int, rows: int) -> None:
    now = 5
    rehearsal = Rehearsal(lanes, now)
    for _ in range(50):
        now += 10 * MS
        rehearsal.tick(now)
        assert rehearsal._job is not None and len(rehearsal._job.token_ids) == rows
    assert rehearsal._number == rows
    assert rehearsal.ticks == 50 and rehearsal._engine.serving is not None and rehearsal._engine.serving.kv.invariants() == []


def test_sequences_that_come_to_their_end_are_followed_by_others() -> None:
    rehearsal = Rehearsal(2, 1)
    full = 0
    for number in range(3 * CONTEXT):
        rehearsal.tick(number + 2)
        full += rehearsal._job is not None and len(rehearsal._job.token_ids) == 2
    assert rehearsal._number > 5 and full > 2.9 * CONTEXT


def test_a_tick_is_the_tick_of_the_engine() -> None:
    rehearsal, seen = Rehearsal(4, 1), []
    handle = rehearsal._engine.handle
    rehearsal._engine.handle = lambda event, now: seen.append((type(event), done := handle(event, now))) or done  # type: ignore[assignment,func-returns-value]
    rehearsal.tick(2)
    assert seen[0][0] is JobCompleted and any(isinstance(action, SubmitJob) for action in seen[0][1])
