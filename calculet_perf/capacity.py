"""The highest stable rate (acceptance §14.3): not a peak, but the highest open-loop rate at which errors and latency hold and
the queue does not grow, over a whole window.

The search climbs by a factor in short screens until one fails, halves the distance (geometrically) until pass and fail are
within the tolerance, then gives the candidate its full windows: it must pass as often as `confirmations` says, and the next
step up must fail. A failing candidate goes down a step. What is shorter than the specification's 30 minutes is labelled by the
caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from calculet_perf.assemble import nearest_rank
from calculet_perf.records import RequestRecord
from calculet_perf.statistics.series import theil_sen
from calculet_perf.workloads.matrix import Capacity

WINDOW_S, SCREEN_S = 1800.0, 180.0
"""What acceptance §14.3 asks for, and the screens' usual length."""
BLOCKS = 20
"""The queue's trend is taken over so many block medians, because neighbouring samples depend on each other."""
MAX_TRIALS = 60
Kind = Literal["screen", "window", "step"]


class Trial(msgspec.Struct, frozen=True):
    """A window to run: `screen` is short, `window` decides, `step` is the next rate up, which must fail."""

    number: int
    kind: Kind
    qps: float
    seconds: float


class Outcome(msgspec.Struct, kw_only=True):
    """What a window showed; `reasons` is empty when it passed."""

    trial: Trial
    requests: int
    error_share: float
    ttft_p99_ms: float | None
    """From the scheduled start, failures as infinite; null: unbounded, or no sample."""
    e2e_p99_ms: float | None
    queue_slope_per_s: float | None
    """Upper bound of the trend of requests in the system; null: too few samples to bound it."""
    queue_start: float
    queue_end: float
    reasons: list[str]

    @property
    def passed(self) -> bool:
        """Stable and within the SLA."""
        return not self.reasons


class Search:
    """Ask `next` for a trial, `tell` how it went, until `next` gives None. `best` is then the answer, None when no rate passed."""

    def __init__(self, spec: Capacity) -> None:
        self._spec = spec
        self._low: float | None = None
        self._high: float | None = None
        self._rate = spec.start_qps
        self._stage: Literal["ladder", "bisect", "window", "step", "over"] = "ladder"
        self._confirmed = 0
        self._numbers = 0
        self._asked: Trial | None = None
        self.best: float | None = None
        self.unproven: str | None = None
        """Why the answer is only a bound, if it is."""

    def next(self) -> Trial | None:
        """The next trial; None: the search is over."""
        if self._stage == "over":
            return None
        if self._numbers >= MAX_TRIALS:
            self.unproven = f"the search ended after {MAX_TRIALS} windows"
            return None
        spec, self._numbers = self._spec, self._numbers + 1
        kind: Kind = "screen" if self._stage in ("ladder", "bisect") else "window" if self._stage == "window" else "step"
        self._asked = Trial(self._numbers, kind, self._rate, spec.screen_s if kind == "screen" else spec.window_s)
        return self._asked

    def tell(self, passed: bool) -> None:
        """How the trial that `next` gave went."""
        assert self._asked is not None
        {"ladder": self._ladder, "bisect": self._bisect, "window": self._window, "step": self._step}[self._stage](passed)
        self._asked = None

    def _ladder(self, passed: bool) -> None:
        spec = self._spec
        if passed:
            self._low = self._rate
            if self._high is not None:
                self._narrow()
            elif self._rate >= spec.max_qps:
                self.unproven = f"no rate up to max_qps = {spec.max_qps:g} failed"
                self._candidate(self._rate)
            else:
                self._rate = min(spec.max_qps, self._rate * spec.factor)
        else:
            self._high = self._rate
            if self._low is not None:
                self._narrow()
            elif self._rate / spec.factor < spec.min_qps:
                self._stage = "over"
            else:
                self._rate /= spec.factor

    def _bisect(self, passed: bool) -> None:
        if passed:
            self._low = self._rate
        else:
            self._high = self._rate
        self._narrow()

    def _narrow(self) -> None:
        assert self._low is not None and self._high is not None
        if self._high / self._low <= 1 + self._spec.tolerance:
            self._candidate(self._low)
        else:
            self._stage, self._rate = "bisect", math.sqrt(self._low * self._high)

    def _candidate(self, rate: float) -> None:
        self._stage, self._rate, self._confirmed = "window", rate, 0

    def _window(self, passed: bool) -> None:
        if not passed:
            lower = self._rate / (1 + self._spec.tolerance)
            if lower < self._spec.min_qps:
                self._stage = "over"
            else:
                self._candidate(lower)
            return
        self._confirmed += 1
        if self._confirmed < self._spec.confirmations:
            return
        self.best = self._rate
        if self.unproven is not None:
            self._stage = "over"
        else:
            self._stage, self._rate = "step", self._rate * (1 + self._spec.tolerance)

    def _step(self, passed: bool) -> None:
        if passed:
            self._candidate(self._rate)  # the candidate was too low
            self._confirmed = 1
        else:
            self._stage = "over"


