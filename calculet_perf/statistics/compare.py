"""Two builds, one cell (acceptance §9): the difference, its direction, its uncertainty, and what may be concluded.

Samples are pooled over rounds; uncertainty comes from resampling whole rounds, the same ones on both sides, because what disturbs
a minute disturbs all requests in it. With fewer than `MIN_ROUNDS` shared rounds requests are resampled, in blocks where neighbours
depend on each other. A conclusion has three values: certain to be within the limit, certain to be beyond it, or undecided.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from calculet_perf.statistics import Floats, bootstrap
from calculet_perf.statistics.quantiles import nearest_rank, rank
from calculet_perf.statistics.series import block_length

RESAMPLES = 1_999
MIN_ROUNDS = 6
TAIL = 0.025
"""Of a 95 % two-sided interval."""
_BATCH_CELLS = 4_000_000

Rounds = Mapping[int, Floats]
"""Round -> its samples in the order of time, +inf for a failure."""


class Direction(enum.StrEnum):
    """Which way is good; part of every record, so that no table can be misread."""

    LOWER_IS_BETTER = "lower_is_better"
    HIGHER_IS_BETTER = "higher_is_better"


class Change(enum.StrEnum):
    """What the interval says about the sign."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"


class Outcome(enum.StrEnum):
    """What the interval says about a limit."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Delta:
    """A difference of candidate to base. `log_ratios` are ascending resamples of log(candidate / base), the raw sign."""

    base: float
    candidate: float
    direction: Direction
    log_ratios: Floats
    method: str
    rounds: int
    """Shared rounds that were resampled; 0 when requests were."""

    @property
    def absolute(self) -> float:
        """candidate - base, in the metric's unit."""
        return self.candidate - self.base

    @property
    def percent(self) -> float:
        """(candidate / base - 1) * 100; NaN where that has no value."""
        return _percent(_log_ratio(self.base, self.candidate))

    @property
    def interval_percent(self) -> tuple[float, float]:
        """95 % interval of `percent`."""
        ordered = self.log_ratios
        low, high = ordered[rank(len(ordered), TAIL) - 1], ordered[rank(len(ordered), 1 - TAIL) - 1]
        return _percent(float(low)), _percent(float(high))

    @property
    def worse_percent(self) -> tuple[float, float]:
        """95 % interval of how much worse the candidate is; negative: better. For throughput that is the loss of it."""
        low, high = self.interval_percent
        return (low, high) if self.direction is Direction.LOWER_IS_BETTER else (-high, -low)

    @property
    def change(self) -> Change:
        """Whether the interval excludes "no difference"."""
        low, high = self.worse_percent
        if low > 0:
            return Change.WORSE
        return Change.BETTER if high < 0 else Change.UNDECIDED

    def p_within(self, limit_percent: float) -> float:
        """One-sided p-value of "not worse than the limit": small means certainly beyond it."""
        sign = 1 if self.direction is Direction.LOWER_IS_BETTER else -1
        edge = math.log1p(sign * limit_percent / 100)
        beyond = sign * (self.log_ratios - edge)
        within = int(np.count_nonzero(beyond <= 0))
        counted = (within + 1) / (len(beyond) + 1)
        if within:
            return counted
        # No resample is within: the count only says "below 1 / 2000", which a correction for many gates would use up.
        finite = beyond[np.isfinite(beyond)]
        if len(finite) == 0 or finite.std() == 0:
            return 0.0
        return min(counted, 1 - NormalDist().cdf(float(finite.mean() / finite.std())))


def not_worse(delta: Delta, limit_percent: float, p_adjusted: float | None = None) -> Outcome:
    """At most so much worse. `p_adjusted` replaces the delta's own p-value where several gates were asked at once."""
    low, high = delta.worse_percent
    if high <= limit_percent:
        return Outcome.PASS
    beyond = low > limit_percent if p_adjusted is None else p_adjusted <= TAIL
    return Outcome.FAIL if beyond else Outcome.UNDECIDED


def improved(delta: Delta, least_percent: float) -> Outcome:
    """At least so much better."""
    low, high = delta.worse_percent
    if -high >= least_percent:
        return Outcome.PASS
    return Outcome.FAIL if -low < least_percent else Outcome.UNDECIDED


def quantile_delta(
    base: Rounds, candidate: Rounds, q: float, seed: int, direction: Direction = Direction.LOWER_IS_BETTER
) -> Delta | None:
    """The change of a quantile; None: a side has no samples."""
    if not _count(base) or not _count(candidate):
        return None
    generator = np.random.default_rng(seed)
    shared = sorted(set(base) & set(candidate))
    if len(shared) >= MIN_ROUNDS:
        base, candidate = {key: base[key] for key in shared}, {key: candidate[key] for key in shared}
        chosen = bootstrap.rounds_indices(len(shared), RESAMPLES, generator)
        before = _round_quantiles([base[key] for key in shared], q, chosen)
        after = _round_quantiles([candidate[key] for key in shared], q, chosen)
        method, used = "rounds", len(shared)
    else:
        before, first = _request_quantiles(_all(base), q, generator)
        after, second = _request_quantiles(_all(candidate), q, generator)
        method, used = ("requests" if max(first, second) == 1 else f"blocks of {max(first, second)} requests"), 0
    values = [nearest_rank(np.sort(_all(side)), q) for side in (base, candidate)]
    return Delta(values[0], values[1], direction, _ordered_ratios(before, after), method, used)


