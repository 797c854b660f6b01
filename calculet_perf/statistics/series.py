"""Samples in the order of time: how much neighbours depend on each other, and whether there is a trend.

Requests that shared a batch or a hot minute are not independent; resampling them one by one makes intervals too narrow. The block
length follows Carlstein's rule for a first-order autoregressive series. Trends are Theil-Sen slopes: the median of all pairwise
slopes, which a third of wild samples cannot bend, with Sen's interval from Kendall's statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from calculet_perf.statistics import Floats

MAX_TREND_POINTS = 2_000
"""Pairs grow with the square: more points than this must be summarised in blocks first."""


def lag_one(values: Floats) -> float:
    """Lag-1 autocorrelation of finite samples; 0 when they do not vary or are fewer than 3."""
    centred = values - values.mean() if len(values) else values
    power = float((centred**2).sum())
    if len(values) < 3 or power == 0:
        return 0.0
    return float((centred[1:] * centred[:-1]).sum()) / power


def block_length(values: Floats) -> int:
    """Block for a block bootstrap: 1 when neighbours are not correlated beyond chance, at most a quarter of the samples."""
    finite = values[np.isfinite(values)]
    count, correlation = len(finite), min(lag_one(finite), 0.97)
    if count < 8 or correlation < 1.96 / math.sqrt(count):
        return 1
    length: int = math.ceil((2 * correlation / (1 - correlation**2)) ** (2 / 3) * count ** (1 / 3))
    return max(1, min(length, count // 4))


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope in units of y per unit of x; `low` and `high` bound it. None: too few points to bound it."""

    slope: float
    low: float | None
    high: float | None
    points: int


def theil_sen(x: Floats, y: Floats, confidence: float = 0.95) -> Trend:
    """The median of all pairwise slopes and its two-sided interval, ties in y considered.

    Raises:
        ValueError: fewer than 2 distinct x, more than `MAX_TREND_POINTS`, or lengths that differ.
    """
    count = len(x)
    if count != len(y) or count > MAX_TREND_POINTS:
        raise ValueError(f"a trend needs x and y of one length up to {MAX_TREND_POINTS}, not {count} and {len(y)}")
    first, second = np.triu_indices(count, 1)
    apart = x[second] - x[first]
    used = apart != 0
    if not used.any():
        raise ValueError("a trend needs two different times")
    slopes = np.sort((y[second] - y[first])[used] / apart[used])
    pairs = len(slopes)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    half = z * math.sqrt(_kendall_variance(y))
    low, high = round((pairs - half) / 2) - 1, round((pairs + half) / 2)
    bounded = low >= 0 and high < pairs
    return Trend(float(np.median(slopes)), float(slopes[low]) if bounded else None, float(slopes[high]) if bounded else None, count)


def _kendall_variance(y: Floats) -> float:
    """Of Kendall's S without trend, lessened by ties."""
    _, ties = np.unique(y, return_counts=True)
    count = len(y)
    return float(count * (count - 1) * (2 * count + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
