"""What the dashboard's charts show: rates and quantiles over a sliding window, one point a second, a few minutes of them.

Sums are read once a second from what is counted anyway, so a request and a token cost nothing for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

POINTS = 300
"""Five minutes."""
WINDOW = 10
"""Seconds that a quantile looks back."""


class Reading(msgspec.Struct, frozen=True):
    """Sums since the router started, at one moment; `first` counts times to the first token by bucket."""

    at_s: float
    requests: int
    failed: int
    generated: int
    """Tokens of ended and of running requests."""
    inflight: int
    first: tuple[int, ...]


class Point(msgspec.Struct, frozen=True):
    """One second of the charts. None: nothing happened that it could be told from."""

    at_s: float
    requests_per_s: float
    failed_per_s: float
    tokens_per_s: float
    inflight: int
    first_p50_ms: float | None
    first_p95_ms: float | None


class Samples:
    """`bounds_s` are the upper bounds of the buckets; the last bucket has none."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._readings: deque[Reading] = deque(maxlen=WINDOW + 1)
        self.points: deque[Point] = deque(maxlen=POINTS)

    def add(self, reading: Reading) -> Point | None:
        """The point that the reading makes together with the one before; None for the first."""
        last = self._readings[-1] if self._readings else None
        self._readings.append(reading)
        if last is None or reading.at_s <= last.at_s:
            return None
        seconds = reading.at_s - last.at_s
        first = [now - then for now, then in zip(reading.first, self._readings[0].first, strict=True)]
        point = Point(
            reading.at_s,
            round((reading.requests - last.requests) / seconds, 2),
            round((reading.failed - last.failed) / seconds, 2),
            round(max(0, reading.generated - last.generated) / seconds, 1),
            reading.inflight,
            self._quantile_ms(first, 0.5),
            self._quantile_ms(first, 0.95),
        )
        self.points.append(point)
        return point

    def _quantile_ms(self, counts: Sequence[int], share: float) -> float | None:
        """Within its bucket by proportion; above the last bound that bound."""
        total = sum(counts)
        if total <= 0:
            return None
        wanted, below = share * total, 0
        for place, count in enumerate(counts):
            if below + count >= wanted and count:
                if place == len(self._bounds_s):
                    return self._bounds_s[-1] * 1000
                low = self._bounds_s[place - 1] if place else 0.0
                return round((low + (self._bounds_s[place] - low) * (wanted - below) / count) * 1000, 2)
            below += count
        return None
