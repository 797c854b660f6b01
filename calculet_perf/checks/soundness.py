"""Is the product right, and is the measurement sound? Golden, crosstalk, deaths, faults, leaks, clocks (acceptance §13-§15)."""

from __future__ import annotations

import msgspec

from calculet_perf.checks.base import Answer, Context, Result
from calculet_perf.evidence import Evidence
from calculet_perf.rules import SwapGoal
from calculet_perf.stability import HOUR_S, LeakOutcome, StageRun
from calculet_perf.swapping import Driven


def manifest(context: Context) -> Answer:
    """Files are what the run used, and complete."""
    errors = [*context.evidence.configuration_errors, *(context.base.configuration_errors if context.base else [])]
    if errors:
        return Result.FAIL, errors[0], errors
    return Result.PASS, "read and complete", []


def golden(context: Context) -> Answer:
    """Before and after."""
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


def no_crosstalk(context: Context) -> Answer:
    """Greedy answers of one sample agree."""
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


def finite_outputs(context: Context) -> Answer:
    """No output with a bad status was used."""
    evidence = context.evidence
    used = [f"{bad.request_id} step {bad.step}: {bad.status} on {bad.board}, and it went on" for bad in evidence.used_bad_steps]
    if used:
        return Result.FAIL, f"bad outputs that were used: {len(used)}", used
    if evidence.cells.count and not evidence.traced:
        return Result.NOT_ASKED, "the server wrote no trace; golden and agreement stand for it", []
    return Result.PASS, f"{len(evidence.bad_steps)} bad outputs, none used", []


def no_process_death(context: Context) -> Answer:
    """By what clients and journals saw."""
    rules, counts = context.rules, _errors(context.evidence)
    dead = {code: count for code, count in counts.items() if code in rules.process_death_errors}
    endless = {code: count for code, count in counts.items() if code in rules.endless_wait_errors}
    injected = bool(context.evidence.info.injector_armed)
    if (dead or endless) and not injected:
        lines = [f"{count} requests ended with {code}" for code, count in {**dead, **endless}.items()]
        return Result.FAIL, lines[0], lines
    deaths = context.evidence.deaths
    if deaths and not injected:
        return Result.FAIL, deaths[0], deaths
    seen = "none seen by the clients" if deaths is None else "none seen by the clients or the journals"
    return Result.PASS, seen + (" outside of planned faults" if injected else ""), []


def promises(context: Context) -> Answer:
    """The fleet's own history."""
    broken = context.evidence.broken_promises
    if broken is None:
        return Result.NOT_ASKED, "no journals were given (`--journal`)", []
    if broken:
        return Result.FAIL, f"{len(broken)} are broken: {broken[0]}", broken
    return Result.PASS, "none is broken", []


def faults_recovered(context: Context) -> Answer:
    """The fault list ended as designed."""
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


def no_lost_board(context: Context) -> Answer:
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


def no_busy_wait(context: Context) -> Answer:
    """By the CPU time of the server's processes while nothing runs; of the boards' also under load. A process that tells no CPU
    time is not judged, but no verdict comes without the boards'."""
    evidence, limits = context.stage_of, context.rules.busy_wait
    on_host = evidence.info.backend in limits.host_engines
    spins, unsure = [], []
    for use in evidence.cpu:
        if use.idle_share is not None and use.idle_share > limits.idle_share:
            spins.append(f"{use.board}: {use.idle_share:.0%} of a core while nothing runs, {limits.idle_share:.0%} are allowed")
        if use.load_share is not None and use.load_share > limits.load_share and use.role == "board" and not on_host:
            spins.append(f"{use.board}: {use.load_share:.0%} of a core under load, {limits.load_share:.0%} are allowed")
        if use.idle_s < limits.least_idle_s:
            unsure.append(f"{use.board}: {use.idle_s:.0f} s without load were seen, {limits.least_idle_s:g} are needed")
    if spins:
        return Result.FAIL, spins[0], spins + unsure
    if unsure or not any(use.role == "board" for use in evidence.cpu):
        return Result.INSUFFICIENT, unsure[0] if unsure else "no board's process told its CPU time", unsure
    most = max(use.idle_share or 0.0 for use in evidence.cpu)
    under = "; its engine computes on the host, so that its load says nothing" if on_host else ""
    others = ", ".join(use.board for use in evidence.cpu if use.role == "other")
    who = f" (boards, {others})" if others else " (boards; routers and supervisor told nothing)"
    return Result.PASS, f"at most {most:.1%} of a core while nothing runs{who}{under}", []


