"""`chaos`: a fault that an administrator orders on the running fleet (`calculet_core.chaos`).

An order is checked, committed to the audit log, and then carried: signals, the stolen lock and faults of the supervisor itself
here, the others by the worker or router that they are about. There is no other way to a fault: not by a request, not by a file, and
not at all without `chaos.enabled` in the configuration that this supervisor started with.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core import history, wire
from calculet_core.chaos import (
    AnyFault,
    FreezeWorker,
    FullDisk,
    KillRouter,
    KillSupervisor,
    KillWorker,
    NoDescriptors,
    StealLock,
    TroubleFrames,
    lasts_s,
    name_of,
    needs_board,
    words,
)
from calculet_core.clock import S
from calculet_core.shell.chaos import Carrier, die
from calculet_core.shell.files import FileLock, LockHeld
from calculet_core.shell.journal import Journal
from calculet_supervisor.shell.control import Caller, Refused, Verb
from calculet_supervisor.shell.store import Act
from calculet_supervisor.world import NOTHING_SEEN, Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

ANSWER_FIRST_S = 0.05
"""From the answer to the supervisor's own death."""
STEAL_LOOK_S = 0.002
STEAL_TRY_S = 3.0
"""How long a stolen lock is tried for; the worker's successor takes longer to start."""
MAX_ORDER_NAME = 64


