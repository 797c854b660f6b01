"""The keeper's router: its listening socket is the keeper's, and a successor serves before it drains.

A restart refuses nobody: connections come to the socket, which outlives every router; who accepts them does not matter. When the
router is to be replaced another one is started beside it, under another name (a name stands for journal, log and metrics). Once
that is ready the first is told to end: it takes nobody new, and its streams finish. A successor that does not become ready is
ended, and the first goes on. Where the configuration names another address, the successor listens there, and the old one is closed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from calculet_core.errors import ConfigError
from calculet_core.ids import SUCCESSOR
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.listening import bind
from calculet_core.shell.sd_notify import KEPT
from calculet_core.shell.standing import load_or_held
from calculet_supervisor.shell.children import Child, Children, command_of
from calculet_supervisor.shell.watchdog import Watchdog

NAMES = ("router", f"router{SUCCESSOR}")
"""Who replaces whom."""
READY_S = 60.0
"""A successor that is not ready so long after its start is given up."""
END_S = 8.0
"""What an old router may take beyond its drain time-out, before SIGKILL."""
Failed = Callable[[int, str], None]
"""(pid of the router that stays, why)."""
log = logging.getLogger("calculet.keeper")


class Front:
    """One keeper's; `failed` hears of replacements that came to nothing."""

    def __init__(self, fleet: Fleet, children: Children, watchdog: Watchdog, failed: Failed) -> None:
        self._fleet, self._children, self._watchdog, self._failed = fleet, children, watchdog, failed
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._listen = ""
        self._next_socket: socket.socket | None = None
        self._next_listen = ""
        self._timer: asyncio.TimerHandle | None = None
        self._old: set[Child] = set()
        self.serving: Child | None = None
        self._successor: Child | None = None
        self._name = NAMES[0]

    @property
    def living(self) -> Iterator[Child]:
        """Every router that runs."""
        yield from (child for child in (self.serving, self._successor, *self._old) if child is not None)

    def start(self) -> Child:
        """The router that serves; at first, and again when it has died.

        Raises:
            OSError: it cannot be started.
        """
        fleet = self._read()
        if fleet.config.router.listen != self._listen:
            with suppress(OSError):  # the router itself says so, and ends with the exit code of that
                sock = bind(fleet.config.router.listen)
                self._take(sock, fleet.config.router.listen)
        self.serving = self._born(self._name, self._socket)
        return self.serving

    def replace(self, pid: int) -> None:
        """Put a successor in the place of the router `pid`; one that drains already, or is being replaced, is left to that."""
        serving = self.serving
        if serving is None or serving.pid != pid or self._successor is not None:
            return
        try:
            fleet = load_or_held(self._fleet.path, self._fleet.run_dir)
            self._next_listen = fleet.config.router.listen
            if self._next_listen != self._listen or self._socket is None:
                self._next_socket = bind(self._next_listen)
            name = NAMES[self._name == NAMES[0]]
            self._successor = self._born(name, self._next_socket or self._socket)
        except ConfigError as error:
            self._give_up(pid, str(error))
        except OSError as error:
            self._give_up(pid, f"{self._next_listen}: {error.strerror or error}")
        else:
            self._timer = self._loop.call_later(READY_S, self._too_late)

    def is_ready(self, pid: int) -> None:
        """A process says that it serves."""
        if self._successor is not None and self._successor.pid == pid:
            self._promote()

    def ended(self, child: Child, words: str) -> bool:
        """A router has ended, as `words` say; whether the keeper has to start one again."""
        if child is self._successor:
            self._successor = None
            self._give_up(self.serving.pid if self.serving is not None else 0, f"its successor ended ({words})")
            return False
        if child is self.serving:
            self.serving = None
            if self._successor is not None:  # it was about to be replaced anyway
                self._promote()
                return False
            return True
        self._old.discard(child)
        return False

    def refuse(self) -> None:
        """From now on whoever connects is refused, once the routers have closed theirs, too."""
        self._close_next()
        if self._socket is not None:
            self._socket.close()
            self._socket, self._listen = None, ""

    # ---------------------------------------------------------------- a replacement
    def _born(self, name: str, sock: socket.socket | None) -> Child:
        fds = () if sock is None else (sock.fileno(),)
        kept = {} if sock is None else {KEPT: str(sock.fileno())}
        command = command_of("calculet_router", self._fleet.path, "--name", name)
        child = self._children.start(name, name, command, fds, {**kept, **self._watchdog.environment})
        self._watchdog.watch(child.pid)
        return child

    def _promote(self) -> None:
        """The successor serves; who served before drains and ends."""
        old, self.serving, self._successor = self.serving, self._successor, None
        assert self.serving is not None
        self._name = self.serving.name
        self._stop_waiting()
        if self._next_socket is not None:
            sock, self._next_socket = self._next_socket, None
            self._take(sock, self._next_listen)
        fleet = self._read()
        if old is not None:
            self._old.add(old)
            old.signal(signal.SIGTERM)
            self._loop.call_later(fleet.config.router.drain_timeout_s + END_S, self._kill, old)

    def _kill(self, old: Child) -> None:
        if old in self._old:
            old.signal(signal.SIGKILL, group=True)

    def _too_late(self) -> None:
        if self._successor is not None:
            log.error("the router's successor is not ready within %g s (log: %s)", READY_S, self._successor.log)
            self._successor.signal(signal.SIGKILL, group=True)

    def _give_up(self, pid: int, why: str) -> None:
        self._stop_waiting()
        self._close_next()
        self._failed(pid, why)

    def _close_next(self) -> None:
        if self._next_socket is not None:
            self._next_socket.close()
            self._next_socket = None

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self, sock: socket.socket, listen: str) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._listen = sock, listen

    def _read(self) -> Fleet:
        """As the file says now, or as was in force; a wrong one at the first start is the router's to refuse."""
        try:
            return load_or_held(self._fleet.path, self._fleet.run_dir)
        except ConfigError:
            return self._fleet
