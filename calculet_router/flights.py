"""What the dispatcher keeps about calls: hot, mutable records that only it writes.

A *call* is what one client asked; each of its choices is a *flight*, a request with its own id, of which one attempt at a time is
with one worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core.errors import CalculetError
from calculet_core.requests import Prompt, SamplingParams
from calculet_core.states.request import RequestState
from calculet_core.tracing import TraceContext
from calculet_core.wire import AliasView
from calculet_router.actions import Ticket
from calculet_router.openai import Call
from calculet_router.tenants import Identity

if TYPE_CHECKING:
    from calculet_router.fleet import Worker


class Flight(msgspec.Struct, eq=False):
    """One choice on its way."""

    ongoing: Ongoing
    request_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams
    worker: Worker | None = None
    """Who has the current attempt; None between attempts and at the end."""
    attempt: int = 0
    sent_ns: int = 0
    accepted: bool = False
    begun: bool = False
    """A generated token of it has been written: it is never sent again."""
    done: bool = False
    losses: int = 0
    generated: int = 0
    prompt_tokens: int = 0
    cost: float = 0.0
    state: RequestState = RequestState.NEW
    """Of the wait for its model's turn (`calculet_router.parking`); a worker has the rest of its life."""
    parked_ns: int = 0
    held_until_ns: int = 0
    """When it waits, or has waited, for a board that is about to be reached: no longer than until then; 0: it has not."""
    refusals: dict[tuple[str, int], CalculetError] = {}
    """Lives of workers that do not get it again, with what they said."""


class Ongoing(msgspec.Struct, eq=False):
    """One call until its terminal."""

    owner: Any
    call: Call
    ticket: Ticket
    alias: AliasView
    identity: Identity
    accepted_ns: int
    deadline_ns: int
    deadline_asked: bool
    left: int
    """Choices that have not ended."""
    first_ns: int | None = None
    moves: int = 0
    """How often it had to leave an artifact that no worker serves any more, before anything was written."""
    flights: list[Flight] = []
    label: str | None = None
    """The client's own request id."""
    trace: TraceContext | None = None
