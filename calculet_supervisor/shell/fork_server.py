"""The keeper's side of its fork server (`calculet-worker fork-server`): workers that start in milliseconds.

It is an advantage, never a need: where it cannot be had, does not answer in time or has died, a worker is started as any other
process; one that hangs is killed and started again. Whoever is asked for is started exactly once, since a forked worker begins
only with the keeper's go-ahead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from calculet_core.shell.fleet import Fleet
from calculet_supervisor.shell.children import Child, Children, Ended, command_of

NAME = "fork-server"
ANSWER_S = 5.0
"""How long a worker may take to be forked, the server's own start included, before it is started without it."""
STABLE_S = 30.0
RETRY_S = 5.0
MAX_FAILURES = 3
"""A server that ended so often soon after its start is not tried again: this installation's worker knows no such command."""
MESSAGE_BYTES = 65_536
Started = Callable[[Child | OSError], None]
log = logging.getLogger("calculet.keeper")


@dataclass(slots=True)
class _Asked:
    board: str
    started: Started
    output: int
    go_ahead: int
    """The write end of the pipe at which the forked worker waits."""
    log_start: int
    timer: asyncio.TimerHandle


class ForkServer:
    """Starts workers by the server while there is one, else directly. Belongs to the keeper's loop."""

    def __init__(self, fleet: Fleet, children: Children) -> None:
        self._fleet, self._children = fleet, children
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._child: Child | None = None
        self._asked: dict[int, _Asked] = {}
        self._number = self._failures = 0
        self._is_ready = False
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def living(self) -> list[Child]:
        """The server's process, while it lives."""
        return [] if self._child is None else [self._child]

    # ---------------------------------------------------------------- the server's life
    def open(self) -> None:
        """Start the server; without one workers start directly."""
        self._retry = None
        if self._closed or self._child is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        devices = ",".join(sorted({board.device for board in self._fleet.config.boards}))
        command = [sys.executable, "-m", "calculet_worker", "fork-server"]
        command += ["--socket", str(theirs.fileno()), "--devices", devices]
        try:
            self._child = self._children.start(NAME, NAME, command, (theirs.fileno(),))
        except OSError as error:
            log.warning("no fork server: %s", error)
            ours.close()
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._loop.add_reader(ours, self._readable)

    def ended(self, child: Child, how: Ended) -> bool:
        """Whether the child that ended was the server. Whoever waits for it is started directly."""
        if child is not self._child:
            return False
        self._child, self._is_ready = None, False
        self._hang_up()
        self._failures = 1 if time.monotonic() - child.started_s > STABLE_S else self._failures + 1
        if not self._closed:
            log.warning("the fork server ended (code %s, signal %s): workers start without it", how.code, how.signal)
            if self._failures < MAX_FAILURES:
                self._retry = self._loop.call_later(RETRY_S * (self._failures - 1), self.open)
        for number in list(self._asked):
            self._give_up(number)
        return True

    def close(self) -> None:
        """The server ends by itself when its keeper hangs up. Whoever still waits for a worker gets none."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._hang_up()
        for number in list(self._asked):
            self._drop(number)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    # ---------------------------------------------------------------- workers
    def start(self, board: str, started: Started) -> None:
        """Start the worker of a board; `started` is called once, with the child or with what was wrong."""
        if self._socket is None:
            self._directly(board, started)
            return
        self._number += 1
        number, server = self._number, self._socket
        output, log_start = self._children.open_log(_log_name(board))
        waiting, go_ahead = os.pipe2(os.O_CLOEXEC)
        message = msgpack.packb({"number": number, "command": self._command(board)})
        timer = self._loop.call_later(ANSWER_S, self._too_late, number)
        self._asked[number] = _Asked(board, started, output, go_ahead, log_start, timer)
        try:
            socket.send_fds(server, [message], [output, self._children.death_pipe, waiting])
        except OSError as error:
            log.warning("the fork server cannot be asked: %s", error)
            self._give_up(number)
        finally:
            os.close(waiting)

    def _directly(self, board: str, started: Started) -> None:
        try:
            started(self._children.start(board, _log_name(board), self._command(board)))
        except OSError as error:
            started(error)

    def _command(self, board: str) -> list[str]:
        return command_of("calculet_worker", self._fleet.path, "--board", board)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it ends; its exit tells the rest
            self._hang_up()
            return
        answer = msgpack.unpackb(data)
        if "ready" in answer:
            self._is_ready = True
            return
        number = answer["number"]
        if number not in self._asked:
            return  # it was too late, and the worker that it tells of ended unborn
        if "pid" not in answer:
            log.warning("the fork server made no worker: %s", answer["error"])
            self._give_up(number)
            return
        asked = self._asked.pop(number)
        found: Child | OSError
        try:
            found = self._children.adopt(asked.board, _log_name(asked.board), answer["pid"], asked.log_start)
            os.write(asked.go_ahead, b"g")
        except ChildProcessError:
            found = OSError("its process was killed before it began")
        except BrokenPipeError:
            pass  # killed as well; its exit will be seen
        self._free(asked)
        asked.started(found)

    def _too_late(self, number: int) -> None:
        log.warning("the fork server does not answer: the worker of %s starts without it", self._asked[number].board)
        self._give_up(number)
        if self._is_ready and self._child is not None:  # it hangs; one that still loads is let load
            self._child.signal(signal.SIGKILL)

    def _give_up(self, number: int) -> None:
        """Without its go-ahead a worker that was forked after all ends; one that begins is started directly."""
        asked = self._drop(number)
        self._directly(asked.board, asked.started)

    def _drop(self, number: int) -> _Asked:
        asked = self._asked.pop(number)
        self._free(asked)
        return asked

    @staticmethod
    def _free(asked: _Asked) -> None:
        asked.timer.cancel()
        os.close(asked.go_ahead)
        os.close(asked.output)


def _log_name(board: str) -> str:
    return f"worker-{board}"
