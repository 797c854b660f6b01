"""Log lines on stderr: one line an event, `key=value` behind the words, no time stamp under systemd (the journal has it).

Under systemd stderr goes to the journal, which unprivileged processes cannot read back; a size-capped copy goes to the same file
that the development keeper would write, so that crash bundles and people find it at the same place.
"""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Protocol

STAMP = "%(asctime)s.%(msecs)03d "
COPY_BYTES = 4 << 20
"""A copy above it is put aside as NAME.1."""


class Stream(Protocol):
    """Where log lines go."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def set_up_logs(process: str, level: str = "INFO", stream: Stream | None = None) -> None:
    """Configure the root logger of a process, on stderr or `stream`; `CALCULET_LOG_LEVEL` overrides the level."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(process, "" if _under_systemd() else STAMP))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("CALCULET_LOG_LEVEL", level).upper())


def set_level(level: str) -> None:
    """From now on; the environment's word goes before it."""
    logging.getLogger().setLevel(os.environ.get("CALCULET_LOG_LEVEL", level).upper())


def keep_copy(process: str, path: Path) -> None:
    """Write the log to `path` as well, where stderr does not go there anyway. A full disk costs the copy only."""
    if not _under_systemd():
        return
    handler = _Copy(path, maxBytes=COPY_BYTES, backupCount=1, delay=True)
    handler.setFormatter(_formatter(process, STAMP))
    logging.getLogger().addHandler(handler)


class _Copy(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """The original went to the journal."""


def _under_systemd() -> bool:
    return "JOURNAL_STREAM" in os.environ


def _formatter(process: str, stamp: str) -> logging.Formatter:
    return logging.Formatter(f"{stamp}%(levelname).1s {process} %(message)s", "%H:%M:%S")
