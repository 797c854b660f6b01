"""A fault becomes a plan: `FAULT_POLICY` decides, nobody else (acceptance §12.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from calculet_core.errors import CalculetError, error_from_code
from calculet_core.faults import FAULT_POLICY, FaultKind, ResetRule, Response
from calculet_core.states.model_generation import ModelEvent


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What the worker does about a fault."""

    kind: FaultKind
    detail: str
    response: Response
    event: ModelEvent | None
    """What happens to the generation; None: it stays."""
    wants_reset: bool
    condemns: bool
    """Only an operator may bring the board back."""

    def confined(self) -> RecoveryPlan:
        """The same fault where it is the lanes' alone: the generation goes on."""
        return replace(self, response=Response.FAIL_BATCH_AND_RETEST, event=None, wants_reset=False, condemns=False)

    def error(self) -> CalculetError:
        """For the requests of the job that showed the fault."""
        return error_from_code(FAULT_POLICY[self.kind].error_code, f"{self.kind}: {self.detail}")

    def bystander_error(self) -> CalculetError:
        """For the other requests of the board: they may be served elsewhere."""
        code = "model_recovering" if self.wants_reset else "board_failed"
        return error_from_code(code, f"the board had a fault ({self.kind})")


_EVENTS: dict[Response, ModelEvent | None] = {
    Response.QUARANTINE_AND_RECOVER: ModelEvent.FAULT,
    Response.STOP_ADMISSION_AND_RECOVER: ModelEvent.FAULT,
    Response.DROP_LOGITS_AND_RECOVER: ModelEvent.FAULT,
    Response.QUARANTINE_ARTIFACT: ModelEvent.FAIL,
    Response.FAIL_CLOSED: ModelEvent.FAIL,
    Response.BACK_OFF: None,
    Response.FAIL_BATCH_AND_RETEST: None,
}


def plan_for(kind: FaultKind, detail: str) -> RecoveryPlan:
    """The plan for a fault."""
    rule = FAULT_POLICY[kind]
    return RecoveryPlan(
        kind,
        detail,
        rule.response,
        _EVENTS[rule.response],
        wants_reset=rule.reset is ResetRule.WITHIN_BUDGET,
        condemns=rule.reset is ResetRule.OPERATOR_ONLY,
    )


def plan_for_failed_golden(detail: str) -> RecoveryPlan:
    """Bad numbers, and the golden re-test failed: now a reset is due."""
    rule = FAULT_POLICY[FaultKind.BAD_NUMBERS]
    return RecoveryPlan(
        FaultKind.BAD_NUMBERS,
        detail,
        rule.response,
        ModelEvent.FAULT,
        wants_reset=rule.reset is ResetRule.IF_GOLDEN_FAILS,
        condemns=False,
    )


def plan_for_worn_out(kind: FaultKind, detail: str) -> RecoveryPlan:
    """Faults of single lanes have left too few: now it is the board's."""
    words = f"{detail}; what is left of the lanes cannot take the largest request"
    return plan_for_failed_golden(words) if kind is FaultKind.BAD_NUMBERS else plan_for(kind, words)
