"""The report's words and tables, once for HTML and PDF, in the reader's order: verdict, why, what speaks against it, the data."""

from __future__ import annotations

from collections.abc import Iterator

from calculet_perf.cells import METRICS
from calculet_perf.comparison import CellDelta, Gate
from calculet_perf.report import figures
from calculet_perf.report.counterexamples import counterexamples
from calculet_perf.report.drawing import number
from calculet_perf.report.layout import MOST_LINES, WORDS, Section, Table, cell_name, interval, more, number_name, percent, span
from calculet_perf.report.model import CellReport, Report, RunReport
from calculet_perf.statistics.compare import Outcome
from calculet_perf.statistics.summary import Quantile

SHOWN_METRICS = ("ttft", "tpot", "e2e", "scheduled_ttft", "scheduled_e2e", "ttfh", "ttfe", "queue")


BY_GATES = ("aa_floor", "not_worse", "improved")
"""Checks whose details are the table of gates."""
MOST_DETAILS = 20


def sections(report: Report) -> list[Section]:
    """All of them, in order."""
    run = report.run
    found = [_why(report)]
    if report.comparison is not None:
        found += [_gates(report), _winners(report)]
    found += counterexamples(run)
    found += [_cells(run, "Cells" if report.base is None else "Cells of the candidate")]
    if report.base is not None:
        found.append(_cells(report.base, "Cells of the base"))
    return [*found, _limits(report), _identity(report)]


def _why(report: Report) -> Section:
    order = {"fail": 0, "insufficient_evidence": 1, "pass": 2, "not_asked": 3}
    checks = sorted(report.verdict.checks, key=lambda check: order[str(check.result)])
    rows = [(WORDS[str(check.result)], check.title, check.why, check.clause) for check in checks]
    lines = []
    for check in report.verdict.reasons():
        if check.check not in BY_GATES and len(check.details) > 1:
            lines += [f"{check.title}: {line}" for line in check.details[:MOST_DETAILS]]
            lines += [f"{check.title}: and {len(check.details) - MOST_DETAILS} more"] if len(check.details) > MOST_DETAILS else []
    return Section(
        "why",
        "Why",
        "Every question that was asked, what failed first. Hard gates go before speed.",
        [Table(("", "question", "answer", "clause"), rows, states=[str(check.result) for check in checks])],
        lines=lines,
    )


def _gates(report: Report) -> Section:
    assert report.comparison is not None
    order = {"fail": 0, "undecided": 1, "pass": 2}
    gates = sorted(report.comparison.gates, key=lambda gate: order[str(gate.outcome)])
    rows = [_gate_row(gate) for gate in gates[:MOST_LINES]]
    head = ("", "cell", "number", "base", "candidate", "change", "95 % interval", "limit", "A/A", "why")
    lead = (
        "Each number held against its limit. A number decides only with enough samples on both sides, and where two identical "
        f"builds differ by less than half of the limit; that noise comes from {report.comparison.control}."
    )
    return Section(
        "gates",
        "Gates",
        lead,
        [Table(head, rows, frozenset({3, 4, 5, 6, 7, 8}), [str(gate.outcome) for gate in gates[:MOST_LINES]])],
    )


def _gate_row(gate: Gate) -> tuple[str, ...]:
    delta = gate.delta
    sign = "at most" if gate.question == "not_worse" else "at least"
    limit = f"{sign} {gate.limit_pct:g} % {'worse' if gate.question == 'not_worse' else 'better'}"
    floor = "unknown" if gate.floor_pct is None else f"{gate.floor_pct:.2f} %"
    return (
        WORDS.get(str(gate.outcome), "passed"),
        delta.cell,
        number_name(delta.metric, delta.quantile),
        f"{number(delta.base)} {delta.unit}",
        f"{number(delta.candidate)} {delta.unit}",
        percent(delta.delta_pct),
        interval(delta),
        limit,
        floor,
        gate.why if gate.outcome is Outcome.UNDECIDED else "",
    )


def _winners(report: Report) -> Section:
    assert report.comparison is not None
    comparison = report.comparison
    counts = {
        change: sum(delta.change == change for delta in comparison.deltas if delta.certified)
        for change in ("better", "worse", "undecided")
    }
    wins, losses = counts["better"], counts["worse"]
    lead = f"Of {sum(counts.values())} certified numbers {wins} are better, {losses} are worse, {counts['undecided']} undecided."
    pictures = [
        figures.forest(comparison, "ttft", "p50", "TTFT P50"),
        figures.forest(comparison, "tpot", "p50", "TPOT P50"),
        figures.forest(comparison, "tpot", "p99", "TPOT P99"),
        figures.forest(comparison, "tokens_per_s", None, "Tokens per second"),
    ]
    shown = sorted(comparison.deltas, key=_badness)[:MOST_LINES]
    rows = [
        (
            delta.change,
            delta.cell,
            number_name(delta.metric, delta.quantile) + ("" if delta.certified else " *"),
            f"{number(delta.base)} {delta.unit}",
            f"{number(delta.candidate)} {delta.unit}",
            percent(delta.delta_pct),
            interval(delta),
            delta.direction.replace("_", " "),
            f"{delta.base_count} / {delta.candidate_count}",
        )
        for delta in shown
    ]
    head = ("", "cell", "number", "base", "candidate", "change", "95 % interval", "direction", "samples")
    lines = [f"only in the base: {', '.join(comparison.only_base)}"] if comparison.only_base else []
    lines += [f"only in the candidate: {', '.join(comparison.only_candidate)}"] if comparison.only_candidate else []
    lines += [*more(len(comparison.deltas)), *report.notes, "* not certified: too few samples for this quantile"]
    table = Table(head, rows, frozenset({3, 4, 5, 6, 8}), [delta.change for delta in shown])
    return Section("winners", "Winners and losers", lead, [table], [picture for picture in pictures if picture], lines)


