"""A worker process as the supervisor sees it: one board's process from spawn to exit, then back-off or quarantine."""

from __future__ import annotations

from enum import IntEnum, auto

from calculet_core.fsm import Machine


class ProcessState(IntEnum):
    """Where a board's worker process is."""

    ABSENT = 0
    STARTING = 1
    UP = 2
    STOPPING = 3
    BACKOFF = 4
    QUARANTINED = 5
    """The restart budget is spent: a slow half-open retry, an alert, or an operator's word brings it back."""


class ProcessEvent(IntEnum):
    """What can happen to it."""

    SPAWN = auto()
    HELLO = auto()
    """It said hello on the control link; an adopting supervisor sees this from ABSENT."""
    STOP = auto()
    EXITED = auto()
    """A commanded exit."""
    DIED = auto()
    """An unexpected exit: the budget allows another start after a back-off."""
    GIVE_UP = auto()
    """An unexpected exit with the budget spent, or a configuration error (exit 78)."""
    RETRY = auto()
    FORGET = auto()
    """The desired state is down while waiting."""


_S, _E = ProcessState, ProcessEvent

WORKER_PROCESS: Machine[ProcessState, ProcessEvent] = Machine(
    "worker_process",
    _S.ABSENT,
    {
        (_S.ABSENT, _E.SPAWN): _S.STARTING,
        (_S.ABSENT, _E.HELLO): _S.UP,
        (_S.STARTING, _E.HELLO): _S.UP,
        (_S.STARTING, _E.STOP): _S.STOPPING,
        (_S.STARTING, _E.DIED): _S.BACKOFF,
        (_S.STARTING, _E.GIVE_UP): _S.QUARANTINED,
        (_S.UP, _E.STOP): _S.STOPPING,
        (_S.UP, _E.DIED): _S.BACKOFF,
        (_S.UP, _E.GIVE_UP): _S.QUARANTINED,
        (_S.UP, _E.EXITED): _S.ABSENT,
        (_S.STOPPING, _E.EXITED): _S.ABSENT,
        (_S.BACKOFF, _E.RETRY): _S.STARTING,
        (_S.BACKOFF, _E.FORGET): _S.ABSENT,
        (_S.QUARANTINED, _E.RETRY): _S.STARTING,
        (_S.QUARANTINED, _E.FORGET): _S.ABSENT,
    },
)
