"""A process: it can be killed between any two of its actions, stopped and continued, and its memory ends with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.transport import Pipe
    from simulation.world import World


class Crashed(BaseException):
    """The process ends here and now, in the middle of what it does."""


class Process:
    """Base of keeper's children. Everything that reaches a process goes through `call`."""

    def __init__(self, world: World, name: str, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.timeline = world.timeline
        self.alive, self.stopped = True, False
        self.inbound: list[Pipe] = []
        self.watchers: list[Callable[[], None]] = []
        """Told when it has ended: pidfds."""
        self._deferred: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._crash_after: int | None = None
        self._abort_pending = False
        self.started_ns = world.timeline.now

    def call(self, work: Callable[..., None], *args: Any) -> None:
        """Something reaches the process: not when it is dead, later when it is stopped."""
        if not self.alive:
            return
        if self.stopped:
            self._deferred.append((work, args))
            return
        try:
            work(*args)
        except Crashed:
            self.world.keeper.ended(self, signal=9)

    def later(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        """A timer."""
        self.timeline.after(delay_ns, self.call, work, *args)

    def acted(self) -> None:
        """Between two actions: here a crash that was arranged for happens."""
        if self._crash_after is not None:
            self._crash_after -= 1
            if self._crash_after < 0:
                raise Crashed

    # ---------------------------------------------------------------- signals
    def crash_after(self, actions: int) -> None:
        """kill -9 after so many more actions."""
        self._crash_after = actions

    def forget_crash(self) -> None:
        """The arranged crash does not come."""
        self._crash_after = None

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

    def abort(self) -> None:
        """SIGABRT: a stopped process gets it when it is continued."""
        if self.stopped:
            self._abort_pending = True
        else:
            self.world.keeper.ended(self, signal=6)

    def has_ended(self) -> None:
        """For the keeper's use: memory and timers are gone."""
        self.alive = False
        self._deferred.clear()
