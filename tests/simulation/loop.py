"""An asyncio event loop in virtual time, one for each process: tasks, futures, locks and sleeps are asyncio's own.

It keeps what is scheduled in the world's timeline. What a callback raises is told as asyncio tells it, and counts as a bug. When
its process dies nothing of it runs any more: its coroutines are closed at that moment and not whenever the collector comes by.
"""

from __future__ import annotations

import asyncio
import signal
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from calculet_core.clock import MS, S

if TYPE_CHECKING:
    from simulation.processes import Process

THREAD_NS = 15 * MS
"""What a thread does takes so long."""
MANY_TASKS = 64
CLOSING_TRIES = 4


class Handle:
    """Of something that is to be called."""

    __slots__ = ("_args", "_due_ns", "_process", "_work")

    def __init__(self, process: Process, due_ns: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._process, self._due_ns, self._work, self._args = process, due_ns, work, args

    def __call__(self) -> None:
        """Its time has come."""
        if self._work is None:
            return
        if self._process.stopped:
            self._process.call(self._run)  # it may be cancelled before that is done
        else:
            self._process.call(self._work, *self._args)

    def _run(self) -> None:
        if self._work is not None:
            self._work(*self._args)

    def cancel(self) -> None:
        """It is not called."""
        self._work = None  # type: ignore[assignment]
        self._args = ()

    def cancelled(self) -> bool:
        """Whether it is not."""
        return self._work is None

    def when(self) -> float:
        """In seconds of the loop."""
        return self._due_ns / S


class VirtualLoop(asyncio.AbstractEventLoop):
    """What the shells, and asyncio itself, ask of a loop."""

    def __init__(self, process: Process) -> None:
        self.process, self._timeline = process, process.timeline
        self.signals: dict[int, Callable[[], Any]] = {}
        self.readers: dict[int, Callable[[], Any]] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._threads = 0
        self._told: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], Any] | None = None

    # ---------------------------------------------------------------- in time
    def time(self) -> float:
        return self._timeline.now / S

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self._after(0, callback, args)

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self._after(int(delay * S), callback, args)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self._after(int(when * S) - self._timeline.now, callback, args)

    def _after(self, delay_ns: int, callback: Callable[..., Any], args: tuple[Any, ...]) -> Handle:
        handle = Handle(self.process, self._timeline.now + delay_ns, callback, args)
        if self.process.alive:
            self._timeline.put(self.process.lane, delay_ns, handle, ())
        return handle

    # ---------------------------------------------------------------- futures and tasks
    def create_future(self) -> Any:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name)
        if not self.process.alive:
            coro.close()  # of somebody's `finally`: it never begins
        self._tasks.append(task)
        if len(self._tasks) > MANY_TASKS:
            self._tasks = [one for one in self._tasks if not one.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """`executor` None: some thread; else something with `submit(work, future)`."""
        future = self.create_future()
        if executor is None:
            self._threads += 1
            thread = self._timeline.lane(f"{self.process.name} {self.process.pid} thread {self._threads}")
            self._timeline.put(thread, THREAD_NS, self.process.call, (self._run_thread, future, func, args))
        else:
            executor.begin(lambda: func(*args), future)
        return future

    def _run_thread(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        try:
            result = func(*args)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run(self, work: Coroutine[Any, Any, Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Let a coroutine run; `done(result, error)` unless the process dies before."""

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                error = task.exception()
                done(None if error is not None else task.result(), error)

        self.create_task(work).add_done_callback(ended)

    # ---------------------------------------------------------------- the system
    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        self.signals[sig] = lambda: callback(*args)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self.readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    def readable(self, fd: int) -> None:
        """Something has come."""
        if fd in self.readers:
            self.readers[fd]()

    def signalled(self, sig: signal.Signals) -> bool:
        """Whether somebody handles the signal."""
        if (handler := self.signals.get(sig)) is None:
            return False
        handler()
        return True

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        """Of the one address that a process listens at for clients."""
        return self.process.listens(protocol_factory)

    # ---------------------------------------------------------------- what goes wrong
    def set_exception_handler(self, handler: Any) -> None:
        self._told = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Of asyncio: an exception that nobody waits for."""
        if self.process.alive and (error := context.get("exception")) is not None:
            self.process.world.bug(self.process, error)
            if self._told is not None:
                self._told(self, context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self.process.alive

    def is_closed(self) -> bool:
        return not self.process.alive

    def end(self) -> None:
        """The process is gone. A coroutine that wants to wait while it is closed is closed again, and does not get further."""
        tasks, self._tasks = self._tasks, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a task that has not begun never awaits what it was given
            for task in tasks:
                self._close(task)
        self.readers.clear()
        self.signals.clear()

    @staticmethod
    def _close(task: asyncio.Task[Any]) -> None:
        work: Any = task.get_coro()
        for _ in range(CLOSING_TRIES):
            with suppress(BaseException):
                if not task.done():
                    work.close()
                return