def model_swaps(context: Context) -> Answer:
    """By the cycles that the stage drove, where it drove any, else by the supervisor's journal alone. That no answer is of two
    generations is the history's to tell, so that journals are wanted in either case."""
    evidence, goal = context.stage_of, context.rules.model_swaps
    swaps, driven = evidence.swaps, evidence.driven
    wrong = [*driven.failed, *driven.mixed, *_residue(driven, goal.residue_bytes)] if driven is not None else []
    wrong += [f"never ended: {name}" for name in swaps.unfinished] if swaps is not None else []
    if wrong:
        return Result.FAIL, f"{len(wrong)} swaps were not as asked: {wrong[0]}", wrong
    if swaps is None or evidence.broken_promises is None:
        return Result.INSUFFICIENT, "no journals of the fleet were given (`--journal`, of every process)", []
    if driven is not None:
        return _driven(driven, goal)
    found = f"{swaps.loads} loads and {swaps.rollbacks} rollbacks ended as asked"
    if swaps.loads < goal.loads or swaps.rollbacks < goal.rollbacks:
        return Result.INSUFFICIENT, f"{found}; {goal.loads} and {goal.rollbacks} are needed", []
    return Result.PASS, found, []


def _driven(driven: Driven, goal: SwapGoal) -> Answer:
    """A way back is a cycle of unload and load like any other."""
    cycles = driven.loads + driven.rollbacks
    found = f"{cycles} cycles ended as asked, {driven.rollbacks} of them rollbacks, {driven.unloads} into emptied boards"
    if cycles < goal.loads or driven.rollbacks < goal.rollbacks or driven.unloads < goal.unloads:
        needed = f"{goal.loads}, {goal.rollbacks} and {goal.unloads} are needed"
        return Result.INSUFFICIENT, f"{found}; {needed}", []
    if not any(item.moments > 1 for item in driven.residue):
        return Result.INSUFFICIENT, f"{found}; no board told its memory while it was empty", []
    return Result.PASS, found, []


def _residue(driven: Driven, allowed: float) -> list[str]:
    return [
        f"{item.board}: {item.last_bytes:.0f} bytes of device memory while empty at the end, {item.first_bytes:.0f} at the begin"
        for item in driven.residue
        if item.last_bytes - item.first_bytes > allowed
    ]


def returned(context: Context) -> Answer:
    """Resources after the run."""
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


def no_leak(context: Context) -> Answer:
    """Of the stage that is judged."""
    stage_of = context.stage_of
    leaks = [f"{item.board} {item.resource}: {item.why}" for item in stage_of.leaks if item.outcome is LeakOutcome.LEAK]
    unsure = [f"{item.board} {item.resource}: {item.why}" for item in stage_of.leaks if item.outcome is LeakOutcome.INSUFFICIENT]
    if leaks:
        return Result.FAIL, leaks[0], leaks + unsure
    if unsure or not any(item.method == "trend" for item in stage_of.leaks):
        return Result.INSUFFICIENT, unsure[0] if unsure else "no memory was watched", unsure
    return Result.PASS, f"{len(stage_of.leaks)} resources watched", []


def zero_errors(context: Context) -> Answer:
    """Every request succeeded."""
    counts = _errors(context.evidence)
    lines = [f"{count} x {code}" for code, count in counts.items()]
    if counts:
        return Result.FAIL, f"{sum(counts.values())} requests failed", lines
    if not context.evidence.cells.by_name:
        return Result.INSUFFICIENT, "no request counts", []
    return Result.PASS, "no request failed", []


def stage_length(context: Context) -> Answer:
    """Real hours, as many as the rules ask for."""
    stage, wanted = context.stage_of.stage, context.needs_stage
    if wanted is not None and (stage is None or stage.stage != wanted):
        hours = context.rules.stages[wanted].duration_s / HOUR_S
        return Result.INSUFFICIENT, f"a {wanted} stage of {hours:g} h is needed, and no such run was given", []
    assert stage is not None, "asked of a run with a stage only"
    asked = StageRun(**{**msgspec.structs.asdict(stage), "asked_s": context.rules.stages[stage.stage].duration_s})
    if not asked.satisfies_long_gates:
        return Result.INSUFFICIENT, f"{stage.stage}: {'; '.join(asked.labels())}", []
    return Result.PASS, f"{stage.stage}: {stage.done_s / HOUR_S:.3g} h", []


def measurement(context: Context) -> Answer:
    """Clock, network, rate, client, join."""
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


def injector_off(context: Context) -> Answer:
    """No performance is judged while faults are injected."""
    runs = [context.evidence, *([context.base] if context.base else [])]
    armed = [run.info.run_id for run in runs if run.info.injector_armed]
    if armed and context.comparison is not None:
        return Result.FAIL, f"{armed[0]}: a fault injector was armed", armed
    if armed and not context.evidence.faults:
        return Result.FAIL, f"{armed[0]}: a fault injector was armed in a run without scenarios", armed
    return Result.PASS, "none was armed" if not armed else "armed for the run's scenarios; no performance is judged", []


def _errors(evidence: Evidence) -> dict[str, int]:
    counts: dict[str, int] = {}
    for cell in evidence.cells.by_name.values():
        for code, count in cell.errors.items():
            counts[code] = counts.get(code, 0) + count
    return counts
