"""Log lines on stderr: one line an event, `key=value` behind the words, no time stamp under systemd (the journal has it)."""

from __future__ import annotations

import logging
import os
import sys


def set_up_logs(process: str, level: str = "INFO") -> None:
    """Configure the root logger of a process; `CALCULET_LOG_LEVEL` overrides the level."""
    handler = logging.StreamHandler(sys.stderr)
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s.%(msecs)03d "
    handler.setFormatter(logging.Formatter(f"{stamp}%(levelname).1s {process} %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("CALCULET_LOG_LEVEL", level).upper())
