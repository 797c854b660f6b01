"""Everything that one run shows, gathered in one pass over its records; what a verdict and a report are made from."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from calculet_perf.agreement import Agreement, Disagreement
from calculet_perf.cells import Cells
from calculet_perf.cpu_use import CpuUse, cpu_use, process_use
from calculet_perf.device_series import BoardSeries, DeviceSeries, DeviceTimeline
from calculet_perf.faults import Outcome as FaultRun
from calculet_perf.joins import BadStep, Decomposition, DeviceTotals, StepJoin
from calculet_perf.manifest import Manifest
from calculet_perf.records import DeviceRecord, ProcessRecord, RequestRecord, StepRecord
from calculet_perf.rules import Rules
from calculet_perf.runinfo import CaseRecord, RunInfo
from calculet_perf.stability import BREATHING, COUNTED, Finding, StageRun, baseline_leak, trend_leak
from calculet_perf.statistics import Floats
from calculet_perf.swapping import Driven

SLOWEST = 20
TIMELINE_POINTS = 240


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest requests, with where its time went."""

    request_id: str
    case: str
    round: int
    e2e_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    tokens: int | None
    throttled: bool | None
    error: str | None
    hottest_c: float | None
    parts: Decomposition | None
    """None: the server wrote no trace of it."""


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """A board was reset or configured again."""

    board: str
    at_ns: int
    kind: str
    """`reset` or `reconfigure`."""
    recovery_ms: float | None
    """Until it served again; null: not seen."""
    source: str
    """Where it was seen: the device's counter (then within a sample of it), or the journal."""


class Swaps(msgspec.Struct, frozen=True, kw_only=True):
    """Model swaps of the run, by the supervisor's journal (scheduling §10, §11)."""

    loads: int
    """Loads of an artifact that ended as asked."""
    rollbacks: int
    """Ways back that ended as asked, by an operator's word or by themselves."""
    refused: int
    """Refused with nothing changed."""
    unfinished: list[str]
    """Rollouts that had no end when the journal ended."""


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the boards were like in a part of the run; the worst of it."""

    hours: float
    temperature_c: float | None
    power_w: float | None
    throttled: bool | None


@dataclass(slots=True)
class Evidence:
    """What a run shows. Sequences are complete; where they grow with the run they are of exceptions only."""

    info: RunInfo
    manifest: Manifest | None
    configuration_errors: list[str]
    cells: Cells
    compared_answers: int
    disagreements: list[Disagreement]
    bad_steps: list[BadStep]
    used_bad_steps: list[BadStep]
    device: DeviceTotals
    traced: int
    """Requests whose steps were joined whole."""
    join_errors: int
    unmatched_steps: int
    vendor_steps: int
    slowest: list[Slow]
    unattributed_ms: Floats
    leaks: list[Finding]
    resets: list[Reset]
    hottest_c: float | None
    power_w: float | None
    """Most of any board's sum of chips in one sample."""
    throttled_requests: int
    faults: list[FaultRun] | None
    """None: the run had no fault scenarios."""
    stage: StageRun | None
    deaths: list[str] | None
    """Workers that died during the run; None: no journals were given."""
    broken_promises: list[str] | None
    last_success_ns: int | None
    """End of the last request that succeeded; null: none did."""
    swaps: Swaps | None = None
    driven: Driven | None = None
    """Cycles that the stage drove itself; None: it drove none."""
    """None: no journals were given."""
    cpu: list[CpuUse] = field(default_factory=list)
    """Of each board's process that tells it."""
    own_rules: bool = False
    """Judged by other rules than the shipped ones."""
    timeline: list[TimelinePoint] = field(default_factory=list)
    cases: list[CaseRecord] = field(default_factory=list)

    @property
    def long_gates(self) -> bool:
        """Whether the run's stage lasted its real hours."""
        return self.stage is not None and self.stage.satisfies_long_gates

    @property
    def labels(self) -> list[str]:
        """What must be said wherever the run is named."""
        found = list(self.stage.labels()) if self.stage else []
        samples = [item for item in self.info.shortened if item.what.startswith("samples of ")]
        if len(samples) > 2:
            found.append(f"shortened: samples of {len(samples)} cells, at least {min(item.done for item in samples):g} (§8.6)")
        for item in self.info.shortened:
            if len(samples) <= 2 or item not in samples:
                clause = f"§{item.clause}" if item.clause[:1].isdigit() else item.clause  # another specification's names it
                found.append(f"shortened: {item.what}, {item.done:g} of {item.asked:g} {item.unit} ({clause})")
        if self.own_rules:
            found.append("judged by other rules than the shipped calculet-rules/v1")
        if self.info.injector_armed:
            found.append("a fault injector was armed")
        if self.info.foreign:
            found.append("foreign server: end-to-end numbers only")
        if self.manifest is not None and self.manifest.server.tls is not None and not self.manifest.server.tls.verify:
            found.append("the server's certificate was not verified: anybody may have answered")
        if self.info.status != "complete":
            found.append(f"status: {self.info.status}")
        return found