def judge(trial: Trial, records: Sequence[RequestRecord], spec: Capacity) -> Outcome:
    """Whether the rate is stable (acceptance §14.3): errors, P99 from the scheduled start, number of requests in the system."""
    total = len(records)
    failed = sum(not record.ok for record in records)
    share = failed / total if total else 1.0
    ttft, e2e = _p99(records, "ttft_ms"), _p99(records, "e2e_ms")
    times, levels = queue_levels(records)
    slope, start, end = _trend(times, levels)
    reasons = []
    if share > spec.error_share:
        reasons.append(f"{share:.2%} of requests failed (at most {spec.error_share:.2%})")
    for name, value, limit in (("TTFT", ttft, spec.ttft_p99_ms), ("E2E", e2e, spec.e2e_p99_ms)):
        if limit is not None and (value is None or value > limit):
            shown = "unbounded" if value is None or math.isinf(value) else f"{value:.0f} ms"
            reasons.append(f"P99 {name} {shown} (at most {limit:g} ms)")
    if slope is None:
        reasons.append("too few requests to bound the queue's trend")
    elif slope * trial.seconds > spec.queue_growth:
        reasons.append(f"the queue may grow by {slope * trial.seconds:.1f} over the window (at most {spec.queue_growth:g})")
    if end > start + spec.queue_growth:
        reasons.append(f"the queue grew from {start:.1f} to {end:.1f} requests")
    return Outcome(
        trial=trial, requests=total, error_share=share, ttft_p99_ms=_finite(ttft), e2e_p99_ms=_finite(e2e), queue_slope_per_s=slope,
        queue_start=start, queue_end=end, reasons=reasons,
    )  # fmt: skip


def queue_levels(records: Sequence[RequestRecord], points: int = 400) -> tuple[list[float], list[float]]:
    """(seconds, requests in the system: due and not ended) at even times over the schedule."""
    due = np.sort([record.open_loop.scheduled_start_ns for record in records if record.open_loop is not None])
    ends = np.sort([record.client_ns.response_end or _last_sign(record) for record in records if record.open_loop is not None])
    if len(due) < 2:
        return [], []
    times = np.linspace(due[0], due[-1], points)
    levels = np.searchsorted(due, times, side="right") - np.searchsorted(ends, times, side="right")
    return list((times - due[0]) / 1e9), [float(level) for level in levels]


def _last_sign(record: RequestRecord) -> int:
    """When a failed request was over, as far as anything of it is known; what left no sign was refused at once."""
    clock = record.client_ns
    known = [at for at in (clock.request_start, clock.headers_sent, clock.response_headers, clock.last_token) if at is not None]
    return max(known, default=0)


def _trend(times: list[float], levels: list[float]) -> tuple[float | None, float, float]:
    """(upper bound of the slope, level in the first block, level in the last) by block medians."""
    if len(times) < BLOCKS:
        return None, 0.0, 0.0
    x = np.array([np.median(part) for part in np.array_split(np.array(times), BLOCKS)])
    y = np.array([np.median(part) for part in np.array_split(np.array(levels), BLOCKS)])
    return theil_sen(x, y).high, float(y[0]), float(y[-1])


def _p99(records: Sequence[RequestRecord], field: str) -> float | None:
    values = sorted(
        (value if record.ok and (value := getattr(record.open_loop, field)) is not None else math.inf)
        for record in records
        if record.open_loop is not None
    )
    return nearest_rank(values, 0.99)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
