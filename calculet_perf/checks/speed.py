"""Is it fast enough? Gates of a comparison, limits of the board, service level, stable rate (acceptance §14.2, §14.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calculet_perf.cells import Cell
from calculet_perf.checks.base import Answer, Context, Result
from calculet_perf.comparison import Gate, matches
from calculet_perf.cpu_use import CpuUse
from calculet_perf.rules import Sla
from calculet_perf.statistics.compare import Outcome
from calculet_perf.statistics.quantiles import Bound, binomial_at_least, certified, samples_needed, upper_bound
from calculet_perf.statistics.throughput import backlog_grows

REFUSALS = (
    "over_capacity", "tenant_rate_limited", "tenant_quota", "no_ready_worker", "model_draining", "model_recovering",
    "http_429", "http_503",
)  # fmt: skip
"""Error codes of a server that says "not now"."""
SLA_METRICS = {
    "ttft_p99_ms": ("ttft", "scheduled_ttft"), "tpot_p99_ms": ("tpot",), "e2e_p99_ms": ("e2e", "scheduled_e2e"),
    "queue_p99_ms": ("queue",),
}  # fmt: skip
"""Field of the service level -> the metrics that answer it, the last one that the cell has: open loop counts from the schedule."""


def aa_floor(context: Context) -> Answer:
    """No gate is within the noise."""
    assert context.comparison is not None
    loud = [_gate_line(gate) for gate in context.comparison.gates if gate.blocked == "noise"]
    if loud:
        return Result.INSUFFICIENT, f"{len(loud)} of {len(context.comparison.gates)} gates are within the noise", loud
    return Result.PASS, f"from {context.comparison.control}", []


def not_worse(context: Context) -> Answer:
    """All gates of that kind."""
    assert context.comparison is not None
    return _gates([gate for gate in context.comparison.gates if gate.question == "not_worse"], "is within its limit")


def improved(context: Context) -> Answer:
    """Every target cell improves, by its own number or by the alternative."""
    assert context.comparison is not None
    gates = [gate for gate in context.comparison.gates if gate.question == "improved"]
    chosen: list[Gate] = []
    for gate in gates:
        if gate.alternative and chosen and chosen[-1].delta.cell == gate.delta.cell:
            order = (Outcome.PASS, Outcome.UNDECIDED, Outcome.FAIL)
            chosen[-1] = min(chosen[-1], gate, key=lambda item: order.index(item.outcome))
        else:
            chosen.append(gate)
    return _gates(chosen, "improves enough")


def _gates(gates: Sequence[Gate], good: str) -> Answer:
    failed = [_gate_line(gate) for gate in gates if gate.outcome is Outcome.FAIL]
    unsure = [_gate_line(gate) for gate in gates if gate.outcome is Outcome.UNDECIDED]
    if failed:
        return Result.FAIL, failed[0], failed + unsure
    if unsure:
        return Result.INSUFFICIENT, unsure[0], unsure
    if not gates:
        return Result.INSUFFICIENT, "no cell that the rules ask about was measured in both runs", []
    return Result.PASS, f"each of {len(gates)} numbers {good}", []


def _gate_line(gate: Gate) -> str:
    quantile = f" {gate.delta.quantile.upper()}" if gate.delta.quantile else ""
    return f"{gate.delta.cell}: {gate.delta.metric.upper()}{quantile}: {gate.why}"


def limits(context: Context) -> Answer:
    """Power and temperature."""
    limits, evidence = context.claim.limits, context.evidence
    if limits is None or (limits.temperature_c is None and limits.power_w is None):
        return Result.INSUFFICIENT, "the claim states no limits of the board", []
    pairs = (("temperature", "C", limits.temperature_c, evidence.hottest_c), ("power", "W", limits.power_w, evidence.power_w))
    asked = [(name, unit, limit, seen) for name, unit, limit, seen in pairs if limit is not None]
    over = [
        f"{name}: {seen:g} {unit}, the limit is {limit:g}" for name, unit, limit, seen in asked if seen is not None and seen > limit
    ]
    unknown = [f"{name} was not seen" for name, _, _, seen in asked if seen is None]
    if over:
        return Result.FAIL, over[0], over + unknown
    if unknown:
        return Result.INSUFFICIENT, unknown[0], unknown
    return Result.PASS, ", ".join(f"{name} up to {seen:g} of {limit:g} {unit}" for name, unit, limit, seen in asked), []


def sla(context: Context) -> Answer:
    """The claim's service level, in its cells."""
    sla = context.claim.sla
    if sla is None:
        return Result.INSUFFICIENT, "no service level was stated (the claim's `sla`)", []
    cells = [cell for cell in context.evidence.cells.by_name.values() if matches(cell.id, sla.cells) and not cell.stratum]
    return _sla_of(cells, sla, context.evidence.cpu)


