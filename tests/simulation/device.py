"""A board and the device thread in virtual time: the pure `SimBoard` in the real `FaultyDevice`, polled instead of waited for.

`Hardware` outlives processes: what a killed worker left running keeps the board busy until it is done, or until a reset when its DMA
never ends. `DeviceThread` does what `calculet_worker.shell.executor` does on its thread: one thing at a time, a job whose deadline
passed is reported lost and still waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from calculet_core.artifact import Package
from calculet_core.capacity import GIB
from calculet_core.clock import MS
from calculet_core.jobs import ChipTelemetry, Completion, DeviceCounters, DeviceVersions, EngineBank, Job, JobHandle, ReturnCode
from calculet_worker import actions, events
from calculet_worker.device import faulty
from calculet_worker.device.base import DeviceLimits, Inspection
from calculet_worker.device.faults import AnyFault, FaultPlan, Hook
from calculet_worker.device.sim_board import SimBoard

if TYPE_CHECKING:
    from simulation.timeline import Timeline
    from simulation.worker import WorkerHost

SLICE_NS = 50 * MS
CONFIGURE_NS = 60 * MS
UNCONFIGURE_NS = 2 * MS
RESET_NS = 200 * MS
DRAM_BYTES = 32 * GIB


class Hardware:
    """One board's silicon."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name, self.timeline = name, timeline
        self.board: VirtualBoard | None = None
        self.busy_until_ns = 0
        """A dead worker's jobs still run."""
        self.stuck = False
        """A dead worker's DMA never ends; a reset helps."""
        self.lies = False
        """The next configuration computes wrong tokens."""
        self.resets = 0

    def open(self, epoch: int) -> VirtualBoard:
        """A new process has it; what was configured went with the old one."""
        if self.board is not None:
            self.busy_until_ns = max(self.busy_until_ns, self.board.last_done_ns())
        versions = DeviceVersions("sim", self.name, chips=2, power_mode="balanced")
        self.board = VirtualBoard(self, SimBoard(versions, DRAM_BYTES, seed=epoch))
        return self.board


class VirtualBoard:
    """The device protocol over a `SimBoard`; time is the timeline's."""

    def __init__(self, hardware: Hardware, sim: SimBoard) -> None:
        self._hardware, self.sim, self._timeline = hardware, sim, hardware.timeline
        self.done: list[Completion] = []
        self._lying = False

    def submit(self, job: Job, engine: EngineBank = EngineBank.AUTO) -> JobHandle | ReturnCode:
        return self.sim.submit(job, engine, self._timeline.now)

    def wait_any(self, timeout_ns: int) -> Completion | ReturnCode:
        """Never waits."""
        if not self.done:
            self.done = self.sim.collect(self._timeline.now)
            if not self.done:
                return ReturnCode.TIMEOUT
        found = self.done.pop(0)
        if self._lying and found.logits is not None:
            found = msgspec.structs.replace(found, logits=np.roll(found.logits, 1, axis=1))
        return found

    def last_done_ns(self) -> int:
        """When the last job in flight ends."""
        return max((flight.done_ns for flight in self.sim._flights), default=0)

    def configure(self, package: Package, generation: int) -> ReturnCode:
        hardware = self._hardware
        if hardware.stuck or self._timeline.now < hardware.busy_until_ns:
            return ReturnCode.DEVICE_BUSY
        self._lying, hardware.lies = hardware.lies, False
        return self.sim.configure(package, generation)

    def reset_configuration(self) -> ReturnCode:
        return ReturnCode.DEVICE_BUSY if self.done else self.sim.reset_configuration()

    def reset(self) -> ReturnCode:
        self._hardware.stuck, self._hardware.busy_until_ns, self._lying = False, 0, False
        self._hardware.resets += 1
        for completion in self.done:
            self.sim.give_back(completion)
        self.done = []
        return self.sim.reset()

    def close(self) -> None:
        self.sim.close()

    def give_back(self, completion: Completion) -> None:
        self.sim.give_back(completion)

    def release(self, lane: int) -> ReturnCode:
        return self.sim.release(lane)

    def can_allocate(self, sequences: int) -> bool:
        return self.sim.can_allocate(sequences)

    def counters(self) -> DeviceCounters:
        return self.sim.counters()

    def telemetry(self) -> tuple[ChipTelemetry, ...]:
        return self.sim.telemetry(self._timeline.now)

    def versions(self) -> DeviceVersions:
        return self.sim.versions()

    def limits(self) -> DeviceLimits:
        return self.sim.limits()

    def inspect(self) -> Inspection:
        return self.sim.inspect()


class ArmedPlan(FaultPlan):
    """The product's plan; `arm` lets a fault fire at the next visit of its site."""

    def arm(self, fault: AnyFault) -> None:
        self.faults = [*self.faults, fault]

    def visit(self, hook: Hook, kind: Any = None, job_id: int | None = None) -> AnyFault | None:
        if not self.faults:
            return None
        fault = super().visit(hook, kind, job_id)
        if fault is not None and fault.rate == 1.0:
            self.faults = [other for other in self.faults if other is not fault]
        return fault


