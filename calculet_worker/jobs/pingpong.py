"""Whether two jobs may be in flight: the guard that goes back to one by itself, and never forward (scheduling §14).

Two in flight is the configuration's choice and the device's ability; this part only takes it back. What ends it: a device that
refuses the second job several times in a row, a job that timed out, an output of another engine than its job was sent to, device
counters that do not add up, a recovery (nobody knows what the other bank did), and steps whose P99 shows that two in flight gain
nothing. It touches new jobs only: what was submitted drains. Every step is recorded, and only an operator brings the
second job back, or an artifact that was not here before.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from calculet_core.config import ExecutorConfig


class Degraded(StrEnum):
    """Why only one job may be in flight. A closed set: a metric's label."""

    BUSY = "busy"
    TIMEOUT = "timeout"
    CROSSTALK = "crosstalk"
    COUNTERS = "counters"
    P99 = "p99"
    RECOVERY = "recovery"
    OPERATOR = "operator"


WINDOW = 512
MIN_ALONE, MIN_TOGETHER = 20, 128
"""Steps of a profile before its P99s are compared."""
CHECK_EVERY = 64


class PingPong:
    """One board's guard; outlives generations. `reason` None: as many jobs as configured."""

    __slots__ = ("_alone", "_busy", "_config", "_count", "_digest", "_together", "_told", "detail", "reason")

    def __init__(self) -> None:
        self._config = ExecutorConfig()
        self._digest = ""
        self.reason: Degraded | None = None
        self.detail = ""
        self._told: Degraded | None = None
        self._forget()

    def serve(self, config: ExecutorConfig, digest: str) -> None:
        """A generation begins. Another artifact starts with a clean slate; the same one after a reset does not."""
        self._config = config
        if digest != self._digest:
            self._digest = digest
            self.reason, self.detail = None, ""
        self._forget()

    @property
    def wanted(self) -> bool:
        """The configuration asks for two in flight."""
        return self._config.max_inflight > 1

    # ---------------------------------------------------------------- what ends it
    def refused_second(self) -> None:
        """The device was busy while it held another job."""
        self._busy += 1
        if self._busy >= self._config.degrade_after_busy:
            self._degrade(Degraded.BUSY, f"the second job was refused {self._busy} times in a row")

    def took_second(self) -> None:
        """The device took a job while it held another."""
        self._busy = 0

    def saw_step(self, compiled_batch: int, took_ns: int, together: bool) -> None:
        """A decode step took so long on the device, alone there or beside another job."""
        if not together:
            self._alone.setdefault(compiled_batch, deque(maxlen=WINDOW)).append(took_ns)
            return
        window = self._together.setdefault(compiled_batch, deque(maxlen=WINDOW))
        window.append(took_ns)
        self._count += 1
        if self._count % CHECK_EVERY == 0:
            self._compare(compiled_batch)

    def other_engine(self, detail: str) -> None:
        """An output came from an engine that its job was not sent to: outputs may be mixed up."""
        self._degrade(Degraded.CROSSTALK, detail)

    def counted(self, pending: int, inflight: int) -> None:
        """The device's own count of jobs; more than were sent cannot be."""
        if pending > inflight:
            self._degrade(Degraded.COUNTERS, f"the device counts {pending} jobs pending, {inflight} are in flight")

    def faulted(self, timed_out: bool, detail: str) -> None:
        """The generation ends in a fault."""
        self._degrade(Degraded.TIMEOUT if timed_out else Degraded.RECOVERY, detail)

    def set(self, allowed: bool) -> None:
        """An operator's word: it recovers what was degraded, or degrades."""
        if allowed:
            self.reason, self.detail = None, ""
            self._forget()
        else:
            self._degrade(Degraded.OPERATOR, "an operator's word", force=True)

    # ---------------------------------------------------------------- what is told
    @property
    def unsaid(self) -> bool:
        """Whether `changed` has something to tell."""
        return self.reason is not self._told

    def changed(self) -> tuple[Degraded | None, str] | None:
        """What is to be recorded: the state, when it is not the one that was told last."""
        if self.reason is self._told:
            return None
        self._told = self.reason
        return self.reason, self.detail

    def _compare(self, compiled_batch: int) -> None:
        alone, together = self._alone.get(compiled_batch, ()), self._together[compiled_batch]
        if len(alone) < MIN_ALONE or len(together) < MIN_TOGETHER:
            return
        before, now = _p99(alone), _p99(together)
        if now > before * self._config.degrade_p99_factor:
            words = f"B{compiled_batch}: P99 of a step is {now / 1e6:.2f} ms with two in flight, {before / 1e6:.2f} ms alone"
            self._degrade(Degraded.P99, words)

    def _degrade(self, reason: Degraded, detail: str, force: bool = False) -> None:
        if force or (self.reason is None and self.wanted):
            self.reason, self.detail = reason, detail

    def _forget(self) -> None:
        self._busy = self._count = 0
        self._alone: dict[int, deque[int]] = {}
        self._together: dict[int, deque[int]] = {}


def _p99(values: deque[int] | tuple[()]) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
