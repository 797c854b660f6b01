"""The host's disk: what was committed survives a crash, what was not does not.

The supervisor's store is the real one, on a real SQLite file, with its thread replaced by the timeline: one transaction after the
other, each taking the time of a sync. A crash before the commit loses it, a crash after it loses only the answer.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core.clock import MS, US
from calculet_core.wire import FleetView
from calculet_supervisor.shell import store as store_module
from calculet_supervisor.shell.store import Memory, Store

if TYPE_CHECKING:
    from simulation.processes import Process
    from simulation.timeline import Timeline

SYNC_NS = (500 * US, 12 * MS)
ANSWER_NS = 60 * US
SHARED_MEMORY = Path("/dev/shm")


class Disk:
    """Files of the host."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        self.database = Path(self._folder.name) / "supervisor.sqlite"
        self.file: bytes | None = None
        """The fleet-view file."""
        self.epochs: dict[str, int] = {}
        self.full = False

    def close(self) -> None:
        self._folder.cleanup()


class Later:
    """Something that a coroutine waits for."""

    def __init__(self, start: Callable[[Callable[[Any, BaseException | None], None]], None]) -> None:
        self.start = start

    def __await__(self) -> Generator[Later, Any, Any]:
        return (yield self)


def run(process: Process, work: Coroutine[Any, Any, Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Let a process's coroutine run, from one wait to the next; it ends with the process."""

    def step(value: Any, error: BaseException | None) -> None:
        try:
            waits: Later = work.send(value) if error is None else work.throw(error)
        except StopIteration as end:
            done(end.value, None)
        except Exception as failed:
            done(None, failed)
        else:
            waits.start(step)

    step(None, None)


class VirtualStore(Store):
    """The real statements, committed in virtual time."""

    def __init__(self, process: Process, disk: Disk) -> None:
        super().__init__(_with_clock(process.timeline, lambda: store_module._open(disk.database)), None)  # type: ignore[arg-type]
        self._process, self._disk = process, disk
        self._rng = process.world.rng(f"disk {process.pid}")
        self._free_ns = 0
        self._connected = True

    def read(self) -> Memory:
        """Everything, at a start."""
        return self._transact(self._recall)

    def look(self, work: Callable[[Store], Any]) -> Any:
        """What the disk holds, at once."""
        return self._transact(lambda: work(self))

    def _spend(self, kind: str, board: str) -> None:
        super()._spend(kind, board)
        self._process.world.checker.saved(kind, board)

    async def publish(self, view: FleetView, at_least: int, file: Path) -> FleetView:
        published = await self._do(lambda: self._publish(view, at_least))
        await self._do(lambda: self._write_file(msgspec.json.encode(published)))
        return published

    def close(self) -> None:
        """The process's handle is gone; SQLite rolls back what was not committed."""
        if self._connected:
            self._connected = False
            self._db.close()

    async def _do(self, work: Callable[[], Any]) -> Any:
        return await Later(lambda done: self._begin(work, done))

    def _begin(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        now = self._process.timeline.now
        self._free_ns = max(self._free_ns, now) + self._rng.randrange(*SYNC_NS)
        self._process.later(self._free_ns - now, self._commit, work, done)

    def _commit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        result, failed = None, None
        try:
            if self._disk.full:
                raise sqlite3.OperationalError("database or disk is full")
            result = self._transact(work)
        except sqlite3.Error as error:
            failed = error
            self._process.world.saw("a commit failed: the disk is full")
        self._process.later(ANSWER_NS, self._answer, done, result, failed)

    def _answer(self, done: Callable[[Any, BaseException | None], None], result: Any, failed: BaseException | None) -> None:
        self._process.acted()
        done(result, failed)

    def _transact(self, work: Callable[[], Any]) -> Any:
        def transaction() -> Any:
            with self._db:
                return work()

        return _with_clock(self._process.timeline, transaction)

    def _write_file(self, content: bytes) -> None:
        self._disk.file = content


def _with_clock(timeline: Timeline, work: Callable[[], Any]) -> Any:
    """The store asks the module `time`: for so long it is the timeline."""
    real, store_module.time = store_module.time, timeline  # type: ignore[assignment]
    try:
        return work()
    finally:
        store_module.time = real
