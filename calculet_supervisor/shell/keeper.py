"""The development keeper, `calculet up`: it anchors the lives of router, supervisor and workers, and decides nothing about boards.

It starts router and supervisor and starts them again when they die; workers it starts on the supervisor's word, which comes over
its socket. All are its children, so that it sees every exit at once; all hold the death pipe, so that they end however it ends.
A service that lives and does nothing is ended and started again (`watchdog`). Told to stop, it ends the router first (clients are
told), then the workers, then the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgpack

from calculet_core.budgets import Backoff
from calculet_core.clock import MS
from calculet_core.errors import ExitCode
from calculet_core.shell.control_client import pack, unpacker
from calculet_core.shell.doors import serve_unix
from calculet_core.shell.files import FileLock, LockHeld
from calculet_core.shell.fleet import STANDING, Fleet
from calculet_core.shell.stacks import DUMP
from calculet_core.shell.standing import VARIABLE as RUN_DIR
from calculet_supervisor.shell.children import Child, Children, Ended, command_of
from calculet_supervisor.shell.fork_server import ForkServer
from calculet_supervisor.shell.front import Front
from calculet_supervisor.shell.watchdog import Watchdog
from calculet_supervisor.shell.watching import Watch

SERVICES = ("router", "supervisor")
BACKOFF = Backoff(100 * MS, 10_000 * MS)
STABLE_S = 30.0
"""A service that lived so long starts its back-off anew."""
CONFIG_GLANCE_S = 0.5
CONFIG_RETRY_S = 30.0
"""A service that ended with a configuration error after the start is tried again so much later, or when the file was changed."""
PREDECESSOR_S = 10.0
"""How long the processes of a killed keeper may take to end."""
STOP_GRACE_S = 8.0
"""What a stop may take beyond the drain deadline, before SIGKILL."""
ABORT_S = 1.0
"""How long one that hangs may take to write its stacks."""
CHUNK_BYTES = 65_536
SIGNALS: dict[str, tuple[signal.Signals, bool]] = {
    "stop": (signal.SIGTERM, False),
    "dump": (DUMP, False),
    "abort": (signal.SIGABRT, False),
    "kill": (signal.SIGKILL, True),
}
"""Verb -> signal, and whether the whole group gets it."""
log = logging.getLogger("calculet.keeper")


class AlreadyRuns(Exception):
    """Another keeper has this fleet."""


class Keeper:
    """One fleet's keeper; `run` returns the exit code of `calculet up`. `say` and `complain` print for people."""

    def __init__(self, fleet: Fleet, say: Callable[[str], None], complain: Callable[[str], None]) -> None:
        self._fleet, self._complain = fleet, complain
        self._lock = take_over(fleet)
        self._children = Children(fleet.log_dir, {RUN_DIR: str(fleet.run_dir)})
        self._services: dict[str, Child] = {}
        self._workers: dict[str, Child] = {}
        self._forks = ForkServer(fleet, self._children)
        self._starting: set[str] = set()
        """Boards whose worker is asked for and has no process yet."""
        self._stamps: dict[str, tuple[int, int] | None] = dict.fromkeys(SERVICES)
        """The configuration's file as each service found it, or an older one."""
        self._failures = dict.fromkeys(SERVICES, 0)
        self._rng = random.Random()
        self._supervisor: asyncio.StreamWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._watch = Watch(fleet, say, complain, self._end)
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._changed = asyncio.Event()
        self._stopping = self._hurry = False
        self._watchdog = Watchdog(fleet.config.supervision.service_timeout_ms / 1000, self._silent, on_ready=self._is_ready)
        self._front = Front(fleet, self._children, self._watchdog, self._not_replaced)

    async def run(self) -> int:
        """Serve until a signal, or until the start proves to be hopeless."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._asked_to_stop)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        server = await serve_unix(self._fleet.keeper_socket, self._converse)
        self._forks.open()
        for name in SERVICES:
            self._start_service(name)
        try:
            return await self._ended
        finally:
            self._watch.close()
            self._watchdog.close()
            await self._stop_everything()
            server.close()
            self._children.close()
            sweep(self._fleet)
            with suppress(OSError):
                self._fleet.run_dir.rmdir()
            self._lock.release()

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def _asked_to_stop(self) -> None:
        """The first signal drains, the second kills."""
        self._hurry = self._ended.done()
        self._changed.set()
        self._end(ExitCode.OK)

    # ---------------------------------------------------------------- router and supervisor
    def _start_service(self, name: str) -> None:
        if self._stopping:
            return
        self._stamps[name] = self._stamp()
        try:
            if name == "router":
                self._front.start()
                return
            command = command_of(f"calculet_{name}", self._fleet.path)
            child = self._children.start(name, name, command, variables=self._watchdog.environment)
        except OSError as error:
            self._complain(f"the {name} cannot be started: {error}")
            self._loop.call_later(CONFIG_RETRY_S, self._start_service, name)
            return
        self._services[name] = child
        self._watchdog.watch(child.pid)

    def _silent(self, pid: int) -> None:
        """It lives and does nothing: SIGABRT lets it write where it is, SIGKILL ends one that does not even do that."""
        child = next((child for child in (*self._services.values(), *self._front.living) if child.pid == pid), None)
        if child is None or self._stopping:
            return
        limit_s = self._fleet.config.supervision.service_timeout_ms / 1000
        self._complain(f"the {child.name} (pid {pid}) hangs: it said nothing for {limit_s:g} s, and is ended (log: {child.log})")
        child.signal(signal.SIGABRT)
        self._loop.call_later(ABORT_S, self._kill, child)

    def _kill(self, child: Child) -> None:
        if self._services.get(child.name) is child or child in self._front.living:
            child.signal(signal.SIGKILL, group=True)

    def _is_ready(self, pid: int) -> None:
        if not self._stopping:
            self._front.is_ready(pid)

    def _router_ended(self, child: Child, how: Ended) -> None:
        self._watchdog.forget(child.pid)
        serves = child is self._front.serving
        self._changed.set()
        if self._front.ended(child, _words(child, how)):
            self._service_ended("router", child, how)
        elif serves:
            self._complain(f"the router ended ({_words(child, how)}); its successor serves (log: {child.log})")

    def _not_replaced(self, pid: int, why: str) -> None:
        if self._stopping:
            return
        self._complain(f"the router is not replaced and goes on: {why}")
        self._tell(router_stays=pid, reason=why)

    def _service_ended(self, name: str, child: Child, how: Ended) -> None:
        words = _words(child, how)
        self._watchdog.forget(child.pid)
        self._services.pop(name, None)
        self._changed.set()
        if self._stopping:
            return
        if how.code == ExitCode.CONFIG:
            self._complain(f"the {name} cannot start: {child.last_words()}")
            if not self._watch.ready:
                self._end(ExitCode.CONFIG)
                return
            self._start_when_mended(name, self._stamps[name], self._loop.time() + CONFIG_RETRY_S)
            return
        lived_s = time.monotonic() - child.started_s
        self._failures[name] = 1 if lived_s > STABLE_S else self._failures[name] + 1
        delay_s = BACKOFF.delay_ns(self._failures[name], self._rng) / 1e9
        self._complain(f"the {name} ended ({words}); it starts again (log: {child.log})")
        self._loop.call_later(delay_s, self._start_service, name)

    def _start_when_mended(self, name: str, seen: tuple[int, int] | None, until_s: float) -> None:
        """Once the configuration's file is another one; or after a while, since it may be about a file that it names."""
        if self._stamp() != seen or self._loop.time() >= until_s:
            self._start_service(name)
        else:
            self._loop.call_later(CONFIG_GLANCE_S, self._start_when_mended, name, seen, until_s)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._fleet.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    # ---------------------------------------------------------------- workers, on the supervisor's word
    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._supervisor, incoming = writer, unpacker()
        try:
            while data := await reader.read(CHUNK_BYTES):
                incoming.feed(data)
                for message in incoming:
                    try:
                        self._obey(message)
                    except Exception:  # the supervisor would take a closed connection for the keeper's end
                        log.exception("what the supervisor said was not done: %s", message)
        except (msgpack.UnpackException, msgpack.BufferFull, ValueError) as error:
            log.error("the supervisor's connection is closed: not a message: %s", error)
        except ConnectionError:
            pass
        finally:
            if self._supervisor is writer:
                self._supervisor = None
            writer.close()

    def _obey(self, message: dict[str, Any]) -> None:
        verb = message["verb"]
        if self._stopping and verb in ("start", "tell"):
            return  # the supervisor sees its workers go, and would have them back
        if verb == "list":
            self._tell(listed={board: child.pid for board, child in self._workers.items()})
        elif verb == "tell":
            self._watch.see(message["boards"])
        elif verb == "start":
            self._start_worker(message["board"])
        elif verb == "replace":
            if not self._stopping:
                self._front.replace(message["router"])
        elif (child := self._workers.get(message["board"])) is not None:
            number, group = SIGNALS[verb]
            child.signal(number, group=group)

    def _start_worker(self, board: str) -> None:
        if board in self._workers:
            self._tell(started=board, pid=self._workers[board].pid)
            return
        if board not in self._starting:
            self._starting.add(board)
            self._forks.start(board, lambda found: self._worker_started(board, found))

    def _worker_started(self, board: str, found: Child | OSError) -> None:
        self._starting.discard(board)
        if isinstance(found, OSError):
            self._tell(exited=board, code=None, signal=None, reason=f"it cannot be started: {found}")
            return
        self._workers[board] = found
        if self._stopping:  # it was asked for before; the others have been told already
            found.signal(signal.SIGTERM)
        self._tell(started=board, pid=found.pid)

    def _tell(self, **message: Any) -> None:
        if self._supervisor is not None:
            self._supervisor.write(pack(message))

    def _reap(self) -> None:
        for child, how in self._children.reap():
            if child in self._front.living:
                self._router_ended(child, how)
            elif child.name in SERVICES and self._services.get(child.name) is child:
                self._service_ended(child.name, child, how)
            elif self._forks.ended(child, how):
                self._changed.set()
            elif self._workers.get(child.name) is child:
                del self._workers[child.name]
                self._changed.set()
                reason = child.last_words() if how.code else None
                self._tell(exited=child.name, code=how.code, signal=how.signal, reason=reason)

    # ---------------------------------------------------------------- the end
    async def _stop_everything(self) -> None:
        """Router, workers, supervisor: each gets SIGTERM and its drain time, then SIGKILL."""
        self._stopping = True
        config = self._fleet.config
        drain_s = config.supervision.drain_timeout_ms / 1000
        self._forks.close()
        self._front.refuse()
        await self._stop(lambda: list(self._front.living), config.router.drain_timeout_s + STOP_GRACE_S)
        await self._stop(lambda: list(self._workers.values()), drain_s + STOP_GRACE_S)
        await self._stop(lambda: self._named("supervisor"), STOP_GRACE_S)
        await self._stop(lambda: self._forks.living, STOP_GRACE_S)

    def _named(self, name: str) -> list[Child]:
        return [self._services[name]] if name in self._services else []

    async def _stop(self, living: Callable[[], Iterable[Child]], limit_s: float) -> None:
        for child in living():
            child.signal(signal.SIGTERM)
        deadline_s = self._loop.time() + limit_s
        while left := list(living()):
            wait_s = deadline_s - self._loop.time()
            if wait_s <= 0 or self._hurry:
                for child in left:
                    self._complain(f"{child.name} did not end in time and is killed (log: {child.log})")
                    child.signal(signal.SIGKILL, group=True)
                wait_s = STOP_GRACE_S
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue


