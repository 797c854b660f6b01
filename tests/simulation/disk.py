"""The host's disk: what was committed survives a crash, what was not does not.

The supervisor's store is the real one, on a real SQLite file, with its thread replaced by the timeline: one piece of work after the
other, each taking the time of a sync. A crash before it is done loses it, a crash after it loses only the answer.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calculet_core.clock import MS, US
from calculet_supervisor.shell import store as store_module
from calculet_supervisor.shell.store import Memory, Store

if TYPE_CHECKING:
    from simulation.processes import Process

SYNC_NS = (500 * US, 12 * MS)
ANSWER_NS = 60 * US
SHARED_MEMORY = Path("/dev/shm")


class Disk:
    """Files of the host, in a folder that goes with the world."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        self.root = Path(self._folder.name)
        self.full = False

    def close(self) -> None:
        self._folder.cleanup()


class DiskThread:
    """Does one thing after the other for one process, and tells it."""

    def __init__(self, process: Process, disk: Disk) -> None:
        self._process, self._disk = process, disk
        self._rng = process.world.rng(f"disk {process.pid}")
        self._lane = process.timeline.lane(f"disk {process.pid}")
        self._free_ns = 0

    def begin(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        """In its turn."""
        now = self._process.timeline.now
        self._free_ns = max(self._free_ns, now) + self._rng.randrange(*SYNC_NS)
        self._later(self._free_ns - now, self._do, work, future)

    def _do(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        result: Any = None
        failed: Exception | None = None
        try:
            if self._disk.full:
                raise sqlite3.OperationalError("database or disk is full")
            result = work()
        except (sqlite3.Error, OSError) as error:
            failed = error
            self._process.world.saw("a commit failed: the disk is full")
        self._later(ANSWER_NS, self._answer, future, result, failed)

    def _later(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        self._process.timeline.put(self._lane, delay_ns, self._process.call, (work, *args))

    def _answer(self, future: asyncio.Future[Any], result: Any, failed: Exception | None) -> None:
        self._process.acted()
        if future.cancelled():
            return
        if failed is not None:
            future.set_exception(failed)
        else:
            future.set_result(result)


class VirtualStore(Store):
    """The real one; `look` shows what the disk holds to who judges."""

    def __init__(self, process: Process, disk: Disk, path: Path) -> None:
        self._disk_thread: Any = DiskThread(process, disk)
        super().__init__(store_module._open(path), self._disk_thread, path)
        self._process = process
        self._connected = True

    def read(self) -> Memory:
        """Everything, at a start."""
        return self.look(lambda store: store._recall())

    def look(self, work: Callable[[Store], Any]) -> Any:
        """At once."""
        with self._db:
            return work(self)

    def _spend(self, kind: str, board: str) -> None:
        super()._spend(kind, board)
        self._process.world.checker.saved(kind, board)

    def close(self) -> None:
        """The process's handle is gone; SQLite rolls back what was not committed."""
        if self._connected:
            self._connected = False
            self._db.close()