class ChaosVerbs:
    """The verb of one supervisor."""

    def __init__(self, supervisor: Supervisor, journal: Journal) -> None:
        self._supervisor, self._allowed = supervisor, supervisor.fleet.config.chaos
        self._carrier = Carrier("supervisor", journal) if self._allowed.enabled else None
        self._carry: dict[type[Any], Callable[[str, Any, str | None], dict[str, Any]]] = {
            KillWorker: self._kill_worker,
            FreezeWorker: self._freeze_worker,
            KillRouter: self._kill_router,
            KillSupervisor: self._kill_supervisor,
            TroubleFrames: self._to_worker,
            FullDisk: self._starve,
            NoDescriptors: self._starve,
            StealLock: self._steal_lock,
        }

    def table(self) -> dict[str, Verb]:
        """Verb -> what it does."""
        return {"chaos": self.chaos}

    async def chaos(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Carry `fault`, called `order` in journals, on `board` where it is about one."""
        order, fault, board = self._parse(arguments)
        detail = f"{words(fault)} (order {order})"
        try:
            await self._supervisor.store.record(Act("chaos", board, caller.uid, caller.pid, detail))
        except (sqlite3.Error, OSError) as error:
            raise Refused(f"chaos {detail} could not be saved and was not done: {error}", "is the disk full?") from None
        data = {"verb": "chaos", "uid": caller.uid, "by_pid": caller.pid, "detail": detail}
        self._supervisor.note(Note(history.FLEET_ADMIN, board or "-", data=data))
        self._supervisor.chaos_ordered(name_of(fault))
        return {"order": order, "board": board, **self._carry[type(fault)](order, fault, board)}

    def _parse(self, arguments: Mapping[str, Any]) -> tuple[str, AnyFault, str | None]:
        supervisor = self._supervisor
        if self._carrier is None:
            hint = f"`chaos: {{enabled: true}}` in {supervisor.fleet.path} does, in a fleet that is there to be broken"
            raise Refused("this fleet does not allow chaos", hint)
        order, board = arguments.get("order"), arguments.get("board")
        if not isinstance(order, str) or not 0 < len(order) <= MAX_ORDER_NAME:
            raise Refused(f"$.order: a name of at most {MAX_ORDER_NAME} characters is needed")
        try:
            fault: AnyFault = msgspec.convert(arguments.get("fault"), AnyFault)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            raise Refused(f"$.fault{path.rstrip('`')}: {message}") from None
        if lasts_s(fault) > self._allowed.max_fault_s:
            raise Refused(f"$.fault.for_s: {lasts_s(fault):g} is above chaos.max_fault_s ({self._allowed.max_fault_s:g})")
        if not needs_board(fault):
            return order, fault, None
        if board not in supervisor.boards:
            raise Refused(f"there is no board {board!r}", f"boards: {', '.join(supervisor.boards)}")
        return order, fault, str(board)

    # ---------------------------------------------------------------- what is carried elsewhere
    def _to_worker(self, order: str, fault: AnyFault, board: str | None) -> dict[str, Any]:
        assert board is not None
        pid = self._pid(board)
        if not self._supervisor.send(board, self._disturb(order, fault)):
            raise Refused(f"{board}: its worker is not connected", "ask again when `calculet status` shows it READY")
        return {"pid": pid, "carried_by": f"worker-{board}"}

    def _to_router(self, order: str, fault: AnyFault) -> dict[str, Any]:
        identity, pid = self._router()
        if not self._supervisor.send_to(identity, self._disturb(order, fault)):
            raise Refused("the router is not connected", "ask again")
        return {"pid": pid, "carried_by": "router"}

    def _disturb(self, order: str, fault: AnyFault) -> wire.Disturb:
        return wire.Disturb(order, fault, time.monotonic_ns() + int(lasts_s(fault) * S))

    def _starve(self, order: str, fault: FullDisk | NoDescriptors, board: str | None) -> dict[str, Any]:
        if fault.process == "worker":
            return self._to_worker(order, fault, board)
        if fault.process == "router":
            return self._to_router(order, fault)
        assert self._carrier is not None
        # Its answer goes out first: with no descriptors left nobody could ask again.
        asyncio.get_running_loop().call_later(ANSWER_FIRST_S, self._carrier.take, self._disturb(order, fault))
        return {"pid": os.getpid(), "carried_by": "supervisor"}

    # ---------------------------------------------------------------- what is carried here
    def _kill_worker(self, order: str, fault: KillWorker, board: str | None) -> dict[str, Any]:
        if fault.phase is not None:
            return self._to_worker(order, fault, board)
        assert board is not None
        return {"pid": self._signal(self._pid(board), signal.SIGKILL, order, fault, board), "carried_by": "supervisor"}

    def _freeze_worker(self, order: str, fault: FreezeWorker, board: str | None) -> dict[str, Any]:
        assert board is not None and self._carrier is not None
        pid = self._pid(board)
        handle = _open(pid)

        def thaw() -> None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)
            self._told().healed(order, fault, board=board)

        if self._carrier.begin(self._disturb(order, fault), f"freeze {board}", thaw):
            self._carrier.fired(order, fault, board=board, pid=pid)
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
        return {"pid": pid, "carried_by": "supervisor"}

    def _kill_router(self, order: str, fault: KillRouter, board: str | None) -> dict[str, Any]:
        _, pid = self._router()
        return {"pid": self._signal(pid, signal.SIGKILL, order, fault, None), "carried_by": "supervisor"}

    def _kill_supervisor(self, order: str, fault: KillSupervisor, board: str | None) -> dict[str, Any]:
        self._told().fired(order, fault)
        asyncio.get_running_loop().call_later(ANSWER_FIRST_S, die)
        return {"pid": os.getpid(), "carried_by": "supervisor"}

    def _steal_lock(self, order: str, fault: StealLock, board: str | None) -> dict[str, Any]:
        assert board is not None
        pid = self._pid(board)
        handle = _open(pid)
        self._supervisor.begin(self._steal(order, fault, board, handle))
        return {"pid": pid, "carried_by": "supervisor"}

    async def _steal(self, order: str, fault: StealLock, board: str, handle: int) -> None:
        """Kill the worker and be faster than its successor; the lock is this process's, and goes with it."""
        told, path = self._told(), self._supervisor.fleet.board_lock(board)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)
        end = time.monotonic() + STEAL_TRY_S
        while True:
            try:
                lock = FileLock(path)
                break
            except LockHeld:
                if time.monotonic() > end:
                    return
                await asyncio.sleep(STEAL_LOOK_S)

        def give_back() -> None:
            lock.release()
            told.healed(order, fault, board=board)

        told.fired(order, fault, board=board)
        if not told.begin(self._disturb(order, fault), f"lock {board}", give_back):
            lock.release()

    # ---------------------------------------------------------------- small parts
    def _told(self) -> Carrier:
        assert self._carrier is not None
        return self._carrier

    def _pid(self, board: str) -> int:
        pid = self._supervisor.sightings.boards.get(board, NOTHING_SEEN).pid
        if pid is None:
            raise Refused(f"{board} has no living worker", "ask again when `calculet status` shows it READY")
        return pid

    def _router(self) -> tuple[bytes, int]:
        """(identity, pid) of the router with the most in flight."""
        seen = self._supervisor.sightings.routers
        if not seen:
            raise Refused("no router has reported lately", "ask again")
        identity = max(seen, key=lambda one: (seen[one].report.inflight, one))
        return identity, seen[identity].report.pid

    def _signal(self, pid: int, number: signal.Signals, order: str, fault: AnyFault, board: str | None) -> int:
        handle = _open(pid)
        try:
            self._told().fired(order, fault, **({"board": board} if board else {}), pid=pid)
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            raise Refused(f"pid {pid} has just gone", "ask again") from None
        finally:
            os.close(handle)
        return pid


def _open(pid: int) -> int:
    """A pidfd: whatever is signalled through it is this process and no later one of its number."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise Refused(f"pid {pid}: {error.strerror}", "ask again") from None
