"""Whose turn it is on a board that models share in time, under a fake clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from calculet_core.clock import S
from calculet_core.config import TimeSharedConfig
from calculet_core.wire import ModelWait
from calculet_supervisor.turns import Resident, Switch, next_turn

CONFIG = TimeSharedConfig(min_residence_s=60, max_wait_s=30)
NOW = 1_000 * S


def decide(
    waits: dict[str, float], served_s: float | None = 100.0, busy: bool = True, able: tuple[str, ...] = ("a", "b", "c"),
    forced: str | None = None, failed: bool = False,
) -> Switch | None:  # fmt: skip
    """`waits`: alias -> for how many seconds its first request waits; `a` is there."""
    serving_ns = None if served_s is None else NOW - int(served_s * S)
    found = {alias: ModelWait(1, NOW - int(seconds * S)) for alias, seconds in waits.items()}
    return next_turn(CONFIG, Resident("a", serving_ns, busy, failed), able, found, forced, NOW)


def test_without_anybody_waiting_nothing_changes() -> None:
    assert decide({}) is None and decide({}, busy=False) is None
    assert decide({"a": 500.0}, busy=False) is None, "it is its own turn already"


def test_a_model_stays_for_its_least_residence_whatever_waits() -> None:
    assert decide({"b": 59.0}, served_s=59.9, busy=False) is None
    assert decide({"b": 59.0}, served_s=60.0, busy=False) == Switch(
        "b", "a has nothing to do; waiting: 1 request for b, the first for 59.0 s"
    )


def test_a_model_with_work_goes_when_the_longest_wait_is_over() -> None:
    assert decide({"b": 29.9}) is None
    switch = decide({"b": 30.0})
    assert switch is not None and switch.alias == "b" and switch.reason.startswith("time_shared.max_wait_s is over")


def test_who_waited_longest_is_next() -> None:
    assert (decide({"b": 31.0, "c": 40.0}) or Switch("", "")).alias == "c"
    assert (decide({"b": 41.0, "c": 40.0}) or Switch("", "")).alias == "b"


def test_a_model_on_its_way_in_or_out_is_not_chased_away() -> None:
    assert decide({"b": 500.0}, served_s=None) is None


def test_a_model_that_cannot_be_loaded_gives_way_at_once() -> None:
    assert decide({}, served_s=None, able=("b", "c"), failed=True) == Switch("b", "a could not be loaded")
    assert decide({"c": 1.0}, served_s=None, able=("b", "c")) == Switch("c", "a is unloaded")
    assert decide({"c": 1.0}, served_s=None, able=()) is None
    assert decide({"b": 500.0}, able=("a", "c")) is None, "nobody is sent to what cannot be loaded"


def test_a_rollout_gets_the_board_and_keeps_it() -> None:
    assert decide({}, served_s=1.0, forced="b") == Switch("b", "a rollout of b is under way")
    assert decide({"b": 500.0}, forced="a") is None


@dataclass
class Board:
    """One board and its three models, second by second: a switch takes some seconds, requests arrive as they like."""

    config: TimeSharedConfig
    resident: str = "a"
    serving: int | None = 0
    waiting: dict[str, list[int]] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    stays: list[int] = field(default_factory=list)

    def second(self, now: int, arrivals: list[str], load_s: int) -> None:
        for alias in arrivals:
            self.waiting.setdefault(alias, []).append(now)
        if self.serving is not None and now >= self.serving:
            for arrived in self.waiting.pop(self.resident, []):
                self.longest[self.resident] = max(self.longest.get(self.resident, 0), now - arrived)
        waits = {alias: ModelWait(len(found), found[0] * S) for alias, found in self.waiting.items() if found}
        serving_ns = self.serving * S if self.serving is not None and now >= self.serving else None
        seen = Resident(self.resident, serving_ns, self.resident in arrivals)
        if (switch := next_turn(self.config, seen, ("a", "b", "c"), waits, None, now * S)) is not None:
            assert self.serving is not None
            self.stays.append(now - self.serving)
            self.resident, self.serving = switch.alias, now + load_s


@pytest.mark.parametrize("seed", range(5))
def test_no_model_starves_and_none_leaves_before_its_time_however_requests_arrive(seed: int) -> None:
    rng = random.Random(seed)
    board = Board(TimeSharedConfig(min_residence_s=20, max_wait_s=30))
    for now in range(20_000):
        board.second(now, [alias for alias, rate in (("a", 0.9), ("b", 0.3), ("c", 0.01)) if rng.random() < rate], load_s=5)
    assert len(board.stays) > 100 and min(board.stays) >= 20
    # Two others may be before it: each stays until the next one's wait is over, and is loaded.
    assert max(board.longest.values()) <= 2 * (30 + 20 + 2 * 5), board.longest
    assert set(board.longest) == {"a", "b", "c"}