class DeviceThread:
    """Owns the device for one worker process."""

    def __init__(self, process: WorkerHost, hardware: Hardware, plan: ArmedPlan) -> None:
        self._process, self._timeline = process, process.timeline
        self.deliver: Callable[[Any], Any] = lambda event: None
        self.on_their_way = 0
        """Completions that were fetched, and that the engine has not been told of."""
        self.board = hardware.open(process.epoch)
        self.plan = plan
        self.device = faulty.FaultyDevice(self.board, plan)
        self.deadlines: dict[int, int] = {}
        self._unproven: set[int] = set()
        self._inbox: deque[Any] = deque()
        self._working = self._begins = False
        self._lane = process.timeline.lane(f"device {process.pid}")
        self._poll_ns: int | None = None
        self._overdue_ns: int | None = None

    def _later(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        self._timeline.put(self._lane, delay_ns, self._process.call, (work, *args))

    # ---------------------------------------------------------------- jobs
    def submit(self, action: actions.SubmitJob) -> Any:
        """At once; the event that says what came of it."""
        job_id = action.job.job_id
        answer = self.device.submit(action.job, action.engine)
        if not isinstance(answer, JobHandle):
            return events.JobRefused(job_id, int(answer))
        self.deadlines[job_id] = action.deadline_ns
        self._poll_at(self.board.sim.next_done_ns())
        self._overdue_at(action.deadline_ns)
        return events.JobSubmitted(job_id, answer.engine)

    def _poll_at(self, at_ns: int | None) -> None:
        if at_ns is not None and (self._poll_ns is None or at_ns < self._poll_ns):
            self._poll_ns = at_ns
            self._later(at_ns - self._timeline.now, self._poll, at_ns)

    def _poll(self, at_ns: int) -> None:
        """Whatever is done by now."""
        if self._poll_ns != at_ns:
            return
        self._poll_ns = None
        if self._working:
            return  # polled when the work is done
        board, device, now = self.board, self.device, self._timeline.now
        while not isinstance(found := device.wait_any(0), ReturnCode):
            self.deadlines.pop(found.job_id, None)
            self._unproven.discard(found.job_id)
            self.on_their_way += 1
            self.deliver(events.JobCompleted(found))
            next_ns = board.sim.next_done_ns()
            if not board.done and not device._due and not device._held and (next_ns is None or next_ns > now):
                break
        self._poll_at(board.sim.next_done_ns())
        if device._held:
            self._poll_at(min((held.due_ns for held in device._held if held.due_ns is not None), default=None))

    def _overdue_at(self, at_ns: int) -> None:
        if self._overdue_ns is None or at_ns < self._overdue_ns:
            self._overdue_ns = at_ns
            self._later(at_ns - self._timeline.now, self._look_for_overdue, at_ns)

    def _look_for_overdue(self, at_ns: int) -> None:
        if self._overdue_ns != at_ns:
            return
        self._overdue_ns = None
        now = self._timeline.now
        if not self._working:
            for job_id, deadline in list(self.deadlines.items()):
                if deadline <= now and self.deadlines.pop(job_id, None) is not None:
                    self._unproven.add(job_id)
                    self._process.world.saw("job lost")
                    self.deliver(events.JobLost(job_id, int(ReturnCode.TIMEOUT)))
        if self.deadlines:
            self._overdue_at(max(min(self.deadlines.values()), now + SLICE_NS))

    # ---------------------------------------------------------------- what may block
    def perform(self, action: Any) -> None:
        """Configure, unconfigure, reset: one after the other, after the slice in which jobs are waited for."""
        if isinstance(action, actions.ConfigureDevice):
            self._process.world.digests[action.generation] = action.package.digest
        self._inbox.append(action)
        self._begin_soon()

    def stop(self, timeout_s: float) -> bool:
        """It ends with its process."""
        return True

    def busy_ns(self) -> int:
        """Nobody asks."""
        return 0

    def _begin_soon(self) -> None:
        if self._inbox and not self._working and not self._begins:
            self._begins = True
            waits = self.deadlines or self._unproven
            self._later(self._process.rng.randrange(SLICE_NS) if waits else 0, self._begin)

    def _begin(self) -> None:
        action = self._inbox.popleft()
        self._begins, self._working = False, True
        if isinstance(action, actions.ConfigureDevice):
            answer, took = self._configure(action), CONFIGURE_NS
        elif isinstance(action, actions.UnconfigureDevice):
            rc = self.device.reset_configuration()
            answer, took = events.DeviceUnconfigured(action.generation, int(rc)), UNCONFIGURE_NS
        else:
            rc = self.device.reset()
            answer, took = events.DeviceReset(int(rc)), RESET_NS
            if rc == ReturnCode.OK:
                self.deadlines.clear()
                self._unproven.clear()
        self._later(took, self._end, answer)

    def _configure(self, action: actions.ConfigureDevice) -> Any:
        rc = self.device.configure(action.package, action.generation)
        inspection = self.device.inspect() if rc == ReturnCode.OK else None
        if rc == ReturnCode.DEVICE_BUSY:
            self._process.world.saw("configure found the board busy")
        return events.DeviceConfigured(action.generation, int(rc), inspection)

    def _end(self, answer: Any) -> None:
        self._working = False
        self.deliver(answer)
        self._poll_ns = None
        self._poll_at(self._timeline.now)
        self._begin_soon()
