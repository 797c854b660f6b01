"""A canary is judged by enough evidence, and only by what a server can be blamed for."""

from __future__ import annotations

from typing import Any

import pytest

from calculet_core.clock import S
from calculet_core.config import CanaryConfig
from calculet_core.wire import RouterReport, VersionReport, bucket_ms, bucket_of
from calculet_supervisor.canary import Canary, Verdict, p99_ms

BLUE, GREEN = "b" * 64, "9" * 64


def a_version(digest: str, requests: int, failed: int = 0, first_ms: float = 10.0, between_ms: float = 5.0) -> VersionReport:
    good = requests - failed
    return VersionReport(digest, requests, failed, {bucket_of(first_ms): good}, {bucket_of(between_ms): good})


def a_report(*versions: VersionReport, router: int = 1) -> RouterReport:
    return RouterReport(router, 1, 1, 1, versions=list(versions))


def verdict(*reports: RouterReport, after_s: float = 100.0, before: tuple[RouterReport, ...] = (), **config: Any) -> tuple[Verdict, str]:
    canary = Canary(CanaryConfig(**config), BLUE, GREEN, before, 0)
    canary.see(reports)
    opinion = canary.opinion(int(after_s * S))
    return opinion.verdict, opinion.words


def test_a_canary_like_blue_is_good_after_its_hold() -> None:
    report = a_report(a_version(BLUE, 900), a_version(GREEN, 100))
    assert verdict(report)[0] is Verdict.GOOD
    assert verdict(report, after_s=59) == (Verdict.WAIT, "100 of 100 requests, 59 of 60 s, 0 failed")
    assert verdict(a_report(a_version(BLUE, 900), a_version(GREEN, 99)))[0] is Verdict.WAIT


def test_errors_are_judged_before_the_hold_is_over_but_not_by_a_single_one() -> None:
    found, words = verdict(a_report(a_version(BLUE, 900, 9), a_version(GREEN, 30, 3)), after_s=1)
    assert found is Verdict.BAD and words == "3 of 30 requests failed (10.0%; blue: 1.0%)"
    assert verdict(a_report(a_version(BLUE, 900), a_version(GREEN, 30, 2)), after_s=1)[0] is Verdict.WAIT
    assert verdict(a_report(a_version(BLUE, 900, 90), a_version(GREEN, 100, 11)))[0] is Verdict.GOOD, "blue is no better"


@pytest.mark.parametrize("slow", [{"first_ms": 200.0}, {"between_ms": 200.0}])
def test_a_p99_that_is_much_larger_is_bad(slow: dict[str, float]) -> None:
    found, words = verdict(a_report(a_version(BLUE, 900), a_version(GREEN, 100, **slow)))
    assert found is Verdict.BAD and words.startswith("P99 of ")


def test_a_small_difference_in_milliseconds_is_nothing() -> None:
    assert verdict(a_report(a_version(BLUE, 900, first_ms=1.0), a_version(GREEN, 100, first_ms=10.0)))[0] is Verdict.GOOD


def test_a_percentile_of_too_few_is_no_evidence() -> None:
    assert verdict(a_report(a_version(BLUE, 50), a_version(GREEN, 100, first_ms=900.0)))[0] is Verdict.GOOD


def test_what_was_counted_before_is_subtracted_and_a_new_router_counts_from_nothing() -> None:
    before = a_report(a_version(BLUE, 1_000), a_version(GREEN, 500, 400, first_ms=900.0))
    now = a_report(a_version(BLUE, 1_900), VersionReport(GREEN, 560, 400, {bucket_of(900.0): 100, bucket_of(10.0): 60}, {}))
    found, words = verdict(now, a_report(a_version(GREEN, 40), router=2), before=(before,))
    assert found is Verdict.GOOD and words.startswith("100 requests, 0 failed")


def test_the_percentile_is_the_bucket_that_holds_it() -> None:
    counts = {bucket_of(10.0): 98, bucket_of(100.0): 2}
    assert p99_ms(counts) == bucket_ms(bucket_of(100.0))
    assert p99_ms({bucket_of(10.0): 99, bucket_of(100.0): 1}) == bucket_ms(bucket_of(10.0))
