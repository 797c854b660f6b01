"""Lanes and KV as transactions (scheduling §9)."""

from __future__ import annotations

import pytest

from calculet_core.fsm import InvalidTransitionError
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_worker.kv import KvManager


def a_manager(lanes: int = 2, max_seq: int = 64, max_tokens: int | None = None, max_sequences: int = 99) -> KvManager:
    return KvManager(1, lanes, max_seq, max_tokens or lanes * max_seq, max_sequences)


def test_a_sequence_grows_only_when_its_job_is_committed() -> None:
    kv = a_manager()
    lane = kv.reserve(7, 10)
    assert lane is not None
    kv.submit(lane, 4)
    assert (lane.state, lane.committed_len) == (KvSequenceState.UPDATING, 0)
    kv.commit(lane)
    assert (lane.state, lane.committed_len, kv.used_tokens, kv.reserved_tokens) == (KvSequenceState.ACTIVE, 4, 4, 10)
    assert kv.invariants() == []


def test_a_lane_is_given_again_only_after_the_runtime_confirmed() -> None:
    kv = a_manager(lanes=1)
    lane = kv.reserve(1, 10)
    assert lane is not None
    kv.release(lane)
    assert kv.reserve(2, 10) is None
    kv.confirm_free(lane)
    assert kv.reserve(2, 10) is lane
    assert lane.seq_id == 2


def test_a_lost_lane_is_never_given_again_and_keeps_its_share_of_the_budget() -> None:
    kv = a_manager(lanes=2, max_tokens=100)
    lost = kv.reserve(1, 60)
    assert lost is not None
    kv.submit(lost, 5)
    kv.lose(lost)
    assert kv.reserve(2, 60) is None, "60 of 100 tokens are lost"
    other = kv.reserve(2, 40)
    assert other is not None and other is not lost
    assert (kv.reserved_tokens, kv.used_tokens, kv.busy_lanes) == (40, 0, 1)
    with pytest.raises(InvalidTransitionError):
        kv.release(lost)
    assert kv.invariants() == []


@pytest.mark.parametrize("tokens", [0, -1, 65])
def test_what_cannot_fit_a_lane_is_not_reserved(tokens: int) -> None:
    assert a_manager(max_seq=64).reserve(1, tokens) is None


def test_prompt_and_output_may_fill_a_lane_to_the_last_position() -> None:
    kv = a_manager(lanes=1, max_seq=64)
    lane = kv.reserve(1, 64)
    assert lane is not None
    kv.submit(lane, 63)
    kv.commit(lane)
    kv.submit(lane, 1)
    kv.commit(lane)
    with pytest.raises(ValueError, match="64 reserved"):
        kv.submit(lane, 1)


def test_a_second_job_on_a_lane_that_is_updating_is_refused_by_the_table() -> None:
    kv = a_manager()
    lane = kv.reserve(1, 10)
    assert lane is not None
    kv.submit(lane, 4)
    with pytest.raises(InvalidTransitionError):
        kv.submit(lane, 1)


def test_fewer_sequences_than_lanes_can_be_configured() -> None:
    kv = a_manager(lanes=3, max_sequences=2)
    assert kv.reserve(1, 5) and kv.reserve(2, 5)
    assert kv.reserve(3, 5) is None
    assert kv.free_lanes == 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("committed_len", 11, "committed 11"),
        ("generation", 2, "of generation 2"),
        ("seq_id", 2, "two lanes"),
        ("state", KvSequenceState.FREE, "free list"),
        ("reserved_len", 9, "counted"),
    ],
)
def test_invariants_name_what_is_broken(field: str, value: int, words: str) -> None:
    kv = a_manager()
    lane = kv.reserve(1, 10)
    assert lane is not None and kv.reserve(2, 10) is not None and kv.invariants() == []
    setattr(lane, field, value)
    assert any(words in problem for problem in kv.invariants())


def test_states_always_name_all_six() -> None:
    assert a_manager(lanes=3).states() == {"FREE": 3, "RESERVED": 0, "ACTIVE": 0, "UPDATING": 0, "UNKNOWN": 0, "RELEASING": 0}
