"""A model swap across the fleet: verify, stage board by board, shift the alias, drain blue; or roll back."""

from __future__ import annotations

from enum import IntEnum, auto

from calculet_core.fsm import Machine


class RolloutState(IntEnum):
    """Where a swap of one alias is."""

    PENDING = 0
    VERIFYING = 1
    STAGING = 2
    SHIFTING = 3
    DRAINING_BLUE = 4
    ROLLING_BACK = 5
    DONE = 6
    ROLLED_BACK = 7
    REFUSED = 8


class RolloutEvent(IntEnum):
    """What can happen to it."""

    BEGIN = auto()
    VERIFIED = auto()
    REFUSE = auto()
    """Verification failed: nothing has changed."""
    STAGED = auto()
    SHIFTED = auto()
    """Every router with a live lease acknowledged the view that carries the new alias."""
    DRAINED = auto()
    ABORT = auto()
    RESTORED = auto()
    """Blue serves again everywhere that it did."""


_S, _E = RolloutState, RolloutEvent

ROLLOUT: Machine[RolloutState, RolloutEvent] = Machine(
    "rollout",
    _S.PENDING,
    {
        (_S.PENDING, _E.BEGIN): _S.VERIFYING,
        (_S.VERIFYING, _E.VERIFIED): _S.STAGING,
        (_S.VERIFYING, _E.REFUSE): _S.REFUSED,
        (_S.STAGING, _E.STAGED): _S.SHIFTING,
        (_S.STAGING, _E.ABORT): _S.ROLLING_BACK,
        (_S.SHIFTING, _E.SHIFTED): _S.DRAINING_BLUE,
        (_S.SHIFTING, _E.ABORT): _S.ROLLING_BACK,
        (_S.DRAINING_BLUE, _E.DRAINED): _S.DONE,
        (_S.DRAINING_BLUE, _E.ABORT): _S.ROLLING_BACK,
        (_S.ROLLING_BACK, _E.RESTORED): _S.ROLLED_BACK,
    },
    terminal=frozenset({_S.DONE, _S.ROLLED_BACK, _S.REFUSED}),
)
