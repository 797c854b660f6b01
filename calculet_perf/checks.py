"""What a verdict asks: one function a check, each with three answers and a reason (acceptance §14).

Which checks are asked of which run, and with what numbers, is data (`rules/`); here is how each is answered. A check that cannot
be answered says why, and that is insufficient evidence, never a pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from calculet_perf.cells import Cell
from calculet_perf.comparison import Comparison, Gate, matches
from calculet_perf.evidence import Evidence
from calculet_perf.rules import Claim, Kind, Rules, Sla
from calculet_perf.stability import HOUR_S, LeakOutcome, StageRun
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


class Result(enum.StrEnum):
    """What became of a check."""

    PASS = "pass"
    FAIL = "fail"
    INSUFFICIENT = "insufficient_evidence"
    NOT_ASKED = "not_asked"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check, with what it saw."""

    check: str
    kind: Kind
    clause: str
    title: str
    result: Result
    why: str
    details: list[str] = []


class Context(msgspec.Struct, frozen=True):
    """What the checks look at."""

    evidence: Evidence
    rules: Rules
    claim: Claim
    base: Evidence | None
    comparison: Comparison | None
    stage_of: Evidence
    needs_stage: str | None
    """The stage that the claim asks for; None: the run's own."""


Answer = tuple[Result, str, list[str]]


def run_check(name: str, context: Context, prefix: str = "") -> CheckResult:
    """Ask one."""
    check = context.rules.checks[name]
    result, why, details = CHECKS[name](context)
    return CheckResult(
        check=prefix + name,
        kind=check.kind,
        clause=check.clause,
        title=prefix + check.title,
        result=result,
        why=why,
        details=details,
    )


def _manifest(context: Context) -> Answer:
    errors = [*context.evidence.configuration_errors, *(context.base.configuration_errors if context.base else [])]
    if errors:
        return Result.FAIL, errors[0], errors
    return Result.PASS, "read and complete", []


def _golden(context: Context) -> Answer:
    outcomes = {golden.moment: golden for golden in context.evidence.info.golden}
    failed = [golden for golden in outcomes.values() if not golden.passed]
    if failed:
        lines = [f"golden {golden.moment}: {line}" for golden in failed for line in (golden.failures or ["failed"])]
        return Result.FAIL, lines[0], lines
    missing = [moment for moment in ("before", "after") if moment not in outcomes]
    if missing:
        return Result.INSUFFICIENT, f"golden {' and '.join(missing)} did not run", []
    empty = [golden.moment for golden in outcomes.values() if golden.cases == 0]
    if empty:
        return Result.INSUFFICIENT, f"golden {empty[0]} had no case", []
    return Result.PASS, f"{sum(golden.cases for golden in outcomes.values())} cases passed", []


def _no_crosstalk(context: Context) -> Answer:
    evidence = context.evidence
    certain = [item for item in evidence.disagreements if item.swapped_with is not None]
    counted = certain if not context.claim.batch_invariant else evidence.disagreements
    details = [
        f"sample {item.sample_id} gave {item.token_hash[:16]} {item.count} times, not {item.expected[:16]}"
        + (f"; that is the answer of {item.swapped_with}" if item.swapped_with else "")
        + f": {', '.join(f'{request} in {case}' for request, case in item.requests[:3])}"
        for item in evidence.disagreements
    ]
    differing = sum(item.count for item in evidence.disagreements)
    if counted:
        why = f"{sum(item.count for item in counted)} of {evidence.compared_answers} greedy answers are not those of their samples"
        return Result.FAIL, why, details
    if not evidence.compared_answers:
        return Result.INSUFFICIENT, "no greedy sample was answered twice with its tokens told: nothing could be compared", []
    if details:
        why = f"{differing} of {evidence.compared_answers} answers differ, none is another sample's (not a batch-invariant engine)"
        return Result.PASS, why, details
    return Result.PASS, f"{evidence.compared_answers} answers agree", []


def _finite_outputs(context: Context) -> Answer:
    evidence = context.evidence
    used = [f"{bad.request_id} step {bad.step}: {bad.status} on {bad.board}, and it went on" for bad in evidence.used_bad_steps]
    if used:
        return Result.FAIL, f"bad outputs that were used: {len(used)}", used
    if evidence.cells.count and not evidence.traced:
        return Result.NOT_ASKED, "the server wrote no trace; golden and agreement stand for it", []
    return Result.PASS, f"{len(evidence.bad_steps)} bad outputs, none used", []


