"""What the dispatcher is told: `Dispatcher.handle(event, now_ns) -> list[Action]`.

Structs rather than dataclasses: one is made for every message of every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core.tracing import TraceContext
from calculet_core.wire import FleetView, LookupAnswer, Tick, WorkerHello
from calculet_router.openai import Call
from calculet_router.tenants import Identity

if TYPE_CHECKING:
    from calculet_router.lookups import Question


class CallArrived(msgspec.Struct, frozen=True):
    """A parsed call. `owner` is whoever gets the answer; the dispatcher only hands it back."""

    owner: Any
    call: Call
    created_s: int
    """UTC, for the answer's `created`."""
    identity: Identity | None = None
    """Whose call it is; None: there are no keys."""
    timeout_ms: int | None = None
    label: str | None = None
    """The client's own request id."""
    trace: TraceContext | None = None
    """Where the call stands in a trace."""


class ClientGone(msgspec.Struct, frozen=True):
    """Nobody reads the answer any more; `code` when that was our decision (`slow_reader`, `shutting_down`)."""

    owner: Any
    reason: str
    code: str | None = None


class ViewPublished(msgspec.Struct, frozen=True):
    """From the supervisor or its file."""

    view: FleetView


class HelloArrived(msgspec.Struct, frozen=True):
    """A worker said who it is. `board` and `epoch` are the link's."""

    board: str
    epoch: int
    hello: WorkerHello


class TickArrived(msgspec.Struct, frozen=True):
    """All that a worker had for this router. `board` and `epoch` are the link's."""

    board: str
    epoch: int
    tick: Tick


class WorkerEnded(msgspec.Struct, frozen=True):
    """The worker's process is gone."""

    board: str
    epoch: int
    reason: str


class LookupAsked(msgspec.Struct, frozen=True):
    """A parsed question about tokens."""

    owner: Any
    question: Question
    identity: Identity


class LookupAnswered(msgspec.Struct, frozen=True):
    """A worker's answer to one. `board` and `epoch` are the link's."""

    board: str
    epoch: int
    answer: LookupAnswer


class Unsent(msgspec.Struct, frozen=True):
    """The link could not take a submission."""

    board: str
    epoch: int
    request_id: int
    attempt: int


class TimePassed(msgspec.Struct, frozen=True):
    """Several times a second: acceptance and request deadlines, silence of workers."""


class Overslept(msgspec.Struct, frozen=True):
    """This process stood still for so long (stopped, suspended, starved) and has not read what came meanwhile: told before anything
    else, so that nobody's silence is counted for that time."""

    by_ns: int


Event = (
    CallArrived | ClientGone | ViewPublished | HelloArrived | TickArrived | WorkerEnded | LookupAsked | LookupAnswered | Unsent
    | TimePassed | Overslept
)  # fmt: skip
