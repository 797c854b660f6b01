"""An engine on a small honest board in virtual time.

The board keeps the tokens each lane was given and derives the next one from exactly those, so that a swapped lane or a lost token
changes the output; `reference` computes the same without any lanes. Faults are scripted per submission.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from calculet_core import wire
from calculet_core.artifact import CapacityInfo, GoldenCase, Manifest, Package, Proof, TokenizerInfo
from calculet_core.batches import BatchProfile, InactiveLanePolicy, InactiveMode, KvLayout
from calculet_core.clock import MS, S
from calculet_core.config import AdmissionConfig, BatchConfig, ExecutorConfig, RecoveryConfig, SchedulerConfig, TenantConfig
from calculet_core.history import Event
from calculet_core.ids import WireKey
from calculet_core.jobs import Completion, EngineBank, Holdings, Job, JobKind, JobTimings, OutputStatus, ReturnCode
from calculet_core.limits import Limits
from calculet_core.requests import InferenceRequest, Prompt, SamplingParams, SequenceState, StopRules
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_worker import actions, events
from calculet_worker.device.base import DeviceLimits, Inspection
from calculet_worker.engine import Engine

VOCAB = 64
EOS = 63
DIGEST = "d" * 64
ALIAS = "toy"
VOCABULARY = [bytes([48 + token]) for token in range(EOS)] + [b""]


def next_token(history: list[int]) -> int:
    """What the toy model says after these tokens; never EOS."""
    return (sum((place + 1) * token for place, token in enumerate(history)) * 31 + len(history)) % EOS


def reference(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


def text_of(prompt: list[int], count: int) -> str:
    return b"".join(VOCABULARY[token] for token in reference(prompt, count)).decode()


def a_profile(size: int, context: int = 64, mode: InactiveMode = InactiveMode.COMPACT) -> BatchProfile:
    policy = InactiveLanePolicy(mode=mode, kv_mode="toy", logits_returned=False, writes_kv=False)
    layout = KvLayout(kind="per_lane_contiguous", dtype="float16", bytes_per_token=2)
    return BatchProfile(f"decode-b{size}", size, context, "int32", "float32", layout, policy if size > 1 else None)


def a_manifest(lanes: int = 4, profiles: tuple[int, ...] = (1, 4), context: int = 64, **changes: Any) -> Manifest:
    mode = changes.pop("mode", InactiveMode.COMPACT)
    cut = changes.pop("cut", None)
    abilities = {"incremental_prefill": Proof("C0", "the toy board's own tests", cut)} if cut else {}
    fields: dict[str, Any] = {
        "schema": "calculet-artifact/v1", "name": "toy", "version": "1", "backend": "toy", "image": "image", "image_sha256": "1" * 64,
        "files": {}, "profiles": tuple(a_profile(size, context, mode) for size in profiles), "context": context, "lanes": lanes,
        "tokenizer": TokenizerInfo("bytes", VOCAB, eos_token_ids=(EOS,)), "capacity": CapacityInfo(1, 1, 1 << 30),
        "golden": "golden.jsonl", "abilities": abilities,
    }  # fmt: skip
    return Manifest(**(fields | changes))


def a_case(prompt: list[int], count: int = 4, wrong: bool = False) -> GoldenCase:
    expected = reference(prompt, count)
    if wrong:
        expected[-1] = (expected[-1] + 1) % EOS
    return GoldenCase(f"case {prompt}", prompt, expected, [1.0] * count)


def a_package(manifest: Manifest | None = None, cases: list[GoldenCase] | None = None, digest: str = DIGEST) -> Package:
    golden = tuple(cases if cases is not None else [a_case([1, 2, 3]), a_case([9] * 10)])
    return Package(Path("/nowhere"), manifest or a_manifest(), digest, golden, "key")


def a_scheduler(profiles: tuple[int, ...] = (1, 4), **sections: Any) -> SchedulerConfig:
    batch = BatchConfig(profiles=profiles, **sections.pop("batch", {}))
    admission = AdmissionConfig(**sections.pop("admission", {}))
    executor = ExecutorConfig(**sections.pop("executor", {}))
    return SchedulerConfig("calculet-scheduler/v1", ALIAS, admission=admission, executor=executor, batch=batch, **sections)


def a_request(
    number: int = 1, prompt_tokens: int = 4, max_new_tokens: int | None = 4, tenant: str = "default", deadline_ns: int = 1000 * S,
    asked: bool = False, weight: float = 1.0,
) -> InferenceRequest:  # fmt: skip
    return InferenceRequest(
        WireKey(number, 1, 1), 7, ALIAS, tenant, weight, Prompt(token_ids=(1,) * prompt_tokens), max_new_tokens,
        SamplingParams(temperature=0.0), StopRules(), deadline_ns, asked, 0,
    )  # fmt: skip


def a_sequence(number: int = 1, prompt_tokens: int = 4, max_new_tokens: int = 4, **fields: Any) -> SequenceState:
    request_fields = {name: fields.pop(name) for name in ("tenant", "deadline_ns", "asked", "weight") if name in fields}
    request = a_request(number, prompt_tokens, max_new_tokens, **request_fields)
    ids = np.ones(prompt_tokens, np.int32)
    return SequenceState(
        request, number, fields.pop("generation", 1), ids, prompt_tokens, max_new_tokens, request.deadline_ns, **fields
    )


# ------------------------------------------------------------------------------------------------ the board
@dataclass
class Fault:
    """What happens to one submission instead of success."""

    refuse: ReturnCode | None = None
    lose: ReturnCode | None = None
    """Reported lost at the job's deadline; its completion comes `late_ns` after."""
    late_ns: int | None = None
    status: OutputStatus = OutputStatus.DONE
    bad_row: int | None = None
    failed_rows: tuple[int, ...] | None = None
    """The device says that the status is about these alone; there are logits of the others."""


