"""One device submission and what comes back.

A job owns its input arrays until its completion; a completion owns its output buffer until `give_back`. Nobody shares either
(scheduling §14). Times in a `JobTimings` are nanoseconds; what a device cannot tell is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import msgspec

from calculet_core.batches import BatchProfile


class JobKind(StrEnum):
    """What a job computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineBank(IntEnum):
    """Which of the device's two job engines takes it (scheduling §14)."""

    AUTO = 0
    PING = 1
    PONG = 2


class OutputStatus(StrEnum):
    """The status word of an output buffer. Only `DONE` carries logits that may be used."""

    DONE = "done"
    CCU_EXCEPTION = "ccu_exception"
    ABORTED = "aborted"


class ReturnCode(IntEnum):
    """CalRT's codes that the specifications name; `OTHER` stands for any code without a row."""

    OK = 0
    TIMEOUT = 13
    DEVICE_BUSY = 17
    DEVICE_UNAVAILABLE = 18
    INVALID_SHAPE = 21
    INVALID_DTYPE = 22
    OTHER = 255


class Job(msgspec.Struct, frozen=True, eq=False):
    """Immutable once submitted.

    Prefill: one lane; `token_ids` and `positions` are int32 [n] and `lanes` is int32 [1]. Decode: `lanes`, `token_ids`,
    `positions` int32 [rows] and `lane_valid` uint8 [rows], with `rows` as `DecodeBatch` says.
    """

    job_id: int
    generation: int
    kind: JobKind
    profile: BatchProfile
    lanes: Any
    token_ids: Any
    positions: Any
    lane_valid: Any = None
    want_logits: bool = True
    """False for a cut of a prompt that is not its last."""


class JobHandle(msgspec.Struct, frozen=True):
    """The device's receipt: the job is in its queue on `engine`."""

    job_id: int
    engine: EngineBank


class JobTimings(msgspec.Struct, frozen=True):
    """Where the device's time went (acceptance §2.3)."""

    h2d_ns: int | None = None
    wait_ns: int | None = None
    d2h_ns: int | None = None
    started_ns: int | None = None
    """When computing began, on the host's CLOCK_MONOTONIC; with `wait_ns` the device's own trace, which alone proves overlap."""


class Completion(msgspec.Struct, frozen=True, eq=False):
    """A finished job. `logits` is [rows, vocabulary] (prefill: [1, vocabulary]) or None, valid until given back.

    Float32; from a device whose profile says `bfloat16`, its bits as uint16 until the executor has widened them.
    """

    job_id: int
    generation: int
    status: OutputStatus
    logits: Any
    engine: EngineBank
    timings: JobTimings
    buffer_id: int
    """Output buffer that is leased to the receiver until `Device.give_back`."""
    failed_rows: tuple[int, ...] | None = None
    """With a status that is not `DONE`: the rows it is about; the others' logits hold. None: it is about the whole job. Believed
    only where the artifact proves `lane_fault_isolation` (scheduling §7.4)."""


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """The device's queue counters and resets."""

    pending: int
    finished: int
    left: int
    """Finished jobs whose output has not been given back."""
    resets: int


@dataclass(frozen=True, slots=True)
class ChipTelemetry:
    """One chip; None where the device cannot tell."""

    temperature_c: float | None = None
    power_w: float | None = None
    frequency_mhz: float | None = None
    throttled: bool | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a device holds when nothing is configured, by its own counters (scheduling §12)."""

    memory_used_bytes: int | None = None
    """All chips together; None where the device cannot tell."""
    pending: int = 0
    left: int = 0
    """Finished jobs whose output has not been given back."""
    error: str | None = None
    """Why its counters could not be read: then nobody knows how it is."""


@dataclass(frozen=True, slots=True)
class DeviceVersions:
    """Who the board is; None where the device cannot tell. The serial is the board's own, salted before it is shown."""

    device: str
    serial: str | None = None
    runtime: str | None = None
    driver: str | None = None
    firmware: str | None = None
    chips: int | None = None
    power_mode: str | None = None
