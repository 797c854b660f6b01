"""What this process itself uses, as the operating system tells."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

_ME = psutil.Process()


def rss_bytes() -> int:
    """Resident memory of this process."""
    size: int = _ME.memory_info().rss
    return size


@dataclass(frozen=True, slots=True)
class Usage:
    """This process, now."""

    rss_bytes: int
    cpu_s: float
    threads: int
    open_fds: int


def usage() -> Usage:
    """What this process uses; a few hundred microseconds."""
    with _ME.oneshot():
        times = _ME.cpu_times()
        return Usage(_ME.memory_info().rss, times.user + times.system, _ME.num_threads(), _ME.num_fds())
