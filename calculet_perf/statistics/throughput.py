"""Throughput of the steady window (acceptance §9): tokens per second while the load is up, without ramp-up and ramp-down.

The window opens when the load has reached its level and closes when it leaves it for good; level is what the case asked for, or
the most that were ever open at once when that is less. Tokens between a request's first and last one are spread evenly; what lies
outside the window is cut off. It is not an average of requests' own speeds, which would count a slow minute as often as it had
requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from calculet_perf.statistics import Floats
from calculet_perf.statistics.series import theil_sen


@dataclass(frozen=True, slots=True)
class Spans:
    """Requests as arrays of one length, in seconds on one clock; float64 [n]."""

    start: Floats
    end: Floats
    """Failed requests too: they occupied the load."""
    first: Floats
    """First token; NaN where it cannot be seen, then tokens are spread from start to end."""
    last: Floats
    tokens: Floats
    """Generated; 0 for a failed request."""


@dataclass(frozen=True, slots=True)
class Steady:
    """The window in seconds, and what it held."""

    begin_s: float
    end_s: float
    level: int
    """Requests open at once while it lasted."""
    tokens: float
    completed: int
    """Requests that ended in it with tokens."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s

    @property
    def tokens_per_s(self) -> float:
        """Aggregate."""
        return self.tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Completed requests."""
        return self.completed / self.seconds


def steady(spans: Spans, concurrency: int | None) -> Steady | None:
    """The steady window of a case; None: it never had one.

    Args:
        concurrency: what the case held open. None (open loop): the window is from the first to the last start, which is when
            load was offered.
    """
    if len(spans.start) == 0:
        return None
    level, begin, end = _window(spans, concurrency)
    if not end > begin:
        return None
    inside = (spans.end > begin) & (spans.end <= end) & (spans.tokens > 0)
    return Steady(begin, end, level, tokens_between(spans, begin, end), int(inside.sum()))


def tokens_between(spans: Spans, begin: float, end: float) -> float:
    """Tokens that came out in [begin, end): the first at its time, the others evenly until the last."""
    visible = np.isfinite(spans.first) & np.isfinite(spans.last)
    first = np.where(visible, spans.first, spans.start)
    last = np.where(visible, spans.last, spans.end)
    at_first = np.where(visible & (spans.tokens > 0), 1.0, 0.0)
    rest = np.maximum(spans.tokens - at_first, 0.0)
    length = last - first
    shared = np.clip(np.minimum(last, end) - np.maximum(first, begin), 0.0, None)
    whole = np.where((last >= begin) & (last < end), 1.0, 0.0)
    share = np.where(length > 0, shared / np.where(length > 0, length, 1.0), whole)
    started = np.where((first >= begin) & (first < end), at_first, 0.0)
    return float((rest * share + started).sum())


def slices(spans: Spans, window: Steady, count: int = 20) -> Floats:
    """Tokens per second in `count` equal parts of the window, in time order: the series behind its uncertainty."""
    edges = np.linspace(window.begin_s, window.end_s, count + 1)
    width = window.seconds / count
    return np.array([tokens_between(spans, float(low), float(high)) / width for low, high in pairwise(edges)])


def backlog_grows(spans: Spans, window: Steady, parts: int = 20) -> bool:
    """Whether the number of open requests went on growing: certainly rising, and by more than its own fluctuation."""
    edges = np.linspace(window.begin_s, window.end_s, parts * 10)
    started = np.searchsorted(np.sort(spans.start), edges, "right")
    opened = (started - np.searchsorted(np.sort(spans.end), edges, "right")).astype(np.float64)
    blocks = opened.reshape(parts, 10).mean(axis=1)
    trend = theil_sen(np.arange(parts, dtype=np.float64), blocks)
    allowed = 1 + 2 * np.sqrt(max(1.0, float(blocks[: parts // 4].mean())))
    return trend.low is not None and trend.low > 0 and trend.slope * parts > allowed


def _window(spans: Spans, concurrency: int | None) -> tuple[int, float, float]:
    if concurrency is None:
        return _most_open(spans), float(spans.start.min()), float(spans.start.max())
    level = max(1, min(concurrency, _most_open(spans)))
    # Full from the level-th start on; a replacement follows its predecessor's end at once, so the last full moment is when the last
    # request starts, and the load leaves its level at the first end after that.
    begin = float(np.sort(spans.start)[level - 1])
    last_start = float(spans.start.max())
    after = spans.end[spans.end > last_start]
    return level, begin, float(after.min()) if len(after) else last_start


def _most_open(spans: Spans) -> int:
    """Most requests open at once; one that ends when another starts is not open with it."""
    times = np.concatenate((spans.start, spans.end))
    change = np.concatenate((np.ones(len(spans.start)), -np.ones(len(spans.end))))
    order = np.lexsort((change, times))
    return int(np.cumsum(change[order]).max())
