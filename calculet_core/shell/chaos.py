"""What every process that may be disturbed shares: carrying a fault of the process itself, and telling what fired.

The fault's end is a timer of this process's own loop, set before the fault begins. What fired is written to the process's journal
and flushed at once, because the fault may be its last act, or the end of its disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from calculet_core import history, wire
from calculet_core.chaos import AnyFault, FullDisk, NoDescriptors, words
from calculet_core.clock import S
from calculet_core.shell.journal import Journal

log = logging.getLogger("calculet.chaos")


class Carrier:
    """Carries faults of one process, called `process` in its journal's lines; made only where the configuration allows it."""

    def __init__(self, process: str, journal: Journal, board: str | None = None, epoch: int | None = None) -> None:
        self._process, self._journal, self._board, self._epoch = process, journal, board, epoch
        self._loop = asyncio.get_running_loop()
        self._ends: dict[str, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}
        """By kind: one of a kind at a time, a second one replaces the first."""

    def take(self, order: wire.Disturb) -> bool:
        """Whether the fault is one that any process can carry; then it has begun, unless its time is over."""
        if isinstance(order.fault, FullDisk):
            self._limit(order, resource.RLIMIT_FSIZE, lambda: 0)
        elif isinstance(order.fault, NoDescriptors):
            self._limit(order, resource.RLIMIT_NOFILE, _lowest_free)
        else:
            return False
        return True

    def begin(self, order: wire.Disturb, kind: str, heal: Callable[[], None]) -> bool:
        """Set the end, then tell that it begins. `heal` is called once, at the end or when another of its kind replaces it. False:
        it came too late."""
        left_s = (order.until_ns - time.monotonic_ns()) / S
        if left_s <= 0:
            return False
        self.end(kind)
        self._ends[kind] = self._loop.call_later(left_s, self.end, kind), heal
        return True

    def end(self, kind: str) -> None:
        """Now; nothing when none of the kind is there."""
        found = self._ends.pop(kind, None)
        if found is not None:
            found[0].cancel()
            found[1]()

    def fired(self, order: str, fault: AnyFault, **data: Any) -> None:
        """On disk before it happens."""
        log.warning("chaos: %s (order %s)", words(fault), order)
        self._tell(history.CHAOS_FIRED, order, fault, data)

    def healed(self, order: str, fault: AnyFault, **data: Any) -> None:
        """It is over."""
        log.warning("chaos: %s is over (order %s)", words(fault), order)
        self._tell(history.CHAOS_HEALED, order, fault, data)

    def _tell(self, event: str, order: str, fault: AnyFault, data: dict[str, Any]) -> None:
        fields = {"board": self._board, "epoch": self._epoch, "order": order, "fault": words(fault), "process": self._process}
        self._journal.write(event, **{**fields, **data})
        self._journal.flush()

    def _limit(self, order: wire.Disturb, kind: int, value: Callable[[], int]) -> None:
        soft, hard = resource.getrlimit(kind)

        def heal() -> None:
            resource.setrlimit(kind, (soft, hard))
            self.healed(order.order, order.fault)

        if self.begin(order, str(kind), heal):
            self.fired(order.order, order.fault)
            soft, hard = resource.getrlimit(kind)  # after an earlier one of the kind was healed
            resource.setrlimit(kind, (value(), hard))


def die() -> None:
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _lowest_free() -> int:
    """The number that the next descriptor would get: with it as limit there is none."""
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return fd
