"""One cell's numbers (acceptance §9): counts, quantiles with what certifies them, mean and its spread.

A quantile that the sample count does not carry is printed all the same, marked; it may inform a reader and never a gate.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from calculet_perf.statistics import Floats, bootstrap
from calculet_perf.statistics.quantiles import Bound, certified, interval, nearest_rank

QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}
NORMAL_MAD = 1.4826022185056018
"""Makes the median absolute deviation of normal samples estimate their standard deviation."""


class Quantile(msgspec.Struct, frozen=True, kw_only=True):
    """One quantile. `unbounded`: more requests failed than it leaves out, so it is infinite and `value` is null."""

    value: float | None
    unbounded: bool
    exact_low: float | None
    exact_high: float | None
    """Order-statistic interval at 95 %; null: nothing bounds that side."""
    bootstrap_low: float | None
    bootstrap_high: float | None
    """Bootstrap interval at 95 %; null: infinite."""
    bound: Bound
    """Sides that this many samples bound at 95 %."""
    certified: bool
    """May be relied on, at least from above."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one metric in one cell. Moments are over the `success` samples, quantiles over all, failures infinite; null: none."""

    count: int
    success: int
    error: int
    quantiles: dict[str, Quantile]
    max: float | None
    """Largest success."""
    mean: float | None
    mean_low: float | None
    mean_high: float | None
    """95 % bootstrap interval of the mean (BCa up to 2,000 samples)."""
    std: float | None
    """Sample standard deviation (n - 1)."""
    mad: float | None
    """Median absolute deviation, raw."""
    mad_normal: float | None
    """Scaled to estimate a normal standard deviation."""


def summarise(values: Floats, seed: int, resamples: int = bootstrap.RESAMPLES) -> Summary | None:
    """The summary of samples, +inf for a failure. None: there are none.

    Raises:
        ValueError: a NaN among them.
    """
    if len(values) == 0:
        return None
    if np.isnan(values).any():
        raise ValueError("NaN among samples: what cannot be had is left out, not NaN")
    ordered = np.sort(values)
    good = ordered[np.isfinite(ordered)]
    quantiles = {name: _quantile(ordered, q, seed + index, resamples) for index, (name, q) in enumerate(QUANTILES.items())}
    mean_low = mean_high = std = mad = None
    if len(good):
        mean_low, mean_high = bootstrap.mean_interval(good, seed, resamples=resamples)
        mad = float(np.median(np.abs(good - np.median(good))))
        std = float(good.std(ddof=1)) if len(good) > 1 else None
    return Summary(
        count=len(values),
        success=len(good),
        error=len(values) - len(good),
        quantiles=quantiles,
        max=float(good[-1]) if len(good) else None,
        mean=float(good.mean()) if len(good) else None,
        mean_low=mean_low,
        mean_high=mean_high,
        std=std,
        mad=mad,
        mad_normal=None if mad is None else mad * NORMAL_MAD,
    )


def _quantile(ordered: Floats, q: float, seed: int, resamples: int) -> Quantile:
    value = nearest_rank(ordered, q)
    exact_low, exact_high = interval(ordered, q)
    low, high = bootstrap.quantile_interval(ordered, q, seed, resamples=resamples)
    bound = certified(len(ordered), q)
    return Quantile(
        value=finite(value),
        unbounded=math.isinf(value),
        exact_low=finite(exact_low),
        exact_high=finite(exact_high),
        bootstrap_low=finite(low),
        bootstrap_high=finite(high),
        bound=bound,
        certified=bound is not Bound.NONE,
    )


def finite(value: float | None) -> float | None:
    """None for what JSON cannot say."""
    return None if value is None or not math.isfinite(value) else value
