"""One verdict, one exit code (acceptance §14, §15).

Hard gates come first. When several things are true, the exit code is that of the first line that applies:

    2  configuration  a manifest, claim or hash is wrong: nothing else can be believed
    1  correctness    hard evidence against the product; a sound clock does not make a wrong token right
    3  infrastructure the measurement itself is invalid: neither pass nor fail, run it again
    4  performance    certainly slower than the claim allows
    3  insufficient   something that must be shown was not: too few samples, too much noise, too few hours
    0  pass           everything that was asked is certain

Insufficient evidence is never a pass, and it does not hide a certain regression either: more samples would not take that away.
A pass says no more than was asked: milestones M0-M4 and the 24 h and 8 h gates need a stage of that many real hours.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from calculet_perf.checks import CheckResult, Context, Result, run_check
from calculet_perf.comparison import Comparison
from calculet_perf.evidence import Evidence
from calculet_perf.rules import Claim, Rules


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a run, or on a comparison."""

    exit_code: int
    conclusion: str
    """pass, correctness_fail, configuration_invalid, infrastructure_invalid, performance_regression or insufficient_evidence."""
    headline: str
    claim: str
    claim_title: str
    milestone: str | None
    """The milestone that this verdict satisfies; null: none."""
    labels: list[str]
    """What must be said with it: shortened, virtual time, foreign server."""
    limits_of_conclusion: list[str]
    """What the evidence cannot tell."""
    checks: list[CheckResult]
    rules_version: str
    rules_sha256: str

    def reasons(self) -> list[CheckResult]:
        """What failed, in the order of precedence, then what was not shown."""
        failed = [check for kind in PRECEDENCE for check in self.checks if check.kind == kind and check.result is Result.FAIL]
        return failed + [check for check in self.checks if check.result is Result.INSUFFICIENT]


CONCLUSIONS = {
    0: ("pass", "Pass: everything that was asked is shown"),
    1: ("correctness_fail", "Correctness or reliability failed"),
    2: ("configuration_invalid", "The configuration or an artifact is invalid"),
    3: ("infrastructure_invalid", "The measurement is invalid: neither pass nor fail"),
    4: ("performance_regression", "Performance is worse than the claim allows"),
}
INSUFFICIENT = ("insufficient_evidence", "Not enough evidence: neither pass nor fail")
FAIL_CODE: dict[str, int] = {"configuration": 2, "hard": 1, "infrastructure": 3, "performance": 4}
BASE_CHECKS = ("golden", "no_crosstalk", "finite_outputs")
PRECEDENCE = ("configuration", "hard", "infrastructure", "performance")


def exit_code(checks: Iterable[CheckResult]) -> tuple[int, bool]:
    """The exit code, and whether a 3 stands for insufficient evidence; the table is at the top of this module."""
    found = list(checks)
    failed = {check.kind for check in found if check.result is Result.FAIL}
    for kind in PRECEDENCE:
        if kind in failed:
            return FAIL_CODE[kind], False
    insufficient = any(check.result is Result.INSUFFICIENT for check in found)
    return (3, True) if insufficient else (0, False)


def judge(
    evidence: Evidence, rules: Rules, rules_sha256: str, claim: Claim, base: Evidence | None = None,
    comparison: Comparison | None = None, soak: Evidence | None = None,
) -> Verdict:  # fmt: skip
    """The verdict on a run (`comparison` None), or on a candidate against its base.

    Args:
        soak: a run of the stage that the claim needs; None: the evidence's own run is it.
    """
    rule = rules.claims[claim.claim]
    asked = [*rules.always, "injector_off"]
    stage_of = soak if soak is not None else evidence
    if evidence.stage is not None and evidence.stage.stage in rules.stages:
        asked += [*rules.stages[evidence.stage.stage].passes, "stage_length"]
    if rule.stage is not None:
        asked += [*rules.stages[rule.stage].passes, "stage_length"]
    asked += rule.checks
    if claim.sla is not None:
        asked.append("sla")
    if comparison is not None:
        asked += ["aa_floor", *(["not_worse"] if rule.not_worse else []), *(["improved"] if rule.improved else [])]
    context = Context(evidence, rules, claim, base, comparison, stage_of, rule.stage)
    checks = [run_check(name, context) for name in rules.checks if name in asked]
    if base is not None:
        checks += [_of_base(name, Context(base, rules, claim, None, None, base, None)) for name in BASE_CHECKS]
    if soak is not None:
        checks += [run_check(name, Context(soak, rules, claim, None, None, soak, None), "soak: ") for name in rules.always]
    code, insufficient = exit_code(checks)
    conclusion, headline = INSUFFICIENT if insufficient else CONCLUSIONS[code]
    labels = list(dict.fromkeys([*evidence.labels, *(base.labels if base else []), *(soak.labels if soak else [])]))
    return Verdict(
        exit_code=code, conclusion=conclusion, headline=headline, claim=claim.claim, claim_title=rule.title,
        milestone=rule.milestone if code == 0 and rule.milestone and _may_sign(rule.stage, evidence, stage_of) else None,
        labels=labels, limits_of_conclusion=_limits_of_conclusion(evidence), checks=checks,
        rules_version=rules.version, rules_sha256=rules_sha256,
    )  # fmt: skip


def _of_base(name: str, context: Context) -> CheckResult:
    """A base that is itself wrong says nothing against the candidate: it is no measure."""
    found = run_check(name, context, "base: ")
    return msgspec.structs.replace(found, result=Result.INSUFFICIENT) if found.result is Result.FAIL else found


def _may_sign(stage: str | None, evidence: Evidence, stage_of: Evidence) -> bool:
    """A milestone in a signed report: shipped rules, nothing shortened, no virtual time, and the stage's hours where it has one."""
    if evidence.own_rules or evidence.info.shortened or (evidence.stage is not None and evidence.stage.labels()):
        return False
    return stage is None or (stage_of.stage is not None and stage_of.stage.stage == stage and stage_of.long_gates)


def _limits_of_conclusion(evidence: Evidence) -> list[str]:
    found = []
    if not evidence.vendor_steps:
        found.append(
            "no vendor counters (cycles, bytes, queues): conclusions stay at the level of graph and service, no kernel is blamed"
        )
    if not evidence.traced:
        found.append("no server trace: what happened between the client's clocks is not attributed")
    if evidence.info.foreign:
        found.append("a foreign server: no device, no resources, no generations were seen")
    if evidence.hottest_c is None:
        found.append("no temperatures: throttling cannot be told from slowness")
    return found
