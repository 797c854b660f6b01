"""Time is an argument.

Decisions take `now_ns`, nanoseconds of one monotonic clock; only a `shell/` reads a real one. All processes of a host share
CLOCK_MONOTONIC, so a deadline crosses the wire as an absolute `_ns` value.
"""

from __future__ import annotations

US = 1_000
MS = 1_000_000
S = 1_000_000_000


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self, start_ns: int = 1 * S) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Nanoseconds as last set."""
        return self._now_ns

    def advance(self, by_ns: int) -> int:
        """Move forward and return the new time.

        Raises:
            ValueError: `by_ns` is negative; monotonic time does not go back.
        """
        if by_ns < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-by_ns} ns")
        self._now_ns += by_ns
        return self._now_ns

    def advance_to(self, at_ns: int) -> int:
        """Move to `at_ns`, or stay when that has passed."""
        self._now_ns = max(self._now_ns, at_ns)
        return self._now_ns
