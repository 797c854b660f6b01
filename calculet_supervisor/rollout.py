"""What an alias stands for, and how it comes to stand for something else: the records that are kept (scheduling §10, §11).

A `Rollout` is the whole truth about one swap: which boards were moved, on which side the alias is, every step that was taken. It is
replaced by its next version only once that is committed, so a supervisor that was killed anywhere goes on from the last step. What
to do next is `planner`'s business. *Blue* is what served at the start, *green* what shall serve; an `AliasVersion` is committed
with the step that moves the alias.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from calculet_core.states.model_generation import ModelState
from calculet_core.states.rollout import ROLLOUT, RolloutEvent, RolloutState
from calculet_core.wire import AliasView, BoardView

READY = ModelState.READY.name
LOG_KEPT = 200


class Artifact(msgspec.Struct, frozen=True):
    """A package that can be loaded."""

    digest: str
    package: str
    """Absolute path of its folder."""
    name: str = ""
    """`name version`."""

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})" if self.name else self.digest[:12]


class AliasVersion(msgspec.Struct, frozen=True):
    """What an alias has stood for since `wall_s`. `artifact` None: it was unloaded."""

    alias: str
    artifact: Artifact | None
    previous: Artifact | None
    """What `rollback` goes to."""
    configured: str
    """Digest of the package that the configuration named then: another one there now is a newer word than this."""
    wall_s: float
    rollout: int | None = None
    version: int = 0


class Step(msgspec.Struct, frozen=True):
    """One line of a rollout's history."""

    wall_s: float
    text: str


class Rollout(msgspec.Struct, frozen=True):
    """A swap of one alias. `floor` boards serve at any time; at most `max_unavailable` do not because of this or otherwise."""

    id: int
    alias: str
    verb: str
    """`load`, `rollback` or `unload`."""
    boards: tuple[str, ...]
    """All that the alias is placed on."""
    package: str = ""
    """Path that the operator named."""
    green: Artifact | None = None
    blue: Artifact | None = None
    floor: int = 0
    max_unavailable: int = 1
    canary: float = 0.0
    """Share of new requests that green gets before the alias moves; 0: none."""
    allow_downtime: bool = False
    override: bool = False
    """The artifact may be one that was set aside."""
    avoid: tuple[str, ...] = ()
    """Boards on which green has failed before: another one goes first, to tell whose fault it is."""
    state: str = RolloutState.PENDING.name
    assigned: tuple[str, ...] = ()
    """Boards that were moved to green."""
    on_green: bool = False
    """Where the alias points."""
    share: float = 0.0
    """Share of new requests that goes to green while the alias points to blue."""
    promoted: bool = False
    """The canary has passed, or an operator said so."""
    reason: str | None = None
    """Why it was refused or rolled back."""
    failed_board: str | None = None
    urgent: bool = False
    """An operator wants blue back: any blue board that is left takes the alias at once, whatever the floor."""
    dark_since: float | None = None
    """Since when no board serves the alias (UTC seconds); `dark_s` adds up how long none did."""
    dark_s: float = 0.0
    acknowledged: bool = False
    """Going back: every router has been told."""
    uid: int | None = None
    begun: float = 0.0
    ended: float | None = None
    log: tuple[Step, ...] = ()

    @property
    def over(self) -> bool:
        """Nothing more comes of it."""
        return RolloutState[self.state] in ROLLOUT.terminal

    @property
    def serving(self) -> Artifact | None:
        """What the alias stands for at this step."""
        return self.green if self.on_green else self.blue

    def wanted(self, board: str) -> Artifact | None:
        """What the board shall hold at this step."""
        return self.green if board in self.assigned else self.blue


def advance(rollout: Rollout, wall_s: float, text: str, event: RolloutEvent | None = None, **changes: Any) -> Rollout:
    """The next version of a rollout. Its state changes only here, through the `ROLLOUT` table."""
    if event is not None:
        state = ROLLOUT.next(RolloutState[rollout.state], event)
        changes["state"] = state.name
        if state in ROLLOUT.terminal:
            changes["ended"] = wall_s
    return msgspec.structs.replace(rollout, log=(*rollout.log, Step(wall_s, text))[-LOG_KEPT:], **changes)


def verified(rollout: Rollout, wall_s: float, **found: Any) -> Rollout:
    """Steps 1-4 of scheduling §11 are good; `found` are the fields they fill in."""
    text = "verified: path, signature, hashes, manifest, versions, capacity"
    return advance(rollout, wall_s, text, RolloutEvent.VERIFIED, **found)


def refuse(rollout: Rollout, wall_s: float, reason: str) -> Rollout:
    """Verification failed: nothing has changed."""
    return advance(rollout, wall_s, f"refused: {reason}", RolloutEvent.REFUSE, reason=reason)


def abort(rollout: Rollout, wall_s: float, reason: str, board: str | None = None, urgent: bool = False) -> Rollout:
    """Go back to blue; what the canary gets is nothing from this step on."""
    reason = f"{board}: {reason}" if board else reason
    changes = {"share": 0.0, "reason": reason, "failed_board": board, "urgent": urgent}
    return advance(rollout, wall_s, f"rolls back: {reason}", RolloutEvent.ABORT, **changes)


def choose_alias(configured: AliasView, previous: AliasView | None, boards: Iterable[BoardView]) -> AliasView:
    """For an alias that no operator has moved: the configured artifact, or the previous one while more ready boards serve that.

    A package that changes on disk while its predecessor serves is not forced on anybody: boards keep what they have until they
    are restarted, and the alias stands for what most ready boards serve.
    """
    if previous is None or previous.digest == configured.digest:
        return configured
    ready = Counter(board.digest for board in boards if board.alias == configured.alias and board.state == READY)
    return previous if ready[previous.digest] > ready[configured.digest] else configured