def gather(
    info: RunInfo, manifest: Manifest | None, rules: Rules, requests: Iterable[RequestRecord], golden: Iterable[RequestRecord],
    steps: Iterable[StepRecord], device: Iterable[DeviceRecord], cases: Iterable[CaseRecord],
    faults: Sequence[FaultRun] | None = None, stage: StageRun | None = None, journal_resets: Sequence[Reset] = (),
    deaths: Sequence[str] | None = None, broken_promises: Sequence[str] | None = None,
    configuration_errors: Sequence[str] = (), swaps: Swaps | None = None, own_rules: bool = False,
    driven: Driven | None = None, processes: Iterable[ProcessRecord] = (),
) -> Evidence:  # fmt: skip
    """Read everything once, steps first: requests are joined as they come."""
    join = StepJoin()
    for step in steps:
        join.add(step)
    series = DeviceSeries(device)
    timeline = series.timeline()
    cells, agreement = Cells(), Agreement()
    slowest: list[tuple[float, int, Slow]] = []
    unattributed: list[float] = []
    traced = join_errors = throttled = last_success_ns = 0
    for record in golden:
        agreement.add(record)
    for number, record in enumerate(requests):
        begin, end = record.client_ns.request_start, record.client_ns.response_end
        if record.quality.throttled is None and begin is not None and end is not None:
            record.quality.throttled = timeline.was_throttled(begin, end)
        parts = join.decompose(record)
        joined = join.apply(record)
        if not cells.add(joined):
            continue
        agreement.add(joined)
        if joined.ok and end is not None:
            last_success_ns = max(last_success_ns, end)
        traced += joined.quality.server_trace_joined
        throttled += bool(record.quality.throttled)
        if parts is not None:
            join_errors += parts.join_error
            if parts.unattributed is not None:
                unattributed.append(parts.unattributed)
        _keep_slow(slowest, number, joined, parts, timeline)
    found_cases = list(cases)
    for case in found_cases:
        cells.add_case(case)
    return Evidence(
        info=info, manifest=manifest, configuration_errors=list(configuration_errors), cells=cells,
        compared_answers=agreement.compared, disagreements=agreement.disagreements(), bad_steps=join.bad,
        used_bad_steps=[bad for bad in join.bad if join.went_on(bad)], device=join.device(), traced=traced, join_errors=join_errors,
        unmatched_steps=join.unmatched(), vendor_steps=join.vendor_steps,
        slowest=[slow for _, _, slow in sorted(slowest, reverse=True)], unattributed_ms=np.array(unattributed),
        leaks=leaks_of(series, stage, rules), resets=[*journal_resets] or resets_of(series),
        hottest_c=_greatest(timeline.temperature_c), power_w=_greatest(timeline.power_w), throttled_requests=throttled,
        faults=None if faults is None else list(faults), stage=stage, last_success_ns=last_success_ns or None,
        deaths=None if deaths is None else list(deaths),
        broken_promises=None if broken_promises is None else list(broken_promises),
        timeline=_points(timeline), cases=found_cases, swaps=swaps, cpu=[*cpu_use(series), *process_use(processes)],
        own_rules=own_rules,
        driven=driven,
    )  # fmt: skip


