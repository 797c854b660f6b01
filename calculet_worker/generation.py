"""A model generation's way through load, service, recovery and unload, step by step (scheduling §10-§12).

Loading: verify (path, signature, hashes, manifest, profiles, DRAM: a failure changes nothing) -> configure -> compare what the
board really has with what the manifest says -> golden and warm-up -> Ready. Recovering: a reset ends the old generation and the
same verified package begins a new one, so a late completion can always be told by its generation. This part owns the
`ModelGeneration` record and what a report says about it; it moves only through the `MODEL_GENERATION` table.
"""

from __future__ import annotations

from collections.abc import Sequence

from calculet_core import history, wire
from calculet_core.artifact import Manifest, Package
from calculet_core.capacity import DramPlan
from calculet_core.config import BatchConfig, ExecutorConfig, RecoveryConfig, SchedulerConfig, check_profiles
from calculet_core.errors import (
    BoardFailed,
    CalculetError,
    ConfigError,
    ExitCode,
    ModelDraining,
    ModelRecovering,
    NoReadyWorker,
)
from calculet_core.faults import FAULT_POLICY, FaultKind, ResetRule, fault_of_code
from calculet_core.jobs import ReturnCode
from calculet_core.models import ModelGeneration
from calculet_core.states.model_generation import MODEL_GENERATION, ModelEvent, ModelState
from calculet_worker.actions import Action, Announce, ConfigureDevice, Exit, ResetDevice, UnconfigureDevice, VerifyPackage
from calculet_worker.events import DeviceConfigured, DeviceReset, DeviceUnconfigured, PackageVerified
from calculet_worker.inspecting import compare, residue
from calculet_worker.jobs.durations import backoff_ns
from calculet_worker.jobs.recovery import RecoveryPlan
from calculet_worker.records import Recorder

_M, _E = ModelState, ModelEvent
RUNS_JOBS = frozenset({_M.WARMING, _M.READY, _M.DRAINING})
RESTS = frozenset({_M.UNLOADED, _M.FAILED})
_LOADING = frozenset({_M.VALIDATING, _M.CONFIGURING, _M.WARMING})


