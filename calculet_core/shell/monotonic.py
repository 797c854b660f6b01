"""The real clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """CLOCK_MONOTONIC of the host: the same for all its processes."""

    __slots__ = ()

    def now_ns(self) -> int:
        """Nanoseconds since boot or so."""
        return time.monotonic_ns()
