"""Board resets are rationed per board (acceptance §12)."""

from __future__ import annotations

from calculet_core.clock import S
from calculet_supervisor.resets import Resets


def test_third_reset_in_ten_minutes_is_refused_and_says_when_the_next_is_allowed() -> None:
    resets = Resets({"board0": 2})
    assert resets.ask("board0", 0) is None
    assert resets.ask("board0", 100 * S) is None
    refusal = resets.ask("board0", 200 * S)
    assert refusal is not None
    assert "2 resets in ten minutes are spent" in refusal.reason and "400 s" in refusal.reason
    assert refusal.next_ns == 600 * S
    assert resets.ask("board0", refusal.next_ns) is None


def test_a_refused_reset_spends_nothing() -> None:
    resets = Resets({"board0": 1})
    assert resets.ask("board0", 0) is None
    for at_s in range(1, 599):
        assert resets.ask("board0", at_s * S) is not None
    assert resets.ask("board0", 600 * S) is None


def test_boards_have_budgets_of_their_own() -> None:
    resets = Resets({"board0": 1, "board1": 1})
    assert resets.ask("board0", 0) is None
    assert (resets.left("board0", 0), resets.left("board1", 0)) == (0, 1)


def test_a_limit_of_none_at_all_is_always_refused() -> None:
    refusal = Resets({"board0": 0}).ask("board0", 0)
    assert refusal is not None and "turned off" in refusal.reason


def test_spends_of_an_earlier_supervisor_count_also_before_the_boot() -> None:
    resets = Resets({"board0": 2}, {"board0": [-30 * S, -700 * S, 0]})
    assert resets.left("board0", 1 * S) == 0
    assert resets.left("board0", 571 * S) == 1
