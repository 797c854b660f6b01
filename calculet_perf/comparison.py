"""Two runs, cell by cell (acceptance §9, §14.2): every shared cell's differences, and those that the claim's rules ask about.

A gate is one number of one cell held against one limit. It decides only when both sides have the samples that certify the quantile
and when two identical builds would differ by less than half of the limit here (the A/A floor); else it is undecided and says why.
With many gates a failure must survive Holm's correction; a pass needs none, since all of them must pass.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec
import numpy as np

from calculet_perf.cells import METRICS, THROTTLED, THROUGHPUT, Cell, Cells, Metric
from calculet_perf.rules import Claim, ClaimRule, Limit
from calculet_perf.statistics import compare
from calculet_perf.statistics.compare import Delta, Outcome
from calculet_perf.statistics.holm import adjusted
from calculet_perf.statistics.quantiles import Bound, certified, samples_needed
from calculet_perf.statistics.summary import QUANTILES, finite

TOKENS_PER_S = "tokens_per_s"
SHOWN = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("e2e", "p50"), ("e2e", "p99"), (TOKENS_PER_S, None))
"""Differences that are shown for every shared cell, asked or not: winners and losers (acceptance §16)."""
CONFIDENCE = 0.95


class CellDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One number of one cell in both runs. Percentages keep the raw sign; `direction` says which way is good."""

    cell: str
    metric: str
    quantile: str | None
    unit: str
    direction: str
    base: float | None
    candidate: float | None
    """null: infinite, since more failed than the quantile leaves out."""
    delta_abs: float | None
    delta_pct: float | None
    low_pct: float | None
    high_pct: float | None
    """95 % interval of `delta_pct`; null: unbounded."""
    change: str
    """better, worse or undecided."""
    method: str
    """What was resampled."""
    rounds: int
    base_count: int
    candidate_count: int
    certified: bool
    """Both sides have the samples that the quantile needs."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One number held against one limit."""

    question: str
    """not_worse or improved."""
    limit_pct: float
    """Positive: how much worse it may be, or how much better it must be."""
    scope: str
    delta: CellDelta
    worse_low_pct: float | None
    worse_high_pct: float | None
    """95 % interval of how much worse the candidate is, whatever the direction; negative is better."""
    floor_pct: float | None
    """What two identical builds differ by here (A/A)."""
    p_adjusted: float | None
    outcome: Outcome
    blocked: str | None
    """Why it could not decide at all: `samples`, `noise` (A/A) or `plan`; null: its interval decided, or was too wide."""
    why: str
    alternative: bool = False
    """Suffices in place of the gate before it."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was compared."""

    deltas: list[CellDelta]
    gates: list[Gate]
    only_base: list[str]
    only_candidate: list[str]
    control: str
    """Where the A/A floor comes from."""


def compare_runs(
    base: Cells, candidate: Cells, rule: ClaimRule, claim: Claim, seed: int, control: Cells | None = None
) -> Comparison:
    """Compare all cells that both have; what ran throttled is shown and never gated.

    Args:
        control: a second run of the base build; None: the floor comes from splits of the base's own rounds.
    """
    shared = [name for name in base.by_name if name in candidate.by_name]
    deltas = [
        describe(name, metric, quantile, delta, base.by_name[name], candidate.by_name[name])
        for name in shared
        for metric, quantile in SHOWN
        if (delta := cell_delta(base.by_name[name], candidate.by_name[name], metric, quantile, seed)) is not None
    ]
    gated = [name for name in shared if base.by_name[name].stratum != THROTTLED]
    gates = list(_gates(gated, base, candidate, rule, claim, seed, control))
    return Comparison(
        deltas=deltas,
        gates=_holm(gates),
        only_base=[name for name in base.by_name if name not in candidate.by_name],
        only_candidate=[name for name in candidate.by_name if name not in base.by_name],
        control="a second run of the base" if control is not None else "splits of the base's own rounds",
    )


def cell_delta(base: Cell, candidate: Cell, metric: str, quantile: str | None, seed: int) -> Delta | None:
    """The change of one number; None: a side does not have it."""
    seed += zlib.crc32(f"{base.name}/{metric}/{quantile}".encode())
    if metric == TOKENS_PER_S:
        return _throughput_delta(base, candidate, seed)
    if metric not in base.metrics or metric not in candidate.metrics or quantile is None:
        return None
    return compare.quantile_delta(
        base.samples(metric), candidate.samples(metric), QUANTILES[quantile], seed, METRICS[metric].direction
    )


def _throughput_delta(base: Cell, candidate: Cell, seed: int) -> Delta | None:
    before, after = base.tokens_per_s(), candidate.tokens_per_s()
    shared = sorted(set(before) & set(after))
    if len(shared) >= compare.MIN_ROUNDS:
        sides = [np.array([side[key] for key in shared]) for side in (before, after)]
        return compare.mean_delta(sides[0], sides[1], seed, THROUGHPUT.direction, paired=True)
    return compare.mean_delta(base.slices(), candidate.slices(), seed, THROUGHPUT.direction, paired=False)


def describe(name: str, metric: str, quantile: str | None, delta: Delta, base: Cell, candidate: Cell) -> CellDelta:
    """The delta as a record."""
    about = metric_of(metric)
    low, high = delta.interval_percent
    counts = [cell.count if quantile is None else len(cell.values(metric)) for cell in (base, candidate)]
    carried = quantile is None or all(certified(count, QUANTILES[quantile], CONFIDENCE) is not Bound.NONE for count in counts)
    return CellDelta(
        cell=name, metric=metric, quantile=quantile, unit=about.unit, direction=str(delta.direction), base=finite(delta.base),
        candidate=finite(delta.candidate), delta_abs=finite(delta.absolute), delta_pct=finite(delta.percent), low_pct=finite(low),
        high_pct=finite(high), change=str(delta.change), method=delta.method, rounds=delta.rounds, base_count=counts[0],
        candidate_count=counts[1], certified=carried,
    )  # fmt: skip


