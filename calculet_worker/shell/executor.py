"""The device thread: everything of the board that may block happens here, and nothing else does.

`submit` is called on the actor's thread, as a device never blocks in it; the device thread then waits for completions and hands
each to the loop, BF16 logits widened to float32 and the best of each row found. While a job is out it waits in slices, so that a
reset or an end is not kept waiting by a job's time limit; with nothing out it sleeps on its inbox. For a job so brief that waking
the thread would take longer the actor looks once itself (`look`) while the thread sleeps; what has not ended by then goes to the
thread like any other job. Once in a long job, shortly before it should end, the thread wakes the loop for a rehearsal. A job whose
deadline passes is reported lost (rc 13) but still waited for: its late completion is what proves that its buffers are free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from msgspec.structs import replace

from calculet_core.clock import MS
from calculet_core.jobs import Completion, Holdings, JobHandle, ReturnCode
from calculet_worker.actions import ConfigureDevice, ResetDevice, SubmitJob, UnconfigureDevice
from calculet_worker.device.base import Device
from calculet_worker.events import (
    DeviceConfigured,
    DeviceReset,
    DeviceUnconfigured,
    Event,
    JobCompleted,
    JobLost,
    JobRefused,
    JobSubmitted,
)
from calculet_worker.output.bf16 import BITS, Widener
from calculet_worker.output.sampling import row_facts

SLICE_NS = 50 * MS
log = logging.getLogger("calculet.executor")

Deliver = Callable[[Event], Any]


class Executor:
    """Owns the device thread. `deliver` and `rehearse` are called on it and must be safe to call from any thread."""

    def __init__(self, device: Device, deliver: Deliver, rehearse: Callable[[], Any] | None = None) -> None:
        self._device, self._deliver, self._rehearse = device, deliver, rehearse
        self._rehearse_ns: int | None = None
        """When the rehearsal for the job that was submitted last is due."""
        self._brief: SubmitJob | None = None
        """Submitted, and the device thread does not know of it."""
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deadlines: dict[int, int] = {}
        self._unproven: set[int] = set()
        """Jobs reported lost whose end nobody has seen."""
        self._busy = _BusyClock()
        self._widener = Widener()
        self._stopping = False
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- actor's thread
    def submit(self, action: SubmitJob) -> JobSubmitted | JobRefused:
        """Submit at once; the device thread learns of it, or `look` must follow."""
        job_id = action.job.job_id
        self._rehearse_ns = action.rehearse_ns
        brief = action.brief and not self._deadlines and not self._unproven  # so the device thread is not in the device
        if not brief:
            self._deadlines[job_id] = action.deadline_ns  # before: it may complete before `submit` has returned
        answer = self._device.submit(action.job, action.engine)
        if isinstance(answer, JobHandle):
            self._busy.change(1)
            if brief:
                self._brief = action
            else:
                self._inbox.put(_nothing)
            return JobSubmitted(job_id, answer.engine)
        self._deadlines.pop(job_id, None)
        return JobRefused(job_id, int(answer))

    def look(self) -> JobCompleted | JobLost | None:
        """After `submit`: the end of a brief job, if that is what it was and it is there; else the device thread waits for it."""
        action, self._brief = self._brief, None
        if action is None:
            return None
        job_id, found = action.job.job_id, self._wait_any(0)
        if isinstance(found, Completion):
            event = self._completed(found)
            if found.job_id == job_id:
                self._busy.change(-1)
                return event
        elif found is not ReturnCode.TIMEOUT:
            self._busy.change(-1)
            return JobLost(job_id, int(found))
        else:
            event = None
        self._deadlines[job_id] = action.deadline_ns
        self._inbox.put(_nothing)
        return event

    def perform(self, action: ConfigureDevice | UnconfigureDevice | ResetDevice) -> None:
        """Queue an action that may block; its answer is delivered."""
        self._inbox.put(lambda: self._deliver(self._answer(action)))

    def busy_ns(self) -> int:
        """How long at least one job was out, from its submission to its completion's arrival here."""
        return self._busy.change(0)

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close the device; False when it is stuck in the device, which only the process's end can help."""
        self._stopping = True
        self._inbox.put(_nothing)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---------------------------------------------------------------- device thread
    def _run(self) -> None:
        while not self._stopping:
            if self._deadlines or self._unproven:
                self._wait()
                try:
                    request = self._inbox.get_nowait()
                except Empty:
                    continue
            else:
                request = self._inbox.get()
            request()
        self._device.close()

    def _wait(self) -> None:
        first = min(self._deadlines.copy().values(), default=None)
        now = time.monotonic_ns()
        timeout = SLICE_NS if first is None else max(0, min(SLICE_NS, first - now))
        early = self._rehearse_ns
        if early is not None:
            timeout = max(0, min(timeout, early - now))
        found = self._wait_any(timeout)
        if not isinstance(found, ReturnCode):
            self._rehearse_ns = None
            if self._deadlines.pop(found.job_id, None) is not None:
                self._busy.change(-1)
            self._unproven.discard(found.job_id)
            self._deliver(self._completed(found))
        elif found == ReturnCode.TIMEOUT:
            now = time.monotonic_ns()
            if early is not None and early <= now:
                self._rehearse_ns = None
                if self._rehearse is not None:
                    self._rehearse()
            for job_id, deadline in self._deadlines.copy().items():
                if deadline <= now:
                    self._lose(job_id, found)
        else:
            for job_id in self._deadlines.copy():
                self._lose(job_id, found)
            self._unproven.clear()  # the device has said that it will not tell

    def _wait_any(self, timeout_ns: int) -> Completion | ReturnCode:
        try:
            return self._device.wait_any(timeout_ns)
        except Exception:
            log.exception("device: waiting failed")
            return ReturnCode.OTHER

    def _completed(self, found: Completion) -> JobCompleted:
        arrived_ns, bf16_ns, logits = time.monotonic_ns(), None, found.logits
        if logits is None or logits.ndim != 2:
            return JobCompleted(found, arrived_ns)
        if logits.dtype == BITS:
            logits = self._widener.widen(found.buffer_id, logits)
            found, bf16_ns = replace(found, logits=logits), time.monotonic_ns() - arrived_ns
        facts = row_facts(logits) if logits.dtype == np.float32 and logits.size else None
        return JobCompleted(found, arrived_ns, bf16_ns, facts)

    def _lose(self, job_id: int, rc: ReturnCode) -> None:
        if job_id in self._deadlines:
            self._unproven.add(job_id)  # before: with both empty the actor takes this thread for asleep
            del self._deadlines[job_id]
            self._busy.change(-1)
            self._deliver(JobLost(job_id, int(rc)))

    def _answer(self, action: ConfigureDevice | UnconfigureDevice | ResetDevice) -> Event:
        if isinstance(action, ConfigureDevice):
            return self._configure(action)
        if isinstance(action, UnconfigureDevice):
            rc = self._code(self._device.reset_configuration)
            return DeviceUnconfigured(action.generation, rc, self._holdings())
        rc = self._code(self._device.reset)
        if rc == ReturnCode.OK:
            self._busy.change(-len(self._deadlines))
            self._deadlines.clear()
            self._unproven.clear()
        return DeviceReset(rc)

    def _configure(self, action: ConfigureDevice) -> DeviceConfigured:
        before = self._holdings()
        try:
            rc = self._device.configure(action.package, action.generation)
            if rc != ReturnCode.OK:
                return DeviceConfigured(action.generation, int(rc), before=before)
            return DeviceConfigured(action.generation, int(rc), self._device.inspect(), before=before)
        except Exception as error:
            log.exception("device: configuring failed")
            detail = f"{type(error).__name__}: {error}"
            return DeviceConfigured(action.generation, ReturnCode.OTHER, detail=detail, before=before)

    def _holdings(self) -> Holdings:
        """What the device's own counters say that it holds."""
        try:
            used = [chip.memory_used_bytes for chip in self._device.telemetry()]
            counters = self._device.counters()
        except Exception as error:
            log.exception("device: its counters cannot be read")
            return Holdings(error=f"{type(error).__name__}: {error}")
        known = [size for size in used if size is not None]
        return Holdings(sum(known) if known and len(known) == len(used) else None, counters.pending, counters.left)

    def _code(self, call: Callable[[], ReturnCode]) -> int:
        try:
            return int(call())
        except Exception:
            log.exception("device: an operation failed")
            return ReturnCode.OTHER


