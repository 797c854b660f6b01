"""KV records and the context operations nobody has proven (scheduling §9)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from calculet_core.errors import Unsupported
from calculet_core.states.kv_sequence import KV_SEQUENCE, KvSequenceState


@dataclass(slots=True, eq=False)
class KvSequence:
    """Scheduling §9.1's record, one per hardware lane; written only by `calculet_worker.kv`. Lengths are in tokens."""

    seq_id: int
    hardware_lane: int
    generation: int
    committed_len: int = 0
    reserved_len: int = 0
    pending_len: int = 0
    """Committed length once the job in flight succeeds."""
    state: KvSequenceState = KV_SEQUENCE.initial


class ContextOp(StrEnum):
    """Scheduling §9.3, every row."""

    APPEND = "append"
    REMOVE_TAIL = "remove_tail"
    COPY = "copy"
    KEEP_ONE = "keep_one"
    POSITION_SHIFT = "position_shift"
    SAVE_LOAD = "save_load"
    SHIFT = "shift"


@dataclass(frozen=True, slots=True)
class ContextOpRule:
    """Whether an operation is allowed and what would have to be proven first."""

    allowed: bool
    needs_proof: bool
    reason: str


CONTEXT_OPS: dict[ContextOp, ContextOpRule] = {
    ContextOp.APPEND: ContextOpRule(True, False, "the main path, as transactions"),
    ContextOp.REMOVE_TAIL: ContextOpRule(True, True, "only where the artifact proves RemoveTokensAtEnd at its boundaries"),
    ContextOp.COPY: ContextOpRule(False, False, "the runtime's adapter is empty: no prompt cache, fork or beam search"),
    ContextOp.KEEP_ONE: ContextOpRule(False, False, "the runtime's adapter is empty"),
    ContextOp.POSITION_SHIFT: ContextOpRule(False, False, "position add and div are empty in the runtime's adapter"),
    ContextOp.SAVE_LOAD: ContextOpRule(False, False, "saving and loading session KV is empty in the runtime's adapter"),
    ContextOp.SHIFT: ContextOpRule(False, False, "DoShift exists but its semantics are not closed (C1/C2)"),
}


def refuse(op: ContextOp, asked: str) -> Unsupported | None:
    """Why what was `asked` (a parameter's name) cannot be had, for it needs this operation; None: it can.

    An operation that needs an artifact's proof is refused here, for no request knows the artifact.
    """
    rule = CONTEXT_OPS[op]
    if rule.allowed and not rule.needs_proof:
        return None
    return Unsupported(f"{asked} is not supported: it needs the context operation {op.value!r} ({rule.reason})", param=asked)
