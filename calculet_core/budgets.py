"""Budgets over a sliding window (resets, restarts) and full-jitter back-off. Time is an argument; rates are in `limits`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


class WindowBudget:
    """At most `limit` spends in any window of `window_ns`; durable callers save `spends()` and hand it back."""

    __slots__ = ("_spends", "limit", "window_ns")

    def __init__(self, limit: int, window_ns: int, spends: Iterable[int] = ()) -> None:
        self.limit, self.window_ns = limit, window_ns
        self._spends: deque[int] = deque(sorted(spends))

    def left(self, now_ns: int) -> int:
        """How many spends the window still allows."""
        self._expire(now_ns)
        return max(0, self.limit - len(self._spends))

    def spend(self, now_ns: int) -> bool:
        """Spend one if the window allows it."""
        if self.left(now_ns) == 0:
            return False
        self._spends.append(now_ns)
        return True

    def next_ns(self, now_ns: int) -> int:
        """When the next spend will be allowed; `now_ns` when it is already."""
        if self.left(now_ns) or not self._spends:
            return now_ns
        return self._spends[len(self._spends) - self.limit] + self.window_ns

    def clear(self) -> None:
        """Forget all spends: a stable period, or an operator's word."""
        self._spends.clear()

    def spends(self) -> tuple[int, ...]:
        """Times of the spends still in memory, oldest first."""
        return tuple(self._spends)

    def _expire(self, now_ns: int) -> None:
        while self._spends and self._spends[0] <= now_ns - self.window_ns:
            self._spends.popleft()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with full jitter: uniformly between 0 and min(cap, base * 2**failures)."""

    base_ns: int
    cap_ns: int

    def delay_ns(self, failures: int, rng: random.Random) -> int:
        """Delay before the try that follows `failures` failures (1 or more)."""
        return int(rng.uniform(0, min(self.cap_ns, self.base_ns * 2 ** min(failures - 1, 32))))
