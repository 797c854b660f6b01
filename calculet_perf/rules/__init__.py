"""Acceptance rules as versioned data, `calculet-rules/v1` (acceptance §13-§15), and claims, `calculet-claim/v1`.

The rules say what a kind of claim must show; a claim is written before the measurement and says what is claimed here: which rules,
which cells it aims at, and what only the project can decide, such as the aggregate target of a batch artifact or the board's
limits. A number that the rules need and the claim lacks is an error that names the field, never a default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from calculet_perf.cpu_use import BusyWait
from calculet_perf.stability import Budget, Stage

RULES_FILE = "calculet-rules-v1.yaml"
Kind = Literal["configuration", "hard", "infrastructure", "performance"]
Scope = Literal["all", "target", "others"]
QuantileName = Literal["p50", "p90", "p95", "p99"]


class RulesError(Exception):
    """Rules or a claim are wrong: names the file and the field. Exit code 2."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: frozen, unknown keys are errors."""


class Check(_Section, frozen=True, kw_only=True):
    """One question that a verdict answers."""

    kind: Kind
    clause: str
    title: str


class Alternative(_Section, frozen=True, kw_only=True):
    """What suffices instead."""

    metric: str
    quantile: QuantileName | None = None
    percent: float


class Limit(_Section, frozen=True, kw_only=True):
    """One number and how much it may, or must, change."""

    metric: str
    """A metric of cells, `tokens_per_s`, or `target`: the claim's own `target_metric`."""
    quantile: QuantileName | None = None
    """None for throughput."""
    percent: float | Literal["batch_target"]
    scope: Scope
    alternative: Alternative | None = msgspec.field(default=None, name="or")


class ClaimRule(_Section, frozen=True, kw_only=True):
    """What a kind of claim must show."""

    title: str
    milestone: str | None = None
    needs: tuple[str, ...] = ()
    """Fields that a claim of this kind must fill."""
    not_worse: tuple[Limit, ...] = ()
    improved: tuple[Limit, ...] = ()
    checks: tuple[str, ...] = ()
    stage: str | None = None
    """A stage of this length must have been passed, in real hours."""


class SwapGoal(_Section, frozen=True, kw_only=True):
    """What M4 asks of model swaps (scheduling §19)."""

    loads: int
    """Without a stage that drives them: loads by the journal. With one: its cycles, rollbacks among them."""
    rollbacks: int
    unloads: int
    """Of the loads of a stage that drives them itself: so many into boards that were emptied first."""
    residue_bytes: float
    """So much more device memory may an empty board use at the stage's end than at its begin."""


class Rules(_Section, frozen=True, kw_only=True):
    """`calculet-rules/v1`."""

    schema: Literal["calculet-rules/v1"]
    version: str
    checks: dict[str, Check]
    process_death_errors: tuple[str, ...]
    endless_wait_errors: tuple[str, ...]
    always: tuple[str, ...]
    stages: dict[str, Stage]
    leak_budgets: dict[str, Budget]
    busy_wait: BusyWait
    model_swaps: SwapGoal
    capacity_window_s: float
    """A rate is stable when it was carried for so long (acceptance §14.3)."""
    claims: dict[str, ClaimRule]


class BoardLimits(_Section, frozen=True, kw_only=True):
    """What the board or the product allows (acceptance §14.2)."""

    temperature_c: float | None = None
    """Hottest chip."""
    power_w: float | None = None
    """Sum of a board's chips."""


class BatchTarget(_Section, frozen=True, kw_only=True):
    """What a batch artifact must bring, agreed before it is measured."""

    target_percent: Annotated[float, Meta(gt=0)]
    """More aggregate tokens/s than B1 at the target concurrency."""


class Sla(_Section, frozen=True, kw_only=True):
    """The interactive service level, by cell pattern; null: not asked."""

    cells: tuple[str, ...] = ("*",)
    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None
    e2e_p99_ms: float | None = None
    queue_p99_ms: float | None = None
    reject_rate: Annotated[float, Meta(ge=0, le=1)] | None = None
    """429 and 503 over all requests."""
    utilisation: Annotated[float, Meta(gt=0, le=1)] | None = None
    """At most so much of the time under load may a board's device have a job: what is above is no headroom."""


class Claim(_Section, frozen=True, kw_only=True):
    """`calculet-claim/v1`: what is claimed, registered before the measurement."""

    schema: Literal["calculet-claim/v1"] = "calculet-claim/v1"
    claim: str
    """A key of the rules' `claims`."""
    target_cells: tuple[str, ...] = ()
    """Patterns of cell ids (`*` matches anything); empty: the claim has no target cells of its own."""
    target_metric: Literal["ttft", "tpot", "e2e"] = "tpot"
    """Which number of the target cells an optimisation claims to improve."""
    batch: BatchTarget | None = None
    limits: BoardLimits | None = None
    sla: Sla | None = None
    batch_invariant: bool = True
    """False: the engine's greedy answers may depend on the batch; then only certain crosstalk fails."""


def parse_rules(data: bytes, source: str) -> Rules:
    """Rules, cross-checked.

    Raises:
        RulesError: names the file, the field and what is wrong.
    """
    rules: Rules = _convert(data, Rules, source)
    named = {
        "always": rules.always,
        **{f"stages.{name}.passes": stage.passes for name, stage in rules.stages.items()},
        **{f"claims.{name}.checks": claim.checks for name, claim in rules.claims.items()},
    }
    for path, checks in named.items():
        for check in checks:
            if check not in rules.checks:
                raise RulesError(f"{source}: $.{path}: no check {check!r}")
    for name, claim in rules.claims.items():
        if claim.stage is not None and claim.stage not in rules.stages:
            raise RulesError(f"{source}: $.claims.{name}.stage: no stage {claim.stage!r}")
        for field in claim.needs:
            if field not in Claim.__struct_fields__:
                raise RulesError(f"{source}: $.claims.{name}.needs: a claim has no field {field!r}")
    return rules


def parse_claim(data: bytes, source: str, rules: Rules) -> Claim:
    """A claim that fills what its rules need.

    Raises:
        RulesError: names the file, the field and what is wrong.
    """
    claim: Claim = _convert(data, Claim, source)
    check_claim(claim, source, rules)
    return claim


def check_claim(claim: Claim, source: str, rules: Rules) -> None:
    """A claim made without a file is held to the same.

    Raises:
        RulesError: an unknown kind, or a field that it needs and lacks.
    """
    rule = rules.claims.get(claim.claim)
    if rule is None:
        raise RulesError(f"{source}: $.claim: no rules for {claim.claim!r} (there are: {', '.join(rules.claims)})")
    for field in rule.needs:
        if not getattr(claim, field):
            hint = " (`{target_percent: N}`: the aggregate gain over B1 has no default)" if field == "batch" else ""
            raise RulesError(f"{source}: $.{field}: a {claim.claim} claim must state it{hint}")
    if "sla" in rule.checks and (claim.sla is None or claim.sla == Sla()):
        raise RulesError(f"{source}: $.sla: a {claim.claim} claim must state the interactive service level")


def _convert(data: bytes, cls: Any, source: str) -> Any:
    try:
        value = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RulesError(f"{source}: not valid YAML: {error}") from None
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise RulesError(f"{source}: {path.rstrip('`') or '$'}: {message}") from None
