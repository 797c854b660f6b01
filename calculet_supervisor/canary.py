"""Is green worse than blue? Judged by what routers count of both while a canary runs (scheduling §11 step 9, §14's spirit).

Only what a server can be blamed for counts as an error: 5xx and lost workers, never a client's 400 or a full queue. Latencies come
as counts in buckets an eighth of an octave wide: to the first token, and between tokens, which do not depend on an answer's length.
A percentile needs `min_requests` answers on each side; until then, and until `hold_s` have passed, there is no opinion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from calculet_core.clock import S
from calculet_core.config import CanaryConfig
from calculet_core.wire import RouterReport, VersionReport, bucket_ms


class Verdict(Enum):
    """What follows."""

    WAIT = auto()
    GOOD = auto()
    BAD = auto()


@dataclass(frozen=True, slots=True)
class Opinion:
    """A verdict, and why, in words."""

    verdict: Verdict
    words: str


@dataclass(slots=True)
class Sums:
    """What all routers have counted of one artifact since the canary began."""

    requests: int
    failed: int
    first: Counter[int]
    between: Counter[int]


class Canary:
    """One canary's evidence: the routers' counts when it began are subtracted; a router that starts later counts from 0."""

    def __init__(self, config: CanaryConfig, blue: str, green: str, reports: Iterable[RouterReport], now_ns: int) -> None:
        self._config, self._blue, self._green, self._since_ns = config, blue, green, now_ns
        self._before = {report.router: report for report in reports}
        self._latest: dict[int, RouterReport] = dict(self._before)

    def see(self, reports: Iterable[RouterReport]) -> None:
        """Newer counts; those of a router that is gone stay."""
        for report in reports:
            self._latest[report.router] = report

    def opinion(self, now_ns: int) -> Opinion:
        """What to think of green now. Errors are judged as soon as there are enough of them, latency after the hold."""
        config, blue, green = self._config, self._sums(self._blue), self._sums(self._green)
        least = max(1, config.min_requests)
        errors = green.failed / max(1, green.requests)
        usual = blue.failed / max(1, blue.requests)
        early = min(least, config.min_errors * 10)
        if green.failed >= config.min_errors and green.requests >= early and errors > usual + config.max_error_gap:
            return Opinion(Verdict.BAD, f"{green.failed} of {green.requests} requests failed ({errors:.1%}; blue: {usual:.1%})")
        held_s = (now_ns - self._since_ns) / S
        if held_s < config.hold_s or green.requests < least:
            return Opinion(
                Verdict.WAIT, f"{green.requests} of {least} requests, {held_s:.0f} of {config.hold_s:g} s, {green.failed} failed"
            )
        for what, ours, theirs in (("first token", green.first, blue.first), ("time between tokens", green.between, blue.between)):
            if min(ours.total(), theirs.total()) < least:
                continue
            new, old = p99_ms(ours), p99_ms(theirs)
            if new > old * config.max_p99_ratio and new - old > config.min_p99_gap_ms:
                return Opinion(Verdict.BAD, f"P99 of {what} is {new:.1f} ms, blue has {old:.1f} ms (n={ours.total()})")
        return Opinion(Verdict.GOOD, f"{green.requests} requests, {green.failed} failed, {held_s:.0f} s")

    def _sums(self, digest: str) -> Sums:
        sums = Sums(0, 0, Counter(), Counter())
        for router, report in self._latest.items():
            now, before = _of(report, digest), _of(self._before.get(router), digest)
            sums.requests += now.requests - before.requests
            sums.failed += now.failed - before.failed
            sums.first += _difference(now.first, before.first)
            sums.between += _difference(now.between, before.between)
        return sums


def p99_ms(counts: Mapping[int, int]) -> float:
    """The upper bound of the bucket that holds the 99th percentile, in milliseconds."""
    left = sum(counts.values()) * 0.99
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return bucket_ms(bucket)
    return 0.0


def _of(report: RouterReport | None, digest: str) -> VersionReport:
    found = (version for version in report.versions if version.digest == digest) if report is not None else iter(())
    return next(found, VersionReport(digest))


def _difference(now: Mapping[int, int], before: Mapping[int, int]) -> Counter[int]:
    return Counter({bucket: count - before.get(bucket, 0) for bucket, count in now.items()})
