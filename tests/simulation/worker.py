"""A worker process: the product's `Worker`, with a device thread that lives in virtual time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from calculet_core.clock import MS
from calculet_core.errors import ExitCode
from calculet_core.jobs import DeviceCounters
from calculet_core.shell.files import write_atomic
from calculet_worker import events
from calculet_worker.engine import Engine
from calculet_worker.shell.app import Worker
from simulation.device import ArmedPlan, DeviceThread
from simulation.processes import Process

if TYPE_CHECKING:
    from simulation.world import World

BOOT_NS = (250 * MS, 900 * MS)
"""Interpreter, imports, lock, epoch."""


class VirtualWorker(Worker):
    """The shell, watched: it can crash between two actions, and what only the world can judge is told to the checker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        fleet = host.world.fleet
        super().__init__(fleet, fleet.board(host.board), host.epoch, host.thread.device, ())

    def _handle(self, event: Any) -> None:
        kind = type(event)
        if kind is events.JobCompleted:
            self._host.thread.on_their_way -= 1
        elif kind is events.RouterLost:
            self._host.router_lost(event)
        super()._handle(event)

    def _perform(self, action: Any) -> None:
        if self._host.crashes:
            self._host.acted()
        self._performers[type(action)](action)

    def _set_wakeup(self) -> None:
        self._host.look_at_lanes()
        super()._set_wakeup()

    def _bug(self, error: BaseException | None) -> None:
        self._host.world.bug(self._host, error or RuntimeError("unknown"))
        super()._bug(error)

    def _from_supervisor(self, frames: Any) -> None:
        self._host.commanded(frames)
        super()._from_supervisor(frames)


class WorkerHost(Process):
    """One life of a board's worker."""

    kind = "worker"

    def __init__(self, world: World, board: str, epoch: int, pid: int) -> None:
        super().__init__(world, board, pid)
        self.board, self.epoch = board, epoch
        self.booted = False
        self._looked = 0
        self.later(self.rng.randrange(*BOOT_NS), self._boot)

    def _boot(self) -> None:
        world = self.world
        world.fleet.board_exit(self.board).unlink(missing_ok=True)
        self.plan = ArmedPlan()
        self.thread = DeviceThread(self, world.hardware[self.board], self.plan)
        self.device = self.thread.device
        self.app = VirtualWorker(self)
        self.engine: Engine = self.app._engine
        self.booted = True
        for fault in world.armed.pop(self.board, []):
            self.plan.arm(fault)
        self.loop.run(self.app.run(), self._ended)

    def device_thread(self, deliver: Any) -> DeviceThread:
        """Of `Executor`."""
        self.thread.deliver = deliver
        return self.thread

    def _ended(self, found: tuple[int, str] | None, error: BaseException | None) -> None:
        """What `calculet_worker.shell.app.serve` does at the end."""
        if error is not None:
            self.world.bug(self, error)
        code, reason = found or (int(ExitCode.BUG), str(error))
        content = json.dumps({"code": code, "reason": reason, "epoch": self.epoch}).encode()
        if not self.world.disk.full:
            write_atomic(self.world.fleet.board_exit(self.board), content + b"\n")
        self.world.keeper.ended(self, code=code)

    # ---------------------------------------------------------------- for who judges
    def router_lost(self, event: events.RouterLost) -> None:
        """It takes a router for gone."""
        self.world.saw(f"worker lost a router: {event.reason.split(':')[0]}")
        self.world.checker.router_lost(self, event.router)

    def look_at_lanes(self) -> None:
        """Once in a while."""
        self._looked += 1
        if self._looked >= self.world.settings.check_every:
            self._looked = 0
            serving = self.engine.serving
            if serving is not None and (broken := serving.kv.invariants()):
                self.world.broken("kv_invariants", f"{self.board}: {broken}")

    def commanded(self, frames: Any) -> None:
        """For who reads the story."""
        self.world.tell(self.name, "command", frames)

    @property
    def serves(self) -> bool:
        """Ready for requests."""
        return self.booted and self.engine.life.refusal() is None and not self.engine.control.stopping

    def board_counters(self) -> DeviceCounters:
        """The silicon's own count."""
        return self.thread.board.counters()
