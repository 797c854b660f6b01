"""A process's journal: one JSON line per event, the name first, in a size-capped file that rotates.

Never a prompt and never an answer. Lines are collected and written by `flush`, which a shell calls once in a while; a kill -9
loses at most what was not flushed. A full disk must not stop serving: a failed write is counted and dropped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from calculet_core.history import Event

FLUSH_BYTES = 65_536
FLUSH_EVENTS = 256
"""About so many bytes."""
log = logging.getLogger("calculet.journal")
_encode_lines = msgspec.json.Encoder().encode_lines


class LineFile:
    """Append-only lines; `keep` older files stay as NAME.1, NAME.2, ... A `path` of None writes nothing."""

    lost_by_process: ClassVar[int] = 0
    """Lines that files of this process have lost; told by `calculet_process_journal_lost_total`."""

    def __init__(self, path: Path | None, max_bytes: int, keep: int) -> None:
        self.path, self._max_bytes, self._keep = path, max_bytes, keep
        self._lines: list[bytes] = []
        self._pending = self._size = self.lost = 0
        self._fd = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def add(self, line: bytes) -> None:
        """Add a line, without its end."""
        if self.path is None:
            return
        self._lines.append(line)
        self._pending += len(line) + 1
        if self._pending >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        if not self._lines:
            return
        data = b"\n".join(self._lines) + b"\n"
        count, self._lines, self._pending = len(self._lines), [], 0
        self.write_data(data, count)

    def write_data(self, data: bytes, count: int) -> None:
        """Write `count` whole lines."""
        try:
            if self._size + len(data) > self._max_bytes:
                self._rotate()
            if self._fd < 0:
                self._open()
            self._size += os.write(self._fd, data)
        except OSError as error:
            self.lost += count
            LineFile.lost_by_process += count
            log.error("%s: %d lines lost: %s", self.path, count, error)

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        assert self.path is not None
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        assert self.path is not None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for number in range(self._keep, 0, -1):
            older = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if older.exists():
                older.rename(self.path.with_name(f"{self.path.name}.{number}"))
        if self._keep == 0:
            self.path.unlink(missing_ok=True)
        self._open()


class Journal(LineFile):
    """A process's events. They are encoded all together when they are written, so an appended event must not be changed."""

    def __init__(self, path: Path | None, max_bytes: int, keep: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(path, max_bytes, keep)
        self._now_ns = now_ns
        self._events: list[Event] = []

    def write(self, event: str, **fields: Any) -> None:
        """Add an event now; `fields` are `Event`'s, anything else goes into its `data`."""
        if self.path is None:
            return
        known = {name: fields.pop(name) for name in _FIELDS if name in fields}
        self.append(Event(event=event, t=self._now_ns(), data=fields, wall=round(time.time(), 3), **known))

    def append(self, event: Event) -> None:
        """Add a ready event."""
        if self.path is not None:
            self._events.append(event)
            if len(self._events) >= FLUSH_EVENTS:
                self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        if self._events:
            events, self._events = self._events, []
            try:
                data = _encode_lines(events)
            except (TypeError, ValueError, OverflowError, RecursionError):  # a bug in one must not lose the others
                events = [event for event in events if self._can_be_written(event)]
                data = _encode_lines(events)
            self.write_data(data, len(events))

    def _can_be_written(self, event: Event) -> bool:
        try:
            _encode_lines([event])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self.lost += 1
            LineFile.lost_by_process += 1
            log.error("%s: %s cannot be written: %s", self.path, event.event, error)
            return False
        return True


_FIELDS = ("request", "attempt", "board", "epoch", "generation", "job")


def read_journal(path: Path) -> list[Event]:
    """All events of a journal with its rotated files, oldest first; a torn last line is skipped."""
    files = [path.with_name(f"{path.name}.{n}") for n in range(99, 0, -1)] + [path]
    events: list[Event] = []
    for file in files:
        if file.exists():
            for line in file.read_bytes().splitlines():
                try:
                    events.append(msgspec.json.decode(line, type=Event))
                except msgspec.DecodeError:
                    continue
    return events


class Tail:
    """A journal from its beginning (rotated files included), then what is added; a rotation in between loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""
        self._open()

    def skip(self) -> None:
        """Leave out what is there already."""
        self._file.seek(0, os.SEEK_END)

    def whole(self) -> list[Event]:
        """Everything up to now."""
        older = [self.path.with_name(f"{self.path.name}.{number}") for number in range(99, 0, -1)]
        return [event for path in older if path.exists() for event in _decoded(path.read_bytes().split(b"\n"))] + self.more()

    def more(self) -> list[Event]:
        """What was added since."""
        data = self._rest + self._file.read()
        with suppress(OSError):
            if self.path.stat().st_ino != self._inode:
                data += self._file.read() + self._rotated()
        *lines, self._rest = data.split(b"\n")
        return _decoded(lines)

    def _open(self) -> None:
        self._file = self.path.open("rb")
        self._inode = os.fstat(self._file.fileno()).st_ino

    def _rotated(self) -> bytes:
        """What was written to newer files than the one that is open; goes on with the newest."""
        old = self._inode
        self._file.close()
        self._open()
        newer = []
        for number in range(1, 100):
            path = self.path.with_name(f"{self.path.name}.{number}")
            if not path.exists() or path.stat().st_ino == old:
                break
            newer.append(path.read_bytes())
        return b"".join(reversed(newer)) + self._file.read()


def _decoded(lines: Iterable[bytes]) -> list[Event]:
    found = []
    for line in lines:
        with suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=Event))
    return found
