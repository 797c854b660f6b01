"""The keeper: it starts router and supervisor and starts them again, workers on the supervisor's word, and sees every exit.

It never dies here: when it does, everything ends, and there is nothing left to check.
"""

from __future__ import annotations

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

    def begin(self) -> None:
        """Start everything."""
        for index in range(self._routers):
            self._start_router(f"router{index}")
        self._start_supervisor()

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
        self._timeline.after(SOCKET_NS, self._start_worker, board)

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
        self._timeline.after(SOCKET_NS, self._kill, board)

    def _signal(self, board: str, name: str) -> None:
        def deliver() -> None:
            worker = self.workers.get(board)
            if worker is not None:
                worker.call(worker.terminate) if name == "terminate" else worker.abort()

        self._timeline.after(SOCKET_NS, deliver)

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
        for watcher in process.watchers:
            self._timeline.after(REAP_NS, watcher)
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
            self._timeline.after(self._delay(process), self._start_router, process.name)
        else:
            self.supervisor = self._attached = None
            world.checker.supervisor_died()
            world.note("supervisor died", words)
            self._timeline.after(self._delay(process), self._start_supervisor)

    def _delay(self, process: Process) -> int:
        lived = self._timeline.now - process.started_ns
        failures = self._failures[process.name] = 1 if lived > STABLE_NS else self._failures.get(process.name, 0) + 1
        return BACKOFF.delay_ns(failures, self._rng)