def _keep_slow(
    heap: list[tuple[float, int, Slow]], number: int, record: RequestRecord, parts: Decomposition | None, timeline: DeviceTimeline
) -> None:
    e2e, client = record.durations_ms.e2e, record.client_ns
    if e2e is None or (len(heap) == SLOWEST and e2e <= heap[0][0]):
        return
    hottest = None
    if client.request_start is not None and client.response_end is not None:
        hottest = timeline.hottest_c(client.request_start, client.response_end)
    slow = Slow(
        request_id=record.request_id, case=record.case.id, round=record.case.round, e2e_ms=e2e, ttft_ms=record.durations_ms.ttft,
        tpot_ms=record.durations_ms.tpot, tokens=record.workload.actual_output_tokens, throttled=record.quality.throttled,
        error=None if record.ok else record.result.error_code, hottest_c=hottest, parts=parts,
    )  # fmt: skip
    (heapq.heappush if len(heap) < SLOWEST else heapq.heapreplace)(heap, (e2e, number, slow))


def leaks_of(series: DeviceSeries, stage: StageRun | None, rules: Rules) -> list[Finding]:
    """Counted resources of every board against their baseline; breathing ones by trend, in a stage that asks for it."""
    found = []
    spec = rules.stages.get(stage.stage) if stage else None
    for name, board in sorted(series.boards.items()):
        at = board.seconds
        before, idle = np.array(board.before, bool), np.array(board.idle, bool)
        for resource, tolerance in COUNTED.items():
            values = board.column(resource)
            known = np.isfinite(values)
            if not known.any():
                continue
            first = values[known & before]
            moments = [
                (float(when), float(value)) for when, value in zip(at[known & idle] - at[0], values[known & idle], strict=True)
            ]
            found.append(baseline_leak(resource, name, float(np.median(first)) if len(first) else None, moments, tolerance))
        if spec is not None and "no_leak" in spec.passes:
            blocks = {"warmup_s": spec.warmup_s, "block_s": spec.block_s, "horizon_s": spec.horizon_s}
            for resource in BREATHING:
                values = board.column(resource)
                if np.isfinite(values).any():
                    found.append(trend_leak(resource, name, at, values, budget=rules.leak_budgets[resource], **blocks))
    return found


def resets_of(series: DeviceSeries) -> list[Reset]:
    """Increments of the boards' reset counters, as close as the samples show them."""
    return [reset for name, board in sorted(series.boards.items()) for reset in _resets(name, board)]


def _resets(name: str, board: BoardSeries) -> Iterator[Reset]:
    counts = board.column("reset_count")
    known = np.flatnonzero(np.isfinite(counts))
    for before, after in pairwise(known):
        for _ in range(max(0, int(counts[after] - counts[before]))):
            yield Reset(board=name, at_ns=board.times_ns[after], kind="reset", recovery_ms=None, source="device counter")


def _points(timeline: DeviceTimeline, parts: int = TIMELINE_POINTS) -> list[TimelinePoint]:
    """The timeline in at most so many parts."""
    count = len(timeline.times_ns)
    found = []
    for part in np.array_split(np.arange(count), min(parts, count)) if count else ():
        throttled = timeline.throttled[part][np.isfinite(timeline.throttled[part])]
        found.append(
            TimelinePoint(
                hours=float(timeline.times_ns[part[0]] - timeline.times_ns[0]) / 3.6e12,
                temperature_c=_greatest(timeline.temperature_c[part]),
                power_w=_greatest(timeline.power_w[part]),
                throttled=bool(throttled.max() > 0) if len(throttled) else None,
            )
        )
    return found


def _greatest(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None