class Board:
    """Answers jobs in virtual time. `step_ns` for a decode step, `token_ns` per prompt token."""

    def __init__(self, manifest: Manifest, step_ns: int = 10 * MS, token_ns: int = 1 * MS, outputs: int = 2) -> None:
        self.manifest, self.step_ns, self.token_ns = manifest, step_ns, token_ns
        self.limits = DeviceLimits(outputs, outputs, overlap=False)
        self.lanes: dict[int, list[int]] = {}
        self.leased: set[int] = set()
        self.busy_until_ns = 0
        self.jobs: list[Job] = []
        self.buffers = 0
        self.completes_on = EngineBank.PING
        self.delay_ns: Callable[[], int] | None = None
        """How much longer each job takes, and none waits for another: completions come out of order."""

    def configure(self) -> None:
        self.lanes = {lane: [] for lane in range(self.manifest.lanes)}

    def inspect(self) -> Inspection:
        manifest = self.manifest
        return Inspection(manifest.profiles, manifest.lanes, manifest.context, manifest.tokenizer.vocab_size, None)

    def compute(self, job: Job) -> Any:
        """Write the job's tokens, then say what follows, float32 [rows, vocabulary]."""
        if job.kind is JobKind.PREFILL:
            self._write(int(job.lanes[0]), job.token_ids.tolist(), job.positions.tolist())
            return self._rows([int(job.lanes[0])]) if job.want_logits else None
        lanes = []
        for lane, token, position, valid in zip(
            job.lanes.tolist(), job.token_ids.tolist(), job.positions.tolist(), job.lane_valid.tolist(), strict=True
        ):
            if valid:
                self._write(lane, [token], [position])
                lanes.append(lane)
        return self._rows(lanes)

    def _write(self, lane: int, tokens: list[int], positions: list[int]) -> None:
        held = self.lanes[lane]
        assert positions == list(range(len(held), len(held) + len(tokens))), f"lane {lane} holds {len(held)}, got {positions}"
        assert all(0 <= token < VOCAB for token in tokens)
        held.extend(tokens)

    def _rows(self, lanes: list[int]) -> Any:
        logits = np.zeros((len(lanes), VOCAB), np.float32)
        for row, lane in enumerate(lanes):
            logits[row, next_token(self.lanes[lane])] = 5.0
        return logits


