"""Leaks are found, healthy runs are not blamed, and too little says so."""

from __future__ import annotations

import numpy as np
import pytest

from calculet_perf.stability import Budget, LeakOutcome, StageRun, baseline_leak, trend_leak

HOUR = 3600.0
MB = float(1 << 20)
BUDGET = Budget(bytes=64 * MB)


def memory(
    hours: float, seed: int, leak_mb_per_hour: float = 0.0, step_s: float = 10.0, noise_mb: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Resident memory that breathes with the load: an autoregressive wander, spikes, a warm-up that settles; and a leak."""
    generator, at = np.random.default_rng(seed), np.arange(0, hours * HOUR, step_s)
    wander = np.empty(len(at))
    wander[0] = 0.0
    shocks = generator.normal(0, noise_mb * np.sqrt(1 - 0.98**2), len(at))
    for index in range(1, len(at)):
        wander[index] = 0.98 * wander[index - 1] + shocks[index]
    spikes = np.where(generator.random(len(at)) < 0.02, generator.exponential(20, len(at)), 0)
    settle = -80 * np.exp(-at / 600)
    return at, (500 + wander + spikes + settle + leak_mb_per_hour * at / HOUR) * MB


def judge(hours: float, seed: int, leak: float = 0.0, **changes: float) -> LeakOutcome:
    at, value = memory(hours, seed, leak)
    settings = {"warmup_s": HOUR, "block_s": 1200.0, "horizon_s": 24 * HOUR, **changes}
    return trend_leak("rss_bytes", "b0", at, value, budget=BUDGET, **settings).outcome


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_twice_the_budget_is_found_in_eight_hours(seed: int) -> None:
    assert judge(8, seed, leak=2 * 64 / 24) is LeakOutcome.LEAK


def test_healthy_runs_are_not_blamed() -> None:
    outcomes = [judge(8, seed) for seed in range(40)]
    assert outcomes.count(LeakOutcome.LEAK) == 0
    assert outcomes.count(LeakOutcome.NONE) >= 36


def test_growth_within_the_budget_is_no_leak() -> None:
    assert judge(24, 1, leak=0.3 * 64 / 24) is LeakOutcome.NONE


def test_too_few_blocks_are_insufficient_even_when_it_leaks() -> None:
    assert judge(3, 1, leak=50.0) is LeakOutcome.INSUFFICIENT


def test_noise_that_would_hide_the_budget_is_insufficient_not_a_pass() -> None:
    at, value = memory(8, 1, noise_mb=400.0)
    found = trend_leak("rss_bytes", "b0", at, value, warmup_s=HOUR, block_s=1200.0, horizon_s=24 * HOUR, budget=BUDGET)
    assert found.outcome is LeakOutcome.INSUFFICIENT and found.calibrated is False


def test_warm_up_is_not_a_leak() -> None:
    at, value = memory(8, 2)
    value += 300 * MB * (1 - np.exp(-at / 900))
    found = trend_leak("rss_bytes", "b0", at, value, warmup_s=2 * HOUR, block_s=1200.0, horizon_s=24 * HOUR, budget=BUDGET)
    assert found.outcome is LeakOutcome.NONE and found.calibrated


@pytest.mark.parametrize("seed", range(5))
def test_what_grew_and_then_stood_still_is_no_leak_and_no_pass(seed: int) -> None:
    """Caches and allocators fill: that is a warm-up that was taken for too short, not a leak that goes on."""
    at = np.arange(10 * 60) * 60.0
    fill = 70e6 + 2e6 * np.minimum(1, at / (5.5 * HOUR)) + np.random.default_rng(seed).normal(0, 2e4, len(at))
    found = trend_leak("rss_bytes", "b0", at, fill, warmup_s=600, block_s=1200, horizon_s=720 * HOUR, budget=BUDGET)
    assert found.outcome is LeakOutcome.INSUFFICIENT and "stood still" in found.why, found.why


def test_gaps_and_unknown_samples_are_survived() -> None:
    at, value = memory(8, 3, leak_mb_per_hour=20)
    value[::3] = np.nan
    keep = (at < 4 * HOUR) | (at > 5 * HOUR)
    found = trend_leak("rss_bytes", "b0", at[keep], value[keep], warmup_s=HOUR, block_s=1200.0, horizon_s=24 * HOUR, budget=BUDGET)
    assert found.outcome is LeakOutcome.LEAK
    nothing = trend_leak("rss_bytes", "b0", at, np.full(len(at), np.nan), warmup_s=0, block_s=60, horizon_s=HOUR, budget=BUDGET)
    assert nothing.outcome is LeakOutcome.INSUFFICIENT


class LeakyPool:
    """Gives leases out and takes them back; forgets one of a thousand."""

    def __init__(self, one_in: int | None) -> None:
        self.leased, self._one_in, self._count = 0, one_in, 0

    def request(self) -> None:
        self._count += 1
        self.leased += 1
        if self._one_in is None or self._count % self._one_in:
            self.leased -= 1


@pytest.mark.parametrize(("one_in", "expected"), [(1_000, LeakOutcome.LEAK), (None, LeakOutcome.NONE)])
def test_one_lease_in_a_thousand_is_found_by_the_first_idle_moment(one_in: int | None, expected: LeakOutcome) -> None:
    pool, idle = LeakyPool(one_in), []
    for _ in range(1_000):
        pool.request()
    idle.append((60.0, float(pool.leased)))
    found = baseline_leak("leased_buffers", "b0", 0.0, idle)
    assert found.outcome is expected and found.last == (1.0 if one_in else 0.0)


def test_no_idle_moment_or_no_baseline_is_insufficient() -> None:
    assert baseline_leak("threads", "b0", 5.0, []).outcome is LeakOutcome.INSUFFICIENT
    assert baseline_leak("threads", "b0", None, [(1.0, 5.0)]).outcome is LeakOutcome.INSUFFICIENT
    assert baseline_leak("threads", "b0", 5.0, [(1.0, 9.0)], tolerance=4).outcome is LeakOutcome.NONE


def test_only_real_whole_stages_satisfy_long_gates() -> None:
    whole = StageRun(stage="release", asked_s=24 * HOUR, done_s=24 * HOUR)
    assert whole.satisfies_long_gates and whole.labels() == []
    short = StageRun(stage="release", asked_s=24 * HOUR, done_s=60.0)
    assert not short.satisfies_long_gates and "shortened" in short.labels()[0]
    virtual = StageRun(stage="release", asked_s=24 * HOUR, done_s=24 * HOUR, virtual_time=True)
    paused = StageRun(stage="release", asked_s=86_400, done_s=86_400, sessions=2, longest_pause_s=45)
    assert paused.satisfies_long_gates and paused.labels() == ["interrupted and resumed once, without load for up to 45 s"]
    rested = StageRun(stage="release", asked_s=86_400, done_s=86_400, sessions=3, longest_pause_s=7200)
    assert not rested.satisfies_long_gates and "more than the 600 s" in rested.labels()[0]
    assert not virtual.satisfies_long_gates and virtual.labels() == ["virtual time"]
