"""The charts' numbers: rates of neighbouring readings, quantiles over a window, and nothing where there is nothing."""

from __future__ import annotations

import pytest

from calculet_router.samples import POINTS, WINDOW, Reading, Samples

BOUNDS_S = (0.01, 0.1, 1.0)


def reading(at_s: float, requests: int = 0, generated: int = 0, first: tuple[int, ...] = (0, 0, 0, 0), **fields: int) -> Reading:
    return Reading(at_s, requests, fields.get("failed", 0), generated, fields.get("inflight", 0), first)


def test_rates_are_per_second_of_real_time() -> None:
    samples = Samples(BOUNDS_S)
    assert samples.add(reading(10.0)) is None
    point = samples.add(reading(12.0, requests=10, generated=500, failed=1, inflight=7))
    assert point is not None
    assert (point.requests_per_s, point.failed_per_s, point.tokens_per_s, point.inflight) == (5.0, 0.5, 250.0, 7)
    assert (point.first_p50_ms, point.first_p95_ms) == (None, None)


def test_a_clock_that_stands_still_or_goes_back_makes_no_point() -> None:
    samples = Samples(BOUNDS_S)
    samples.add(reading(10.0))
    assert samples.add(reading(10.0, requests=5)) is None
    assert samples.add(reading(9.0, requests=5)) is None


def test_tokens_that_a_restart_takes_back_are_no_negative_rate() -> None:
    samples = Samples(BOUNDS_S)
    samples.add(reading(1.0, generated=100))
    point = samples.add(reading(2.0, generated=40))
    assert point is not None and point.tokens_per_s == 0


def test_quantiles_lie_within_their_bucket_and_forget_what_left_the_window() -> None:
    samples = Samples(BOUNDS_S)
    samples.add(reading(0.0))
    point = samples.add(reading(1.0, first=(0, 10, 0, 0)))
    assert point is not None and point.first_p50_ms == pytest.approx(10 + 90 * 0.5) and point.first_p95_ms == pytest.approx(10 + 90 * 0.95)
    for second in range(2, 2 + WINDOW):
        point = samples.add(reading(float(second), first=(0, 10, 0, 0)))
    assert point is not None and point.first_p50_ms is None
    point = samples.add(reading(100.0, first=(0, 10, 0, 4)))
    assert point is not None and point.first_p50_ms == 1000.0, "above the last bound only the bound is known"


def test_five_minutes_are_kept() -> None:
    samples = Samples(BOUNDS_S)
    for second in range(POINTS + 50):
        samples.add(reading(float(second)))
    assert len(samples.points) == POINTS and samples.points[-1].at_s == POINTS + 49
