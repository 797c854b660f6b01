"""Prompts: three queues, and cuts only where they are proven (scheduling §6)."""

from __future__ import annotations

import pytest
from builders_engine import a_manifest, a_sequence

from calculet_core.config import QueuesConfig
from calculet_core.requests import SequenceState
from calculet_core.states.request import RequestState
from calculet_worker.scheduling.arbiter import Turn
from calculet_worker.scheduling.prefill import PrefillQueues, proven_cut


def ready(number: int, prompt: int, finish: float = 0.0, done: int = 0) -> SequenceState:
    return a_sequence(number, prompt, state=RequestState.PREFILL_READY, virtual_finish_time=finish, kv_length=done)


@pytest.mark.parametrize(
    ("prompt", "done", "turn"),
    [
        (1, 0, Turn.SHORT), (512, 0, Turn.SHORT), (513, 0, Turn.MEDIUM), (4_096, 0, Turn.MEDIUM), (4_097, 0, Turn.LONG),
        (40_960, 0, Turn.LONG), (40_960, 36_864, Turn.LONG), (40_960, 40_448, Turn.LONG), (4_096, 4_000, Turn.MEDIUM),
    ],
)  # fmt: skip
def test_a_prompts_length_decides_its_queue_until_its_last_part(prompt: int, done: int, turn: Turn) -> None:
    assert PrefillQueues(QueuesConfig(), None).turn_of(ready(1, prompt, done=done)) is turn


@pytest.mark.parametrize("prompt", [1, 512, 40_959])
def test_without_proof_a_prompt_is_one_job(prompt: int) -> None:
    queues = PrefillQueues(QueuesConfig(), proven_cut(a_manifest(), 512))
    seq = ready(1, prompt)
    queues.push(seq)
    part = queues.take(queues.turn_of(seq))
    assert (part.start, part.end, part.last) == (0, prompt, True)


@pytest.mark.parametrize(("granularity", "most", "cut"), [(64, 512, 512), (64, 500, 448), (64, 63, 64), (64, 64, 64), (1, 100, 100)])
def test_a_cut_is_a_multiple_of_the_proven_granularity(granularity: int, most: int, cut: int) -> None:
    assert proven_cut(a_manifest(cut=granularity), most) == cut


@pytest.mark.parametrize("prompt", [15, 16, 17, 31, 32, 33, 48])
def test_parts_meet_at_proven_boundaries_and_cover_the_prompt(prompt: int) -> None:
    queues = PrefillQueues(QueuesConfig(), 16)
    seq, parts = ready(1, prompt), []
    while seq.kv_length < prompt:
        queues.push(seq)
        part = queues.take(Turn.SHORT)
        parts.append(part)
        seq.kv_length = part.end
    assert [part.start for part in parts] == list(range(0, prompt, 16))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].end == prompt


def test_a_queue_goes_by_virtual_finish() -> None:
    queues = PrefillQueues(QueuesConfig(), None)
    late, early = ready(1, 10, finish=9.0), ready(2, 10, finish=3.0)
    queues.push(late), queues.push(early)
    assert [queues.take(Turn.SHORT).seq, queues.take(Turn.SHORT).seq] == [early, late]


def test_a_sequence_that_ended_while_it_waited_is_passed_over() -> None:
    queues = PrefillQueues(QueuesConfig(), None)
    gone, there = ready(1, 10), ready(2, 10)
    queues.push(gone), queues.push(there)
    gone.state = RequestState.CANCELLED
    queues.removed(gone)
    assert queues.depths[Turn.SHORT] == 1
    assert queues.take(Turn.SHORT).seq is there
    assert queues.depths[Turn.SHORT] == 0


def test_the_oldest_wait_of_an_empty_queue_is_absent() -> None:
    assert PrefillQueues(QueuesConfig(), None).oldest_ns(Turn.LONG) is None


def test_what_the_next_prompt_still_lacks_is_known_and_ended_ones_are_passed_over() -> None:
    queues = PrefillQueues(QueuesConfig(), cut=64)
    assert queues.rest(Turn.SHORT) is None
    first, second = a_sequence(1, 100, state=RequestState.PREFILL_READY), a_sequence(2, 200, state=RequestState.PREFILL_READY, kv_length=64)
    first.virtual_finish_time, second.virtual_finish_time = 1.0, 2.0
    queues.push(first)
    queues.push(second)
    assert queues.rest(Turn.SHORT) == 100
    first.state = RequestState.CANCELLED
    queues.removed(first)
    assert queues.rest(Turn.SHORT) == 136 and queues.depths[Turn.SHORT] == 1
    assert queues.take(Turn.SHORT).seq is second
    assert queues.rest(Turn.SHORT) is None
