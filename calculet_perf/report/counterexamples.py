"""What speaks against a run (acceptance §16): its slowest requests, failures of the runtime, every reset, what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calculet_perf.evidence import Slow
from calculet_perf.joins import PARTS
from calculet_perf.report import figures
from calculet_perf.report.drawing import number
from calculet_perf.report.layout import MOST_LINES, Section, Table, more, span
from calculet_perf.report.model import RunReport
from calculet_perf.swapping import Driven


def counterexamples(run: RunReport) -> Iterator[Section]:
    """All of them; a section without any says so."""
    yield _slowest(run)
    yield _runtime(run)
    yield _resets(run)
    yield _excluded(run)
    yield _curve(run)
    yield from _faults(run)
    yield _stability(run)


def _slowest(run: RunReport) -> Section:
    title = f"The {len(run.slowest)} slowest requests"
    told = [part for part in PARTS if any(slow.parts and getattr(slow.parts, part) is not None for slow in run.slowest)]
    names = [*told, "unattributed"] if told else []
    marked = any(_marks(slow) for slow in run.slowest)
    head = ("request", "case", "e2e ms", "ttft", "tpot", "tokens", *(name.replace("_", " ") for name in names))
    rows = [(*_client_side(slow), *_parts(slow, names), *([_marks(slow)] if marked else [])) for slow in run.slowest]
    lead = "Queue, host and device time of each, joined by request and job. What no step accounts for is unattributed, not TTFT."
    if not told:
        lead = "The server wrote no trace of them: their time is not attributed to queue, host or device."
    elif len(told) < len(PARTS):
        lead += f" No step tells {', '.join(part for part in PARTS if part not in told)}."
    picture = figures.slowest(run.slowest, told) if told else None
    table = Table((*head, *(["marks"] if marked else [])), rows, frozenset(range(2, 6 + len(names))))
    return Section("slowest", title, lead, [table], [picture] if picture else [])


def _client_side(slow: Slow) -> tuple[str, ...]:
    times = (number(slow.e2e_ms), number(slow.ttft_ms), number(slow.tpot_ms))
    return (slow.request_id, slow.case, *times, "–" if slow.tokens is None else str(slow.tokens))


def _parts(slow: Slow, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(number(getattr(slow.parts, name) if slow.parts else None) for name in names)


def _marks(slow: Slow) -> str:
    join_error = slow.parts is not None and slow.parts.join_error
    return " ".join(filter(None, (slow.error, "throttled" if slow.throttled else "", "join error" if join_error else "")))


def _runtime(run: RunReport) -> Section:
    rows = [
        (bad.status, bad.board or "–", str(bad.generation or "–"), str(bad.job_id), bad.kind, str(bad.step), bad.request_id)
        for bad in run.bad_steps[:MOST_LINES]
    ]
    lead = "Every job that did not end as a success, also where the request succeeded in the end."
    if not rows:
        lead = "None was seen." if run.traced else "None could be seen: the server wrote no trace."
    head = ("status", "board", "generation", "job", "kind", "step", "request")
    return Section(
        "runtime", "Runtime results other than success", lead, [Table(head, rows)] if rows else [], lines=more(len(run.bad_steps))
    )


def _resets(run: RunReport) -> Section:
    rows = [
        (
            reset.kind,
            reset.board,
            f"{reset.at_ns / 1e9:.3f}",
            "not seen" if reset.recovery_ms is None else f"{reset.recovery_ms / 1e3:.2f}",
            reset.source,
        )
        for reset in run.resets[:MOST_LINES]
    ]
    head = ("what", "board", "at, s (monotonic)", "recovery, s", "seen by")
    lead = "Every reset and reconfiguration, and how long until the board served again." if rows else "None was seen."
    return Section("resets", "Resets", lead, [Table(head, rows, frozenset({2, 3}))] if rows else [], lines=more(len(run.resets)))


def _excluded(run: RunReport) -> Section:
    left = sum(run.excluded.values())
    lead = (
        f"{run.requests:,} requests were sent, {run.counted:,} count, {left:,} are left out for reasons registered before the run."
    )
    tables = [Table(("reason", "requests"), [(reason, str(count)) for reason, count in run.excluded.items()], frozenset({1}))]
    if run.excluded_requests:
        tables.append(Table(("request", "case", "reason"), list(run.excluded_requests[:MOST_LINES])))
    if run.errors:
        tables.append(Table(("error", "requests"), [(code, str(count)) for code, count in run.errors.items()], frozenset({1})))
    lines = [f"{run.throttled_requests} ran on a throttled board and are a stratum of their own"] if run.throttled_requests else []
    lines += [f"not applicable: {item.case}: {item.reason}" for item in run.not_applicable]
    return Section("excluded", "Samples left out, and failures", lead, tables, lines=lines + more(len(run.excluded_requests)))


def _curve(run: RunReport) -> Section:
    picture = figures.context_curve(run.curve)
    rows = [
        (
            f"{point.prompt_tokens:,}",
            number(point.p50),
            span(point.p50_low, point.p50_high),
            number(point.p99),
            "yes" if point.certified_p99 else "no",
            str(point.count),
            point.cell,
        )
        for point in run.curve
    ]
    lead = "One request at a time, by the length of its prompt." if rows else "No cell with one streamed request at a time."
    head = ("prompt tokens", "TPOT P50, ms", "exact 95 %", "P99, ms", "P99 certified", "samples", "cell")
    table = [Table(head, rows, frozenset({0, 1, 2, 3, 5}))] if rows else []
    return Section("curve", "Time per token at long contexts", lead, table, [picture] if picture else [])


def _faults(run: RunReport) -> Iterator[Section]:
    if run.faults is None:
        return
    rows = [
        (
            "passed" if fault.as_expected else "FAILED" if fault.valid else "invalid",
            fault.scenario,
            f"{fault.fired} of {fault.planned}",
            fault.expected,
            "; ".join([fault.observed, *fault.reasons]),
            {True: "passed", False: "failed", None: "not run"}[fault.golden_after],
            number(fault.recovery_ms),
        )
        for fault in run.faults
    ]
    head = ("", "scenario", "fired", "expected", "observed", "golden after", "recovery, ms")
    states = [{"passed": "pass", "FAILED": "fail"}.get(row[0], "insufficient_evidence") for row in rows]
    lead = "A scenario counts only when every planned fault fired and ended as designed."
    yield Section("faults", "Injected faults", lead, [Table(head, rows, frozenset({6}), states)])


def _stability(run: RunReport) -> Section:
    rows = [
        (
            {"no_leak": "passed", "leak": "LEAK"}.get(str(item.outcome), "not shown"),
            item.board,
            item.resource,
            figures.si(item.baseline or 0.0),
            "–" if item.last is None else figures.si(item.last),
            "–" if item.slope_per_hour is None else figures.si(item.slope_per_hour),
            item.why,
        )
        for item in run.leaks
    ]
    states = [{"no_leak": "pass", "leak": "fail"}.get(str(item.outcome), "insufficient_evidence") for item in run.leaks]
    pictures = [figures.leak(item) for item in run.leaks if item.method == "trend" or str(item.outcome) == "leak"]
    heat = figures.device(run.timeline)
    lead = (
        "Counted resources must be back at their baseline; memory is judged by the trend of blocks, calibrated by an injected leak."
    )
    head = ("", "board", "resource", "baseline", "last", "slope per hour", "why")
    tables = [Table(head, rows, frozenset({3, 4, 5}), states)] if rows else []
    if run.cpu:
        cores = [
            (
                use.board, _share(use.idle_share), f"{use.idle_s:,.0f}", _share(use.load_share), f"{use.load_s:,.0f}",
                _share(use.utilisation),
            )
            for use in run.cpu
        ]  # fmt: skip
        columns = ("process", "CPU, idle", "seen, s", "CPU, under load", "seen, s", "device busy, under load")
        tables.append(Table(columns, cores, frozenset({1, 2, 3, 4, 5})))
    swaps = run.swaps
    lines = []
    if swaps is not None:
        lines.append(
            f"model swaps by the journal: {swaps.loads} loads, {swaps.rollbacks} rollbacks, {swaps.refused} refused"
        )
    lines += _driven(run.driven)
    return Section(
        "stability",
        "Resources and temperature",
        lead if rows else "No resources were seen.",
        tables,
        [picture for picture in [heat, *pictures] if picture],
        lines,
    )


def _driven(driven: Driven | None) -> list[str]:
    """What the stage's own load/unload cycles showed, those that failed last and whole."""
    if driven is None:
        return []
    lines = [
        (
            f"load/unload cycles that this stage drove: {driven.loads} loads, {driven.unloads} of them into emptied boards, "
            f"{driven.rollbacks} rollbacks; {driven.under_load} of all under load; {len(driven.failed)} failed, "
            f"{driven.interrupted} interrupted"
        )
    ]
    if driven.median_s is not None and driven.slowest_s is not None:
        lines.append(f"a cycle took {driven.median_s:.1f} s in the median, {driven.slowest_s:.1f} s at most")
    lines += [
        f"{item.board} while empty: {item.first_bytes / 2**20:.1f} MiB of device memory, {item.last_bytes / 2**20:.1f} MiB at last"
        for item in driven.residue
    ]
    return [*lines, *driven.failed, *driven.mixed]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
