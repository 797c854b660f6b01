"""Wakes an event loop at an absolute CLOCK_MONOTONIC nanosecond. The loop's own timers count milliseconds, which an absolute
schedule cannot live with; a timerfd is exact and costs no spinning."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("it_interval", _Timespec), ("it_value", _Timespec)]


class Timer:
    """Calls `wake` on the loop once the time that `at` set has come; one time at a time.

    Raises:
        OSError: the kernel has no timerfd to give.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake
        self._fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._value, self._by_reference = self._spec.it_value, ctypes.byref(self._spec)
        loop.add_reader(self._fd, self._fired)

    def at(self, when_ns: int) -> None:
        """Set the time; one that has passed fires at once."""
        when_ns = max(1, when_ns)
        self._value.tv_sec, self._value.tv_nsec = divmod(when_ns, 1_000_000_000)
        if _libc.timerfd_settime(self._fd, _ABSOLUTE, self._by_reference, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Twice is fine."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._wake()


async def sleep_until(when_ns: int) -> None:
    """Return at an absolute CLOCK_MONOTONIC nanosecond; at once when it has passed."""
    if when_ns <= time.monotonic_ns():
        return
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    timer = Timer(loop, wake)
    try:
        timer.at(when_ns)
        await future
    finally:
        timer.close()
