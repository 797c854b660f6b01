"""The checker finds each broken promise, and nothing in a good history."""

from __future__ import annotations

from typing import Any

import pytest

from calculet_core import history
from calculet_core.clock import S
from calculet_core.history import Budgets, Event, check


def event(name: str, t: int = 1, **fields: Any) -> Event:
    known = {key: fields.pop(key) for key in ("request", "attempt", "board", "epoch", "generation", "job") if key in fields}
    return Event(name, t, data=fields, **known)


def accepted(request: int = 1, t: int = 1) -> Event:
    return event(history.REQUEST_ACCEPTED, t, request=request)


def tokens(request: int = 1, generation: int = 1, ids: tuple[int, ...] = (5, 6), t: int = 2) -> Event:
    return event(history.REQUEST_TOKENS, t, request=request, generation=generation, n=len(ids), ids=list(ids))


def done(request: int = 1, outcome: str = "completed", t: int = 3, **fields: Any) -> Event:
    return event(history.REQUEST_DONE, t, request=request, outcome=outcome, **fields)


def board(name: str, t: int = 1, generation: int = 1, **fields: Any) -> Event:
    return event(name, t, board="board0", epoch=fields.pop("epoch", 1), generation=generation, **fields)


GOOD = [
    board(history.BOARD_GENERATION, state="CONFIGURING"),
    board(history.BOARD_GOLDEN, passed=True),
    board(history.BOARD_GENERATION, state="READY"),
    accepted(),
    board(history.BOARD_LANE_BOUND, lane=0, request=1, attempt=1),
    tokens(),
    done(),
    board(history.BOARD_LANE_FREE, lane=0),
    board(history.BOARD_IDLE, lanes_busy=0, kv_reserved=0, leases=0),
    accepted(2),
    done(2, "failed", code="worker_lost"),
]


def test_a_good_history_has_no_violation() -> None:
    assert check(GOOD, reference={1: [5, 6]}.get) == []


@pytest.mark.parametrize(
    ("rule", "events"),
    [
        ("one_terminal", [accepted()]),
        ("one_terminal", [accepted(), done(), done()]),
        ("one_terminal", [event(history.ATTEMPT_DONE, request=1, attempt=1, board="b", epoch=1)] * 2),
        ("unique_ids", [accepted(), accepted(), done()]),
        ("no_token_after_terminal", [accepted(), done(), tokens()]),
        ("one_generation", [accepted(), tokens(), tokens(generation=2), done()]),
        ("explicit_error", [accepted(), done(outcome="failed")]),
        ("monotone_generations", [board(history.BOARD_GENERATION, generation=g, state="VALIDATING") for g in (2, 1)]),
        ("monotone_epochs", [board(history.FLEET_WORKER_STARTED, epoch=e) for e in (2, 2)]),
        ("golden_before_ready", [board(history.BOARD_GENERATION, state=s) for s in ("CONFIGURING", "READY")]),
        ("one_sequence_per_lane", [board(history.BOARD_LANE_BOUND, lane=0)] * 2),
        ("single_release", [board(history.BOARD_LANE_FREE, lane=0)]),
        ("unknown_never_reused", [board(history.BOARD_LANE_LOST, lane=0), board(history.BOARD_LANE_BOUND, lane=0)]),
        ("baseline", [board(history.BOARD_IDLE, lanes_busy=0, kv_reserved=0, leases=1)]),
        ("baseline", [board(history.BOARD_LANE_BOUND, lane=0), board(history.BOARD_IDLE, lanes_busy=0)]),
    ],
)  # fmt: skip
def test_a_broken_promise_is_found(rule: str, events: list[Event]) -> None:
    assert rule in {violation.rule for violation in check(events)}


def test_another_requests_tokens_are_found() -> None:
    events = [accepted(), tokens(ids=(5, 7)), done()]
    assert [violation.rule for violation in check(events, reference={1: [5, 6]}.get)] == ["no_crosstalk"]


def test_an_answer_that_ends_early_is_found() -> None:
    events = [accepted(), tokens(ids=(5,)), done()]
    assert [violation.rule for violation in check(events, reference={1: [5, 6]}.get)] == ["whole_answer"]


def test_the_third_reset_in_ten_minutes_breaks_a_budget_of_two() -> None:
    granted = [board(history.FLEET_RESET_GRANTED, t=at * S) for at in (1, 200, 599)]
    assert [violation.rule for violation in check(granted, Budgets(resets=2))] == ["within_budget"]
    granted[2] = board(history.FLEET_RESET_GRANTED, t=602 * S)
    assert check(granted, Budgets(resets=2)) == []


def test_a_lane_lost_in_one_generation_may_serve_in_the_next() -> None:
    events = [board(history.BOARD_LANE_LOST, lane=0), board(history.BOARD_LANE_BOUND, generation=2, lane=0)]
    assert check(events) == []


def test_who_asks_twice_may_be_refused_twice() -> None:
    """A refusal holds nothing, so it ends nothing."""
    refused = event(history.ATTEMPT_DONE, request=1, attempt=1, board="b", epoch=1, outcome="refused", code="stale_view")
    assert check([accepted(), refused, refused, done(outcome="failed", code="stale_view")]) == []
