"""What a verdict asks: one function a check, each with three answers and a reason (acceptance §14).

Which checks are asked of which run, and with what numbers, is data (`rules/`); here is how each is answered. A check that cannot
be answered says why, and that is insufficient evidence, never a pass.
"""

from __future__ import annotations

from collections.abc import Callable

from calculet_perf.checks import soundness, speed
from calculet_perf.checks.base import Answer, CheckResult, Context, Result

__all__ = ["CHECKS", "CheckResult", "Context", "Result", "run_check"]

CHECKS: dict[str, Callable[[Context], Answer]] = {
    "manifest": soundness.manifest,
    "golden": soundness.golden,
    "no_crosstalk": soundness.no_crosstalk,
    "finite_outputs": soundness.finite_outputs,
    "no_process_death": soundness.no_process_death,
    "promises": soundness.promises,
    "faults_recovered": soundness.faults_recovered,
    "no_busy_wait": soundness.no_busy_wait,
    "model_swaps": soundness.model_swaps,
    "no_lost_board": soundness.no_lost_board,
    "returned": soundness.returned,
    "no_leak": soundness.no_leak,
    "zero_errors": soundness.zero_errors,
    "stage_length": soundness.stage_length,
    "measurement": soundness.measurement,
    "injector_off": soundness.injector_off,
    "aa_floor": speed.aa_floor,
    "limits": speed.limits,
    "not_worse": speed.not_worse,
    "improved": speed.improved,
    "sla": speed.sla,
    "capacity": speed.capacity,
}


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
