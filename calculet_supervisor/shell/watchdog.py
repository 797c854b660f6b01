"""`calculet up` watches router and supervisor as systemd does: they tell `WATCHDOG=1` while their event loops turn, and one that
has fallen silent is ended and started again. A process that dies is seen by its exit; this is for one that lives and does nothing.

The protocol is sd_notify(3) over a socket of the abstract namespace, so that there is no file to lose. Whoever sends is known by
the process id that the kernel puts beside the message. A service is watched from its first word on: what it does before is a start.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable

CHECK_S = 0.5
STALL_S = 2.0
"""Between two checks: longer, and this process did not run itself; then nobody's silence means anything."""
MESSAGE_BYTES = 4096
CREDENTIALS = struct.Struct("3i")
log = logging.getLogger("calculet.keeper")


class Watchdog:
    """Belongs to the keeper's loop. `on_silent` is called once with the pid of each process that was silent for `limit_s`."""

    def __init__(self, limit_s: float, on_silent: Callable[[int], None], now: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._on_silent, self._now = limit_s, on_silent, now
        self.on_ready: Callable[[int], None] | None = None
        """Told the pid of each process that says `READY=1`."""
        self._heard: dict[int, float] = {}
        self._wanted: set[int] = set()
        self._checked_s = now()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # Linux picks a free name of the abstract namespace
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self.listen)
        self._timer = self._loop.call_later(CHECK_S, self._tick)

    @property
    def environment(self) -> dict[str, str]:
        """For the processes that are watched."""
        name = self._socket.getsockname()
        return {"NOTIFY_SOCKET": f"@{name[1:].decode()}", "WATCHDOG_USEC": str(int(self._limit_s * 1e6))}

    def watch(self, pid: int) -> None:
        """From its first word on."""
        self._wanted.add(pid)

    def forget(self, pid: int) -> None:
        """It has ended."""
        self._wanted.discard(pid)
        self._heard.pop(pid, None)

    def close(self) -> None:
        """Watch nobody any more."""
        self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def listen(self) -> None:
        """Whatever was said."""
        while True:
            try:
                words, beside, _, _ = self._socket.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            for level, kind, data in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid = CREDENTIALS.unpack(data[: CREDENTIALS.size])[0]
                    if pid not in self._wanted:
                        continue
                    self._heard[pid] = self._now()
                    if self.on_ready is not None and b"READY=1" in words.splitlines():
                        self.on_ready(pid)

    def check(self) -> None:
        """Who has been silent for too long."""
        now_s = self._now()
        stalled, self._checked_s = now_s - self._checked_s > STALL_S, now_s
        if stalled:
            self._heard = dict.fromkeys(self._heard, now_s)
        for pid in [pid for pid, heard_s in self._heard.items() if now_s - heard_s > self._limit_s]:
            self.forget(pid)
            self._on_silent(pid)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(CHECK_S, self._tick)
        self.listen()
        self.check()
