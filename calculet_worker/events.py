"""What the engine is told: `Engine.handle(event, now_ns) -> list[Action]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from calculet_core import wire
from calculet_core.config import TenantConfig
from calculet_core.errors import CalculetError
from calculet_core.ids import WireKey
from calculet_core.jobs import Completion, EngineBank, Holdings
from calculet_worker.output.sampling import RowFacts


class RequestArrived(msgspec.Struct, frozen=True):
    """A submission from a router."""

    router: int
    message: wire.Submit


class Tokenized(msgspec.Struct, frozen=True):
    """The prompt's token ids, int32 [n]; with a constraint also its `output.constraint.Matcher`."""

    key: WireKey
    token_ids: Any
    matcher: Any = None
    echo: str = ""
    """The prompt's text, where it was asked for."""


@dataclass(frozen=True, slots=True)
class TokenizingFailed:
    """The prompt cannot be tokenized or rendered; only its request fails."""

    key: WireKey
    error: CalculetError


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A router cancels one attempt."""

    key: WireKey
    reason: str


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router's lease lapsed, or its credit did: all its requests are cancelled."""

    router: int
    reason: str


class JobSubmitted(msgspec.Struct, frozen=True):
    """The device took the job (scheduling §9.2: only now is its KV Updating)."""

    job_id: int
    engine: EngineBank


@dataclass(frozen=True, slots=True)
class JobRefused:
    """The device refused the job; nothing of it ran."""

    job_id: int
    rc: int


@dataclass(frozen=True, slots=True)
class JobCompleted:
    """A completion came home; its buffer is leased until the `GiveBack` action."""

    completion: Completion
    arrived_ns: int = field(default=0, compare=False)
    """When the device thread had it; 0: not told."""
    bf16_ns: int | None = field(default=None, compare=False)
    """How long widening BF16 logits took after that; None: they came as float32."""
    facts: RowFacts | None = field(default=None, compare=False)
    """Of all rows of the logits, found on the device thread; None: the engine finds what it needs."""


@dataclass(frozen=True, slots=True)
class JobLost:
    """Waiting for the job failed (time-out or a code): nobody knows whether it runs on."""

    job_id: int
    rc: int


class LaneReleased(msgspec.Struct, frozen=True):
    """The runtime's answer to `ReleaseLane`; `rc` 0 confirms."""

    generation: int
    lane: int
    rc: int


@dataclass(frozen=True, slots=True)
class CommandArrived:
    """From the supervisor; `seq` orders and deduplicates."""

    command: (
        wire.LoadModel
        | wire.UnloadModel
        | wire.DrainBoard
        | wire.ResumeBoard
        | wire.SetPingPong
        | wire.GrantReset
        | wire.DenyReset
        | wire.StopWorker
    )


@dataclass(frozen=True, slots=True)
class PackageVerified:
    """Answer to `VerifyPackage`: `package` is a `calculet_core.artifact.Package`, or `error` says what is wrong.

    `vocabulary` maps a token id to its bytes (`Sequence[bytes]`); `scheduler` is the alias's `SchedulerConfig`.
    """

    generation: int
    package: Any = None
    vocabulary: Any = None
    scheduler: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceConfigured:
    """Answer to `ConfigureDevice`: `inspection` (a `device.base.Inspection`) when `rc` is 0; `before`: the empty board."""

    generation: int
    rc: int
    inspection: Any = None
    detail: str | None = None
    before: Holdings | None = None


@dataclass(frozen=True, slots=True)
class DeviceUnconfigured:
    """Answer to `UnconfigureDevice`; `after`: what the board still holds."""

    generation: int
    rc: int
    after: Holdings | None = None


@dataclass(frozen=True, slots=True)
class DeviceReset:
    """Answer to `ResetDevice`."""

    rc: int


@dataclass(frozen=True, slots=True)
class CountersRead:
    """What the device says of itself, read between two events: jobs that it counts as pending, and whether it denies room for the
    sequences that the engine counts as free (`can_allocate`, a hint beside our accounting)."""

    pending: int
    full: bool


@dataclass(frozen=True, slots=True)
class TenantsChanged:
    """The configuration has other weights and limits now."""

    tenants: tuple[TenantConfig, ...]


@dataclass(frozen=True, slots=True)
class TimeCame:
    """`Engine.next_wakeup_ns()` has passed."""


Event = (
    RequestArrived | Tokenized | TokenizingFailed | CancelAsked | RouterLost | JobSubmitted | JobRefused | JobCompleted
    | JobLost | LaneReleased | CommandArrived | PackageVerified | DeviceConfigured | DeviceUnconfigured | DeviceReset
    | CountersRead | TenantsChanged | TimeCame
)  # fmt: skip
