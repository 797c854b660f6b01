"""A process: it can be killed between any two of its actions, stopped and continued, and its memory ends with it."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.loop import VirtualLoop

if TYPE_CHECKING:
    from simulation.transport import Listener, Pipe
    from simulation.world import World


class Crashed(SystemExit):
    """The process ends here and now, in the middle of what it does. Of a kind that asyncio's tasks let through."""


class Process:
    """Base of keeper's children. Everything that reaches a process goes through `call`, and runs on its loop."""

    kind = "process"

    def __init__(self, world: World, name: str, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.timeline = world.timeline
        self.alive, self.stopped = True, False
        self.loop = VirtualLoop(self)
        self.listeners: dict[str, Listener] = {}
        """Sockets that it has bound, by path."""
        self.inbound: list[Pipe] = []
        self.lane = world.timeline.lane(f"{name} {pid}")
        self.watchers: list[tuple[Process, Callable[[], None]]] = []
        """Whose pidfds tell when it has ended, and what they call."""
        self._deferred: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.rng = world.rng(f"{name} {pid}")
        self.on_keepers_death: Callable[[], None] | None = None
        self.crashes = False
        """A crash is arranged for."""
        self._crash_after = 0
        self._abort_pending = False
        self.started_ns = world.timeline.now

    def call(self, work: Callable[..., None], *args: Any) -> None:
        """Something reaches the process: not when it is dead, later when it is stopped."""
        if not self.alive:
            return
        if self.stopped:
            self._deferred.append((work, args))
            return
        timeline, loop = self.timeline, self.loop
        nested, before = not timeline.at_top, timeline.loop
        timeline.at_top = False
        if before is not loop:
            timeline.enter(loop)
        try:
            work(*args)
        except Crashed:
            self.world.keeper.ended(self, signal=9)
        except Exception as error:
            loop.call_exception_handler({"exception": error})
        finally:
            if nested:
                if timeline.loop is not before:
                    timeline.enter(before)
            else:
                timeline.at_top = True

    def listens(self, factory: Callable[[], Any]) -> Any:
        """For clients' connections, each with a protocol of the factory's. Returns a server that can be closed."""
        raise NotImplementedError

    def later(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        """A timer."""
        self.timeline.put(self.lane, delay_ns, self.call, (work, *args))

    def acted(self) -> None:
        """Between two actions: here a crash that was arranged for happens."""
        if self.crashes:
            self._crash_after -= 1
            if self._crash_after < 0:
                raise Crashed

    # ---------------------------------------------------------------- signals
    def crash_after(self, actions: int) -> None:
        """kill -9 after so many more actions."""
        self.crashes, self._crash_after = True, actions

    def keeper_died(self) -> None:
        """The death pipe says so; who is too young to watch it sees that at once when it starts."""
        if self.on_keepers_death is not None:
            self.call(self.on_keepers_death)
        else:
            self.world.keeper.ended(self, code=0)

    def forget_crash(self) -> None:
        """The arranged crash does not come."""
        self.crashes = False

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT: what has come meanwhile is done first."""
        if not self.alive or not self.stopped:
            return
        self.stopped = False
        if self._abort_pending:
            self.world.keeper.ended(self, signal=6)
            return
        while self._deferred and self.alive and not self.stopped:
            work, args = self._deferred.popleft()
            self.call(work, *args)
        for pipe in list(self.inbound):
            pipe.pump()

    def terminate(self) -> None:
        """SIGTERM: a process drains, unless it is too young to have a handler."""
        if not self.loop.signalled(signal.SIGTERM):
            self.world.keeper.ended(self, signal=15)

    def abort(self) -> None:
        """SIGABRT: a stopped process gets it when it is continued."""
        if self.stopped:
            self._abort_pending = True
        else:
            self.world.keeper.ended(self, signal=6)

    def has_ended(self) -> None:
        """For the keeper's use: memory and timers are gone."""
        if not self.alive:
            return
        self.alive = self.crashes = False
        self._deferred.clear()
        before = self.timeline.loop
        self.timeline.enter(self.loop)
        self.loop.end()
        self.timeline.enter(before)
        for path in list(self.listeners):
            self.world.listeners.pop(path, None)
