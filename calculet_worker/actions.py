"""What the engine wants done. A shell (or the simulation) performs actions in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from calculet_core import wire
from calculet_core.history import Event
from calculet_core.ids import WireKey
from calculet_core.jobs import Completion, EngineBank, Job, JobKind, JobTimings
from calculet_core.requests import Constraint, Prompt


class SubmitJob(msgspec.Struct, frozen=True):
    """Call `Device.submit` at once and tell the engine `JobSubmitted` or `JobRefused`; the job times out at `deadline_ns`."""

    job: Job
    engine: EngineBank
    deadline_ns: int
    rehearse_ns: int | None = None
    """Shortly before the job should end: when a tick may be rehearsed (`rehearsal`). None: it is too short, or nobody knows."""
    brief: bool = False
    """It should end before the device thread could be woken: look for its end at once."""


class GiveBack(msgspec.Struct, frozen=True):
    """End a completion's lease."""

    completion: Completion


class ReleaseLane(msgspec.Struct, frozen=True):
    """Call `Device.release`; answer `LaneReleased`."""

    generation: int
    lane: int


class Tokenize(msgspec.Struct, frozen=True):
    """Off the actor's path unless it is short; answer `Tokenized` or `TokenizingFailed`. `size`: bytes of the prompt's texts."""

    key: WireKey
    prompt: Prompt
    size: int
    constraint: Constraint | None = None
    """Compiled too, always off the actor's path."""
    echo: bool = False
    """The answer is to begin with the prompt's text, which only the tokenizer knows: tell it too."""


class ToRouter(msgspec.Struct):
    """For one router; a shell joins all of one loop pass into one `wire.Tick`."""

    router: int
    pieces: list[wire.Piece] = []
    accepted: list[wire.Acceptance] = []
    refused: list[wire.Refusal] = []


@dataclass(frozen=True, slots=True)
class VerifyPackage:
    """Verify path, signature, hashes and manifest, load the vocabulary; answer `PackageVerified`."""

    generation: int
    alias: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class ConfigureDevice:
    """Device thread: `configure`, then `inspect`; answer `DeviceConfigured`."""

    generation: int
    package: Any


@dataclass(frozen=True, slots=True)
class UnconfigureDevice:
    """Device thread: `reset_configuration`; answer `DeviceUnconfigured`."""

    generation: int


@dataclass(frozen=True, slots=True)
class ResetDevice:
    """Device thread: `reset`; answer `DeviceReset`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """State or generation changed: tell routers (`wire.WorkerHello`) and the supervisor (`wire.WorkerReport`) now."""


class Record(msgspec.Struct, frozen=True):
    """For the journal, the history and the counters."""

    event: Event


class TracedRow(NamedTuple):
    """One sequence's part of a job, cheap to make: it is made before the job goes out. Times in ns of CLOCK_MONOTONIC."""

    key: WireKey
    seq_id: int
    step: int
    accepted_ns: int
    admitted_ns: int
    ready_ns: int
    kv_before: int
    kv_after: int
    draws: bool
    """The step draws a token for it: not a prompt's part that others follow."""


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """For the step trace; only while it is on."""

    job_id: int
    generation: int
    kind: JobKind
    engine: EngineBank
    status: str
    timings: JobTimings
    compiled: int
    built_ns: int
    wait_done_ns: int
    logits_ready_ns: int
    sampling_ns: int | None
    rows: list[TracedRow]
    bf16_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process with this code."""

    code: int
    reason: str


Action = (
    SubmitJob | GiveBack | ReleaseLane | Tokenize | ToRouter | VerifyPackage | ConfigureDevice | UnconfigureDevice
    | ResetDevice | Announce | Record | TraceSteps | Exit
)  # fmt: skip
