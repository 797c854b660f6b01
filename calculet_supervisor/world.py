"""What is wanted of each board, what is seen of it, and what may be done about the difference.

Desired state comes from the configuration and from operators; it survives in the store. Observed state comes from the launcher
(which processes live, which exits there were) and from the workers' own reports. Neither remembers why: whoever decides compares
the two afresh each time, so that an event that was missed costs nothing once the level is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from calculet_core import wire


# ------------------------------------------------------------------------------------------------ desired
@dataclass(frozen=True, slots=True)
class Placement:
    """The artifact that a board shall serve, and the alias it serves it as."""

    alias: str
    package: str
    """Absolute path of the package folder."""
    digest: str


@dataclass(frozen=True, slots=True)
class BoardWish:
    """What is wanted of one board."""

    placement: Placement | None
    """None: it shall hold nothing."""
    up: bool = True
    """False: an operator stopped it, or it was set aside; it stays down until an operator starts it."""
    draining: bool = False
    min_epoch: int = 0
    """Workers of an older life are to be replaced: how an operator's restart is remembered."""
    swap: bool = False
    """Another artifact than the placement's is drained and unloaded; False: it may stay."""
    drain_ms: int = 120_000
    """How long that drain may take."""
    weight: float = 1.0
    """Its share of work, others having 1."""
    prove: bool = False
    """It comes back from being condemned: it is reset, out of the budget, before anything is loaded."""
    reset_generation: int = 0
    """An operator wants a reset while the board fails or recovers with this generation, whatever the budget says."""
    pool: str = ""
    """Whose requests come here first; empty: everybody's."""
    probation: bool = False
    """It came back from being condemned and has not proved itself yet."""


@dataclass(frozen=True, slots=True)
class Desired:
    """What is wanted of the fleet; a board that is not listed shall not run."""

    boards: Mapping[str, BoardWish]
    aliases: tuple[wire.AliasView, ...] = ()
    """What each alias stands for; one that is not `decided` follows what most ready boards serve."""
    decided: frozenset[str] = frozenset()
    """Aliases that an operator has moved."""
    frozen: str | None = None
    """Why nothing automatic happens to boards that failed; None: it does."""


# ------------------------------------------------------------------------------------------------ observed
@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker process ended. `code` and `signal` are None where nobody could learn them."""

    code: int | None = None
    signal: int | None = None
    reason: str | None = None

    def words(self) -> str:
        """For people: `exit 75: the board is locked`, `killed by signal 9`."""
        how = f"killed by signal {self.signal}" if self.signal else "gone" if self.code is None else f"exit {self.code}"
        return f"{how}: {self.reason}" if self.reason else how


@dataclass(frozen=True, slots=True)
class BoardSeen:
    """What is seen of one board. A report is there only while the process that sent it lives."""

    pid: int | None = None
    exits: int = 0
    """Exits (and failed starts) so far; `last_exit` is the newest."""
    last_exit: Exit | None = None
    report: wire.WorkerReport | None = None
    report_ns: int = 0


NOTHING_SEEN = BoardSeen()


@dataclass(frozen=True, slots=True)
class Observed:
    """What is seen of the fleet's workers."""

    boards: Mapping[str, BoardSeen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerAside:
    """A worker whose restart budget is spent: it is tried once at `retry_ns`, and a life that fails then costs the long time again.
    This outlives the supervisor, until the worker has served for the stable period, the configuration has changed, or an operator
    says otherwise."""

    why: str
    retry_ns: int | None
    """CLOCK_MONOTONIC; None: never by itself (a wrong configuration)."""
    config: str = ""
    """Fingerprint of the configuration under which that was decided."""


# ------------------------------------------------------------------------------------------------ actions
@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the board's worker. `automatic` starts have spent the restart budget; the spend is to be saved."""

    board: str
    automatic: bool = False


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM: a worker that takes no commands yet shall end."""

    board: str


@dataclass(frozen=True, slots=True)
class Abort:
    """SIGABRT: it is sick; let it print where it is stuck and die."""

    board: str
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to its whole process group: it did not die of the abort, or of the stop."""

    board: str
    reason: str


@dataclass(frozen=True, slots=True)
class Load:
    """Mint a generation, durably, and send `wire.LoadModel`."""

    board: str
    seq: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Grant:
    """Save the spend (unless it was saved before), mint a generation, then send `wire.GrantReset`."""

    board: str
    seq: int
    spend: bool


@dataclass(frozen=True, slots=True)
class Send:
    """A command that needs nothing minted."""

    board: str
    message: wire.DrainBoard | wire.ResumeBoard | wire.SetPingPong | wire.DenyReset | wire.StopWorker | wire.UnloadModel


@dataclass(frozen=True, slots=True)
class SetAside:
    """Remember durably that a worker's restart budget is spent; None: forget it."""

    board: str
    aside: WorkerAside | None


@dataclass(frozen=True, slots=True)
class Publish:
    """Commit a new version of the fleet view, write its file, then tell the routers."""

    boards: tuple[wire.BoardView, ...]
    aliases: tuple[wire.AliasView, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the journal, and of the log."""

    event: str
    board: str
    epoch: int | None = None
    generation: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


Action = Spawn | Terminate | Abort | Kill | Load | Grant | Send | SetAside | Publish | Note
