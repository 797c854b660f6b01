"""The keeper: it starts router and supervisor and starts them again, workers on the supervisor's word, and sees every exit.

When it dies, everything ends; somebody starts another one when all of it has ended, or kills what does not end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from calculet_core import history
from calculet_core.budgets import Backoff
from calculet_core.clock import MS, US, S
from calculet_core.history import Event
from calculet_core.shell.files import next_number
from calculet_supervisor.world import Exit
from simulation.processes import Process
from simulation.router import RouterHost
from simulation.supervisor import SupervisorHost
from simulation.worker import WorkerHost

if TYPE_CHECKING:
    from simulation.world import World

BACKOFF = Backoff(100 * MS, 10_000 * MS)
STABLE_NS = 30 * S
SOCKET_NS = 150 * US
REAP_NS = 300 * US
AGAIN_NS = (500 * MS, 3 * S)
"""From a keeper's death to the next one."""
PATIENCE_NS = 10 * S
LOOK_NS = 100 * MS


class Keeper:
    """Processes by name."""

    def __init__(self, world: World, routers: int) -> None:
        self._world, self._timeline, self._rng = world, world.timeline, world.rng("keeper")
        self._routers = routers
        self.workers: dict[str, WorkerHost] = {}
        self.routers: dict[str, RouterHost] = {}
        self.supervisor: SupervisorHost | None = None
        self._attached: SupervisorHost | None = None
        self._pids = 1000
        self._incarnations = 0
        self._failures: dict[str, int] = {}
        self._life = 1
        self._dead_since: int | None = None

    def begin(self) -> None:
        """Start everything."""
        for index in range(self._routers):
            self._start_router(f"router{index}")
        self._start_supervisor()

    # ---------------------------------------------------------------- its own life
    @property
    def alive(self) -> bool:
        """Whether somebody keeps."""
        return self._dead_since is None

    def die(self) -> bool:
        """kill -9 of the keeper; whether there was one."""
        if not self.alive:
            return False
        self._dead_since, self._attached = self._timeline.now, None
        self._life += 1
        self._world.note("keeper died", "")
        for process in self._world.processes():
            self._timeline.put(process.lane, REAP_NS, process.keeper_died, ())
        self._timeline.after(self._rng.randrange(*AGAIN_NS), self._begin_again)
        return True

    def _begin_again(self) -> None:
        """`calculet up` by hand: it waits for the predecessor's processes, and takes over."""
        assert self._dead_since is not None
        left = self._world.processes()
        if left and self._timeline.now < self._dead_since + PATIENCE_NS:
            self._timeline.after(LOOK_NS, self._begin_again)
            return
        for process in left:
            self._world.saw("somebody killed what was left of a dead keeper's fleet")
            if not process.stopped:
                self._world.broken("ends_with_its_keeper", f"{process.name} lives {PATIENCE_NS // S} s after its keeper")
            self.ended(process, signal=9)
        self._world.fleet.fleet_view.unlink(missing_ok=True)
        self._dead_since = None
        self._failures.clear()
        self._world.saw("another keeper took over")
        self.begin()

    def _later(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        """Unless it has died by then, or is dead already: a successor starts its own processes."""
        if not self.alive:
            return
        self._timeline.after(delay_ns, self._if_alive, self._life, work, args)

    def _if_alive(self, life: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life == self._life and self.alive:
            work(*args)

    def _pid(self) -> int:
        self._pids += 1
        return self._pids

    def _start_router(self, name: str) -> None:
        self._incarnations += 1
        self.routers[name] = RouterHost(self._world, name, 0x100 + self._incarnations, self._pid())
        self._world.note("router started", name)

    def _start_supervisor(self) -> None:
        self.supervisor = SupervisorHost(self._world, self._pid())
        self._world.note("supervisor started", f"pid {self._pids}")

    # ---------------------------------------------------------------- on the supervisor's word
    def attach(self, supervisor: SupervisorHost, future: Any) -> None:
        """It has connected and asks who lives."""
        self._attached = supervisor
        supervisor.later(2 * SOCKET_NS, self._list, future)

    def _list(self, future: Any) -> None:
        future.set_result({board: worker.pid for board, worker in self.workers.items()})

    def _tell(self, work: str, *args: Any) -> None:
        self._timeline.after(SOCKET_NS, self._told, self._attached, work, args)

    def _told(self, supervisor: SupervisorHost | None, work: str, args: tuple[Any, ...]) -> None:
        if supervisor is not None and supervisor is self._attached:
            supervisor.call(getattr(supervisor, work), *args)

    def start(self, board: str) -> None:
        """Start the board's worker."""
        self._later(SOCKET_NS, self._start_worker, board)

    def _start_worker(self, board: str) -> None:
        if board not in self.workers:
            epoch = next_number(self._world.fleet.board_epoch(board))
            self.workers[board] = WorkerHost(self._world, board, epoch, self._pid())
            self._world.worker_spawned(board, epoch)
        self._tell("started", board, self.workers[board].pid)

    def terminate(self, board: str) -> None:
        self._signal(board, "terminate")

    def abort(self, board: str) -> None:
        self._signal(board, "abort")

    def kill(self, board: str) -> None:
        self._later(SOCKET_NS, self._kill, board)

    def _signal(self, board: str, name: str) -> None:
        def deliver() -> None:
            worker = self.workers.get(board)
            if worker is not None:
                worker.call(worker.terminate) if name == "terminate" else worker.abort()

        self._later(SOCKET_NS, deliver)

    def _kill(self, board: str) -> None:
        if (worker := self.workers.get(board)) is not None:
            self.ended(worker, signal=9)

    # ---------------------------------------------------------------- exits
    def ended(self, process: Process, code: int | None = None, signal: int | None = None, reason: str | None = None) -> None:
        """A process is gone: its memory at once, what it had sent in part, and whoever watched it hears."""
        if not process.alive:
            return
        process.has_ended()
        world, share = self._world, self._rng.random()
        for link in list(world.links):
            if link.client is process:
                link.close(share)
            elif link.server is process:
                link.cut(share)
        for watcher, told in process.watchers:
            self._timeline.put(watcher.lane, REAP_NS, told, ())
        words = f"signal {signal}" if signal else f"code {code}"
        if isinstance(process, WorkerHost):
            truth = history.FLEET_WORKER_EXITED + ".truth"
            world.see(Event(truth, self._timeline.now, board=process.board, epoch=process.epoch, data={"how": words}), process)
            world.worker_ended(process)
            del self.workers[process.board]
            self._timeline.after(REAP_NS, self._tell, "exited", process.board, Exit(code, signal, reason))
        elif isinstance(process, RouterHost):
            del self.routers[process.name]
            world.note("router died", f"{process.name}: {words}")
            world.clients.router_died(process)
            self._later(self._delay(process), self._start_router, process.name)
        else:
            self.supervisor = self._attached = None
            world.checker.supervisor_died()
            world.note("supervisor died", words)
            self._later(self._delay(process), self._start_supervisor)

    def _delay(self, process: Process) -> int:
        lived = self._timeline.now - process.started_ns
        failures = self._failures[process.name] = 1 if lived > STABLE_NS else self._failures.get(process.name, 0) + 1
        return BACKOFF.delay_ns(failures, self._rng)
