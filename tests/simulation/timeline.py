"""Virtual time: one queue of things that will happen. Nothing here knows what they are.

Time jumps to the next thing. What is due at the same nanosecond is shuffled by the seed, as far as a real host may: whatever happens
belongs to a lane (a process's loop, one of its threads, a socket, a client), and each lane has its own pace within a moment. Within a
lane what was asked for first comes first: asyncio promises that of `call_soon`, and programs rely on it. Only timers of one lane that
were set at different moments may overtake one another when they end at the same one. Too many things at one moment is a livelock,
and an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

from calculet_core.clock import S

START_NS = 1000 * S
"""As if the host had been up for a while: budgets look back ten minutes."""
LIVELOCK_STEPS = 200_000


_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_SPREAD, _PACES = 64, 16
"""Within a moment: where what was waited for begins, and how far apart the steps of a lane may be."""


class Lane:
    """Whose things happen in the order in which they were asked for."""

    __slots__ = ("at", "place", "salt")

    def __init__(self, salt: int) -> None:
        self.salt, self.at, self.place = salt, -1, 0


class Livelock(AssertionError):
    """Time does not move any more."""


class Timeline:
    """`now` is the host's CLOCK_MONOTONIC; `steps` counts what has happened, `overtaken` what was asked for later and came earlier."""

    def __init__(self, seed: int = 0) -> None:
        self.now = START_NS
        self.steps = self.overtaken = 0
        self._seed = seed
        self._order = self._place = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._nobody = self.lane("world")
        self.loop: asyncio.AbstractEventLoop | None = None
        """The running one of asyncio. Telling asyncio costs more than most callbacks do, so it stays until another one runs."""
        self.at_top = False
        """Nothing of a process runs just now, and whoever is next need not put the loop back."""

    def lane(self, name: str) -> Lane:
        """Of somebody whose things keep their order."""
        return Lane(int.from_bytes(hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()))

    def after(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        """Let something of the world's happen later."""
        self.put(self._nobody, delay_ns, work, args)

    def put(self, lane: Lane, delay_ns: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Let something of a lane happen later. Its place within its moment follows from the seed, the lane and the moments alone, so
        that nothing which is left out moves anything else."""
        now = self.now
        self._order += 1
        if delay_ns > 0:
            at = now + delay_ns
            place = ((at ^ now * 5 ^ lane.salt) * _MIX & _MASK) >> 40 & _SPREAD - 1
        else:
            at = now
            if lane.at != now:
                lane.at, lane.place = now, self._place
            place = lane.place = max(lane.place, self._place) + 1 + (((now ^ lane.salt) * _MIX & _MASK) >> 40 & _PACES - 1)
        heapq.heappush(self._heap, (at, place, self._order, work, args))

    def enter(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """From now on this loop is the running one."""
        self.loop = loop
        asyncio._set_running_loop(loop)

    def run_until(self, end_ns: int) -> None:
        """Let everything happen that is due by then."""
        self.at_top = True
        try:
            self._run_until(end_ns)
        finally:
            self.at_top = False
            self.enter(None)

    def _run_until(self, end_ns: int) -> None:
        heap, pop = self._heap, heapq.heappop
        at_start, same = self.steps, 0
        steps, last = at_start, 0
        while heap and heap[0][0] <= end_ns:
            at, self._place, order, work, args = pop(heap)
            if at == self.now:
                same += 1
                if order < last:
                    self.overtaken += 1
                if same > LIVELOCK_STEPS:
                    raise Livelock(f"{LIVELOCK_STEPS} steps at {at} ns, the last is {work}")
            else:
                same, self.now = 0, at
            last = order
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