@dataclass
class Told:
    """What one router was told about one attempt."""

    accepted: wire.Acceptance | None = None
    refused: wire.Refusal | None = None
    pieces: list[wire.Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def last(self) -> wire.Piece:
        return self.pieces[-1]

    @property
    def finish(self) -> str | None:
        return self.pieces[-1].finish if self.pieces else None

    @property
    def error(self) -> str | None:
        if self.refused is not None:
            return self.refused.error.code
        return self.pieces[-1].error.code if self.pieces and self.pieces[-1].error else None

    @property
    def ended(self) -> bool:
        return self.refused is not None or self.finish is not None or self.error is not None


class Driver:
    """Performs the engine's actions at once and the board's work in virtual time."""

    def __init__(
        self, manifest: Manifest | None = None, package: Package | None = None, scheduler: SchedulerConfig | None = None,
        recovery: RecoveryConfig = RecoveryConfig(), tenants: tuple[TenantConfig, ...] = (TenantConfig("default"),), outputs: int = 2,
        seed: int = 1, limits_of_waiting: Limits | None = None, on_host: bool = False, unconfigures: bool = True,
        polls: bool = False,
    ) -> None:  # fmt: skip
        self.manifest = manifest or (package.manifest if package else a_manifest())
        self.package = package or a_package(self.manifest)
        self.scheduler = scheduler
        self.board = Board(self.manifest, outputs=outputs)
        self.board.limits = replace(self.board.limits, on_host=on_host, unconfigures=unconfigures, polls=polls)
        self.engine = Engine(
            "board0", 1, 42, "ipc://x", self.board.limits, recovery, seed, tenants, 32 << 30, limits_of_waiting=limits_of_waiting
        )
        self.now = 1 * S
        self.faults: Iterator[Fault | None] = iter(())
        self.actions: list[actions.Action] = []
        self.told: dict[tuple[int, int], Told] = {}
        self.records: list[Event] = []
        self.exit: actions.Exit | None = None
        self.reset_rc = self.configure_rc = self.unconfigure_rc = ReturnCode.OK
        self.held_before: Holdings | None = None
        self.held_after: list[Holdings] = []
        """What the unconfigured board shows, one answer after the other; the last one stays."""
        self.release_rcs: list[ReturnCode] = []
        self.verify_error: str | None = None
        self.inspection: Inspection | None = None
        self.hold_tokenizing = False
        self.tokenizing: list[actions.Tokenize] = []
        self.seq = 0
        self.generation = 0
        self.later: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._queue: list[events.Event] = []
        self._feeding = False
        self._perform: dict[type[Any], Callable[[Any], None]] = {
            actions.SubmitJob: self._submit, actions.GiveBack: self._give_back, actions.ReleaseLane: self._release,
            actions.Tokenize: self._tokenize, actions.ToRouter: self._to_router, actions.VerifyPackage: self._verify,
            actions.ConfigureDevice: self._configure, actions.UnconfigureDevice: self._unconfigure,
            actions.ResetDevice: self._reset, actions.Announce: lambda a: None, actions.Record: lambda a: self.records.append(a.event),
            actions.Exit: lambda a: setattr(self, "exit", a),
        }  # fmt: skip

    # ---------------------------------------------------------------- events in
    def feed(self, event: events.Event) -> None:
        self._queue.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._queue:
                done = self.engine.handle(self._queue.pop(0), self.now)
                self.actions += done
                for action in done:
                    self._perform[type(action)](action)
        finally:
            self._feeding = False
        if self.engine.serving is not None:
            assert self.engine.serving.kv.invariants() == []
        wakeup = self.engine.next_wakeup_ns()
        assert wakeup is None or wakeup > self.now, "a wake-up that never passes is a busy loop"

    def command(self, kind: type[Any], **fields: Any) -> None:
        self.seq += 1
        self.feed(events.CommandArrived(kind(seq=self.seq, **fields)))

    def load(self, **fields: Any) -> None:
        self.generation += 1
        given = {"generation": self.generation, "alias": ALIAS, "package": "/nowhere", "digest": DIGEST} | fields
        self.command(wire.LoadModel, **given)

    def grant(self) -> None:
        self.generation += 1
        self.command(wire.GrantReset, generation=self.generation)

    def ready(self) -> Driver:
        """Load, and run until Ready."""
        self.load()
        self.until(lambda: self.engine.report(self.now).state in ("READY", "FAILED"))
        assert self.state == "READY", self.engine.report(self.now)
        return self

    def submit(self, number: int = 1, prompt: list[int] | None = None, max_new_tokens: int | None = 4, **fields: Any) -> Told:
        life = self.engine.life
        given: dict[str, Any] = {
            "request_id": number, "attempt": 1, "epoch": 1, "generation": life.generation, "digest": DIGEST, "alias": ALIAS,
            "tenant": "default", "weight": 1.0, "prompt": Prompt(token_ids=tuple(prompt or [number % 50, 2, 3])),
            "max_new_tokens": max_new_tokens, "sampling": SamplingParams(temperature=0.0), "stop": StopRules(),
            "deadline_ns": self.now + 1000 * S, "deadline_asked": False, "accepted_ns": self.now,
        } | fields  # fmt: skip
        router = given.pop("router", 7)
        told = self.told.setdefault((given["request_id"], given["attempt"]), Told())
        self.feed(events.RequestArrived(router, wire.Submit(**given)))
        return told

    def cancel(self, number: int = 1, attempt: int = 1) -> None:
        self.feed(events.CancelAsked(WireKey(number, attempt, 1), "client left"))

    # ---------------------------------------------------------------- time
    def step(self) -> bool:
        """Move to the next thing that happens; False when nothing will."""
        wakeup = self.engine.next_wakeup_ns()
        due = self.later[0][0] if self.later else None
        if due is None and wakeup is None:
            return False
        if due is None or (wakeup is not None and wakeup < due):
            assert wakeup is not None
            self.now = max(self.now, wakeup)
            self.feed(events.TimeCame())
        else:
            at, _, act = heapq.heappop(self.later)
            self.now = max(self.now, at)
            act()
        return True

    def until(self, condition: Callable[[], Any], limit_ns: int = 500 * S) -> None:
        end = self.now + limit_ns
        while not condition():
            assert self.step() and self.now < end, f"it never came true; {self.engine.report(self.now)}"

    def run(self, for_ns: int) -> None:
        """Everything that happens in that time."""
        end = self.now + for_ns
        while True:
            times = [time for time in (self.engine.next_wakeup_ns(), self.later[0][0] if self.later else None) if time is not None]
            if not times or min(times) > end:
                break
            self.step()
        self.now = end

    def call_at(self, at_ns: int, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.later, (at_ns, self._count, act))

    # ---------------------------------------------------------------- views
    @property
    def state(self) -> str:
        return self.engine.report(self.now).state

    def lanes(self, state: KvSequenceState) -> int:
        return self.engine.report(self.now).lanes.get(state.name, 0)

    def record_names(self) -> list[str]:
        return [event.event for event in self.records]

    def events_of(self, name: str) -> list[Event]:
        return [event for event in self.records if event.event == name]

    # ---------------------------------------------------------------- actions out
    def _submit(self, action: actions.SubmitJob) -> None:
        job, fault = action.job, next(self.faults, None) or Fault()
        if fault.refuse is not None:
            self._queue.append(events.JobRefused(job.job_id, fault.refuse))
            return
        assert job.kind is JobKind.PREFILL or job.token_ids.base is not None
        self.board.jobs.append(job)
        spent = self.board.step_ns if job.kind is JobKind.DECODE else self.board.token_ns * len(job.token_ids)
        if self.board.delay_ns is not None:
            done = self.now + spent + self.board.delay_ns()
        else:
            done = self.board.busy_until_ns = max(self.now, self.board.busy_until_ns) + spent
        self._queue.append(events.JobSubmitted(job.job_id, EngineBank.PING))
        if fault.lose is None:
            self.call_at(done, lambda: self._complete(job, fault, spent))
            return
        rc = fault.lose
        self.call_at(action.deadline_ns, lambda: self.feed(events.JobLost(job.job_id, rc)))
        if fault.late_ns is not None:
            self.call_at(action.deadline_ns + fault.late_ns, lambda: self._complete(job, Fault(), spent))

    def _complete(self, job: Job, fault: Fault, spent: int) -> None:
        good = (fault.status is OutputStatus.DONE or fault.failed_rows is not None) and job.generation == self.engine.life.generation
        logits = self.board.compute(job) if good and self.state != "RECOVERING" else None
        if logits is not None and fault.bad_row is not None:
            logits[fault.bad_row, 3] = np.nan
        if logits is not None and fault.failed_rows:
            logits[[row for row in fault.failed_rows if row < len(logits)]] = np.nan
        self.board.buffers += 1
        self.board.leased.add(self.board.buffers)
        timings = JobTimings(wait_ns=spent)
        engine = self.board.completes_on
        completion = Completion(
            job.job_id, job.generation, fault.status, logits, engine, timings, self.board.buffers, fault.failed_rows
        )
        self.feed(events.JobCompleted(completion))

    def _give_back(self, action: actions.GiveBack) -> None:
        self.board.leased.remove(action.completion.buffer_id)

    def _release(self, action: actions.ReleaseLane) -> None:
        rc = self.release_rcs.pop(0) if self.release_rcs else ReturnCode.OK
        if rc == ReturnCode.OK:
            self.board.lanes[action.lane] = []
        self._queue.append(events.LaneReleased(action.generation, action.lane, rc))

    def _tokenize(self, action: actions.Tokenize) -> None:
        if self.hold_tokenizing:
            self.tokenizing.append(action)
        else:
            self._queue.append(self.tokenized(action))

    def tokenized(self, action: actions.Tokenize) -> events.Tokenized:
        return events.Tokenized(action.key, np.array(action.prompt.token_ids, np.int32))

    def _to_router(self, action: actions.ToRouter) -> None:
        for acceptance in action.accepted:
            self.told[acceptance.request_id, acceptance.attempt].accepted = acceptance
        for refusal in action.refused:
            self.told.setdefault((refusal.request_id, refusal.attempt), Told()).refused = refusal
        for piece in action.pieces:
            told = self.told[piece.request_id, piece.attempt]
            assert not told.ended, "a piece after the terminal"
            told.pieces.append(piece)

    def _verify(self, action: actions.VerifyPackage) -> None:
        if self.verify_error:
            answer = events.PackageVerified(action.generation, error=self.verify_error)
        else:
            answer = events.PackageVerified(action.generation, self.package, VOCABULARY, self.scheduler)
        self.call_at(self.now + 1 * MS, lambda: self.feed(answer))

    def _configure(self, action: actions.ConfigureDevice) -> None:
        rc = self.configure_rc
        if rc == ReturnCode.OK:
            self.board.configure()
        found = self.inspection or self.board.inspect() if rc == 0 else None
        answer = events.DeviceConfigured(action.generation, rc, found, before=self.held_before)
        self.call_at(self.now + 1 * MS, lambda: self.feed(answer))

    def _unconfigure(self, action: actions.UnconfigureDevice) -> None:
        rc, after = self.unconfigure_rc, self.held_after[0] if self.held_after else None
        if len(self.held_after) > 1:
            self.held_after.pop(0)
        self.call_at(self.now + 1 * MS, lambda: self.feed(events.DeviceUnconfigured(action.generation, rc, after)))

    def _reset(self, action: actions.ResetDevice) -> None:
        rc = self.reset_rc
        self.board.busy_until_ns = 0
        self.call_at(self.now + 1 * MS, lambda: self.feed(events.DeviceReset(rc)))