class Lifecycle:
    """The generation on this board, from command to command. `dram_bytes` is the board's; `unconfigures`: what its runtime's
    `reset_configuration` is verified to do."""

    def __init__(self, recorder: Recorder, dram_bytes: int, recovery: RecoveryConfig, unconfigures: bool = True) -> None:
        self._recorder, self._dram_bytes, self._fleet_recovery = recorder, dram_bytes, recovery
        self._unconfigures = unconfigures
        self.record: ModelGeneration | None = None
        self.package: Package | None = None
        self.vocabulary: Sequence[bytes] = ()
        self.scheduler: SchedulerConfig | None = None
        self.draining = False
        """An operator's wish; it outlives generations."""
        self.fault: FaultKind | None = None
        self.fault_detail: str | None = None
        self.wants_reset = self.resetting = False
        self.condemned: str | None = None
        self.load_error: str | None = None
        self.step: str | None = None
        self.resets = 0
        self._configured = False
        """The device holds a configuration."""
        self._highest = 0
        self._load: wire.LoadModel | None = None
        self._grant: int | None = None
        self._recovered = False
        self._empty_bytes: int | None = None
        """The least that the empty board's memory counters have shown."""
        self._busy = 0
        self.retry_ns: int | None = None
        """When a board that was busy is asked again."""

    # ---------------------------------------------------------------- views
    @property
    def state(self) -> ModelState:
        """Unloaded when there is no generation."""
        return _M.UNLOADED if self.record is None else self.record.state

    @property
    def generation(self) -> int:
        """The generation's id, 0 when there is none."""
        return 0 if self.record is None else self.record.id

    @property
    def recovery(self) -> RecoveryConfig:
        """The alias's own where its scheduler says something, else the fleet's."""
        own = self.scheduler.recovery if self.scheduler else RecoveryConfig()
        return own if own != RecoveryConfig() else self._fleet_recovery

    def refusal(self) -> CalculetError | None:
        """Why no request may come in now; None: one may."""
        state = self.state
        if state is _M.READY and not self.draining:
            return None
        if state is _M.FAILED:
            return BoardFailed(f"the board failed: {self.condemned or self.fault_detail or self.load_error}")
        if state is _M.RECOVERING or (state in _LOADING and self._recovered):
            return ModelRecovering("the board is recovering from a fault")
        if state in (_M.READY, _M.DRAINING, _M.UNLOADING):
            return ModelDraining("the board is draining")
        return NoReadyWorker("no model is ready on this board")

    # ---------------------------------------------------------------- load
    def load(self, command: wire.LoadModel, unproven_jobs: bool, now_ns: int, out: list[Action]) -> str | None:
        """Begin a load on an idle board; a refusal in words."""
        if self.condemned is not None:
            return f"the board is condemned: {self.condemned}"
        if self.state not in RESTS or self._load is not None or self.resetting:
            return f"generation {self.generation} is {self.state.name}: unload it first"
        if command.generation <= self._highest:
            return f"generation {command.generation} is not new: the board has had {self._highest}"
        if unproven_jobs:
            return "a job of the last generation has not ended: reset the board first"
        self._highest = command.generation
        self._load, self._recovered, self._busy = command, False, 0
        self.fault = self.fault_detail = self.load_error = self.package = None
        self.record = ModelGeneration(command.generation, command.alias, command.digest, "")
        self.move(_E.LOAD, now_ns, out)
        if self._configured:
            self._unconfigure(out)
        else:
            self._verify(command, out)
        return None

    def _unconfigure(self, out: list[Action]) -> None:
        """Only by a verified contract; else with the process, and the next one begins with an empty board (scheduling §12)."""
        self.step = "unconfigure"
        if self._unconfigures:
            out.append(UnconfigureDevice(self.generation))
        else:
            out.append(Exit(ExitCode.OK, "unloaded with its process: the runtime's reset_configuration is not verified"))

    def _verify(self, command: wire.LoadModel, out: list[Action]) -> None:
        self.step = "verify"
        out.append(VerifyPackage(command.generation, command.alias, command.package, command.digest))

    def verified(self, event: PackageVerified, now_ns: int, out: list[Action]) -> None:
        """The package is good, or the load fails with the reason."""
        record, command = self.record, self._load
        if record is None or command is None or event.generation != record.id or record.state is not _M.VALIDATING:
            return
        package, error = event.package, event.error
        if error is None:
            scheduler, error = self._plan(package, event.scheduler, command)
        if error is not None:
            self.fail_load(error, now_ns, out)
            return
        self.package, self.vocabulary, self.scheduler = package, event.vocabulary, scheduler
        record.artifact_digest, record.calbin_sha256 = package.digest, package.manifest.image_sha256
        self.move(_E.VALIDATED, now_ns, out)
        self._configure(out)

    def _plan(
        self, package: Package, scheduler: SchedulerConfig | None, command: wire.LoadModel
    ) -> tuple[SchedulerConfig | None, str | None]:
        """The scheduler's configuration, or what is wrong with the package for this board."""
        manifest = package.manifest
        if command.digest and package.digest != command.digest:
            return None, f"the package's digest is {package.digest[:12]}, {command.digest[:12]} was asked for"
        plan = DramPlan(self._dram_bytes, 0, manifest.capacity.reserved_bytes)
        if not plan.fits:
            return None, f"{manifest.name} {manifest.version} does not fit: {plan.arithmetic()}"
        if scheduler is None:
            scheduler = default_scheduler(command.alias, manifest)
        try:
            check_profiles(scheduler, manifest.compiled_batches, package.digest, f"scheduler of {command.alias}")
        except ConfigError as error:
            return None, str(error)
        return scheduler, None

    def _configure(self, out: list[Action]) -> None:
        self.step, self.retry_ns = "configure", None
        out.append(ConfigureDevice(self.generation, self.package))

    def configured(self, event: DeviceConfigured, now_ns: int, out: list[Action]) -> bool:
        """Whether the device holds what the manifest says, so that golden may begin."""
        if event.before is not None and (used := event.before.memory_used_bytes) is not None:
            self._empty_bytes = used if self._empty_bytes is None else min(used, self._empty_bytes)
        if event.generation != self.generation or self.state is not _M.CONFIGURING:
            return False
        if event.rc == ReturnCode.OK:
            self._configured = True
            assert self.package is not None
            differences = compare(self.package.manifest, event.inspection, self._dram_bytes)
            if not differences:
                self._busy = 0
                self.move(_E.CONFIGURED, now_ns, out)
                return True
            self.fail_load(f"the configured board is not what the manifest says: {'; '.join(differences)}", now_ns, out)
        elif event.rc == ReturnCode.DEVICE_BUSY and self._may_retry(now_ns):
            self.step = "wait for a busy board"
        else:
            self._configure_failed(event.rc, event.detail, now_ns, out)
        return False

    def _configure_failed(self, rc: int, detail: str | None, now_ns: int, out: list[Action]) -> None:
        kind = fault_of_code(rc)
        words = f"configuring returned {rc}" + (f": {detail}" if detail else "")
        self._note_fault(kind, words, now_ns, out)
        if kind is FaultKind.DEVICE_BUSY or FAULT_POLICY[kind].reset is ResetRule.WITHIN_BUDGET:
            # Still busy after all tries: an earlier process's job may run on, and only a reset can end it.
            self.wants_reset, self._load = True, None
            self.load_error, self.step = words, None
            self.move(_E.FAULT, now_ns, out)
        else:
            self.fail_load(words, now_ns, out)

    def _may_retry(self, now_ns: int) -> bool:
        executor = self.scheduler.executor if self.scheduler else ExecutorConfig()
        self._busy += 1
        if self._busy > executor.busy_max_tries:
            return False
        self.retry_ns = now_ns + backoff_ns(executor, self._busy)
        return True

    def retry(self, now_ns: int, out: list[Action]) -> None:
        """Ask a busy board again, when it is time."""
        if self.retry_ns is not None and now_ns >= self.retry_ns:
            self.retry_ns = None
            if self.state is _M.CONFIGURING:
                self._configure(out)
            else:
                self._unconfigure(out)

    def fail_load(self, reason: str, now_ns: int, out: list[Action]) -> None:
        """The load ends here; the board can be loaded again."""
        self.load_error, self.step, self._load, self._recovered = reason, None, None, False
        self.fault_detail = self.fault_detail or reason
        self.move(_E.FAIL, now_ns, out)

    def golden(self, passed: bool, detail: str | None, now_ns: int, out: list[Action]) -> None:
        """Golden and warm-up are over: Ready, or failed. A re-test of a Ready generation only records the result."""
        data = {"passed": passed} | ({"detail": detail} if detail else {})
        self._recorder.of_board(history.BOARD_GOLDEN, now_ns, self.generation, data)
        if self.state is not _M.WARMING:
            return
        if not passed:
            self.fail_load(f"golden: {detail}", now_ns, out)
            return
        self.fault = self.fault_detail = self.load_error = self.step = self._load = None
        self._recovered = False
        self.move(_E.WARMED, now_ns, out)

    # ---------------------------------------------------------------- faults and resets
    def faulted(self, plan: RecoveryPlan, drain_expired: bool, now_ns: int, out: list[Action]) -> None:
        """Take the plan's step. `drain_expired`: the job was all that a drain waited for. A generation that the first fault has
        stopped, while another job was still out, stays as that left it."""
        if self.state not in RUNS_JOBS:
            self._record_fault(plan.kind, plan.detail, now_ns)
            return
        self._note_fault(plan.kind, plan.detail, now_ns, out)
        if plan.event is None:
            if self.state is not _M.WARMING:
                self.fault = self.fault_detail = None
            return
        self.wants_reset = plan.wants_reset
        self.step = self._load = None
        if plan.condemns:
            self.condemned = f"{plan.kind}: {plan.detail}"
        event = plan.event
        if event is _E.FAULT and self.state is _M.DRAINING and drain_expired:
            event = _E.DRAIN_EXPIRED
        self.move(event, now_ns, out)

    def _note_fault(self, kind: FaultKind, detail: str, now_ns: int, out: list[Action]) -> None:
        self.fault, self.fault_detail = kind, detail
        self._record_fault(kind, detail, now_ns)

    def _record_fault(self, kind: FaultKind, detail: str, now_ns: int) -> None:
        self._recorder.of_board(history.BOARD_FAULT, now_ns, self.generation, {"kind": kind.value, "detail": detail})

    def grant(self, command: wire.GrantReset, now_ns: int, out: list[Action]) -> str | None:
        """Reset, and go on as a new generation, or as an empty board that has proved that it can be reset; a refusal in words."""
        if (self.record is not None and self.state not in (_M.RECOVERING, _M.FAILED)) or self.resetting:
            return f"nothing to reset: generation {self.generation} is {self.state.name}"
        if command.generation <= self._highest:
            return f"generation {command.generation} is not new: the board has had {self._highest}"
        self._grant, self._highest = command.generation, command.generation
        self.wants_reset, self.resetting, self.step = False, True, "reset"
        out.append(ResetDevice(self.fault_detail or self.condemned or "an operator's word"))
        return None

    def deny(self, command: wire.DenyReset, now_ns: int, out: list[Action]) -> str | None:
        """The budget is spent: the board is condemned until an operator or the window says otherwise."""
        if self.state is _M.FAILED and self.wants_reset and not self.resetting:
            self.wants_reset, self.condemned = False, command.reason
            return None
        if self.state is not _M.RECOVERING or self.resetting:
            return f"no reset was asked for: generation {self.generation} is {self.state.name}"
        self.wants_reset, self.condemned = False, command.reason
        self.move(_E.FAIL, now_ns, out)
        return None

    def was_reset(self, event: DeviceReset, now_ns: int, out: list[Action]) -> bool:
        """After the reset: a new generation of the same package. False: the reset failed, and the board with it."""
        if not self.resetting or self._grant is None:
            return True
        self.resetting = False
        data = {"rc": event.rc, "passed": event.rc == ReturnCode.OK}
        self._recorder.of_board(history.BOARD_RESET, now_ns, self.generation, data)
        old, new, self._grant = self.record, self._grant, None
        if event.rc != ReturnCode.OK:
            self.step, self.condemned = None, f"the reset failed (rc {event.rc})"
            if old is not None and old.state is _M.RECOVERING:
                self.move(_E.FAIL, now_ns, out)
            return False
        self.resets += 1
        self._configured, self.condemned, self._busy = False, None, 0
        if old is not None and old.state is _M.RECOVERING:
            self.move(_E.RETIRE, now_ns, out)
        if self.package is None or old is None:
            self.step, self.record = None, None
            out.append(Announce())
            return True
        self._recovered = True
        self.fault = self.fault_detail = None  # it ended with the old generation
        self.record = ModelGeneration(new, old.alias, self.package.digest, self.package.manifest.image_sha256)
        self.move(_E.LOAD, now_ns, out)
        self.move(_E.VALIDATED, now_ns, out)
        self._configure(out)
        return True

    # ---------------------------------------------------------------- unload
    def drain(self, now_ns: int, out: list[Action]) -> None:
        """Ready -> Draining."""
        self.move(_E.DRAIN, now_ns, out)

    def drained(self, now_ns: int, out: list[Action]) -> None:
        """Nothing runs any more."""
        self.move(_E.DRAINED, now_ns, out)
        self._unconfigure(out)

    def unload_failed(self, now_ns: int, out: list[Action]) -> None:
        """A generation that failed leaves the board."""
        if self._configured:
            self._unconfigure(out)
        else:
            self._unloaded(out)

    def unconfigured(self, event: DeviceUnconfigured, now_ns: int, out: list[Action]) -> None:
        """The device is empty, by its own counters, or it is asked again, or it has a fault."""
        emptied = event.rc == ReturnCode.OK
        held = residue(event.after, self._empty_bytes, self.recovery.unload_residue_mib << 20) if emptied else None
        if emptied and held is None:
            self._configured, self._busy = False, 0
            if self._load is not None:
                self._verify(self._load, out)
                return
            if self.state is _M.UNLOADING:
                self.move(_E.UNLOADED, now_ns, out)
            self._unloaded(out)
        elif event.rc not in (ReturnCode.OK, ReturnCode.DEVICE_BUSY) or not self._may_retry(now_ns):
            words = f"unconfiguring returned {event.rc}" if held is None else f"after the unload {held}"
            self._note_fault(fault_of_code(event.rc) if held is None else FaultKind.RESIDUE, words, now_ns, out)
            if self.state is _M.UNLOADING:
                self.wants_reset, self.step = True, None
                self.move(_E.FAULT, now_ns, out)
            elif self.state is _M.FAILED:
                self.wants_reset, self.step = True, None
                out.append(Announce())
            elif self.state is _M.VALIDATING:
                self.fail_load(words, now_ns, out)

    def _unloaded(self, out: list[Action]) -> None:
        self.record = self.package = self.scheduler = self.step = None
        self.fault = self.fault_detail = self.load_error = None
        self.vocabulary = ()
        out.append(Announce())

    # ---------------------------------------------------------------- the door
    def move(self, event: ModelEvent, now_ns: int, out: list[Action]) -> None:
        """The one place where a generation changes its state."""
        record = self.record
        assert record is not None
        record.state = MODEL_GENERATION.next(record.state, event)
        self._recorder.of_board(history.BOARD_GENERATION, now_ns, record.id, {"state": record.state.name})
        out.append(Announce())


def default_scheduler(alias: str, manifest: Manifest) -> SchedulerConfig:
    """Without a scheduler file: the defaults, and every profile that the manifest proves."""
    batch = BatchConfig(profiles=manifest.compiled_batches)
    return SchedulerConfig(schema="calculet-scheduler/v1", model_alias=alias, batch=batch)
