"""The faults that a worker carries: its own death at a phase of a job, spoiled messages, a full disk, no descriptors.

Made only where the configuration has `chaos.enabled`; then the performers of a few actions, and both ways of the data link, have
one more call in them. Elsewhere none of this is there.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from calculet_core import wire
from calculet_core.chaos import KillWorker, Phase, TroubleFrames
from calculet_core.jobs import JobKind
from calculet_core.shell.chaos import Carrier, die
from calculet_core.shell.journal import Journal
from calculet_worker.actions import GiveBack, SubmitJob, Tokenize, ToRouter
from calculet_worker.mangling import Frames, Mangler

Perform = Callable[[Any], None]
JOB_PHASES = {JobKind.PREFILL: Phase.PREFILLING, JobKind.DECODE: Phase.DECODING}


class WorkerChaos:
    """One worker's. `take` is given what the supervisor sends."""

    def __init__(self, board: str, epoch: int, journal: Journal) -> None:
        self._carrier = Carrier(f"worker-{board}", journal, board, epoch)
        self._death: tuple[wire.Disturb, Phase] | None = None
        self._ways: list[Tap] = []

    def take(self, order: wire.Disturb) -> None:
        """Carry it."""
        fault = order.fault
        if self._carrier.take(order):
            return
        if isinstance(fault, KillWorker) and fault.phase is not None:
            if self._carrier.begin(order, "death", self._forget_death):
                self._death = order, fault.phase
        elif isinstance(fault, TroubleFrames):
            self._spoil(order, fault)

    # ---------------------------------------------------------------- death at a phase
    def around(self, performers: dict[type[Any], Perform]) -> None:
        """Put the phases around the performers of actions."""
        performers[Tokenize] = self._before(Phase.ADMITTED, performers[Tokenize])
        performers[GiveBack] = self._before(Phase.COMPLETED, performers[GiveBack])
        performers[SubmitJob] = self._after_submission(performers[SubmitJob])
        performers[ToRouter] = self._before_telling(performers[ToRouter])

    def _before(self, phase: Phase, perform: Perform) -> Perform:
        def performed(action: Any) -> None:
            self._visit(phase)
            perform(action)

        return performed

    def _after_submission(self, perform: Perform) -> Perform:
        def performed(action: SubmitJob) -> None:
            perform(action)
            self._visit(JOB_PHASES[action.job.kind])

        return performed

    def _before_telling(self, perform: Perform) -> Perform:
        def performed(action: ToRouter) -> None:
            if action.pieces:
                self._visit(Phase.TELLING)
            perform(action)

        return performed

    def _visit(self, phase: Phase) -> None:
        if self._death is not None and self._death[1] is phase:
            order, _ = self._death
            self._carrier.fired(order.order, order.fault)
            die()

    def _forget_death(self) -> None:
        self._death = None

    # ---------------------------------------------------------------- the data link
    def way(self, deliver: Callable[[Frames], Any]) -> Tap:
        """One way of the link: call it instead of `deliver`."""
        self._ways.append(Tap(deliver))
        return self._ways[-1]

    def _spoil(self, order: wire.Disturb, fault: TroubleFrames) -> None:
        rng = random.Random(order.order)

        def heal() -> None:
            count = sum(way.calm() for way in self._ways)
            self._carrier.healed(order.order, fault, count=count)

        if self._carrier.begin(order, "frames", heal):
            self._carrier.fired(order.order, fault)
            for way in self._ways:
                way.mangler = Mangler(fault, random.Random(rng.random()))


class Tap:
    """Passes messages on as they are, or as its mangler says; the order that comes out of it is kept whatever is late."""

    def __init__(self, deliver: Callable[[Frames], Any]) -> None:
        self._deliver, self._loop = deliver, asyncio.get_running_loop()
        self._queue: deque[tuple[float, Frames]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.mangler: Mangler | None = None

    def __call__(self, frames: Frames) -> bool:
        """True while what really happens is not known yet."""
        if self.mangler is None and not self._queue:
            return bool(self._deliver(frames))
        self._put(self.mangler.take(frames) if self.mangler is not None else [(0.0, frames)])
        return True

    def calm(self) -> int:
        """The trouble is over; how many messages were spoiled."""
        mangler, self.mangler = self.mangler, None
        if mangler is None:
            return 0
        self._put(mangler.rest())
        return mangler.count

    def _put(self, messages: list[tuple[float, Frames]]) -> None:
        now = self._loop.time()
        self._queue.extend((now + delay_s, frames) for delay_s, frames in messages)
        self._run()

    def _run(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue and self._queue[0][0] <= self._loop.time():
            self._deliver(self._queue.popleft()[1])
        if self._queue:
            self._timer = self._loop.call_later(self._queue[0][0] - self._loop.time(), self._run)
