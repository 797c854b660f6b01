"""Samples the boards of a server that exposes them, at a slow beat and in the parent's process, away from the clients' clocks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from calculet_perf.exposition import boards_of, device_record, injector_armed, processes_of, samples_of, throttled
from calculet_perf.records import DeviceRecord, ProcessRecord
from calculet_perf.shell.http import AskError, HttpClient

METRICS = "/metrics"
KEPT = 4096


class Boards:
    """`device.jsonl` and `processes.jsonl` while a run goes. `phase` is what the run is doing; None from
    `sample` when the server tells nothing."""

    def __init__(
        self, client: HttpClient, run_id: str, write: Callable[[DeviceRecord | ProcessRecord], None], every_s: float = 1.0
    ) -> None:
        self._client, self._run_id, self._write, self._every_s = client, run_id, write, every_s
        self._task: asyncio.Task[None] | None = None
        self.phase = "idle"
        self.swapping = False
        """A model is being swapped: what boards use meanwhile is neither rest nor load."""
        self.told = False
        """The server has told of at least one board."""
        self.armed: bool | None = None
        self.failures = 0
        self.recent: deque[DeviceRecord] = deque(maxlen=KEPT)

    async def sample(self) -> list[DeviceRecord]:
        """All boards now; empty when the server tells of none or does not answer."""
        asked_ns = time.monotonic_ns()
        utc = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        try:
            answer = await self._client.fetch(METRICS)
        except AskError:
            self.failures += 1
            return []
        if answer.status != 200:
            return []
        samples = samples_of(answer.body.decode("utf-8", "replace"))
        if (armed := injector_armed(samples)) is not None:
            self.armed = bool(self.armed) or armed
        phase = "swap" if self.swapping else self.phase
        records = [
            device_record(
                board, of_board, run_id=self._run_id, utc=utc, monotonic_ns=asked_ns, sample_ms=answer.round_trip_ns / 1e6,
                phase=phase,
            )
            for board, of_board in sorted(boards_of(samples).items())
        ]  # fmt: skip
        for record in records:
            self._write(record)
        for process in processes_of(samples, run_id=self._run_id, utc=utc, monotonic_ns=asked_ns, phase=phase):
            self._write(process)
        self.recent.extend(records)
        self.told = self.told or bool(records)
        return records

    def start(self) -> None:
        """Sample at the beat until `stop`."""
        self._task = asyncio.ensure_future(self._beat())

    async def stop(self) -> None:
        """Twice is fine."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def between(self, start_ns: int, end_ns: int) -> list[DeviceRecord]:
        """Kept samples of a window."""
        return [record for record in self.recent if start_ns <= record.monotonic_ns <= end_ns]

    def throttled_between(self, start_ns: int, end_ns: int) -> bool | None:
        """Whether a chip was throttled in a window; None: not told."""
        return throttled(self.between(start_ns, end_ns))

    async def _beat(self) -> None:
        while True:
            begin = time.monotonic()
            found = await self.sample()
            slower = 1 if found or self.told else 30  # a server that tells nothing is not asked every second
            await asyncio.sleep(max(0.0, self._every_s * slower - (time.monotonic() - begin)))