def take_over(fleet: Fleet) -> FileLock:
    """The fleet's keeper lock, once the processes of a predecessor that was killed have ended; its sockets are swept.

    Raises:
        AlreadyRuns: another keeper lives.
    """
    try:
        lock = FileLock(fleet.state_dir / "keeper.lock")
    except LockHeld as error:
        raise AlreadyRuns(f"this fleet runs already: {error}") from None
    deadline_s = time.monotonic() + PREDECESSOR_S
    while True:
        try:
            FileLock(fleet.supervisor_lock).release()
            break
        except LockHeld as error:
            if time.monotonic() > deadline_s:
                what = "a supervisor runs without `calculet up`, or one of a killed `calculet up` does not end (kill -9 it)"
                raise AlreadyRuns(f"{what}: {error}") from None
            time.sleep(0.05)
    sweep(fleet)
    fleet.fleet_view.unlink(missing_ok=True)  # it tells of workers that are no more
    return lock


def sweep(fleet: Fleet) -> None:
    """Remove what processes that are no more have left in the run folder: sockets, exit classes, ledgers, what was in force."""
    for pattern in ("*.sock", "exit-*.json", "limits-*", STANDING):
        for path in fleet.run_dir.glob(pattern):
            path.unlink(missing_ok=True)


def _words(child: Child, how: Ended) -> str:
    if how.signal is not None:
        return f"killed by signal {how.signal}"
    return f"exit {how.code}: {child.last_words()}" if how.code else f"exit {how.code}"
