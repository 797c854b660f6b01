"""A request's life (scheduling §2, §4): eleven states, three of them terminal and entered once.

A cancel is a transition only where no job holds the sequence. While a job runs, cancel sets a flag and the job drains; the
drained completion then takes the `DRAINED_CANCELLED` row.
"""

from __future__ import annotations

from enum import IntEnum, auto

from calculet_core.fsm import Machine


class RequestState(IntEnum):
    """Scheduling §2, in its order."""

    NEW = 0
    WAITING_MODEL = 1
    WAITING_ADMISSION = 2
    PREFILL_READY = 3
    PREFILL_RUNNING = 4
    DECODE_READY = 5
    DECODE_RUNNING = 6
    FINISHING = 7
    COMPLETED = 8
    CANCELLED = 9
    FAILED = 10


class RequestEvent(IntEnum):
    """What can happen to a request."""

    AWAIT_MODEL = auto()
    """Its alias has no Ready generation yet."""
    QUEUE = auto()
    """Validated and tokenized; waits for capacity."""
    ADMIT = auto()
    """Lane, KV and budgets are reserved."""
    START_PREFILL = auto()
    PREFILL_PART = auto()
    """A proven cut of the prompt is done; more follows."""
    PREFILL_DONE = auto()
    START_DECODE = auto()
    DECODE_DONE = auto()
    REQUEUE = auto()
    """The device refused the submission (busy): nothing ran."""
    FINISH = auto()
    """The client's terminal is emitted here, once."""
    RELEASED = auto()
    """The runtime confirmed that the lane is free."""
    CANCEL = auto()
    DRAINED_CANCELLED = auto()
    """The running job of a cancelled request came home; its result was dropped."""
    FAIL = auto()


_S, _E = RequestState, RequestEvent
_TERMINAL = frozenset({_S.COMPLETED, _S.CANCELLED, _S.FAILED})
_RUNNING = (_S.PREFILL_RUNNING, _S.DECODE_RUNNING)

REQUEST: Machine[RequestState, RequestEvent] = Machine(
    "request",
    _S.NEW,
    {
        (_S.NEW, _E.AWAIT_MODEL): _S.WAITING_MODEL,
        (_S.NEW, _E.QUEUE): _S.WAITING_ADMISSION,
        (_S.WAITING_MODEL, _E.QUEUE): _S.WAITING_ADMISSION,
        (_S.WAITING_ADMISSION, _E.ADMIT): _S.PREFILL_READY,
        (_S.PREFILL_READY, _E.START_PREFILL): _S.PREFILL_RUNNING,
        (_S.PREFILL_RUNNING, _E.PREFILL_PART): _S.PREFILL_READY,
        (_S.PREFILL_RUNNING, _E.PREFILL_DONE): _S.DECODE_READY,
        (_S.PREFILL_RUNNING, _E.REQUEUE): _S.PREFILL_READY,
        (_S.PREFILL_RUNNING, _E.FINISH): _S.FINISHING,
        (_S.DECODE_READY, _E.START_DECODE): _S.DECODE_RUNNING,
        (_S.DECODE_READY, _E.FINISH): _S.FINISHING,
        (_S.DECODE_RUNNING, _E.DECODE_DONE): _S.DECODE_READY,
        (_S.DECODE_RUNNING, _E.REQUEUE): _S.DECODE_READY,
        (_S.DECODE_RUNNING, _E.FINISH): _S.FINISHING,
        (_S.FINISHING, _E.RELEASED): _S.COMPLETED,
        **{
            (state, _E.CANCEL): _S.CANCELLED
            for state in (_S.NEW, _S.WAITING_MODEL, _S.WAITING_ADMISSION, _S.PREFILL_READY, _S.DECODE_READY)
        },
        **{(state, _E.DRAINED_CANCELLED): _S.CANCELLED for state in _RUNNING},
        **{(state, _E.FAIL): _S.FAILED for state in _S if state not in _TERMINAL and state != _S.FINISHING},
    },
    terminal=_TERMINAL,
)
