"""Board resets are rationed: at most `max_resets_per_10min` per board in any ten minutes (acceptance §12, scheduling §15).

A spend is saved before the reset is granted, and handed back after a restart of the supervisor, so that a crash in between can
only make the budget smaller. A refusal is a value that says when the window will allow the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from calculet_core.budgets import WindowBudget
from calculet_core.clock import S

WINDOW_NS = 600 * S


@dataclass(frozen=True, slots=True)
class Refusal:
    """No reset now: why, and when the budget allows one again."""

    reason: str
    next_ns: int


class Resets:
    """All boards' reset budgets; `limits` and `spends` (monotonic nanoseconds) by board."""

    __slots__ = ("_budgets",)

    def __init__(self, limits: Mapping[str, int], spends: Mapping[str, Iterable[int]] = {}) -> None:
        self._budgets = {board: WindowBudget(limit, WINDOW_NS, spends.get(board, ())) for board, limit in limits.items()}

    def ask(self, board: str, now_ns: int) -> Refusal | None:
        """Spend one; or the refusal."""
        budget = self._budgets[board]
        if budget.spend(now_ns):
            return None
        if budget.limit == 0:
            return Refusal("resets are turned off (recovery.max_resets_per_10min: 0)", now_ns + WINDOW_NS)
        next_ns = budget.next_ns(now_ns)
        wait_s = (next_ns - now_ns) / S
        return Refusal(f"{budget.limit} resets in ten minutes are spent; the next is allowed in {wait_s:.0f} s", next_ns)

    def allowed(self, board: str) -> bool:
        """False: resets of the board are turned off."""
        return self._budgets[board].limit > 0

    def left(self, board: str, now_ns: int) -> int:
        """Resets that the window still allows."""
        return self._budgets[board].left(now_ns)
