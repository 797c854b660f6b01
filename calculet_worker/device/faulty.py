"""A device that misbehaves on purpose: it wraps any other, and a plan says when it lies.

A lie drains the real job all the same: the wrapper has the real completion before it withholds, delays or spoils it, and it gives
back itself what nobody will ever see. To its caller a withheld job is still in flight: it counts as pending, and its lanes are
not released.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from calculet_core.artifact import Package
from calculet_core.clock import MS
from calculet_core.config import BoardConfig
from calculet_core.errors import ConfigError
from calculet_core.jobs import (
    ChipTelemetry,
    Completion,
    DeviceCounters,
    DeviceVersions,
    EngineBank,
    Job,
    JobHandle,
    OutputStatus,
    ReturnCode,
)
from calculet_worker.device.base import Device, DeviceLimits, Inspection
from calculet_worker.device.faults import (
    AnyFault,
    BadNumbers,
    CcuException,
    FaultPlan,
    Firing,
    Hook,
    Refusal,
    Slow,
    StaleCompletion,
    WaitTimeout,
)
from calculet_worker.output.bf16 import BITS, narrow

FAULTS_OPTION = "faults"
ARM_OPTION = "faults_arm"
"""A file that arms the plan while it exists and its time has not passed: `{"until_ns": CLOCK_MONOTONIC}`. An administrator writes
it; a plan whose driver died disarms itself. Without the option the plan is armed from the start."""
LOG_OPTION = "faults_log"
"""A file that gets a JSON line for every firing, so that what was planned can be held against what fired."""
NEVER_NS = 1 << 62


def without_faults(board: BoardConfig) -> BoardConfig:
    """The configuration as the backend knows it."""
    ours = (FAULTS_OPTION, ARM_OPTION, LOG_OPTION)
    options = {name: value for name, value in board.options.items() if name not in ours}
    return msgspec.structs.replace(board, options=options)


def wrap_if_configured(device: Device, board: BoardConfig, fault_injection: bool) -> Device:
    """The device itself, or a faulty one around it when the board's option `faults` has a list.

    Raises:
        ConfigError: the list is wrong, or the fleet does not allow fault injection.
    """
    where = f"board {board.name}: $.options.{FAULTS_OPTION}"
    wanted = board.options.get(FAULTS_OPTION)
    if wanted is None:
        return device
    if not fault_injection:
        raise ConfigError(f"{where}: the fleet does not allow faults (fault_injection: true does)")
    try:
        faults = msgspec.convert(wanted, list[AnyFault])
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ConfigError(f"{where}{path.rstrip('`')}: {message}") from None
    seed = int.from_bytes(hashlib.sha256(board.name.encode()).digest()[:8], "big")
    arm, log = (board.options.get(name) for name in (ARM_OPTION, LOG_OPTION))
    plan = FaultPlan(faults, seed)
    if arm is not None:
        plan.armed = lambda: is_armed(Path(arm))
    if log is not None:
        plan.told = lambda firing: write_firing(Path(log), board.name, firing)
    return FaultyDevice(device, plan)


def is_armed(path: Path) -> bool:
    """Whether the file says so, now; one that cannot be read arms nothing."""
    try:
        until_ns = json.loads(path.read_bytes())["until_ns"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(until_ns, int) and time.monotonic_ns() < until_ns


def write_firing(path: Path, board: str, firing: Firing) -> None:
    """One line, whole."""
    line = {
        "t": time.monotonic_ns(), "board": board, "fault": firing.fault.__struct_config__.tag, "hook": firing.site[0],
        "job_kind": firing.site[1], "ordinal": firing.ordinal, "job": firing.job_id,
    }  # fmt: skip
    with path.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


def _with_exception(completion: Completion, job: Job | None, row: int | None) -> Completion:
    if row is None or job is None:
        return msgspec.structs.replace(completion, status=OutputStatus.CCU_EXCEPTION, logits=None)
    row %= 1 if job.lane_valid is None else max(1, int(job.lane_valid.sum()))  # active rows come first
    logits = completion.logits
    if logits is not None:
        logits = np.array(logits)
        logits[row] = np.nan
    return msgspec.structs.replace(completion, status=OutputStatus.CCU_EXCEPTION, logits=logits, failed_rows=(row,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A real completion that the caller does not get yet."""

    completion: Completion
    lanes: list[int]
    due_ns: int | None
    """When it is shown; None: only a reset ends that."""
    stale: bool = False
    """It is shown after the reset."""


