"""A KV sequence's life on one hardware lane (scheduling §9.1).

`UNKNOWN` has no way out: after a time-out or a CCU fault nobody knows what the lane holds, so it ends with its generation and
is never given to another request (scheduling §9.2).
"""

from __future__ import annotations

from enum import IntEnum, auto

from calculet_core.fsm import Machine


class KvSequenceState(IntEnum):
    """Scheduling §9.1, in its order."""

    FREE = 0
    RESERVED = 1
    ACTIVE = 2
    UPDATING = 3
    UNKNOWN = 4
    RELEASING = 5


class KvEvent(IntEnum):
    """What can happen to a lane's sequence."""

    RESERVE = auto()
    SUBMIT = auto()
    """A job that writes this lane was accepted by the device."""
    COMMIT = auto()
    """Device and output both succeeded: the committed length grows (scheduling §9.2)."""
    LOSE = auto()
    RELEASE = auto()
    """The runtime has been asked to free the lane."""
    CONFIRM_FREE = auto()
    """The runtime confirmed; only now may the lane be reused."""


_S, _E = KvSequenceState, KvEvent

KV_SEQUENCE: Machine[KvSequenceState, KvEvent] = Machine(
    "kv_sequence",
    _S.FREE,
    {
        (_S.FREE, _E.RESERVE): _S.RESERVED,
        (_S.RESERVED, _E.SUBMIT): _S.UPDATING,
        (_S.RESERVED, _E.RELEASE): _S.RELEASING,
        (_S.RESERVED, _E.LOSE): _S.UNKNOWN,
        (_S.ACTIVE, _E.SUBMIT): _S.UPDATING,
        (_S.ACTIVE, _E.RELEASE): _S.RELEASING,
        (_S.ACTIVE, _E.LOSE): _S.UNKNOWN,
        (_S.UPDATING, _E.COMMIT): _S.ACTIVE,
        (_S.UPDATING, _E.LOSE): _S.UNKNOWN,
        (_S.RELEASING, _E.CONFIRM_FREE): _S.FREE,
        (_S.RELEASING, _E.LOSE): _S.UNKNOWN,
    },
    terminal=frozenset({_S.UNKNOWN}),
)
