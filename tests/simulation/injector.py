"""Faults become events: each is named, counted when it really happened, and heals by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from calculet_core.clock import MS
from calculet_worker.device.faults import AnyFault
from simulation.scenario import DEVICE_FAULTS, Fault
from simulation.transport import Tricks

if TYPE_CHECKING:
    from simulation.processes import Process
    from simulation.transport import Link
    from simulation.world import World

FOREVER_MS = 1 << 40


class Injector:
    """Arms a scenario's faults."""

    def __init__(self, world: World) -> None:
        self._world, self._timeline = world, world.timeline
        self.quiet = False
        self.until_ns = 0
        """When the last fault that lasts will have healed."""
        for fault in world.scenario.faults:
            self._timeline.after(fault.at_ns, self._come, fault)

    def _come(self, fault: Fault) -> None:
        if self.quiet:
            return
        self.until_ns = max(self.until_ns, self._timeline.now + fault.ms * MS)
        self._world.note("fault", f"{fault.kind} target={fault.target} ms={fault.ms} actions={fault.actions}")
        if fault.kind in DEVICE_FAULTS:
            self._arm(fault)
        else:
            getattr(self, f"_{fault.kind}")(fault)

    # ---------------------------------------------------------------- the device
    def _arm(self, fault: Fault) -> None:
        """At the next visit of its site; a worker that is not up yet gets it when it is."""
        board = self._board(fault)
        described = {"fault": fault.kind, "rate": 1.0} | ({"delay_ms": float(fault.ms)} if fault.kind == "slow" else {})
        found = msgspec.convert(described, AnyFault)
        worker = self._world.keeper.workers.get(board)
        if worker is not None and worker.booted:
            worker.plan.arm(found)
        else:
            self._world.armed.setdefault(board, []).append(found)

    def _stuck_dma(self, fault: Fault) -> None:
        self._world.hardware[self._board(fault)].stuck = True
        self._kill_worker(fault)
        self._fired("stuck_dma")

    def _bad_board(self, fault: Fault) -> None:
        board = self._board(fault)
        self._world.hardware[board].lies = True
        self._fired("bad_board")
        self._kill_worker(fault)

    def _keep_memory(self, fault: Fault) -> None:
        """The next unload leaves something behind; counted when it does."""
        self._world.hardware[self._board(fault)].keeps = True

    def _board(self, fault: Fault) -> str:
        return self._world.boards[fault.target % len(self._world.boards)]

    # ---------------------------------------------------------------- processes
    def _kill_worker(self, fault: Fault) -> None:
        self._kill(self._world.keeper.workers.get(self._board(fault)), fault)

    def _kill_router(self, fault: Fault) -> None:
        self._kill(self._router(fault), fault)

    def _kill_supervisor(self, fault: Fault) -> None:
        self._kill(self._world.keeper.supervisor, fault)

    def _kill_keeper(self, fault: Fault) -> None:
        if self._world.keeper.die():
            self._fired(fault.kind)

    def _stop_router(self, fault: Fault) -> None:
        self._terminate(self._router(fault), fault)

    def _stop_supervisor(self, fault: Fault) -> None:
        self._terminate(self._world.keeper.supervisor, fault)

    def _stop_worker(self, fault: Fault) -> None:
        self._terminate(self._world.keeper.workers.get(self._board(fault)), fault)

    def _terminate(self, process: Process | None, fault: Fault) -> None:
        """SIGTERM, from somebody else."""
        if process is not None and process.alive:
            self._fired(fault.kind)
            process.call(process.terminate)

    def _kill(self, process: Process | None, fault: Fault) -> None:
        if process is None or not process.alive:
            return
        self._fired(fault.kind)
        if fault.actions:
            process.crash_after(fault.actions)
        else:
            self._world.keeper.ended(process, signal=9)

    def _pause_worker(self, fault: Fault) -> None:
        self._pause(self._world.keeper.workers.get(self._board(fault)), fault)

    def _hang_worker(self, fault: Fault) -> None:
        self._pause(self._world.keeper.workers.get(self._board(fault)), fault)

    def _pause_router(self, fault: Fault) -> None:
        router = self._router(fault)
        if router is not None:
            self._world.checker.paused(self._timeline.now, fault.ms * MS)
        self._pause(router, fault)

    def _pause_supervisor(self, fault: Fault) -> None:
        self._pause(self._world.keeper.supervisor, fault)

    def _pause(self, process: Process | None, fault: Fault) -> None:
        if process is not None and process.alive and not process.stopped:
            self._fired(fault.kind)
            process.stop()
            self._trouble(process, fault.ms or FOREVER_MS)
            if fault.ms:
                self._timeline.after(fault.ms * MS, process.resume)

    def _router(self, fault: Fault) -> Process | None:
        routers = list(self._world.keeper.routers.values())
        return routers[fault.target % len(routers)] if routers else None

    # ---------------------------------------------------------------- links and the disk
    def _cut_data(self, fault: Fault) -> None:
        self._cut("data", fault)

    def _cut_control(self, fault: Fault) -> None:
        self._cut("control", fault)

    def _cut(self, name: str, fault: Fault) -> None:
        link = self._link(name, fault)
        if link is not None:
            self._fired(fault.kind)
            self._trouble_on(link, 0)
            if link.cut():
                self._world.saw("messages were lost with a connection")

    def _partition_data(self, fault: Fault) -> None:
        self._partition("data", fault)

    def _partition_control(self, fault: Fault) -> None:
        self._partition("control", fault)

    def _partition(self, name: str, fault: Fault) -> None:
        link = self._link(name, fault)
        if link is not None:
            self._fired(fault.kind)
            self._trouble_on(link, fault.ms)
            link.partition(True)
            self._timeline.after(fault.ms * MS, link.partition, False)

    def _slow_data(self, fault: Fault) -> None:
        link = self._link("data", fault)
        if link is not None:
            self._fired(fault.kind)
            self._trouble_on(link, fault.ms)
            link.slow(20 * MS)
            self._timeline.after(fault.ms * MS, link.slow, 0)

    def _double_data(self, fault: Fault) -> None:
        self._trick("data", Tricks.DOUBLE, fault)

    def _reorder_data(self, fault: Fault) -> None:
        self._trick("data", Tricks.REORDER, fault)

    def _double_control(self, fault: Fault) -> None:
        self._trick("control", Tricks.DOUBLE, fault)

    def _reorder_control(self, fault: Fault) -> None:
        self._trick("control", Tricks.REORDER, fault)

    def _truncate_data(self, fault: Fault) -> None:
        self._trick("data", Tricks.TRUNCATE, fault)

    def _truncate_control(self, fault: Fault) -> None:
        self._trick("control", Tricks.TRUNCATE, fault)

    def _trick(self, name: str, tricks: Tricks, fault: Fault) -> None:
        link = self._link(name, fault)
        if link is not None:
            self._fired(fault.kind)
            self._trouble_on(link, fault.ms)
            link.play(tricks)
            self._timeline.after(fault.ms * MS, link.play, Tricks.NONE)

    def _link(self, name: str, fault: Fault) -> Link | None:
        found = [link for link in self._world.links if link.name.startswith(name) and link.up]
        return found[fault.target % len(found)] if found else None

    def _disk_full(self, fault: Fault) -> None:
        disk = self._world.disk
        if not disk.full:
            self._fired(fault.kind)
            disk.full = True
            self._timeline.after(fault.ms * MS, setattr, disk, "full", False)

    def _trouble(self, process: Process, ms: int) -> None:
        self._world.checker.troubled(process.name, self._timeline.now + ms * MS)

    def _trouble_on(self, link: Link, ms: int) -> None:
        """A control link is its client's; a data link has a name of its own."""
        name = link.name if link.name.startswith("data") else link.client.name
        self._world.checker.troubled(name, self._timeline.now + ms * MS)

    def _fired(self, kind: str) -> None:
        self._world.fired(kind)