def _sla_of(cells: Sequence[Cell], sla: Sla, boards: Sequence[CpuUse]) -> Answer:
    answers = [line for cell in cells for line in [*_refusals(cell, sla), *_quantiles(cell, sla)]]
    answers += _utilisation(boards, sla)
    failed = [line for result, line in answers if result is Result.FAIL]
    unsure = [line for result, line in answers if result is Result.INSUFFICIENT]
    if failed:
        return Result.FAIL, failed[0], failed + unsure
    if unsure or not answers:
        return Result.INSUFFICIENT, unsure[0] if unsure else "no cell shows what the service level asks", unsure
    return Result.PASS, f"{len(answers)} numbers hold", []


def _refusals(cell: Cell, sla: Sla) -> list[tuple[Result, str]]:
    if sla.reject_rate is None:
        return []
    share = sum(cell.errors[code] for code in REFUSALS) / max(1, cell.count)
    line = f"{cell.name}: {share:.2%} refused, {sla.reject_rate:.2%} are allowed"
    return [(Result.FAIL if share > sla.reject_rate else Result.PASS, line)]


def _utilisation(boards: Sequence[CpuUse], sla: Sla) -> list[tuple[Result, str]]:
    if sla.utilisation is None:
        return []
    told = [(board.board, board.utilisation) for board in boards if board.utilisation is not None]
    if not told:
        return [(Result.INSUFFICIENT, "no board told how long its device was busy")]
    return [
        (
            Result.FAIL if busy > sla.utilisation else Result.PASS,
            f"{board}: its device was busy {busy:.1%} of the time under load, {sla.utilisation:.1%} are allowed",
        )
        for board, busy in told
    ]


def _quantiles(cell: Cell, sla: Sla) -> list[tuple[Result, str]]:
    """P99 by exact bounds: certainly within, certainly beyond, or not certain."""
    found = []
    for name, metrics in SLA_METRICS.items():
        limit = getattr(sla, name)
        metric = next((item for item in reversed(metrics) if item in cell.metrics), None)
        if limit is None or metric is None:
            continue
        values = np.sort(cell.values(metric))
        bound, beyond = upper_bound(values, 0.99), int((values > limit).sum())
        line = f"{cell.name}: {metric.upper()} P99, limit {limit:g} ms: {beyond} of {len(values)} beyond it"
        if bound is not None and bound <= limit:
            found.append((Result.PASS, line))
        elif beyond > 0.01 * len(values) and binomial_at_least(beyond, len(values), 0.01) <= 0.05:
            found.append((Result.FAIL, line))
        else:
            few = certified(len(values), 0.99) is Bound.NONE
            found.append((Result.INSUFFICIENT, line + (f"; {samples_needed(0.99)} samples are needed" if few else "; not certain")))
    return found


def capacity(context: Context) -> Answer:
    """Each open-loop cell holds the service level over a whole window, and its queue does not go on growing (acceptance §14.3)."""
    evidence, window_s = context.evidence, context.rules.capacity_window_s
    cells = [cell for cell in evidence.cells.by_name.values() if cell.arrival == "poisson" and not cell.stratum]
    if not cells or context.claim.sla is None:
        return Result.INSUFFICIENT, "no open-loop cell was measured" if not cells else "no service level was stated", []
    failed, unsure = [], [f"{cell.name}: {cell.invalid[0]}" for cell in cells if cell.invalid]
    for cell in cells:
        for round_ in cell.load_rounds:
            if (window := cell.steady(round_)) is None:
                continue
            if window.seconds < 0.99 * window_s:
                unsure.append(f"{cell.name}: a window of {window.seconds:.0f} s; only {window_s:g} s show a stable rate")
            if backlog_grows(cell.spans(round_), window):
                failed.append(f"{cell.name}: the queue went on growing")
    level = _sla_of(cells, context.claim.sla, evidence.cpu)
    if failed or level[0] is Result.FAIL:
        return Result.FAIL, [*failed, level[1]][0], [*failed, *level[2], *unsure]
    if unsure or level[0] is Result.INSUFFICIENT:
        return Result.INSUFFICIENT, [*unsure, level[1]][0], [*unsure, *level[2]]
    return Result.PASS, f"{len(cells)} offered rates are carried", []