class FaultyDevice:
    """See the module's theory. `plan.firings` tells what was done."""

    def __init__(self, device: Device, plan: FaultPlan) -> None:
        self._device, self.plan = device, plan
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._held: list[_Held] = []
        self._stale: list[Completion] = []
        """Outlived a reset; shown once something is configured."""
        self._due: list[Completion] = []

    # ---------------------------------------------------------------- what may be a lie
    def submit(self, job: Job, engine: EngineBank = EngineBank.AUTO) -> JobHandle | ReturnCode:
        """May be refused."""
        with self._lock:
            fault = self.plan.visit(Hook.SUBMIT, job.kind, job.job_id)
            if isinstance(fault, Refusal):
                return fault.rc
            self._jobs[job.job_id] = job  # before: it may complete before `submit` has returned
        answer = self._device.submit(job, engine)
        if not isinstance(answer, JobHandle):
            with self._lock:
                self._jobs.pop(job.job_id, None)
        return answer

    def wait_any(self, timeout_ns: int) -> Completion | ReturnCode:
        """Completions may be withheld, late or spoiled."""
        end_ns = time.monotonic_ns() + timeout_ns
        while True:
            now_ns = time.monotonic_ns()
            due, next_ns = self._take_due(now_ns)
            if due is not None:
                return due
            found = self._device.wait_any(max(0, min(end_ns, next_ns) - now_ns))
            if isinstance(found, Completion):
                if (shown := self._judge(found)) is not None:
                    return shown
            elif found is not ReturnCode.TIMEOUT or now_ns >= end_ns:
                return found

    def release(self, lane: int) -> ReturnCode:
        """A withheld job's lane is busy."""
        with self._lock:
            if self.plan.visit(Hook.RELEASE) is not None or any(lane in held.lanes for held in self._held):
                return ReturnCode.DEVICE_BUSY
        return self._device.release(lane)

    def configure(self, package: Package, generation: int) -> ReturnCode:
        """Stale completions are due from now on."""
        if self.plan.visit(Hook.CONFIGURE) is not None:
            return ReturnCode.OTHER
        rc = self._device.configure(package, generation)
        if rc is ReturnCode.OK:
            with self._lock:
                self._due, self._stale = self._due + self._stale, []
        return rc

    def reset_configuration(self) -> ReturnCode:
        """A withheld job is in flight."""
        with self._lock:
            if self._held:
                return ReturnCode.DEVICE_BUSY
        return self._device.reset_configuration()

    def reset(self) -> ReturnCode:
        """What is withheld is lost, but for stale completions."""
        if self.plan.visit(Hook.RESET) is not None:
            return ReturnCode.DEVICE_UNAVAILABLE
        with self._lock:
            held, self._held = self._held, []
            self._stale += [one.completion for one in held if one.stale]
            self._jobs.clear()
        for one in held:
            if not one.stale:
                self._device.give_back(one.completion)
        return self._device.reset()

    def counters(self) -> DeviceCounters:
        """A withheld job is pending."""
        found = self._device.counters()
        with self._lock:
            hidden = len(self._held) + len(self._stale) + len(self._due)
            pending = found.pending + len(self._held)
        return DeviceCounters(pending, found.finished - hidden, found.left - hidden, found.resets)

    def _judge(self, completion: Completion) -> Completion | None:
        """What the caller sees of a real completion now."""
        with self._lock:
            job = self._jobs.pop(completion.job_id, None)
            fault = self.plan.visit(Hook.COMPLETION, job.kind if job else None, completion.job_id)
            if isinstance(fault, WaitTimeout | StaleCompletion | Slow):
                due_ns = time.monotonic_ns() + int(fault.delay_ms * MS) if isinstance(fault, Slow) else None
                lanes = job.lanes.tolist() if job else []
                self._held.append(_Held(completion, lanes, due_ns, isinstance(fault, StaleCompletion)))
                return None
        if isinstance(fault, CcuException):
            return _with_exception(completion, job, fault.row)
        if isinstance(fault, BadNumbers) and completion.logits is not None:
            logits = np.array(completion.logits)
            logits[fault.row % len(logits)] = narrow([fault.value])[0] if logits.dtype == BITS else fault.value
            return msgspec.structs.replace(completion, logits=logits)
        return completion

    def _take_due(self, now_ns: int) -> tuple[Completion | None, int]:
        """A withheld completion whose time has come, or when the next one's comes."""
        with self._lock:
            for one in self._held:
                if one.due_ns is not None and one.due_ns <= now_ns:
                    self._held.remove(one)
                    return one.completion, now_ns
            if self._due:
                return self._due.pop(0), now_ns
            return None, min([one.due_ns for one in self._held if one.due_ns is not None], default=NEVER_NS)

    # ---------------------------------------------------------------- what is always the device's own
    def versions(self) -> DeviceVersions:
        """Of the device."""
        return self._device.versions()

    def limits(self) -> DeviceLimits:
        """Of the device."""
        return self._device.limits()

    def inspect(self) -> Inspection:
        """Of the device."""
        return self._device.inspect()

    def can_allocate(self, sequences: int) -> bool:
        """Of the device."""
        return self._device.can_allocate(sequences)

    def telemetry(self) -> tuple[ChipTelemetry, ...]:
        """Of the device."""
        return self._device.telemetry()

    def give_back(self, completion: Completion) -> None:
        """To the device: every completion that is shown has a real one behind it."""
        self._device.give_back(completion)

    def close(self) -> None:
        """With what was never shown."""
        with self._lock:
            hidden = [one.completion for one in self._held] + self._stale + self._due
            self._held, self._stale, self._due = [], [], []
        for completion in hidden:
            self._device.give_back(completion)
        self._device.close()
