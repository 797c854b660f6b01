"""Runs a stability stage (acceptance §13) with golden, idle phase and returned resources around it as in any run."""

from __future__ import annotations

import time

import msgspec

from calculet_perf.plan import Item
from calculet_perf.shell.loading import STAGE
from calculet_perf.shell.runner import Runner
from calculet_perf.stability import StageRun
from calculet_perf.workloads.stages import LOADS, segment

SEGMENTS = 100
LONGEST_SEGMENT_S = 300.0
SHORTEST_SEGMENT_S = 2.0
FIRST_GUESS_PER_S = 1.0


class SoakRunner(Runner):
    """A run that goes on with one stage's load until its time is over."""

    def begin(self, stage: str, asked_s: float, seconds: float, target_qps: float | None) -> None:
        """What to run; before `run`."""
        self._stage, self._asked_s, self._seconds, self._target = stage, asked_s, seconds, target_qps
        self._done_s = 0.0

    async def measure(self) -> None:
        """Segment after segment."""
        load, info = LOADS[self._stage], self.info
        length = min(LONGEST_SEGMENT_S, max(SHORTEST_SEGMENT_S, self._seconds / SEGMENTS))
        begin, number, per_s = time.monotonic(), 0, FIRST_GUESS_PER_S
        while (left := self._seconds - (time.monotonic() - begin)) > 0:
            part = segment(load, self._stage, number, self._target, min(length, left), info.context_tokens, per_s)
            segment_begin = time.monotonic()
            records = await self.cell(number, Item(part.cell, number, part.count))
            per_s = max(0.1, len(records) / (time.monotonic() - segment_begin))
            number += 1
            self._done_s = time.monotonic() - begin
            self._put_stage(load.share)
        self._put_stage(load.share)

    def _put_stage(self, share: float | None) -> None:
        run = StageRun(stage=self._stage, asked_s=self._asked_s, done_s=self._done_s, load_share=share)
        self.put(STAGE, msgspec.json.encode(run) + b"\n")
