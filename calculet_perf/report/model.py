"""`report.json` (`calculet-perf-report/v1`): all that the report says, before it is drawn. HTML and PDF show this and nothing else.

The order is the reader's: the verdict, why, what speaks against it (acceptance §16), then the data.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
import numpy as np

from calculet_perf.agreement import Disagreement
from calculet_perf.cells import METRICS, Cell
from calculet_perf.comparison import Comparison
from calculet_perf.cpu_use import CpuUse
from calculet_perf.evidence import Evidence, Reset, Slow, Swaps, TimelinePoint
from calculet_perf.faults import Outcome as FaultRun
from calculet_perf.joins import BadStep, DeviceTotals
from calculet_perf.runinfo import EXCLUSIONS, GoldenOutcome, Invalid, NotApplicable, Returned, SelfTest
from calculet_perf.stability import Finding
from calculet_perf.statistics.bootstrap import block_interval
from calculet_perf.statistics.series import block_length
from calculet_perf.statistics.summary import Summary, summarise
from calculet_perf.swapping import Driven
from calculet_perf.verdict import Verdict

CURVE_METRIC = "tpot"


class CellReport(msgspec.Struct, kw_only=True):
    """One cell's numbers."""

    cell: str
    stratum: str
    arrival: str
    prompt_tokens: int | None
    output_tokens: int | None
    concurrency: int | None
    stream: bool
    rounds: int
    count: int
    success: int
    errors: dict[str, int]
    metrics: dict[str, Summary]
    tokens_per_s: float | None
    """Of the rounds' steady windows, their mean; null: no window."""
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    """95 % interval, by blocks of the window's parts, which depend on each other; null: too few parts."""
    tokens_per_s_per_request: float | None
    """The same over the concurrency."""
    output_tokens_per_s_p50: float | None
    """Of one request, (tokens - 1) over its decode time, at the median (acceptance §2.2); null: no TPOT."""
    fill_ratio: float | None
    """Active over compiled lanes, and the share of lane steps that was not used; means of rounds."""
    lane_waste: float | None
    coalesced: int
    not_as_planned: list[str]


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """TPOT at a context length, one request at a time."""

    prompt_tokens: int
    cell: str
    p50: float | None
    p50_low: float | None
    p50_high: float | None
    p99: float | None
    certified_p99: bool
    count: int


class RunReport(msgspec.Struct, kw_only=True):
    """One run: identity, health, numbers, and what speaks against it."""

    run_id: str
    purpose: str
    started_utc: str
    ended_utc: str | None
    status: str
    target: str
    perf_version: str
    manifest: dict[str, Any] | None
    manifest_sha256: str
    matrix_sha256: str
    matrix_name: str
    golden: list[GoldenOutcome]
    returned: list[Returned]
    invalid: list[Invalid]
    not_applicable: list[NotApplicable]
    selftest: SelfTest | None
    requests: int
    counted: int
    excluded: dict[str, int]
    """Reason -> how many; every pre-registered reason is there."""
    excluded_requests: list[tuple[str, str, str]]
    throttled_requests: int
    errors: dict[str, int]
    traced: int
    join_errors: int
    unmatched_steps: int
    unattributed_p50_ms: float | None
    unattributed_p99_ms: float | None
    device: DeviceTotals
    hottest_c: float | None
    power_w: float | None
    cells: list[CellReport]
    curve: list[CurvePoint]
    slowest: list[Slow]
    bad_steps: list[BadStep]
    resets: list[Reset]
    faults: list[FaultRun] | None
    leaks: list[Finding]
    cpu: list[CpuUse]
    """Of the boards' processes, the routers and the supervisor, idle and under load."""
    swaps: Swaps | None
    """Model swaps by the supervisor's journal; null: no journals were given."""
    driven: Driven | None
    """Load/unload cycles that the stage drove itself; null: it drove none."""
    notes: list[str]
    """What the run noted that no rule judges, as an idle phase that was not steady (acceptance §8.2)."""
    disagreements: list[Disagreement]
    compared_answers: int
    timeline: list[TimelinePoint]
    vendor_steps: int
    labels: list[str]


class Report(msgspec.Struct, kw_only=True):
    """The whole."""

    schema: Literal["calculet-perf-report/v1"] = "calculet-perf-report/v1"
    created_utc: str
    verdict: Verdict
    run: RunReport
    """The candidate, in a comparison."""
    base: RunReport | None = None
    comparison: Comparison | None = None
    notes: list[str] = []
    """Why the two runs may not be comparable."""
    signed_by: str | None = None
    """Key id; null: not signed."""


def report_of(
    evidence: Evidence,
    verdict: Verdict,
    *,
    created_utc: str,
    seed: int = 1,
    base: Evidence | None = None,
    comparison: Comparison | None = None,
    signed_by: str | None = None,
) -> Report:
    """Summarise a run, or a candidate and its base."""
    return Report(
        created_utc=created_utc,
        verdict=verdict,
        run=run_report(evidence, seed),
        base=run_report(base, seed) if base else None,
        comparison=comparison,
        notes=comparability(base, evidence) if base else [],
        signed_by=signed_by,
    )


