"""The usage log: one durable line for each request that was let in, whatever its client saw of the answer.

Lines are collected on the loop and handed over several times a second; one thread writes them and syncs them, at most once per
interval, so no disk holds up a token. A kill -9 loses what was not handed over (a fraction of a second), a power cut what was not
synced. A disk that is full or broken stops nothing: lost records are counted, logged, and written if it recovers in time.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

import msgspec

from calculet_core.clock import S
from calculet_core.config import UsageConfig
from calculet_core.shell.files import sync_folder
from calculet_core.shell.usage import usage_days, usage_file
from calculet_core.usage import UsageRecord
from calculet_router.actions import Ended

MAX_KEPT = 100_000
"""Records that wait for a disk that takes none; more are lost."""
END_S = 10.0
"""How long the last write may take."""
log = logging.getLogger("calculet.usage")
_encode_lines = msgspec.json.Encoder().encode_lines


class UsageLog:
    """`append` and `flush` on the loop; everything else happens on the log's own thread."""

    def __init__(self, folder: Path, config: UsageConfig, wall_s: Callable[[], float] = time.time) -> None:
        self._folder, self._config, self._wall_s = folder, config, wall_s
        self._pending: list[UsageRecord | tuple[Ended, float]] = []
        self._queue: queue.SimpleQueue[list[UsageRecord | tuple[Ended, float]] | None] = queue.SimpleQueue()
        self.written = self.lost = self.syncs = 0
        self._kept: list[UsageRecord] = []
        self._day, self._fd = "", -1
        self._unsynced = False
        self._synced_s = time.monotonic()
        self._complained = False
        self._thread = threading.Thread(target=self._work, name="usage", daemon=True)
        self._thread.start()

    def append(self, action: Ended) -> None:
        """A call has ended."""
        self._pending.append((action, self._wall_s()))

    def add(self, record: UsageRecord) -> None:
        """A record that is complete."""
        self._pending.append(record)

    def flush(self) -> None:
        """Hand over what was collected; to be called several times a second."""
        if self._pending or self._unsynced or self._kept:
            batch, self._pending = self._pending, []
            self._queue.put(batch)

    def close(self) -> None:
        """Write and sync everything."""
        self.flush()
        self._queue.put(None)
        self._thread.join(END_S)

    # ---------------------------------------------------------------- on the thread
    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._take(batch)
        self._take([], last=True)
        if self._fd >= 0:
            os.close(self._fd)

    def _take(self, batch: list[UsageRecord | tuple[Ended, float]], last: bool = False) -> None:
        records = self._kept + [one if isinstance(one, UsageRecord) else record_of(*one) for one in batch]
        self._kept = []
        try:
            while records:
                day = records[0].day
                days = [record.at[: len(day)] for record in records]
                count = len(days) if days.count(day) == len(days) else next(at for at, other in enumerate(days) if other != day)
                self._write(day, _encode_lines(records[:count]))
                self.written += count
                del records[:count]
            if self._unsynced and (last or time.monotonic() - self._synced_s >= self._config.sync_interval_ms / 1000):
                self._synced_s = time.monotonic()
                os.fdatasync(self._fd)
                self.syncs += 1
                self._unsynced = False
            self._complained = False
        except OSError as error:
            self._failed(records, error, last)

    def _write(self, day: str, data: bytes) -> None:
        if day != self._day:
            self._open(day)
        view = memoryview(data)
        self._unsynced = True
        while view:
            view = view[os.write(self._fd, view) :]

    def _open(self, day: str) -> None:
        """Another day's file; what the last one still holds unsynced is synced first."""
        if self._fd >= 0:
            os.fdatasync(self._fd)
            os.close(self._fd)
            self._day, self._fd = "", -1
        self._folder.mkdir(mode=0o750, exist_ok=True)
        self._fd = os.open(usage_file(self._folder, day), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        if size := os.fstat(self._fd).st_size:
            self._end_torn_line(day, size)
        self._day = day
        sync_folder(self._folder)
        self._forget_old(day)

    def _end_torn_line(self, day: str, size: int) -> None:
        """A predecessor was killed while it wrote: the half line must not swallow the next one."""
        with usage_file(self._folder, day).open("rb") as file:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                os.write(self._fd, b"\n")

    def _forget_old(self, day: str) -> None:
        oldest = (datetime.fromisoformat(day) - timedelta(days=self._config.keep_days)).date().isoformat()
        for old in usage_days(self._folder):
            if old < oldest:
                usage_file(self._folder, old).unlink()

    def _failed(self, records: list[UsageRecord], error: OSError, last: bool) -> None:
        kept = [] if last else records[:MAX_KEPT]
        self._kept = kept
        lost = len(records) - len(kept)
        self.lost += lost
        if not self._complained or lost:
            log.error("usage records cannot be written: %s (%d wait, %d lost)", error, len(kept), self.lost)
        self._complained = True
        if self._fd >= 0:
            os.close(self._fd)
        self._day, self._fd, self._unsynced = "", -1, False


def record_of(action: Ended, wall_s: float) -> UsageRecord:
    """The line of an ended call; `wall_s` is UTC seconds."""
    assert action.request is not None
    return UsageRecord(
        utc(wall_s), action.request, action.tenant, action.alias, action.outcome, action.prompt_tokens, action.generated_tokens,
        round((action.ended_ns - action.accepted_ns) / S, 3), action.key, None if action.error is None else action.error.code,
        action.choices, action.label,
    )  # fmt: skip


def utc(wall_s: float) -> str:
    """2026-11-30T15:53:51.123Z."""
    return f"{_second(int(wall_s))}.{int(wall_s * 1000) % 1000:03d}Z"


@lru_cache(maxsize=4)
def _second(wall_s: int) -> str:
    """Formatting a time costs as much as all the rest of a record."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
