"""Does anything grow that should not (acceptance §13)?

Two kinds of resources, two questions. What is counted in whole things (leases, KV, lanes, file descriptors, threads) is back at
its baseline whenever nothing runs: one lease too many is a leak, however slow. What breathes (resident and device memory) is judged
by its trend: Theil-Sen over medians and over minima of blocks after warm-up. Never over single samples: neighbours are so alike
that a slope looks certain in one healthy run of three. A leak is a slope whose lower bound is above 0 and which would use up the
budget within the horizon. The detector is calibrated on the run's own noise: the budget's leak is added to the series without its
trend and must be found, and the series without it must not be; else, or with too few blocks, there is insufficient evidence, which
is no pass.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from calculet_perf.statistics import Floats
from calculet_perf.statistics.series import Trend, theil_sen

MIN_BLOCKS = 8
"""Fewer block values bound no slope worth the name."""
HOUR_S = 3_600.0
MAX_PAUSE_S = 600.0
"""A stage that was resumed after a longer pause satisfies no long gate."""
MIN_TAIL = 4
SETTLED_SHARE = 0.25
"""A series whose last third grows by less than this share of what is allowed has settled: what it grew by before was no leak."""


class LeakOutcome(enum.StrEnum):
    """Three values, as everywhere."""

    NONE = "no_leak"
    LEAK = "leak"
    INSUFFICIENT = "insufficient_evidence"


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a breathing resource may grow within the horizon before it counts as a leak."""

    bytes: float | None = None
    share: float | None = None
    """Of its first block; the larger of both is allowed."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was concluded about one resource of one board."""

    resource: str
    board: str
    outcome: LeakOutcome
    why: str
    method: str
    """`trend` or `baseline`."""
    baseline: float | None = None
    last: float | None = None
    slope_per_hour: float | None = None
    slope_low_per_hour: float | None = None
    """Lower bound (95 %)."""
    horizon_growth: float | None = None
    """Slope times horizon."""
    budget: float | None = None
    blocks: int | None = None
    calibrated: bool | None = None
    """An injected leak of the budget was found in this run's noise, and none without it."""
    series: list[tuple[float, float]] = []
    """(hours, block median) or (hours, value when idle): for the picture."""


