"""Runs a stability stage (acceptance §13) with golden, idle phase and returned resources around it as in any run."""

from __future__ import annotations

import time

import msgspec

from calculet_perf.plan import Item
from calculet_perf.shell.loading import STAGE
from calculet_perf.shell.runner import Runner
from calculet_perf.shell.screen import span
from calculet_perf.stability import StageRun
from calculet_perf.workloads.stages import LOADS, segment

SEGMENTS = 100
LONGEST_SEGMENT_S = 300.0
SHORTEST_SEGMENT_S = 2.0
FIRST_GUESS_PER_S = 1.0
TOLD = 20
"""How often it is said how far it is."""


class SoakRunner(Runner):
    """A run that goes on with one stage's load until its time is over; interrupted, another session takes it up."""

    def begin(self, stage: StageRun, target_qps: float | None, segments: int = 0, last_ns: int | None = None) -> None:
        """What to run; before `run`.

        Args:
            stage: as a session before this one left it, or one of which nothing is done.
            segments: how many were done before.
            last_ns: end of the last of them, CLOCK_MONOTONIC; None: this is the first session.
        """
        self._stage, self._target, self._number, self._last_ns = stage, target_qps, segments, last_ns

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
        while (left := seconds - self._stage.done_s) > 0:
            part = segment(load, self._stage.stage, self._number, self._target, min(length, left), info.context_tokens, per_s)
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

    def _done(self, seconds: float) -> None:
        self._stage = msgspec.structs.replace(self._stage, done_s=seconds)
        self.put(STAGE, msgspec.json.encode(self._stage) + b"\n")
