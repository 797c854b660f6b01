"""What the dispatcher wants done. The shell performs actions in the order given.

A `history.Event` is an action too: append it to the journal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from calculet_core.errors import CalculetError
from calculet_core.history import Event
from calculet_core.tracing import TraceContext
from calculet_core.wire import BoardView, Cancel, Lookup, Piece, Submit


class Ticket(msgspec.Struct):
    """What the owner may know about its call. `digest` is the artifact that answers; the dispatcher keeps it current."""

    name: str
    """Request id of the first choice, 16 hexadecimal digits."""
    created_s: int
    digest: str = ""
    headers: bytes = b""
    """What the answer's head says of the tenant's limits and of the trace: whole lines."""


class Opened(msgspec.Struct, frozen=True):
    """The call got its id; always the first action of a call."""

    owner: Any
    ticket: Ticket


class Admitted(msgspec.Struct, frozen=True):
    """Every choice's admission has answered yes: headers may go out."""

    owner: Any


class Deliver(msgspec.Struct, frozen=True):
    """Tokens of one choice; its terminal when `piece.finish` is set."""

    owner: Any
    index: int
    piece: Piece


class Restart(msgspec.Struct, frozen=True):
    """The choice starts again elsewhere: forget what was collected of it. Nothing of it has been written."""

    owner: Any
    index: int


class Fail(msgspec.Struct, frozen=True):
    """The client's terminal: an error for the whole call."""

    owner: Any
    error: CalculetError


class Told(msgspec.Struct, frozen=True):
    """The answer to a question about tokens, as JSON."""

    owner: Any
    body: bytes


class Send(msgspec.Struct, frozen=True):
    """To one life of a board's worker. A `Submit` that cannot go is answered with `Unsent`."""

    board: str
    epoch: int
    message: Submit | Cancel | Lookup


class OpenLink(msgspec.Struct, frozen=True):
    """Connect to a worker."""

    view: BoardView


class CloseLink(msgspec.Struct, frozen=True):
    """That life is over, or has nothing more to say."""

    board: str
    epoch: int


class Ended(msgspec.Struct, frozen=True):
    """A call's end, for the counters. Times in CLOCK_MONOTONIC ns; `first_ns` is None when no token came."""

    alias: str
    outcome: str
    error: CalculetError | None
    prompt_tokens: int
    generated_tokens: int
    accepted_ns: int
    first_ns: int | None
    ended_ns: int
    tenant: str
    key: str | None = None
    """Id of the API key."""
    request: str | None = None
    """Request id of the first choice; None for a call that was refused at the door, which used nothing."""
    choices: int = 0
    label: str | None = None
    trace: TraceContext | None = None
    """Of a call that was refused at the door: no event of the journal makes a span of it."""


class Resent(msgspec.Struct, frozen=True):
    """An attempt beyond the first."""

    reason: str


class Parked(msgspec.Struct, frozen=True):
    """The first request waits for a model's turn: the supervisor should hear of it soon."""

    alias: str


class Unparked(msgspec.Struct, frozen=True):
    """A request has waited for its model's turn, and goes to a worker."""

    alias: str
    waited_ns: int


class Held(msgspec.Struct, frozen=True):
    """A request no longer waits for a board that was about to be reached: one took it, or none did."""

    reached: bool


class Ignored(msgspec.Struct, frozen=True):
    """Something of a message was dropped: `late`, `foreign`."""

    reason: str
    count: int


class LostMessages(msgspec.Struct, frozen=True):
    """A gap in a worker's sequence numbers."""

    board: str
    epoch: int
    expected: int
    got: int


Action = (
    Opened | Admitted | Deliver | Restart | Fail | Told | Send | OpenLink | CloseLink | Ended | Resent | Parked | Unparked | Held
    | Ignored | LostMessages | Event
)  # fmt: skip
