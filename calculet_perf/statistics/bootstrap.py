"""Bootstrap intervals, seeded (acceptance §9).

For means: bias-corrected and accelerated (BCa, Efron 1987) up to `BCA_LIMIT` samples, plain percentiles above, where both agree.
For quantiles nothing is resampled: the k-th smallest of n draws with replacement sits at index ceil(n U), where U is the k-th
smallest of n uniform numbers, which is Beta(k, n - k + 1); one draw a resample instead of n. Infinite samples (failures) are fine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from calculet_perf.statistics import Floats
from calculet_perf.statistics.quantiles import rank

RESAMPLES = 9_999
BCA_LIMIT = 2_000
_BATCH_CELLS = 2_000_000
"""Indices drawn at once: 16 MB."""


def quantile_interval(
    ordered: Floats, q: float, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval of the nearest-rank quantile of ascending samples."""
    drawn = quantile_resamples(ordered, q, np.random.default_rng(seed), resamples)
    return _percentiles(np.sort(drawn), (1 - confidence) / 2, (1 + confidence) / 2)


def quantile_resamples(ordered: Floats, q: float, generator: np.random.Generator, resamples: int) -> Floats:
    """The quantile of `resamples` draws with replacement, float64 [resamples]."""
    count = len(ordered)
    k = rank(count, q)
    places = np.ceil(generator.beta(k, count - k + 1, resamples) * count).astype(np.int64) - 1
    drawn: Floats = ordered[np.clip(places, 0, count - 1)]
    return drawn


def mean_interval(values: Floats, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Bootstrap interval of the mean of finite samples.

    Raises:
        ValueError: no samples.
    """
    count = len(values)
    if count == 0:
        raise ValueError("no interval of no samples")
    if count > BCA_LIMIT:
        resamples = min(resamples, RESAMPLES // 5)
    generator = np.random.default_rng(seed)
    drawn = np.empty(resamples)
    step = max(1, _BATCH_CELLS // count)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn[start : start + rows] = values[generator.integers(0, count, (rows, count))].mean(axis=1)
    low, high = (1 - confidence) / 2, (1 + confidence) / 2
    if count <= BCA_LIMIT:
        low, high = _bca(drawn, float(values.mean()), _jackknife_means(values), low, high)
    return _percentiles(np.sort(drawn), low, high)


def block_indices(count: int, block: int, generator: np.random.Generator) -> np.ndarray:
    """Indices of one circular block resample, int64 [count]: runs of `block` neighbours, so that dependence in time survives."""
    if block <= 1:
        return generator.integers(0, count, count)
    starts = generator.integers(0, count, math.ceil(count / block))
    indices: np.ndarray = ((starts[:, None] + np.arange(block)[None, :]) % count).ravel()[:count]
    return indices


def block_interval(
    values: Floats, statistic: Callable[[Floats], float], block: int, seed: int, confidence: float = 0.95, resamples: int = 1_999
) -> tuple[float, float]:
    """Percentile interval of any statistic of a series in time, by circular blocks; `series.block_length` chooses `block`."""
    generator = np.random.default_rng(seed)
    drawn = [statistic(values[block_indices(len(values), block, generator)]) for _ in range(resamples)]
    return _percentiles(np.sort(np.array(drawn)), (1 - confidence) / 2, (1 + confidence) / 2)


def rounds_indices(rounds: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Which rounds each resample takes, int64 [resamples, rounds]."""
    return generator.integers(0, rounds, (resamples, rounds))


def pooled(rounds: Sequence[Floats], chosen: np.ndarray) -> Floats:
    """All samples of the chosen rounds."""
    return np.concatenate([rounds[index] for index in chosen])


def _jackknife_means(values: Floats) -> Floats:
    count = len(values)
    if count < 2:
        return values
    left: Floats = (values.sum() - values) / (count - 1)
    return left


def _bca(drawn: Floats, observed: float, jackknife: Floats, low: float, high: float) -> tuple[float, float]:
    """The percentiles that BCa reads off; the plain ones where the samples do not vary."""
    normal = NormalDist()
    share = (np.count_nonzero(drawn < observed) + 0.5 * np.count_nonzero(drawn == observed)) / len(drawn)
    centred = jackknife.mean() - jackknife
    spread = float((centred**2).sum())
    if not 0 < share < 1 or spread == 0:
        return low, high
    bias, acceleration = normal.inv_cdf(float(share)), float((centred**3).sum()) / (6 * spread**1.5)

    def moved(level: float) -> float:
        z = bias + normal.inv_cdf(level)
        return normal.cdf(bias + z / (1 - acceleration * z))

    return moved(low), moved(high)


def _percentiles(ordered: Floats, low: float, high: float) -> tuple[float, float]:
    """By nearest rank: interpolating between a number and +inf would give neither."""
    return float(ordered[rank(len(ordered), low) - 1]), float(ordered[rank(len(ordered), high) - 1])
