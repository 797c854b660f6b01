"""Restarts: soon, then slower, within a budget; then once in a long while."""

from __future__ import annotations

import random

import pytest

from calculet_core.clock import MS, S
from calculet_core.config import RestartConfig
from calculet_core.errors import ExitCode
from calculet_supervisor.restarts import Restarts

CONFIG = RestartConfig(max_restarts=3, window_s=60, backoff_base_ms=100, backoff_max_ms=1_000, stable_after_s=30, half_open_after_s=300)


def some(spends: tuple[int, ...] = (), seed: int = 1) -> Restarts:
    return Restarts(CONFIG, random.Random(seed), spends)


def die_and_restart(restarts: Restarts, now_ns: int, code: int | None = None) -> int:
    """The time of the restart."""
    verdict = restarts.died(code, now_ns)
    assert not verdict.quarantine and verdict.retry_ns is not None
    restarts.spend(verdict.retry_ns)
    return verdict.retry_ns


@pytest.mark.parametrize("seed", range(20))
def test_the_first_restart_follows_within_the_base_and_later_ones_within_the_doubled_cap(seed: int) -> None:
    restarts = some(seed=seed)
    now_ns = 0
    for cap_ms in (100, 200, 400):
        retry_ns = die_and_restart(restarts, now_ns)
        assert 0 <= retry_ns - now_ns <= cap_ms * MS
        now_ns = retry_ns


def test_delays_are_jittered_over_the_whole_range() -> None:
    delays = [die_and_restart(some(seed=seed), 0) for seed in range(200)]
    assert min(delays) < 10 * MS and max(delays) > 90 * MS


def test_a_fourth_restart_in_a_minute_is_refused_and_comes_much_later() -> None:
    restarts, now_ns = some(), 0
    for _ in range(3):
        now_ns = die_and_restart(restarts, now_ns)
    verdict = restarts.died(None, now_ns)
    assert verdict.quarantine and verdict.retry_ns == now_ns + 300 * S


def test_the_budget_is_a_sliding_window() -> None:
    restarts = some()
    for at_s in (0, 25, 50):
        die_and_restart(restarts, at_s * S)
    assert restarts.left(59 * S) == 0
    assert restarts.left(61 * S) == 1
    assert not restarts.died(None, 61 * S).quarantine


def test_a_half_open_try_that_fails_waits_the_long_time_again() -> None:
    restarts, now_ns = some(), 0
    for _ in range(3):
        now_ns = die_and_restart(restarts, now_ns)
    verdict = restarts.died(None, now_ns)
    assert verdict.retry_ns is not None
    restarts.spend(verdict.retry_ns, half_open=True)
    again = restarts.died(None, verdict.retry_ns + S)
    assert again.quarantine and again.retry_ns == verdict.retry_ns + 301 * S


def test_a_stable_period_forgives_everything() -> None:
    restarts, now_ns = some(), 0
    for _ in range(3):
        now_ns = die_and_restart(restarts, now_ns)
    restarts.serving(now_ns, now_ns + 29 * S)
    assert restarts.failures == 3
    restarts.serving(now_ns, now_ns + 30 * S)
    assert (restarts.failures, restarts.left(now_ns + 30 * S)) == (0, 3)


def test_a_half_open_try_that_is_stable_has_the_whole_budget_again() -> None:
    restarts = some()
    restarts.died(None, 0)
    restarts.spend(0, half_open=True)
    restarts.serving(0, 30 * S)
    assert not restarts.died(None, 31 * S).quarantine


def test_a_configuration_error_is_never_retried() -> None:
    verdict = some().died(ExitCode.CONFIG, 0)
    assert verdict.quarantine and verdict.retry_ns is None


def test_spends_of_an_earlier_supervisor_count() -> None:
    restarts = some(spends=(0, 1 * S, 2 * S))
    assert restarts.died(None, 3 * S).quarantine


def test_a_short_half_open_time_still_waits_for_the_window() -> None:
    config = RestartConfig(max_restarts=1, window_s=60, half_open_after_s=5)
    restarts = Restarts(config, random.Random(1))
    restarts.died(None, 0)
    restarts.spend(0)
    assert restarts.died(None, 1 * S).retry_ns == 60 * S
