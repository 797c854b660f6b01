"""Runs a stability stage (acceptance §13) with golden, idle phase and returned resources around it as in any run."""

from __future__ import annotations

import asyncio
import time

import msgspec

from calculet_perf.plan import Item
from calculet_perf.shell.loading import STAGE
from calculet_perf.shell.run_dir import SWAPS
from calculet_perf.shell.runner import Runner, utc_now
from calculet_perf.shell.screen import span
from calculet_perf.shell.swap_fleet import SwapFleet
from calculet_perf.stability import StageRun
from calculet_perf.swapping import GIVE_UP_AFTER, SwapCycle, due_s, kind_of
from calculet_perf.workloads.stages import LOADS, segment

SEGMENTS = 100
LONGEST_SEGMENT_S = 300.0
SHORTEST_SEGMENT_S = 2.0
FIRST_GUESS_PER_S = 1.0
SEGMENTS_PER_CYCLE = 4
"""A swap begins between two segments: they are short enough that each cycle finds its time."""
LONGER = 1.5
"""A stage whose cycles take longer than their share goes on for them, up to so many times its length."""
TOLD = 20
"""How often it is said how far it is."""


class SoakRunner(Runner):
    """A run that goes on with one stage's load until its time is over; interrupted, another session takes it up."""

    def begin(
        self, stage: StageRun, target_qps: float | None, segments: int = 0, last_ns: int | None = None,
        swaps: SwapFleet | None = None, cycles: int = 0,
    ) -> None:  # fmt: skip
        """What to run; before `run`.

        Args:
            stage: as a session before this one left it, or one of which nothing is done.
            segments: how many were done before.
            last_ns: end of the last of them, CLOCK_MONOTONIC; None: this is the first session.
            swaps: drives the model's swaps; None: nothing is changed on the server.
            cycles: how many of them were done before.
        """
        self._stage, self._target, self._number, self._last_ns = stage, target_qps, segments, last_ns
        self._swaps, self._cycle, self._failing = swaps, cycles, 0
        self._swapping: asyncio.Task[SwapCycle] | None = None

    async def run(self) -> None:
        """As any run; a swap that is under way when it ends is left to the fleet, which ends it by itself."""
        try:
            await super().run()
        finally:
            if self._swapping is not None and not self._swapping.done():
                self._swapping.cancel()
                await asyncio.wait([self._swapping])
                self._writer.close()

    async def measure(self) -> None:
        """Segment after segment."""
        load, info = LOADS[self._stage.stage], self.info
        if self._last_ns is not None:
            pause = max(self._stage.longest_pause_s, (time.monotonic_ns() - self._last_ns) / 1e9)
            self._stage = msgspec.structs.replace(self._stage, sessions=info.sessions, longest_pause_s=pause)
        before, seconds = self._stage.done_s, self._stage.planned_s or self._stage.asked_s
        length = min(LONGEST_SEGMENT_S, max(SHORTEST_SEGMENT_S, seconds / SEGMENTS))
        begin, per_s, told = time.monotonic(), FIRST_GUESS_PER_S, before
        self._screen.whole(round(seconds), round(before), "seconds")
        if self._swaps is not None:
            length = min(length, max(SHORTEST_SEGMENT_S, seconds / self._swaps.part.cycles / SEGMENTS_PER_CYCLE))
        while (left := seconds - self._stage.done_s) > 0 or self._cycles_left(seconds):
            await self._swap_if_due(seconds)
            span_s = min(length, left) if left > 0 else length
            part = segment(load, self._stage.stage, self._number, self._target, span_s, info.context_tokens, per_s)
            segment_begin = time.monotonic()
            records = await self.cell(self._number, Item(part.cell, self._number, part.count))
            per_s = max(0.1, len(records) / (time.monotonic() - segment_begin))
            self._number += 1
            self._done(before + time.monotonic() - begin)
            self._screen.cell_done(round(time.monotonic() - segment_begin))
            if self._stage.done_s - told >= seconds / TOLD:
                told = self._stage.done_s
                self.say(f"  {span(told)} of {span(seconds)} done")
        self._done(self._stage.done_s)
        await self._swap_home()

    # ---------------------------------------------------------------- swaps (scheduling §19 M4)
    def _cycles_left(self, seconds: float) -> bool:
        """Whether the load goes on for cycles that are still to come, or for one that is under way."""
        if self._swaps is None or self._stage.done_s > LONGER * seconds:
            return False
        under_way = self._swapping is not None and not self._swapping.done()
        return under_way or (self._cycle < self._swaps.part.cycles and self._failing < GIVE_UP_AFTER)

    async def _swap_if_due(self, seconds: float) -> None:
        """Begin the next cycle when its time has come: beside the load, or here and now where that must pause for it."""
        swaps = self._swaps
        if swaps is None or self._failing >= GIVE_UP_AFTER or (self._swapping is not None and not self._swapping.done()):
            return
        number = self._cycle
        if number >= swaps.part.cycles or due_s(number, swaps.part.cycles, seconds) > self._stage.done_s:
            return
        self._cycle += 1
        self._boards.swapping = True
        self._swapping = asyncio.ensure_future(
            swaps.cycle(number, lambda home: kind_of(number, swaps.part, to_home=home), utc_now(), self._swapped)
        )
        if swaps.pauses(kind_of(number, swaps.part, to_home=False)):
            await asyncio.wait([self._swapping])

    async def _swap_home(self) -> None:
        """The fleet is left as it was found, and golden afterwards is about what golden before was about."""
        if self._swaps is None:
            return
        if self._swapping is not None:
            await asyncio.wait([self._swapping])
        if self._swapping is not None and not await self._swaps.at_home():
            self._boards.swapping = True
            self._cycle += 1
            self._swapping = asyncio.ensure_future(self._swaps.cycle(self._cycle - 1, lambda _: "home", utc_now(), self._swapped))
            await asyncio.wait([self._swapping])
        if self._cycle < self._swaps.part.cycles:
            self.say(f"  {self._cycle} of {self._swaps.part.cycles} load/unload cycles were begun")

    def _swapped(self, cycle: SwapCycle) -> None:
        """A cycle's end: written, and said when it was not as asked."""
        self._boards.swapping = False
        self._writer.append(SWAPS, cycle)
        self._failing = self._failing + 1 if not (cycle.ok or cycle.interrupted) else 0
        if not cycle.ok:
            self.say(f"  swap cycle {cycle.number} ({cycle.kind}): {cycle.why}")
        if self._failing == GIVE_UP_AFTER:
            self._note(f"{GIVE_UP_AFTER} swap cycles failed one after the other: none was begun after cycle {cycle.number}")

    def _done(self, seconds: float) -> None:
        self._stage = msgspec.structs.replace(self._stage, done_s=seconds)
        self.put(STAGE, msgspec.json.encode(self._stage) + b"\n")