def _no_process_death(context: Context) -> Answer:
    rules, counts = context.rules, _errors(context.evidence)
    dead = {code: count for code, count in counts.items() if code in rules.process_death_errors}
    endless = {code: count for code, count in counts.items() if code in rules.endless_wait_errors}
    injected = bool(context.evidence.info.injector_armed)
    if (dead or endless) and not injected:
        lines = [f"{count} requests ended with {code}" for code, count in {**dead, **endless}.items()]
        return Result.FAIL, lines[0], lines
    return Result.PASS, "none seen by the clients" + (" outside of planned faults" if injected else ""), []


def _faults_recovered(context: Context) -> Answer:
    faults = context.evidence.faults
    if faults is None:
        if "faults_recovered" in context.rules.claims[context.claim.claim].checks:
            return Result.INSUFFICIENT, "the fault list was not run on this build (`--faults`)", []
        return Result.NOT_ASKED, "no fault scenarios were given", []
    bad = [
        f"{fault.scenario}: {(fault.reasons or ['not as expected'])[0]}"
        for fault in faults
        if fault.valid and not fault.as_expected
    ]
    invalid = [f"{fault.scenario}: {fault.planned} planned, {fault.fired} fired: invalid" for fault in faults if not fault.valid]
    if bad:
        return Result.FAIL, bad[0], bad + invalid
    if invalid or not faults:
        return Result.INSUFFICIENT, invalid[0] if invalid else "no scenario is recorded", invalid
    return Result.PASS, f"{len(faults)} scenarios ended as designed", []


def _no_lost_board(context: Context) -> Answer:
    """Every reset was followed by service again: by its own recovery, or at least by a request that succeeded later."""
    evidence = context.stage_of
    last = evidence.last_success_ns
    lost = [
        f"{reset.board}: {reset.kind} at {reset.at_ns / 1e9:.1f} s and nothing was served after it"
        for reset in evidence.resets
        if reset.recovery_ms is None and (last is None or last < reset.at_ns)
    ]
    if lost:
        return Result.FAIL, lost[0], lost
    return Result.PASS, f"{len(evidence.resets)} resets, each followed by service", []


def _returned(context: Context) -> Answer:
    evidence = context.evidence
    if evidence.info.returned:
        back = evidence.info.returned
        stuck = [f"{item.board} {item.resource}: {item.after:g}, {item.before:g} before" for item in back if not item.returned]
        if stuck:
            return Result.FAIL, stuck[0], stuck
        return Result.PASS, f"{len(evidence.info.returned)} resources are back", []
    if evidence.info.foreign:
        return Result.NOT_ASKED, "a foreign server shows no resources", []
    return Result.INSUFFICIENT, "resources were not compared after the run", []


def _no_leak(context: Context) -> Answer:
    stage_of = context.stage_of
    leaks = [f"{item.board} {item.resource}: {item.why}" for item in stage_of.leaks if item.outcome is LeakOutcome.LEAK]
    unsure = [f"{item.board} {item.resource}: {item.why}" for item in stage_of.leaks if item.outcome is LeakOutcome.INSUFFICIENT]
    if leaks:
        return Result.FAIL, leaks[0], leaks + unsure
    if unsure or not any(item.method == "trend" for item in stage_of.leaks):
        return Result.INSUFFICIENT, unsure[0] if unsure else "no memory was watched", unsure
    return Result.PASS, f"{len(stage_of.leaks)} resources watched", []


def _zero_errors(context: Context) -> Answer:
    counts = _errors(context.evidence)
    lines = [f"{count} x {code}" for code, count in counts.items()]
    if counts:
        return Result.FAIL, f"{sum(counts.values())} requests failed", lines
    if not context.evidence.cells.by_name:
        return Result.INSUFFICIENT, "no request counts", []
    return Result.PASS, "no request failed", []


def _stage_length(context: Context) -> Answer:
    stage, wanted = context.stage_of.stage, context.needs_stage
    if wanted is not None and (stage is None or stage.stage != wanted):
        hours = context.rules.stages[wanted].duration_s / HOUR_S
        return Result.INSUFFICIENT, f"a {wanted} stage of {hours:g} h is needed, and no such run was given", []
    assert stage is not None, "asked of a run with a stage only"
    asked = StageRun(**{**msgspec.structs.asdict(stage), "asked_s": context.rules.stages[stage.stage].duration_s})
    if not asked.satisfies_long_gates:
        return Result.INSUFFICIENT, f"{stage.stage}: {'; '.join(asked.labels())}", []
    return Result.PASS, f"{stage.stage}: {stage.done_s / HOUR_S:.3g} h", []


