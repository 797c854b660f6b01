"""Requests: one terminal each, and a cancel that is idempotent in all eleven states (scheduling §4)."""

from __future__ import annotations

import numpy as np
import pytest
from builders_engine import a_request

from calculet_core.fsm import InvalidTransitionError
from calculet_core.requests import SequenceState
from calculet_core.states.request import REQUEST, RequestState
from calculet_worker.registry import Cancelled, RequestRegistry

S = RequestState


def in_state(state: RequestState) -> tuple[RequestRegistry, SequenceState]:
    """A registry with one request that came to `state` the ordinary way."""
    registry = RequestRegistry()
    seq = registry.create(a_request(), 1, 0)
    assert seq is not None
    if state is S.WAITING_MODEL:
        seq.state = S.WAITING_MODEL
        return registry, seq
    if state is S.FAILED:
        registry.fail(seq)
    elif state is S.CANCELLED:
        registry.cancel(seq, "before")
        seq.cancelled = False
    elif state is not S.NEW:
        walk(registry, seq, state)
    assert seq.state is state
    return registry, seq


def walk(registry: RequestRegistry, seq: SequenceState, state: RequestState) -> None:
    steps = {
        S.NEW: lambda: registry.queue(seq, np.ones(4, np.int32), 4, 1.0),
        S.WAITING_ADMISSION: lambda: registry.admit(seq, 0, 1),
        S.PREFILL_READY: lambda: registry.start_prefill(seq),
        S.PREFILL_RUNNING: lambda: registry.on_prefill_complete(seq, 4, 9, 0.0, 5, 2),
        S.DECODE_READY: lambda: registry.start_decode([seq]),
        S.DECODE_RUNNING: lambda: registry.finish(seq),
        S.FINISHING: lambda: registry.released(seq),
    }
    while seq.state is not state:
        steps[seq.state]()


@pytest.mark.parametrize("state", list(RequestState))
def test_cancel_twice_is_the_same_as_once(state: RequestState) -> None:
    registry, seq = in_state(state)
    first = registry.cancel(seq, "why")
    after = seq.state
    assert registry.cancel(seq, "again") is Cancelled.ALREADY
    assert seq.state is after
    if state in (S.PREFILL_RUNNING, S.DECODE_RUNNING):
        assert (first, after, seq.cancelled, seq.cancel_reason) == (Cancelled.WHEN_DRAINED, state, True, "why")
    elif state in REQUEST.terminal or state is S.FINISHING:
        assert (first, after, seq.cancelled) == (Cancelled.ALREADY, state, False)
    else:
        assert (first, after) == (Cancelled.NOW, S.CANCELLED)


@pytest.mark.parametrize("state", [S.PREFILL_RUNNING, S.DECODE_RUNNING])
def test_a_drained_job_ends_a_cancelled_request(state: RequestState) -> None:
    registry, seq = in_state(state)
    registry.cancel(seq, "why")
    assert registry.find(seq.request.key) is seq
    registry.drained(seq)
    assert seq.state is S.CANCELLED and registry.find(seq.request.key) is None


@pytest.mark.parametrize("state", [S.FINISHING, S.COMPLETED, S.CANCELLED, S.FAILED])
def test_a_second_terminal_is_refused(state: RequestState) -> None:
    registry, seq = in_state(state)
    with pytest.raises(InvalidTransitionError):
        registry.fail(seq)
    with pytest.raises(InvalidTransitionError):
        registry.finish(seq)


@pytest.mark.parametrize("state", [state for state in RequestState if state not in REQUEST.terminal and state is not S.FINISHING])
def test_a_request_can_fail_wherever_it_is_and_then_is_not_found(state: RequestState) -> None:
    registry, seq = in_state(state)
    registry.fail(seq)
    assert seq.state is S.FAILED and registry.find(seq.request.key) is None and len(registry) == 0


def test_a_key_that_is_there_is_not_created_twice() -> None:
    registry, seq = in_state(S.NEW)
    assert registry.create(a_request(), 1, 0) is None
    assert registry.live() == [seq]


def test_cost_counts_what_is_owed_and_comes_back_to_zero() -> None:
    registry, seq = in_state(S.WAITING_ADMISSION)
    assert registry.cost == 8
    walk(registry, seq, S.DECODE_READY)
    assert registry.cost == 3, "the prompt is in KV and one of four tokens drawn"
    registry.start_decode([seq])
    registry.on_decode_complete(seq, 5, 8, 0.0, 1, 3)
    assert registry.cost == 2
    registry.cancel(seq, "why")
    assert registry.cost == 0


def test_a_cut_prompt_owes_only_the_rest() -> None:
    registry, seq = in_state(S.PREFILL_RUNNING)
    registry.on_prefill_part(seq, 3, 1, 2)
    assert (registry.cost, seq.state, seq.kv_length) == (5, S.PREFILL_READY, 3)
    registry.fail(seq)
    assert registry.cost == 0


def test_a_refused_job_leaves_the_sequence_where_it_was() -> None:
    registry, seq = in_state(S.DECODE_RUNNING)
    registry.requeue(seq, 5)
    assert (seq.state, seq.generated_tokens, seq.kv_length) == (S.DECODE_READY, 1, 4)