def trend_leak(
    resource: str, board: str, time_s: Floats, value: Floats, *, warmup_s: float, block_s: float, horizon_s: float, budget: Budget
) -> Finding:
    """Judge one breathing resource.

    Args:
        time_s: of the samples, seconds, ascending; `value` of the same length, NaN where unknown.
        warmup_s: from the first sample; what lies within is not judged.
        horizon_s: for how long a board is expected to run without a restart.
    """
    medians, minima, at = _blocks(time_s, value, warmup_s, block_s)
    shown = [(float(hour), float(median)) for hour, median in zip(at / HOUR_S, medians, strict=True)]
    if len(at) < MIN_BLOCKS:
        why = f"{len(at)} blocks of {block_s:g} s after warm-up, {MIN_BLOCKS} are needed"
        return Finding(
            resource=resource, board=board, outcome=LeakOutcome.INSUFFICIENT, why=why, method="trend", blocks=len(at), series=shown
        )
    allowed = max(budget.bytes or 0.0, (budget.share or 0.0) * float(medians[0]))
    trends = [theil_sen(at, medians), theil_sen(at, minima)]
    leaking = all(_grows(trend, horizon_s, allowed) for trend in trends)
    tail = min(len(at) - MIN_TAIL, 2 * len(at) // 3)
    late = theil_sen(at[tail:], medians[tail:]).slope * horizon_s
    settled = late <= SETTLED_SHARE * allowed
    calibrated = _calibrated(at, medians, minima, trends, horizon_s, allowed)
    trend = trends[0]
    growth = trend.slope * horizon_s
    if leaking and settled:
        outcome = LeakOutcome.INSUFFICIENT
        since = (at[tail] - time_s[0]) / HOUR_S
        why = f"grew, then stood still (from {since:.2g} h on); a warm-up of {warmup_s:g} s is too short to tell"
    elif leaking:
        outcome, why = LeakOutcome.LEAK, f"grows by {growth:.4g} within {horizon_s / HOUR_S:g} h, {allowed:.4g} are allowed"
    elif not calibrated:
        outcome = LeakOutcome.INSUFFICIENT
        why = f"a leak of {allowed:.4g} within {horizon_s / HOUR_S:g} h, added to this run's noise, is not told from none"
    else:
        outcome, why = LeakOutcome.NONE, "no growth beyond the budget; a leak of that size would have been found"
    return Finding(
        resource=resource, board=board, outcome=outcome, why=why, method="trend",
        baseline=float(medians[0]), last=float(medians[-1]),
        slope_per_hour=trend.slope * HOUR_S, slope_low_per_hour=None if trend.low is None else trend.low * HOUR_S,
        horizon_growth=growth, budget=allowed, blocks=len(at), calibrated=calibrated, series=shown,
    )  # fmt: skip


def baseline_leak(
    resource: str, board: str, baseline: float | None, idle: Sequence[tuple[float, float]], tolerance: float = 0.0
) -> Finding:
    """Judge one counted resource.

    Args:
        baseline: its value when nothing ran, after warm-up; None: unknown.
        idle: (seconds, value) of moments when nothing ran and everything had been given back, by time; the last is after the run.
        tolerance: allowed above the baseline: 0, but for file descriptors and threads that a pool may open late.
    """
    shown = [(at / HOUR_S, value) for at, value in idle]
    if baseline is None or not idle:
        why = "no value when nothing ran" if baseline is not None else "no baseline"
        return Finding(
            resource=resource,
            board=board,
            outcome=LeakOutcome.INSUFFICIENT,
            why=why,
            method="baseline",
            baseline=baseline,
            series=shown,
        )
    last = idle[-1][1]
    over = last - baseline > tolerance
    why = f"{last:g} after everything had ended, {baseline:g} before" + (f" ({tolerance:g} more are allowed)" if tolerance else "")
    return Finding(
        resource=resource, board=board, outcome=LeakOutcome.LEAK if over else LeakOutcome.NONE, why=why, method="baseline",
        baseline=baseline, last=last, series=shown,
    )  # fmt: skip


def _blocks(time_s: Floats, value: Floats, warmup_s: float, block_s: float) -> tuple[Floats, Floats, Floats]:
    """Median, minimum and mean time of each block; blocks less than half full of what the fullest has are left out."""
    known = np.isfinite(value)
    if not known.any():
        return np.empty(0), np.empty(0), np.empty(0)
    begin = float(time_s[0]) + warmup_s
    known &= time_s >= begin
    at, value = time_s[known], value[known]
    number = ((at - begin) // block_s).astype(np.int64)
    parts = [number == block for block in np.unique(number)]
    fullest = max((int(part.sum()) for part in parts), default=0)
    parts = [part for part in parts if part.sum() * 2 >= fullest]
    return (
        np.array([float(np.median(value[part])) for part in parts]),
        np.array([float(value[part].min()) for part in parts]),
        np.array([float(at[part].mean()) for part in parts]),
    )


def _grows(trend: Trend, horizon_s: float, allowed: float) -> bool:
    return trend.low is not None and trend.low > 0 and trend.slope * horizon_s > allowed


def _calibrated(at: Floats, medians: Floats, minima: Floats, trends: Sequence[Trend], horizon_s: float, allowed: float) -> bool:
    """The budget's leak (and a tenth, to be beyond it) is found in the noise that is left without the trend, and no other."""
    if allowed <= 0:
        return False
    ramp = (at - at[0]) * (1.1 * allowed / horizon_s)
    flat = [series - (at - at[0]) * trend.slope for series, trend in zip((medians, minima), trends, strict=True)]
    found = all(_grows(theil_sen(at, series + ramp), horizon_s, allowed) for series in flat)
    quiet = not all(_grows(theil_sen(at, series), horizon_s, allowed) for series in flat)
    return found and quiet


# ---------------------------------------------------------------- stages (acceptance §13)
class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage asks; the rules file holds them."""

    duration_s: float
    load: str
    passes: list[str]
    """Check ids of the rules that must pass."""
    warmup_s: float
    block_s: float
    horizon_s: float
    optional: bool = False


class StageRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stage.json` of a run (`calculet-perf-stage/v1`): which stage it meant to be, and what it was."""

    schema: str = "calculet-perf-stage/v1"
    stage: str
    asked_s: float
    """By the rules."""
    done_s: float
    """Under load, on a real clock unless `virtual_time`."""
    virtual_time: bool = False
    planned_s: float | None = None
    """How long it was meant to last; null: as asked. A stage that is resumed keeps it."""
    sessions: int = 1
    """1, and one more for each time that it was interrupted and resumed."""
    longest_pause_s: float = 0.0
    """Between an interruption and the load going on, at most."""
    load_share: float | None = None
    """Of the target load, where the stage states one."""

    @property
    def shortened(self) -> bool:
        """Less than the stage asks for; 1 % covers the edges of measuring it."""
        return self.done_s < 0.99 * self.asked_s

    @property
    def broken(self) -> bool:
        """A pause in which the load was gone for long: a board that rested is not one that lasted."""
        return self.longest_pause_s > MAX_PAUSE_S

    @property
    def satisfies_long_gates(self) -> bool:
        """Only real hours count for a 24 h or 8 h gate (acceptance §14.1), and only with at most short pauses."""
        return not self.virtual_time and not self.shortened and not self.broken

    def labels(self) -> list[str]:
        """For every place where the stage is named."""
        found = []
        if self.virtual_time:
            found.append("virtual time")
        if self.shortened:
            found.append(f"shortened: {self.done_s / HOUR_S:.3g} h of {self.asked_s / HOUR_S:.3g} h")
        if self.sessions > 1:
            times = "once" if self.sessions == 2 else f"{self.sessions - 1} times"
            beyond = f", more than the {MAX_PAUSE_S:g} s that a long gate allows" if self.broken else ""
            found.append(f"interrupted and resumed {times}, without load for up to {self.longest_pause_s:.0f} s{beyond}")
        return found


COUNTED: Mapping[str, float] = {
    "leased_buffers": 0.0,
    "quarantined_buffers": 0.0,
    "kv_used_tokens": 0.0,
    "kv_reserved_tokens": 0.0,
    "active_lanes": 0.0,
    "inflight_jobs": 0.0,
    "waiting_requests": 0.0,
    "open_fds": 8.0,
    "threads": 4.0,
}
"""Resources judged by their baseline, with what they may be above it."""
BREATHING = ("rss_bytes", "device_memory_bytes")
"""Resources judged by their trend."""