def run_report(evidence: Evidence, seed: int) -> RunReport:
    """One run's part."""
    info, cells = evidence.info, sorted(evidence.cells.by_name.values(), key=_reading_order)
    reports = [_cell(cell, seed + 100 * index) for index, cell in enumerate(cells)]
    excluded = {reason: evidence.cells.excluded[reason] for reason in EXCLUSIONS}
    rest = np.sort(evidence.unattributed_ms)
    errors: dict[str, int] = {}
    for cell in cells:
        for code, count in cell.errors.items():
            errors[code] = errors.get(code, 0) + count
    return RunReport(
        run_id=info.run_id,
        purpose=evidence.manifest.purpose if evidence.manifest else "",
        started_utc=info.started_utc,
        ended_utc=info.ended_utc,
        status=info.status,
        target=info.target,
        perf_version=info.perf_version,
        manifest=msgspec.to_builtins(evidence.manifest) if evidence.manifest else None,
        manifest_sha256=info.manifest_sha256,
        matrix_sha256=info.matrix_sha256,
        matrix_name=info.matrix_name,
        golden=info.golden,
        returned=info.returned,
        invalid=info.invalid,
        not_applicable=info.not_applicable,
        selftest=info.selftest,
        requests=evidence.cells.count,
        counted=sum(cell.count for cell in cells),
        excluded=excluded,
        excluded_requests=evidence.cells.excluded_requests,
        throttled_requests=evidence.throttled_requests,
        errors=errors,
        traced=evidence.traced,
        join_errors=evidence.join_errors,
        unmatched_steps=evidence.unmatched_steps,
        unattributed_p50_ms=_at(rest, 0.5),
        unattributed_p99_ms=_at(rest, 0.99),
        device=evidence.device,
        hottest_c=evidence.hottest_c,
        power_w=evidence.power_w,
        cells=reports,
        curve=_curve(reports),
        slowest=evidence.slowest,
        bad_steps=evidence.bad_steps,
        resets=evidence.resets,
        faults=evidence.faults,
        leaks=evidence.leaks,
        cpu=evidence.cpu,
        swaps=evidence.swaps,
        driven=evidence.driven,
        notes=info.notes,
        disagreements=evidence.disagreements,
        compared_answers=evidence.compared_answers,
        timeline=evidence.timeline,
        vendor_steps=evidence.vendor_steps,
        labels=evidence.labels,
    )


def _cell(cell: Cell, seed: int) -> CellReport:
    summaries = {
        name: summary
        for index, name in enumerate(METRICS)
        if name in cell.metrics and (summary := summarise(cell.values(name), seed + index)) is not None
    }
    rates = list(cell.tokens_per_s().values())
    rate = _mean(rates)
    low, high = _rate_interval(cell, rate, seed)
    tpot = summaries["tpot"].quantiles["p50"].value if "tpot" in summaries else None
    return CellReport(
        cell=cell.id,
        stratum=cell.stratum,
        arrival=cell.arrival,
        prompt_tokens=cell.prompt_tokens,
        output_tokens=cell.output_tokens,
        concurrency=cell.concurrency,
        stream=cell.stream,
        rounds=len(cell.rounds),
        count=cell.count,
        success=cell.success,
        errors=dict(cell.errors),
        metrics=summaries,
        tokens_per_s=rate,
        tokens_per_s_low=low,
        tokens_per_s_high=high,
        tokens_per_s_per_request=rate / cell.concurrency if rate is not None and cell.concurrency else None,
        output_tokens_per_s_p50=1e3 / tpot if tpot else None,
        fill_ratio=_mean(cell.fill_ratios),
        lane_waste=_mean(cell.lane_wastes),
        coalesced=cell.coalesced,
        not_as_planned=cell.invalid,
    )


def _reading_order(cell: Cell) -> list[tuple[int, str]]:
    """Cells were executed in a random order; a reader looks for them by name, numbers as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", cell.name)]


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _rate_interval(cell: Cell, rate: float | None, seed: int) -> tuple[float | None, float | None]:
    """Relative to the parts' own mean: the run may have counted the tokens more closely than requests tell."""
    parts = cell.slices()
    if rate is None or len(parts) < 8 or parts.mean() == 0:
        return None, None
    low, high = block_interval(parts / parts.mean(), lambda drawn: float(drawn.mean()), block_length(parts), seed, resamples=999)
    return rate * low, rate * high


def _curve(cells: list[CellReport]) -> list[CurvePoint]:
    """One request at a time, streamed, not throttled; of several outputs at one prompt length the longest."""
    best: dict[int, CellReport] = {}
    for cell in cells:
        alone = cell.arrival == "single" and cell.stream and not cell.stratum
        if alone and cell.prompt_tokens is not None and CURVE_METRIC in cell.metrics:
            other = best.get(cell.prompt_tokens)
            if other is None or (cell.output_tokens or 0) > (other.output_tokens or 0):
                best[cell.prompt_tokens] = cell
    points = []
    for prompt_tokens, cell in sorted(best.items()):
        quantiles = cell.metrics[CURVE_METRIC].quantiles
        p50, p99 = quantiles["p50"], quantiles["p99"]
        points.append(
            CurvePoint(
                prompt_tokens=prompt_tokens,
                cell=cell.cell,
                p50=p50.value,
                p50_low=p50.exact_low,
                p50_high=p50.exact_high,
                p99=p99.value,
                certified_p99=p99.certified,
                count=cell.count,
            )
        )
    return points


def comparability(base: Evidence, candidate: Evidence) -> list[str]:
    """What differs between the runs besides the build."""
    notes = []
    if base.info.matrix_sha256 != candidate.info.matrix_sha256:
        notes.append("the matrices differ: only cells that both ran are compared")
    one, other = base.manifest, candidate.manifest
    if one is not None and other is not None:
        for name in ("model", "hardware", "environment", "client"):
            before, after = msgspec.to_builtins(getattr(one, name)), msgspec.to_builtins(getattr(other, name))
            changed = [key for key in before if before[key] != after.get(key)]
            if changed:
                notes.append(f"{name} differs in {', '.join(f'{key} ({before[key]} / {after.get(key)})' for key in changed)}")
    return notes


def _at(ordered: np.ndarray, q: float) -> float | None:
    return float(np.quantile(ordered, q, method="inverted_cdf")) if len(ordered) else None
