"""Virtual time: one queue of things that will happen. Nothing here knows what they are.

Time jumps to the next thing. Things that are due at the same nanosecond happen in the order in which they were asked for, so a run
depends on nothing but its seed. Too many things at one moment is a livelock, and an error.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from calculet_core.clock import S

START_NS = 1000 * S
"""As if the host had been up for a while: budgets look back ten minutes."""
LIVELOCK_STEPS = 200_000


class Livelock(AssertionError):
    """Time does not move any more."""


class Timeline:
    """`now` is the host's CLOCK_MONOTONIC; `steps` counts what has happened."""

    def __init__(self) -> None:
        self.now = START_NS
        self.steps = 0
        self._order = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        """Let something happen later."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_ns if delay_ns > 0 else self.now, self._order, work, args))

    def run_until(self, end_ns: int) -> None:
        """Let everything happen that is due by then."""
        heap, pop = self._heap, heapq.heappop
        at_start, same = self.steps, 0
        steps = at_start
        while heap and heap[0][0] <= end_ns:
            at, _, work, args = pop(heap)
            same = same + 1 if at == self.now else 0
            if same > LIVELOCK_STEPS:
                raise Livelock(f"{LIVELOCK_STEPS} steps at {at} ns, the last is {work}")
            self.now = at
            steps += 1
            work(*args)
        self.steps = steps
        self.now = max(self.now, end_ns)

    def monotonic_ns(self) -> int:
        """As the module `time` has it, for shells' parts that ask for themselves."""
        return self.now

    def time_ns(self) -> int:
        """UTC nanoseconds."""
        return WALL_NS + self.now

    def time(self) -> float:
        """UTC seconds."""
        return self.time_ns() / S

    def monotonic(self) -> float:
        """Seconds."""
        return self.now / S


WALL_NS = 1_700_000_000 * S


def stream(seed: int, name: str) -> random.Random:
    """An own source of randomness for each purpose, so that what one draws moves no other."""
    return random.Random(f"{seed}/{name}")