class SynchronousExecutor(Executor):
    """The reference that M1 compares with: every job is submitted and waited for on the actor's thread, and nothing else happens.

    Never for production: while a job runs, nobody is heard.
    """

    def _start(self) -> None:
        """No thread."""

    def submit(self, action: SubmitJob) -> JobSubmitted | JobRefused:
        """Submit, and wait until the job ended or was lost; its end is delivered."""
        answer = super().submit(replace(action, brief=False))
        while action.job.job_id in self._deadlines:
            self._wait()
        return answer

    def perform(self, action: ConfigureDevice | UnconfigureDevice | ResetDevice) -> None:
        """At once."""
        self._deliver(self._answer(action))

    def stop(self, timeout_s: float) -> bool:
        """Close the device."""
        self._device.close()
        return True


class _BusyClock:
    """Adds up the time in which at least one job is out; both threads move it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out = self._busy_ns = self._at_ns = 0

    def change(self, jobs: int) -> int:
        """So many more jobs are out from now on; the busy time up to now."""
        with self._lock:
            now = time.monotonic_ns()
            if self._out > 0:
                self._busy_ns += now - self._at_ns
            self._out += jobs
            self._at_ns = now
            return self._busy_ns


def _nothing() -> None:
    """What wakes the device thread: a job is out, or the end has come."""