def _measurement(context: Context) -> Answer:
    runs = [context.evidence, *([context.base] if context.base else [])]
    lines = [f"{run.info.run_id}: {item.code}: {item.message}" for run in runs for item in run.info.invalid]
    for run in runs:
        if run.info.status not in ("complete", "golden_failed"):
            lines.append(f"{run.info.run_id}: the run is not complete: its status is {run.info.status}")
        if run.info.selftest and not run.info.selftest.passed:
            lines.append(f"{run.info.run_id}: the client's self-test failed")
    if lines:
        return Result.FAIL, lines[0], lines
    if not any(cell.success for run in runs for cell in run.cells.by_name.values()):
        return Result.INSUFFICIENT, "no request was measured", []
    joins = sum(run.join_errors for run in runs)
    if joins:
        return Result.INSUFFICIENT, f"{joins} requests' parts are more than their whole: the join cannot be believed", []
    return Result.PASS, "sound", []


def _injector_off(context: Context) -> Answer:
    runs = [context.evidence, *([context.base] if context.base else [])]
    armed = [run.info.run_id for run in runs if run.info.injector_armed]
    if armed and context.comparison is not None:
        return Result.FAIL, f"{armed[0]}: a fault injector was armed", armed
    if armed and not context.evidence.faults:
        return Result.FAIL, f"{armed[0]}: a fault injector was armed in a run without scenarios", armed
    return Result.PASS, "none was armed" if not armed else "armed for the run's scenarios; no performance is judged", []


def _aa_floor(context: Context) -> Answer:
    assert context.comparison is not None
    loud = [_gate_line(gate) for gate in context.comparison.gates if gate.blocked == "noise"]
    if loud:
        return Result.INSUFFICIENT, f"{len(loud)} of {len(context.comparison.gates)} gates are within the noise", loud
    return Result.PASS, f"from {context.comparison.control}", []


def _not_worse(context: Context) -> Answer:
    assert context.comparison is not None
    return _gates([gate for gate in context.comparison.gates if gate.question == "not_worse"], "is within its limit")


def _improved(context: Context) -> Answer:
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


def _limits(context: Context) -> Answer:
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


def _sla(context: Context) -> Answer:
    sla = context.claim.sla
    if sla is None:
        return Result.INSUFFICIENT, "no service level was stated (the claim's `sla`)", []
    cells = [cell for cell in context.evidence.cells.by_name.values() if matches(cell.id, sla.cells) and not cell.stratum]
    return _sla_of(cells, sla)


def _sla_of(cells: Sequence[Cell], sla: Sla) -> Answer:
    answers = [line for cell in cells for line in [*_refusals(cell, sla), *_quantiles(cell, sla)]]
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


def _errors(evidence: Evidence) -> dict[str, int]:
    counts: dict[str, int] = {}
    for cell in evidence.cells.by_name.values():
        for code, count in cell.errors.items():
            counts[code] = counts.get(code, 0) + count
    return counts


def _capacity(context: Context) -> Answer:
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
    level = _sla_of(cells, context.claim.sla)
    if failed or level[0] is Result.FAIL:
        return Result.FAIL, [*failed, level[1]][0], [*failed, *level[2], *unsure]
    if unsure or level[0] is Result.INSUFFICIENT:
        return Result.INSUFFICIENT, [*unsure, level[1]][0], [*unsure, *level[2]]
    return Result.PASS, f"{len(cells)} offered rates are carried", []


CHECKS: dict[str, Callable[[Context], Answer]] = {
    "manifest": _manifest,
    "golden": _golden,
    "no_crosstalk": _no_crosstalk,
    "finite_outputs": _finite_outputs,
    "no_process_death": _no_process_death,
    "faults_recovered": _faults_recovered,
    "no_lost_board": _no_lost_board,
    "returned": _returned,
    "no_leak": _no_leak,
    "zero_errors": _zero_errors,
    "stage_length": _stage_length,
    "measurement": _measurement,
    "injector_off": _injector_off,
    "aa_floor": _aa_floor,
    "limits": _limits,
    "not_worse": _not_worse,
    "improved": _improved,
    "sla": _sla,
    "capacity": _capacity,
}
