"""Every fault that a board can show, and the one response to it (acceptance §12.2). The table is total; a test says so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from calculet_core.jobs import OutputStatus, ReturnCode


class FaultKind(StrEnum):
    """What went wrong on a board."""

    WAIT_TIMEOUT = "wait_timeout"
    DEVICE_BUSY = "device_busy"
    DEVICE_UNAVAILABLE = "device_unavailable"
    INVALID_SHAPE = "invalid_shape"
    INVALID_DTYPE = "invalid_dtype"
    CCU_EXCEPTION = "ccu_exception"
    BAD_NUMBERS = "bad_numbers"
    RESIDUE = "residue"
    OTHER = "other"


class Response(StrEnum):
    """What the worker does."""

    QUARANTINE_AND_RECOVER = "quarantine_and_recover"
    BACK_OFF = "back_off"
    STOP_ADMISSION_AND_RECOVER = "stop_admission_and_recover"
    QUARANTINE_ARTIFACT = "quarantine_artifact"
    DROP_LOGITS_AND_RECOVER = "drop_logits_and_recover"
    FAIL_BATCH_AND_RETEST = "fail_batch_and_retest"
    FAIL_CLOSED = "fail_closed"


class ResetRule(StrEnum):
    """Whether a board reset may follow."""

    NEVER = "never"
    WITHIN_BUDGET = "within_budget"
    IF_GOLDEN_FAILS = "if_golden_fails"
    OPERATOR_ONLY = "operator_only"


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One row of the policy."""

    response: Response
    reset: ResetRule
    kv_lost: bool
    error_code: str
    """Stable code of the client's error (`calculet_core.errors`)."""
    confinable: bool = False
    """Where the artifact proves `lane_fault_isolation` and it is known which rows failed, only their lanes are lost and only their
    requests fail; then golden runs (scheduling §7.4)."""


FAULT_POLICY: dict[FaultKind, FaultRule] = {
    FaultKind.WAIT_TIMEOUT: FaultRule(
        Response.QUARANTINE_AND_RECOVER, ResetRule.WITHIN_BUDGET, True, "model_recovering"
    ),
    FaultKind.DEVICE_BUSY: FaultRule(Response.BACK_OFF, ResetRule.NEVER, False, "device_busy"),
    FaultKind.DEVICE_UNAVAILABLE: FaultRule(
        Response.STOP_ADMISSION_AND_RECOVER, ResetRule.WITHIN_BUDGET, True, "model_recovering"
    ),
    FaultKind.INVALID_SHAPE: FaultRule(Response.QUARANTINE_ARTIFACT, ResetRule.NEVER, False, "artifact_rejected"),
    FaultKind.INVALID_DTYPE: FaultRule(Response.QUARANTINE_ARTIFACT, ResetRule.NEVER, False, "artifact_rejected"),
    FaultKind.CCU_EXCEPTION: FaultRule(
        Response.DROP_LOGITS_AND_RECOVER, ResetRule.WITHIN_BUDGET, True, "model_recovering", confinable=True
    ),
    FaultKind.BAD_NUMBERS: FaultRule(
        Response.FAIL_BATCH_AND_RETEST, ResetRule.IF_GOLDEN_FAILS, True, "bad_output", confinable=True
    ),
    FaultKind.RESIDUE: FaultRule(
        Response.STOP_ADMISSION_AND_RECOVER, ResetRule.WITHIN_BUDGET, True, "model_recovering"
    ),
    FaultKind.OTHER: FaultRule(Response.FAIL_CLOSED, ResetRule.OPERATOR_ONLY, True, "board_failed"),
}

_BY_CODE: dict[int, FaultKind] = {
    ReturnCode.TIMEOUT: FaultKind.WAIT_TIMEOUT,
    ReturnCode.DEVICE_BUSY: FaultKind.DEVICE_BUSY,
    ReturnCode.DEVICE_UNAVAILABLE: FaultKind.DEVICE_UNAVAILABLE,
    ReturnCode.INVALID_SHAPE: FaultKind.INVALID_SHAPE,
    ReturnCode.INVALID_DTYPE: FaultKind.INVALID_DTYPE,
}


def fault_of_code(rc: int) -> FaultKind:
    """The fault behind a return code that is not OK; an unlisted code is `OTHER` and fails closed.

    Raises:
        ValueError: `rc` is OK.
    """
    if rc == ReturnCode.OK:
        raise ValueError("return code 0 is no fault")
    return _BY_CODE.get(rc, FaultKind.OTHER)


def fault_of_status(status: OutputStatus) -> FaultKind | None:
    """The fault behind an output status; None when the output is good."""
    if status is OutputStatus.DONE:
        return None
    return FaultKind.CCU_EXCEPTION if status is OutputStatus.CCU_EXCEPTION else FaultKind.OTHER