def metric_of(name: str) -> Metric:
    """A cell's metric, or aggregate throughput."""
    return THROUGHPUT if name == TOKENS_PER_S else METRICS[name]


def matches(cell: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern is the cell's."""
    return any(fnmatchcase(cell, pattern) for pattern in patterns)


def _gates(
    names: Sequence[str], base: Cells, candidate: Cells, rule: ClaimRule, claim: Claim, seed: int, control: Cells | None
) -> Iterator[Gate]:
    for question, limits in (("not_worse", rule.not_worse), ("improved", rule.improved)):
        for limit in limits:
            for name in names:
                target = not claim.target_cells or matches(name, claim.target_cells)
                if limit.scope == "all" or (limit.scope == "target") == target:
                    percent = claim.batch.target_percent if limit.percent == "batch_target" and claim.batch else limit.percent
                    assert not isinstance(percent, str), "a claim that needs a batch target was checked to have one"
                    metric = claim.target_metric if limit.metric == "target" else limit.metric
                    pair = (base.by_name[name], candidate.by_name[name])
                    again = control.by_name.get(name) if control is not None else None
                    yield from _gate(question, limit, metric, limit.quantile, percent, pair, again, seed, False)
                    if (other := limit.alternative) is not None:
                        yield from _gate(question, limit, other.metric, other.quantile, other.percent, pair, again, seed, True)


def _gate(
    question: str, limit: Limit, metric: str, quantile: str | None, percent: float, pair: tuple[Cell, Cell], again: Cell | None,
    seed: int, alternative: bool,
) -> Iterator[Gate]:  # fmt: skip
    base, candidate = pair
    delta = cell_delta(base, candidate, metric, quantile, seed)
    if delta is None:
        return
    described = describe(base.name, metric, quantile, delta, base, candidate)
    floor = _floor(base, again, metric, quantile, seed)
    low, high = delta.worse_percent
    if base.invalid or candidate.invalid:
        outcome, blocked, why = Outcome.UNDECIDED, "plan", f"not executed as planned: {[*base.invalid, *candidate.invalid][0]}"
    elif not described.certified and quantile is not None:
        fewest = min(described.base_count, described.candidate_count)
        needed = samples_needed(QUANTILES[quantile])
        outcome, blocked = Outcome.UNDECIDED, "samples"
        why = f"{quantile.upper()} of {fewest} samples gates nothing, {needed} are needed"
    elif floor is None or floor > percent / 2:
        outcome, blocked = Outcome.UNDECIDED, "noise"
        why = f"two identical builds differ by {floor or 0:.2f} % here; half of the limit is {percent / 2:g} %"
        if floor is None:
            why = "how much two identical builds differ here is not known: give a second run of the base, or more rounds"
    else:
        judge = compare.not_worse if question == "not_worse" else compare.improved
        outcome, blocked = judge(delta, percent), None
        why = _reason(question, percent, low, high)
    p_value = delta.p_within(percent) if question == "not_worse" else None
    yield Gate(
        question=question, limit_pct=percent, scope=limit.scope, delta=described,
        worse_low_pct=finite(low), worse_high_pct=finite(high),
        floor_pct=floor, p_adjusted=p_value, outcome=outcome, blocked=blocked, why=why, alternative=alternative,
    )  # fmt: skip


def _reason(question: str, percent: float, low: float, high: float) -> str:
    if question == "not_worse":
        return f"worse by {_signed(low)} to {_signed(high)} (95 %); at most {percent:g} % is allowed"
    return f"better by {_signed(-high)} to {_signed(-low)} (95 %); at least {percent:g} % is claimed"


def _signed(percent: float) -> str:
    return f"{percent:+.1f} %" if math.isfinite(percent) else ("without bound" if percent > 0 else "-100 %")


def _floor(base: Cell, again: Cell | None, metric: str, quantile: str | None, seed: int) -> float | None:
    """Of the base's own noise, and of a second run of it where there is one; the larger."""
    if quantile is None:
        rates = base.tokens_per_s()
        own = compare.mean_noise_floor(np.array(list(rates.values())) if len(rates) >= compare.MIN_ROUNDS else base.slices(), seed)
    else:
        own = compare.noise_floor(base.samples(metric), QUANTILES[quantile], seed)
    if again is None or own is None:
        return own
    delta = cell_delta(base, again, metric, quantile, seed)
    return own if delta is None or not math.isfinite(delta.percent) else max(own, abs(delta.percent))


def _holm(gates: Sequence[Gate]) -> list[Gate]:
    """Failures of `not_worse` that do not survive the correction become undecided."""
    asked = [index for index, gate in enumerate(gates) if gate.p_adjusted is not None]
    found = list(gates)
    for index, p_value in zip(asked, adjusted([gates[index].p_adjusted or 0.0 for index in asked]), strict=True):
        gate = msgspec.structs.replace(gates[index], p_adjusted=p_value)
        if gate.outcome is Outcome.FAIL and p_value > compare.TAIL:
            why = f"{gate.why}; one of {len(asked)} gates, not certain after Holm's correction (p = {p_value:.3f})"
            gate = msgspec.structs.replace(gate, outcome=Outcome.UNDECIDED, why=why)
        found[index] = gate
    return found