def mean_delta(base: Floats, candidate: Floats, seed: int, direction: Direction, paired: bool) -> Delta | None:
    """The change of a mean over parts of a run (rounds, or slices of a window); None: a side has fewer than 2.

    Args:
        paired: entry i of both sides belongs together and is resampled together; lengths are equal.
    """
    if min(len(base), len(candidate)) < 2:
        return None
    generator = np.random.default_rng(seed)
    if paired:
        chosen = bootstrap.rounds_indices(len(base), RESAMPLES, generator)
        before, after, method = base[chosen].mean(axis=1), candidate[chosen].mean(axis=1), "rounds"
    else:
        sides = []
        for side in (base, candidate):
            block = block_length(side)
            sides.append(np.array([side[bootstrap.block_indices(len(side), block, generator)].mean() for _ in range(RESAMPLES)]))
        (before, after), method = sides, "slices"
    ratios = _ordered_ratios(before, after)
    return Delta(float(base.mean()), float(candidate.mean()), direction, ratios, method, len(base) if paired else 0)


def noise_floor(rounds: Rounds, q: float, seed: int, splits: int = 200) -> float | None:
    """A/A control out of one run, in percent: how far a quantile moves when nothing changed.

    Rounds (with fewer than `MIN_ROUNDS`: ten runs of requests that followed one another) are dealt into two halves many times; the
    95th percentile of the halves' differences, scaled from half the samples to all of them. None: fewer than 20 samples, or a
    quantile that is infinite.
    """
    parts = [rounds[key] for key in sorted(rounds)]
    if _count(rounds) < 20:
        return None
    if len(parts) < MIN_ROUNDS:
        parts = np.array_split(_all(rounds), 10)
    generator, half = np.random.default_rng(seed), len(parts) // 2
    moves = []
    for _ in range(splits):
        order = generator.permutation(len(parts))
        first = nearest_rank(np.sort(bootstrap.pooled(parts, order[:half])), q)
        second = nearest_rank(np.sort(bootstrap.pooled(parts, order[half : 2 * half])), q)
        moves.append(abs(_log_ratio(first, second)))
    worst = nearest_rank(np.sort(np.array(moves)), 0.95) / math.sqrt(2)
    return _percent(worst) if math.isfinite(worst) else None


def mean_noise_floor(parts: Floats, seed: int, splits: int = 200) -> float | None:
    """The same for a mean over parts of a run. None: fewer than `MIN_ROUNDS` parts."""
    if len(parts) < MIN_ROUNDS:
        return None
    generator, half = np.random.default_rng(seed), len(parts) // 2
    orders = [generator.permutation(len(parts)) for _ in range(splits)]
    moves = [abs(_log_ratio(float(parts[order[:half]].mean()), float(parts[order[half : 2 * half]].mean()))) for order in orders]
    worst = nearest_rank(np.sort(np.array(moves)), 0.95) / math.sqrt(2)
    return _percent(worst) if math.isfinite(worst) else None


def _round_quantiles(rounds: Sequence[Floats], q: float, chosen: np.ndarray) -> Floats:
    """The quantile of each resample of rounds: samples are sorted once and counted as often as their round was drawn."""
    values, labels = np.concatenate(rounds), np.repeat(np.arange(len(rounds)), [len(part) for part in rounds])
    order = np.argsort(values, kind="stable")
    values, labels = values[order], labels[order]
    found = []
    step = max(1, _BATCH_CELLS // max(1, len(values)))
    for start in range(0, len(chosen), step):
        part = chosen[start : start + step]
        drawn = (part[:, :, None] == np.arange(len(rounds))).sum(axis=1)
        running = np.cumsum(drawn[:, labels], axis=1, dtype=np.int32)
        wanted = np.maximum(1, np.ceil(np.round(q * running[:, -1], 9)))
        found.append(values[np.argmax(running >= wanted[:, None], axis=1)])
    return np.concatenate(found)


def _request_quantiles(values: Floats, q: float, generator: np.random.Generator) -> tuple[Floats, int]:
    """The quantile of each resample of requests, and the block that was used."""
    block = block_length(values)
    if block == 1:
        return bootstrap.quantile_resamples(np.sort(values), q, generator, RESAMPLES), 1
    place = rank(len(values), q) - 1
    drawn = [
        float(np.partition(values[bootstrap.block_indices(len(values), block, generator)], place)[place]) for _ in range(RESAMPLES)
    ]
    return np.array(drawn), block


def _ordered_ratios(before: Floats, after: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(after) - np.log(before)
    # Both infinite: both builds fail at this quantile, which is no difference; failures are judged by themselves.
    ordered: Floats = np.sort(np.where(np.isnan(ratios), 0.0, ratios))
    return ordered


def _log_ratio(base: float, candidate: float) -> float:
    if base == candidate:
        return 0.0
    if math.isinf(base) or candidate == 0:
        return -math.inf
    return math.inf if math.isinf(candidate) or base == 0 else math.log(candidate / base)


def _percent(log_ratio: float) -> float:
    return math.expm1(log_ratio) * 100


def _all(rounds: Rounds) -> Floats:
    return np.concatenate([rounds[key] for key in sorted(rounds)]) if rounds else np.empty(0)


def _count(rounds: Rounds) -> int:
    return sum(len(values) for values in rounds.values())
