"""The supervisor's process: the product's `Supervisor` with its store, its verbs and all that it decides, in virtual time.

Beside it there is only what `calculet_supervisor.shell.starting` does before: open the store, and believe a newer view on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from calculet_core.clock import MS
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.shell.app import Supervisor
from calculet_supervisor.shell.control import Caller
from calculet_supervisor.shell.recovery import Recovery
from calculet_supervisor.shell.rollouts import Rollouts
from calculet_supervisor.shell.starting import _view_on_disk
from calculet_supervisor.shell.store import Wanted
from calculet_supervisor.world import NOTHING_SEEN, BoardWish, Exit, Spawn
from simulation.disk import VirtualStore
from simulation.processes import Process

if TYPE_CHECKING:
    from calculet_core import wire
    from simulation.world import World

BOOT_NS = (300 * MS, 800 * MS)
CALLER = Caller(1000, 4242)


class Launcher:
    """What the supervisor asks of the keeper."""

    def __init__(self, host: SupervisorHost) -> None:
        self._host, self._keeper = host, host.world.keeper
        self.inner = self

    async def list(self) -> dict[str, int]:
        """Who lives; from now on it is told of exits."""
        future = self._host.loop.create_future()
        self._keeper.attach(self._host, future)
        found: dict[str, int] = await future
        return found

    def start(self, board: str) -> None:
        self._keeper.start(board)

    def stop(self, board: str) -> None:
        self._keeper.terminate(board)

    def dump(self, board: str) -> None:
        """Its stacks are of no interest here."""

    def abort(self, board: str) -> None:
        self._keeper.abort(board)

    def kill(self, board: str) -> None:
        self._keeper.kill(board)

    def tell(self, boards: dict[str, Any]) -> None:
        """Nobody watches."""

    def close(self) -> None:
        """The workers live on."""


class VirtualSupervisor(Supervisor):
    """The shell, watched: it can crash between two actions, and restarts of its own accord are counted."""

    def __init__(self, host: SupervisorHost, store: VirtualStore, memory: Any) -> None:
        self._host = host
        super().__init__(host.world.fleet, {host.world.alias: host.world.package}, store, memory)
        self._performers = {kind: self._guarded(perform) for kind, perform in self._performers.items()}

    def _guarded(self, perform: Callable[[Any], None]) -> Callable[[Any], None]:
        def act(action: Any) -> None:
            if self._host.crashes:
                self._host.acted()
            perform(action)

        return act

    async def _find_launcher(self) -> Any:
        return Launcher(self._host)

    def _spawn(self, action: Spawn) -> None:
        if action.automatic:
            self._host.world.checker.restarted(action.board)
        super()._spawn(action)


class SupervisorHost(Process):
    """One life of the supervisor; what it knows is shown to operators and to the checker."""

    kind = "supervisor"

    def __init__(self, world: World, pid: int) -> None:
        super().__init__(world, "supervisor", pid)
        self.store: VirtualStore | None = None
        self._verbs: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {}
        self.later(self.rng.randrange(*BOOT_NS), self._boot)

    def _boot(self) -> None:
        fleet = self.world.fleet
        self.store = VirtualStore(self, self.world.disk, fleet.store)
        memory = self.store.read()
        self.world.checker.remembered(memory)
        if (on_disk := _view_on_disk(fleet)) is not None and on_disk.version > memory.view.version:
            memory = replace(memory, view=on_disk)
        self.app = VirtualSupervisor(self, self.store, memory)
        self.loop.run(self.app.run(), self._ended)

    def _ended(self, _: None, error: BaseException | None) -> None:
        if error is not None:
            self.world.bug(self, error)
        self.world.keeper.ended(self, code=0 if error is None else 1)

    def has_ended(self) -> None:
        super().has_ended()
        if self.store is not None:
            self.store.close()

    # ---------------------------------------------------------------- operators
    def serves_verbs(self, verbs: dict[str, Any]) -> None:
        """The control socket is there."""
        self._verbs = verbs

    @property
    def serving(self) -> bool:
        """Whether operators are heard."""
        return bool(self._verbs) and self.alive

    def operate(self, verb: str, arguments: dict[str, Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """An operator's act; `done(answer, error)` after it was committed or refused."""
        self.loop.run(self._verbs[verb](arguments, CALLER), done)

    # ---------------------------------------------------------------- the keeper
    def started(self, board: str, pid: int) -> None:
        self.app.started(board, pid)

    def exited(self, board: str, how: Exit) -> None:
        self.app.exited(board, how)

    # ---------------------------------------------------------------- what it knows
    def wish(self, board: str) -> BoardWish:
        return self.app.wish(board)

    @property
    def wanted(self) -> dict[str, Wanted]:
        return self.app.wanted

    @property
    def quarantined(self) -> dict[str, str]:
        return self.app.quarantined

    @property
    def rollouts(self) -> Rollouts:
        return self.app.rollouts

    @property
    def recovery(self) -> Recovery:
        return self.app.recovery

    @property
    def reconciler(self) -> Reconciler:
        return self.app.reconciler

    def outlook(self, board: str) -> tuple[str, wire.WorkerReport | None]:
        """What `calculet status` shows an operator: the process's state and the last report."""
        life, seen = self.reconciler.lives.get(board), self.app.sightings.boards.get(board, NOTHING_SEEN)
        return life.state.name if life else "ABSENT", seen.report
