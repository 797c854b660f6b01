"""A launcher that starts a worker only on a board whose lock is free.

A lock goes with its process, however that ends. If one is still held after the supervisor has seen the end of the worker, somebody
else has the board: a process that the kernel cannot end (stuck in a driver), or one that was started by hand. To start another
would only end in exit 75; it is waited for a little, then told as that, with the holder's name.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from calculet_core.errors import ExitCode
from calculet_core.shell.files import lock_holder
from calculet_core.shell.fleet import Fleet
from calculet_supervisor.shell.launchers import Events, Launcher
from calculet_supervisor.world import Exit

WAIT_S = 5.0
LOOK_S = 0.1
log = logging.getLogger("calculet.supervisor")


class LockChecked:
    """Wraps another launcher."""

    def __init__(self, inner: Launcher, fleet: Fleet, events: Events) -> None:
        self.inner, self._fleet, self._events = inner, fleet, events
        self._waiting: dict[str, asyncio.TimerHandle] = {}

    async def list(self) -> dict[str, int]:
        return await self.inner.list()

    def start(self, board: str) -> None:
        if board not in self._waiting:
            self._try(board, asyncio.get_running_loop().time() + WAIT_S)

    def stop(self, board: str) -> None:
        self.inner.stop(board)

    def dump(self, board: str) -> None:
        self.inner.dump(board)

    def abort(self, board: str) -> None:
        self.inner.abort(board)

    def kill(self, board: str) -> None:
        self.inner.kill(board)

    def tell(self, boards: dict[str, Any]) -> None:
        self.inner.tell(boards)

    def replace_router(self, pid: int) -> bool:
        return self.inner.replace_router(pid)

    def close(self) -> None:
        for handle in self._waiting.values():
            handle.cancel()
        self.inner.close()

    def _try(self, board: str, deadline_s: float) -> None:
        self._waiting.pop(board, None)
        loop = asyncio.get_running_loop()
        try:
            holder = lock_holder(self._fleet.board_lock(board))
        except OSError as error:  # the worker itself will say so, with its exit class
            log.error("board %s: its lock cannot be looked at: %s", board, error)
            holder = None
        if holder is None:
            self.inner.start(board)
        elif loop.time() < deadline_s:
            self._waiting[board] = loop.call_later(LOOK_S, self._try, board, deadline_s)
        else:
            reason = f"{self._fleet.board_lock(board)} is held by another process (pid {holder}) for {WAIT_S:g} s now"
            self._events.exited(board, Exit(ExitCode.BOARD_UNAVAILABLE, None, reason))
