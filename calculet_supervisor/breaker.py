"""When half the boards go bad within minutes, the cause is none of them: power, cooling, a driver, the artifact that all run.

Then resets and set-asides only make it worse. The breaker opens, nothing automatic happens to boards that failed, and it stays so
until an operator closes it. A single bad board never opens it, however small the fleet.
"""

from __future__ import annotations

import math

MIN_BOARDS = 2


class Breaker:
    """Remembers which boards went bad lately; `reason` is why it is open."""

    __slots__ = ("_bad", "_boards", "_share", "_window_s", "reason")

    def __init__(self, boards: int, share: float, window_s: float, reason: str | None = None) -> None:
        self._boards, self._share, self._window_s = boards, share, window_s
        self._bad: dict[str, float] = {}
        """Board -> when it last went bad (UTC seconds)."""
        self.reason = reason

    def bad(self, board: str, wall_s: float) -> str | None:
        """A board that served went bad; the reason when that opens the breaker."""
        self._bad[board] = wall_s
        self._bad = {name: at for name, at in self._bad.items() if wall_s - at <= self._window_s}
        limit = max(MIN_BOARDS, math.ceil(self._boards * self._share))
        if self.reason is not None or len(self._bad) < limit:
            return None
        names = ", ".join(sorted(self._bad))
        self.reason = f"{len(self._bad)} of {self._boards} boards went bad within {self._window_s:g} s: {names}"
        return self.reason

    def close(self) -> None:
        """An operator's word."""
        self.reason = None
        self._bad.clear()
