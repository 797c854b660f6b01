"""What the supervisor's shell asks of `asyncio` and `time`, in virtual time: locks, sleeps, threads, clocks.

Its modules name the standard ones; while its process runs, and only then, those names stand for these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from calculet_core.clock import MS, S
from simulation.disk import Later

if TYPE_CHECKING:
    from simulation.processes import Process

THREAD_NS = 15 * MS
"""What a thread does takes so long."""


class VirtualLock:
    """`asyncio.Lock`, fair."""

    def __init__(self, process: Process) -> None:
        self._process, self._held = process, False
        self._waiting: deque[Callable[[Any, BaseException | None], None]] = deque()

    async def __aenter__(self) -> None:
        if self._held:
            await Later(self._waiting.append)
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        if self._waiting:
            self._process.later(0, self._waiting.popleft(), None, None)  # handed on, never free in between
        else:
            self._held = False


class VirtualAsyncio:
    """As much of `asyncio` as is asked for."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def Lock(self) -> VirtualLock:
        return VirtualLock(self._process)

    async def sleep(self, seconds: float) -> None:
        await Later(lambda done: self._process.later(int(seconds * S), done, None, None))

    async def to_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        await Later(lambda done: self._process.later(THREAD_NS, done, None, None))
        return work(*args)


class Names:
    """Names of modules that stand for something else while this is entered; it may be entered again from inside."""

    def __init__(self, replaced: list[tuple[ModuleType, str, Any]]) -> None:
        self._replaced = [(vars(module), name, value) for module, name, value in replaced]
        self._real = [names[name] for names, name, _ in self._replaced]
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            for names, name, value in self._replaced:
                names[name] = value

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for (names, name, _), real in zip(self._replaced, self._real, strict=True):
                names[name] = real
