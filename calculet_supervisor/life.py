"""One board's worker as the reconciler remembers it: the process state, what was asked of it, and when things are due.

`Life` is a hot-path-free mutable record written only by `reconcile`; its state changes through `WORKER_PROCESS` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from calculet_core.states.worker_process import WORKER_PROCESS, ProcessEvent, ProcessState
from calculet_supervisor.health import Health
from calculet_supervisor.restarts import Restarts
from calculet_supervisor.world import WorkerAside


@dataclass(frozen=True, slots=True)
class Command:
    """The last command to the worker."""

    seq: int
    verb: str
    generation: int
    """That the worker had then."""
    until_ns: int
    """When it counts as lost; what it was for is then decided afresh."""


@dataclass(frozen=True, slots=True)
class ResetAnswer:
    """What was decided about one generation's wish for a reset. `reason` of a refusal; None when granted."""

    epoch: int
    generation: int
    reason: str | None
    next_ns: int
    """When the budget allows the next one."""


@dataclass(slots=True, eq=False)
class Life:
    """What the supervisor knows of a board's worker beyond what it sees."""

    restarts: Restarts
    health: Health
    min_epoch: int
    """The operator's last word that was heeded."""
    state: ProcessState = WORKER_PROCESS.initial
    since_ns: int = 0
    """When the state was entered."""
    exits: int = 0
    """Exits that were dealt with."""
    epoch: int = 0
    """Of the last report."""
    spawned: bool = False
    """Started by this supervisor, not adopted."""
    automatic: bool = False
    """Its start was a restart out of the budget."""
    retry_ns: int | None = None
    why: str | None = None
    """Why it is not up, in words."""
    aborted_ns: int | None = None
    seq: int = 0
    """Highest of all commands in this life."""
    command: Command | None = None
    load_digest: str | None = None
    """Of the last load that was asked for in this life."""
    reset: ResetAnswer | None = None
    failed_ns: int | None = None
    """Since when its model has failed, or its load was refused."""
    aside: WorkerAside | None = None
    """As it is remembered, or about to be."""

    def enter(self, event: ProcessEvent, now_ns: int) -> None:
        """The only way to change `state`."""
        self.state, self.since_ns = WORKER_PROCESS.next(self.state, event), now_ns

    def begin(self, health: Health, now_ns: int, *, spawned: bool, automatic: bool) -> None:
        """A process begins its life, or is found alive."""
        self.health, self.spawned, self.automatic = health, spawned, automatic
        self.retry_ns = self.aborted_ns = self.command = self.failed_ns = self.load_digest = None
        self.seq = 0
        self.since_ns = now_ns
