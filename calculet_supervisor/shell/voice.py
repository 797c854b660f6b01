"""What `calculet up` says, written by a thread of its own: the keeper must never wait for whoever reads it, nor end with him.

A terminal that was stopped with Ctrl-S, a pipe that nobody empties, a reader that has gone, a full disk behind a redirection: each
of them makes a write block or fail, and the write would stand between a dead router and its restart. Lines wait in a queue; where
that is full they are dropped. The descriptors are written to directly, so that a thread that is stuck holds no lock at the end.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import TextIO

MAX_LINES = 1000
CLOSE_S = 1.0
"""How long the last lines may take."""


class Voice:
    """`say` is what was asked for, `complain` everything else. As a stream (`write`, `flush`) it takes the log."""

    def __init__(self) -> None:
        self._out, self._err = _descriptor(sys.stdout), _descriptor(sys.stderr)
        self._lines: queue.Queue[tuple[int, bytes] | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._speak, name="voice", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """A line on stdout."""
        self._put(self._out, f"{text}\n")

    def complain(self, text: str) -> None:
        """A line on stderr."""
        self._put(self._err, f"calculet: {text}\n")

    def write(self, text: str) -> None:
        """For a log handler."""
        self._put(self._err, text)

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """What was said is out, or nobody takes it."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _put(self, fd: int | None, text: str) -> None:
        if fd is None or not text:
            return
        try:
            self._lines.put_nowait((fd, text.encode(errors="backslashreplace")))
        except queue.Full:
            pass

    def _speak(self) -> None:
        while (line := self._lines.get()) is not None:
            fd, data = line
            try:
                while data:
                    data = data[os.write(fd, data) :]
            except OSError:
                pass


def _descriptor(stream: TextIO | None) -> int | None:
    """None when there is none: a descriptor that was closed at the start belongs to some other file by now."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None
