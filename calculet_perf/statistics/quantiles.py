"""Quantiles by nearest rank, with intervals that assume nothing about the distribution.

The q-quantile of n samples is the ceil(q n)-th smallest one, so it is always a sample that was measured. The number of samples
below the true quantile is binomial(n, q), whatever the distribution; that gives exact intervals between order statistics, and says
how many samples a quantile needs before it has an interval at all: with 100 samples there is a 37 % chance that none of them is
beyond the true P99, so nothing bounds it from above.
"""

from __future__ import annotations

import enum
import math

import numpy as np

from calculet_perf.statistics import Floats


class Bound(enum.StrEnum):
    """How far the sample count carries a quantile at a confidence."""

    NONE = "none"
    UPPER = "upper"
    """One-sided: only an upper bound."""
    BOTH = "both"


def nearest_rank(ordered: Floats, q: float) -> float:
    """The q-quantile of ascending samples; +inf when so many failed.

    Raises:
        ValueError: no samples, or q not within 0..1.
    """
    return float(ordered[rank(len(ordered), q) - 1])


def rank(count: int, q: float) -> int:
    """Which of `count` ascending samples is the q-quantile, from 1."""
    if count < 1 or not 0 <= q <= 1:
        raise ValueError(f"no {q}-quantile of {count} samples")
    # 0.95 * 100 is 95.00000000000001 in binary: a rank must not depend on that.
    return max(1, math.ceil(round(q * count, 9)))


def interval(ordered: Floats, q: float, confidence: float = 0.95) -> tuple[float | None, float | None]:
    """Exact two-sided interval of the q-quantile from ascending samples. None: unbounded on that side."""
    tail = (1 - confidence) / 2
    low, high = _ppf(len(ordered), q, tail) - 1, _isf(len(ordered), q, tail)
    return (float(ordered[low]) if low >= 0 else None, float(ordered[high]) if high < len(ordered) else None)


def upper_bound(ordered: Floats, q: float, confidence: float = 0.95) -> float | None:
    """Exact one-sided upper bound of the q-quantile. None: too few samples."""
    high = _isf(len(ordered), q, 1 - confidence)
    return float(ordered[high]) if high < len(ordered) else None


def certified(count: int, q: float, confidence: float = 0.95) -> Bound:
    """Which sides of the q-quantile `count` samples bound.

    An upper bound exists once q^n <= 1 - confidence, a lower one once (1 - q)^n is; both sides need half of that each. So P99 needs
    299 samples one-sided and 368 two-sided at 95 %, 459 and 528 at 99 %.
    """
    if count < 1:
        return Bound.NONE
    tail = 1 - confidence
    if max(q, 1 - q) ** count <= tail / 2:
        return Bound.BOTH
    return Bound.UPPER if q**count <= tail else Bound.NONE


def samples_needed(q: float, confidence: float = 0.95, both: bool = False) -> int:
    """The least count with an upper bound (or `both`) for the q-quantile."""
    tail = (1 - confidence) / (2 if both else 1)
    return math.ceil(math.log(tail) / math.log(max(q, 1 - q) if both else q))


def binomial_at_least(successes: int, count: int, probability: float) -> float:
    """P(binomial(count, probability) >= successes)."""
    return 1.0 if successes <= 0 else float(1 - _cdf(count, probability)[successes - 1])


def _cdf(count: int, q: float) -> Floats:
    """P(binomial(count, q) <= k) for k = 0..count; exact to rounding, by ratios of neighbours."""
    k = np.arange(count)
    steps = np.log((count - k) / (k + 1.0)) + math.log(q) - math.log1p(-q)
    logs = np.concatenate(([count * math.log1p(-q)], count * math.log1p(-q) + np.cumsum(steps)))
    cdf: Floats = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return cdf


def _ppf(count: int, q: float, probability: float) -> int:
    """Smallest k with cdf(k) >= probability."""
    return int(np.searchsorted(_cdf(count, q), probability - 1e-12))


def _isf(count: int, q: float, probability: float) -> int:
    """Smallest k with 1 - cdf(k) <= probability."""
    return int(np.searchsorted(_cdf(count, q), 1 - probability - 1e-12))
