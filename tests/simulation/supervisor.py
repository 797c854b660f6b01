"""The supervisor's process: the real `Reconciler`, `Resets`, `Sightings`, `Store` and `Verbs`, in virtual time.

It does what `calculet_supervisor.shell.app` does: it sees through the keeper and the workers' reports, decides at once when
something was seen and regularly for time-outs, and does what was decided. Its memory is the store; a successor adopts what lives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.history import Event
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.resets import Resets
from calculet_supervisor.rollout import Artifact, Rollout
from calculet_supervisor.shell import recovery, recovery_verbs, rollout_verbs, rollouts, time_sharing, verbs
from calculet_supervisor.shell.app import STALL_NS
from calculet_supervisor.shell.control import Caller
from calculet_supervisor.shell.examining import Unfit, artifact_of
from calculet_supervisor.shell.sightings import Sightings
from calculet_supervisor.shell.spending import Asides, Spending
from calculet_supervisor.shell.store import Wanted
from calculet_supervisor.world import (
    NOTHING_SEEN,
    Abort,
    Action,
    BoardWish,
    Desired,
    Exit,
    Grant,
    Kill,
    Load,
    Note,
    Publish,
    Send,
    SetAside,
    Spawn,
    Terminate,
)
from simulation.coroutines import Names, VirtualAsyncio
from simulation.disk import VirtualStore, run
from simulation.processes import Process
from simulation.transport import Frames, Link

if TYPE_CHECKING:
    from simulation.world import World

BOOT_NS = (300 * MS, 800 * MS)
SILENT = logging.Logger("silent", logging.CRITICAL + 1)
STORE_RETRY_NS = 1 * S
CALLER = Caller(1000, 4242)


class SupervisorHost(Process):
    """One life of the supervisor. Attributes without underscore are what verbs, rollouts and recovery ask for."""

    def __init__(self, world: World, pid: int) -> None:
        super().__init__(world, "supervisor", pid)
        self.rng = world.rng(f"supervisor {pid}")
        clock, loop = world.timeline, VirtualAsyncio(self)
        self._names = Names(
            [
                (rollouts, "asyncio", loop), (rollouts, "time", clock), (rollouts, "examine", self._examine),
                (rollouts, "read_package", world.package_at), (verbs, "asyncio", loop), (verbs, "time", clock),
                (recovery, "time", clock), (recovery, "asyncio", loop), (time_sharing, "time", clock), (rollout_verbs, "time", clock), (recovery_verbs, "time", clock), (rollouts, "log", SILENT), (recovery, "log", SILENT),
            ]
        )  # fmt: skip
        self.serving = False
        self.store: VirtualStore | None = None
        self.later(self.rng.randrange(*BOOT_NS), self._boot)

    def _boot(self) -> None:
        world, settings = self.world, self.world.settings
        self.store = VirtualStore(self, world.disk)
        memory = self.store.read()
        world.checker.recalled(memory.boards)
        if world.disk.file is not None:
            on_disk = msgspec.json.decode(world.disk.file, type=wire.FleetView)
            if on_disk.version > memory.view.version:
                memory = replace(memory, view=on_disk)
        self.fleet, self.boards = world.fleet, tuple(world.boards)
        self.wanted = dict(memory.boards)
        self.sightings = Sightings()
        self.sightings.generation = max((board.generation for board in memory.view.boards), default=0)
        limit = settings.recovery.max_resets_per_10min
        self.resets = Resets(dict.fromkeys(world.boards, limit), _spends(memory.spends, "reset"))
        self.reconciler = Reconciler(
            settings.supervision, self.resets, self.rng, memory.view, _spends(memory.spends, "restart"), memory.asides
        )
        self.view = memory.view
        self._spending, self._asides = Spending(self.store), Asides(self.store)
        self.started_s = world.timeline.monotonic()
        self.quarantined = dict(memory.quarantined)
        self.reconciler.attribution.failures = list(memory.failures)
        me: Any = self
        self.time_sharing = time_sharing.TimeSharing(me, memory)
        self.rollouts = rollouts.Rollouts(me, {world.alias: world.package}, memory)
        self.recovery = recovery.Recovery(me, memory)
        table = verbs.Verbs(me)
        self._verbs = {
            **table.table(), **rollout_verbs.RolloutVerbs(me).table(), **recovery_verbs.RecoveryVerbs(me, table).table()
        }
        self._peers: dict[bytes, Link] = {}
        self._publishing: Publish | None = None
        self._sees = self._decision_due = False
        self._wakeup_ns: int | None = None
        self._decided_ns = self.timeline.now
        self._performers: dict[type[Any], Any] = {
            Spawn: self._spawn, Terminate: lambda action: world.keeper.terminate(action.board), Abort: self._abort,
            Kill: self._kill, Load: lambda action: self.begin(self._load(action)),
            Grant: lambda action: self.begin(self._grant(action)), Send: lambda action: self.send(action.board, action.message),
            Publish: self._publish, Note: self.note,
            SetAside: lambda action: self.begin(self._asides.save(action.board, action.aside)),
        }  # fmt: skip
        world.keeper.attach(self)

    def listed(self, workers: dict[str, int]) -> None:
        """The keeper's answer: from now on living workers are seen."""
        for board, pid in workers.items():
            self.sightings.started(board, pid)
        self._sees = self.serving = True
        self.later(0, self._tick)
        self.later(STORE_RETRY_NS, self._settle_spends)

    def call(self, work: Callable[..., None], *args: Any) -> None:
        """Everything that this process does, it does in virtual time."""
        with self._names:
            super().call(work, *args)

    def _examine(self, rollout: Rollout, context: Any) -> tuple[Any, dict[str, Artifact | None]]:
        """The static half of a load, without files: a package is what its folder's name says."""
        package = self.world.package_at(Path(rollout.package)) if rollout.verb == "load" else self.world.packages[_digest(rollout)]
        green = artifact_of(package)
        if rollout.blue is not None and rollout.blue.digest == green.digest:
            raise Unfit(f"{rollout.alias} already serves {green}")
        if (reason := context.quarantined.get(green.digest)) is not None and not rollout.override:
            raise Unfit(f"{green} was set aside: {reason}")
        return package, {"green": green, "blue": rollout.blue}

    # ---------------------------------------------------------------- what is wanted
    def wish(self, board: str) -> BoardWish:
        wanted, config = self.wanted.get(board, Wanted()), self.fleet.config
        placement, swap = self.rollouts.placement(board)
        return BoardWish(
            placement, wanted.up and wanted.condemned is None, wanted.draining, wanted.min_epoch, swap,
            config.rollout.drain_timeout_ms, config.recall.probation_weight if wanted.probation else 1.0,
            wanted.probation and not wanted.probation_reset, wanted.reset_generation, probation=wanted.probation,
        )  # fmt: skip

    def out(self, board: str) -> str | None:
        wanted = self.wanted.get(board, Wanted())
        if wanted.condemned is not None:
            return f"condemned: {wanted.condemned}"
        return "stopped" if not wanted.up else "drained" if wanted.draining else None

    def last_epoch(self, board: str) -> int:
        return self.world.disk.epochs.get(board, 0)

    def operate(self, verb: str, arguments: dict[str, Any], done: Any) -> None:
        """An operator's act; `done(answer, error)` after it was committed or refused."""
        run(self, self._verbs[verb](arguments, CALLER), done)

    # ---------------------------------------------------------------- what is seen
    def started(self, board: str, pid: int) -> None:
        self.sightings.started(board, pid)
        self.decide_soon()

    def exited(self, board: str, how: Exit) -> None:
        self.sightings.exited(board, how)
        self._decide()

    def accept(self, link: Link) -> Any:
        """A worker or a router has connected."""
        self._peers[link.identity] = link
        identity = link.identity
        return lambda frames: self._from_peer(identity, frames)

    def _from_peer(self, identity: bytes, frames: Frames) -> None:
        message, now = wire.decode(*frames), self.timeline.now
        if isinstance(message, wire.WorkerReport):
            if self.sightings.heard_worker(identity, message, now):
                self.decide_soon()
            else:
                self.world.saw("a report was ignored: not its worker")
        elif isinstance(message, wire.RouterReport):
            self.sightings.heard_router(identity, message, now)
            if self.rollouts.live:
                self.decide_soon()
            if message.view_version < self.view.version:
                self._answer(identity, self.view)

    # ---------------------------------------------------------------- deciding
    def decide_soon(self) -> None:
        if not self._decision_due:
            self._decision_due = True
            self.later(0, self._decide)

    def _tick(self) -> None:
        self.later(self.world.settings.supervisor_tick_ns, self._tick)
        self.sightings.forget_silent_routers(self.timeline.now)
        self._decide()

    def _decide(self) -> None:
        self._decision_due = False
        if not self._sees:
            return
        now = self.timeline.now
        if now - self._decided_ns > STALL_NS + self.world.settings.supervisor_tick_ns:
            self.world.saw("supervisor stood still")
            self.reconciler.overslept(now - self._decided_ns)
        self._decided_ns = now
        wishes = {board: self.wish(board) for board in self.boards}
        desired = Desired(wishes, self.rollouts.aliases(), self.rollouts.decided_aliases(), self.recovery.breaker.reason)
        actions = self.reconciler.decide(desired, self.sightings.observed(), now)
        self.recovery.tick(now)
        self.time_sharing.tick(now)
        self.rollouts.tick(now)
        for action in actions:
            self.acted()
            self._performers[type(action)](action)
        at = self.reconciler.next_wakeup_ns()
        if at is not None and at != self._wakeup_ns and at - now < self.world.settings.supervisor_tick_ns:
            self._wakeup_ns = at
            self.later(at - now, self._decide)

    # ---------------------------------------------------------------- doing
    def _spawn(self, action: Spawn) -> None:
        if action.automatic:
            self.world.checker.restarted(action.board)
            self.begin(self._spending.save("restart", action.board))
        self.world.keeper.start(action.board)

    def _abort(self, action: Abort) -> None:
        self.world.saw("supervisor aborted a worker")
        self.world.keeper.abort(action.board)

    def _kill(self, action: Kill) -> None:
        self.world.saw("supervisor killed a worker")
        self.world.keeper.kill(action.board)

    async def _load(self, action: Load) -> None:
        generation, placement = await self._mint(), action.placement
        self.send(action.board, wire.LoadModel(action.seq, generation, placement.alias, placement.package, placement.digest))

    async def _grant(self, action: Grant) -> None:
        if action.spend:
            await self._spending.save("reset", action.board)
        await self._spending.settle("reset", action.board)
        self.send(action.board, wire.GrantReset(action.seq, await self._mint()))

    async def _mint(self) -> int:
        assert self.store is not None
        return await self.store.mint_generation(self.sightings.generation + 1)

    def send(self, board: str, message: wire.Message) -> None:
        identity = self.sightings.identities.get(board)
        if identity is None or not self._answer(identity, message):
            self.world.saw("a command could not be sent")

    def _answer(self, identity: bytes, message: wire.Message) -> bool:
        link = self._peers.get(identity)
        return link is not None and link.identity == identity and link.server is self and link.answer(wire.encode(message))

    def _settle_spends(self) -> None:
        self.later(STORE_RETRY_NS, self._settle_spends)
        if self._spending.owes:
            self.begin(self._spending.settle_all())
        if self._asides.owes:
            self.begin(self._asides.settle_all())

    def _publish(self, action: Publish) -> None:
        idle, self._publishing = self._publishing is None, action
        if idle:
            self._write_view()

    def _write_view(self) -> None:
        assert self.store is not None and self._publishing is not None
        action = self._publishing
        view = wire.FleetView(0, list(action.boards), list(action.aliases))
        run(self, self.store.publish(view, self.view.version + 1, self.world.disk.database), lambda *end: self._written(action, *end))

    def _written(self, action: Publish, view: wire.FleetView, error: BaseException | None) -> None:
        if error is not None:
            self.later(STORE_RETRY_NS, self._write_view)
            return
        self.view = view
        self.rollouts.published(view)
        for identity in self.sightings.routers:
            self._answer(identity, view)
        self.world.see(
            Event(history.FLEET_VIEW_PUBLISHED, self.timeline.now, data={"version": view.version, "boards": len(view.boards)}), self
        )
        if self._publishing is action:
            self._publishing = None
        else:
            self._write_view()

    def note(self, note: Note) -> None:
        event = Event(
            note.event, self.timeline.now, board=note.board, epoch=note.epoch, generation=note.generation, data=dict(note.data)
        )
        self.world.see(event, self)
        if note.event == history.FLEET_FAULT_SEEN:
            self.recovery.fault(note)

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run it beside everything else."""
        run(self, work, self._done)

    def _done(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            self.world.saw("an action failed and is decided again")

    def has_ended(self) -> None:
        super().has_ended()
        if self.store is not None:
            self.store.close()

    def outlook(self, board: str) -> tuple[str, wire.WorkerReport | None]:
        """What `calculet status` shows an operator: the process's state and the last report."""
        life, seen = self.reconciler.lives.get(board), self.sightings.boards.get(board, NOTHING_SEEN)
        return life.state.name if life else "ABSENT", seen.report


def _digest(rollout: Rollout) -> str:
    assert rollout.green is not None
    return rollout.green.digest


def _spends(spends: dict[tuple[str, str], list[int]], kind: str) -> dict[str, list[int]]:
    return {board: found for (known, board), found in spends.items() if known == kind}


__all__ = ["Action", "SupervisorHost"]