def _badness(delta: CellDelta) -> tuple[int, float]:
    worse = (delta.delta_pct or 0.0) * (1 if delta.direction == "lower_is_better" else -1)
    return ({"worse": 0, "undecided": 1}.get(delta.change, 2), -worse)


def _cells(run: RunReport, title: str) -> Section:
    tables = []
    throughput = [
        (
            cell_name(cell),
            str(cell.count),
            str(cell.success),
            ", ".join(f"{count} {code}" for code, count in cell.errors.items()) or "–",
            number(cell.tokens_per_s),
            "–" if cell.tokens_per_s_low is None else span(cell.tokens_per_s_low, cell.tokens_per_s_high),
            number(cell.tokens_per_s_per_request),
            number(cell.output_tokens_per_s_p50),
            number(cell.fill_ratio),
            number(cell.lane_waste),
            "; ".join(cell.not_as_planned) or "–",
        )
        for cell in run.cells
    ]
    head = (
        "cell", "samples", "successes", "errors", "tokens/s", "95 %", "per user", "one request", "fill", "lane waste",
        "not as planned",
    )  # fmt: skip
    tables.append(Table(head, throughput, frozenset({1, 2, 4, 5, 6, 7, 8, 9})))
    for metric in SHOWN_METRICS:
        rows = [_metric_row(cell, metric) for cell in run.cells if metric in cell.metrics]
        if rows:
            name = f"{METRICS[metric].title}, ms"
            tables.append(
                Table(
                    (
                        name,
                        "n",
                        "P50",
                        "P50 95 %",
                        "P90",
                        "P95",
                        "P99",
                        "P99 95 %",
                        "P99.9",
                        "max",
                        "mean",
                        "mean 95 %",
                        "std",
                        "MAD",
                    ),
                    rows,
                    frozenset(range(1, 14)),
                )
            )
    pictures = [figures.cells(run.cells, "ttft", "Time to first token"), figures.cells(run.cells, "tpot", "Time per output token")]
    lead = (
        "Quantiles are nearest rank over all samples, failures infinitely slow; P50's interval is exact, the others are bootstrap. "
        "* marks what the sample count does not certify. Throughput is of the steady window, without ramps; "
        "'one request' is the median of what a request decodes in a second. Mean and deviations "
        "are of successes."
    )
    return Section("cells-" + run.run_id, title, lead, tables, [picture for picture in pictures if picture])


def _metric_row(cell: CellReport, metric: str) -> tuple[str, ...]:
    summary = cell.metrics[metric]
    q = summary.quantiles

    return (
        cell_name(cell),
        str(summary.count),
        _quantile(q["p50"]),
        span(q["p50"].exact_low, q["p50"].exact_high),
        _quantile(q["p90"]),
        _quantile(q["p95"]),
        _quantile(q["p99"]),
        span(q["p99"].bootstrap_low, q["p99"].bootstrap_high),
        _quantile(q["p999"]),
        number(summary.max),
        number(summary.mean),
        span(summary.mean_low, summary.mean_high),
        number(summary.std),
        number(summary.mad),
    )


def _quantile(quantile: Quantile) -> str:
    text = "unbounded" if quantile.unbounded else number(quantile.value)
    return text if quantile.certified else f"{text} *"


def _limits(report: Report) -> Section:
    run, verdict = report.run, report.verdict
    vendor = (
        f"{run.vendor_steps:,} steps carry the vendor's counters." if run.vendor_steps else "The vendor's trace was not available."
    )
    lines = [*verdict.limits_of_conclusion, *(f"noted in the run: {note}" for note in run.notes)]
    if run.unattributed_p50_ms is not None:
        lines.append(
            f"unattributed: P50 {number(run.unattributed_p50_ms)} ms, P99 {number(run.unattributed_p99_ms)} ms of a request"
        )
    if run.unmatched_steps:
        lines.append(f"{run.unmatched_steps:,} steps belong to no measured request (golden runs, other clients)")
    if run.join_errors:
        lines.append(f"{run.join_errors} requests' parts are more than their whole: their decomposition is not to be believed")
    return Section("limits", "What this does not show", vendor, lines=lines)


def _identity(report: Report) -> Section:
    rows = []
    for name, run in (("run", report.run), ("base", report.base)):
        if run is None:
            continue
        rows += [(f"{name}: id", run.run_id), (f"{name}: started", run.started_utc), (f"{name}: ended", run.ended_utc or "–")]
        rows += [(f"{name}: target", run.target), (f"{name}: manifest sha256", run.manifest_sha256)]
        rows += [(f"{name}: matrix", f"{run.matrix_name} {run.matrix_sha256}")]
        rows += [(f"{name}: {key}", value) for key, value in _flat(run.manifest or {})]
        if run.selftest is not None:
            test = run.selftest
            rows.append(
                (
                    f"{name}: client's self-test",
                    f"{number(test.rate_qps)}/s, adds {number(test.added_p99_ms)} ms at P99 to what it reports",
                )
            )
    rows += [
        ("rules", f"{report.verdict.rules_version}, sha256 {report.verdict.rules_sha256}"),
        ("report made", report.created_utc),
    ]
    rows.append(("signed by key", report.signed_by or "nobody: this report is not signed"))
    lead = "Check it elsewhere with the public key: calculet-perf verify DIR --trust KEY.pub"
    return Section("identity", "What was measured", lead, [Table(("", ""), rows)])


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, "null" if value is None else str(value)
