"""Faults that an administrator may order on a running fleet, as data (`calculet chaos`).

An order goes over the control channel to the supervisor, which commits it to the audit log and carries the fault itself or hands it
to the one process that does. Whoever carries a fault ends it by its own clock: a driver that dies leaves nothing behind, and a
process that dies takes its faults along. None of this exists in a process whose configuration does not say `chaos.enabled: true`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Process = Literal["worker", "router", "supervisor"]


class Phase(StrEnum):
    """Where a job is when its worker is killed."""

    ADMITTED = "admitted"
    """The request was taken; nothing of it has reached the device."""
    PREFILLING = "prefilling"
    """A prefill job is on the device."""
    DECODING = "decoding"
    """A decode job is on the device."""
    COMPLETED = "completed"
    """A job's results were read; its output is still leased, and nobody was told."""
    TELLING = "telling"
    """Tokens were drawn and committed; their message has not gone out."""


class FrameTrouble(StrEnum):
    """What happens to messages between routers and a worker."""

    SLOW = "slow"
    TRUNCATED = "truncated"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"
    CORRUPT = "corrupt"


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="fault"):
    """Base: unknown keys are errors."""


class KillWorker(_Order, frozen=True, tag="kill_worker"):
    """kill -9 of a board's worker: now, or by itself at its next visit of a phase within `for_s`."""

    phase: Phase | None = None
    for_s: Seconds = 20.0


class FreezeWorker(_Order, frozen=True, tag="freeze_worker"):
    """SIGSTOP of a board's worker, SIGCONT after `for_s` if it is still there. Above the limits for silence and hanging it is
    replaced."""

    for_s: Seconds


class KillRouter(_Order, frozen=True, tag="kill_router"):
    """kill -9 of a router."""


class KillSupervisor(_Order, frozen=True, tag="kill_supervisor"):
    """kill -9 of the supervisor, as soon as it has answered."""


class TroubleFrames(_Order, frozen=True, tag="frames"):
    """Messages between routers and a board's worker, both ways, are spoiled for `for_s`. Spoiled bytes are never a message: what
    still decodes is no fault that a check could see."""

    trouble: FrameTrouble
    for_s: Seconds
    rate: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """Share of messages; `slow` has all."""
    delay_ms: Annotated[float, Meta(gt=0, le=10_000)] = 50.0
    """`slow`: how much later each message goes, in order."""


class FullDisk(_Order, frozen=True, tag="full_disk"):
    """Every write to a file fails in one process (RLIMIT_FSIZE 0) for `for_s`."""

    process: Process
    for_s: Seconds


class NoDescriptors(_Order, frozen=True, tag="no_descriptors"):
    """One process can open no file and no socket (RLIMIT_NOFILE) for `for_s`."""

    process: Process
    for_s: Seconds


class StealLock(_Order, frozen=True, tag="steal_lock"):
    """The worker is killed, and somebody else holds its board's lock for `for_s`."""

    for_s: Seconds


AnyFault = KillWorker | FreezeWorker | KillRouter | KillSupervisor | TroubleFrames | FullDisk | NoDescriptors | StealLock
"""One fault. As data: `{fault: kill_worker, phase: decoding}`."""


def name_of(fault: AnyFault) -> str:
    """For people and for metrics: `kill_worker`, `frames`, ..."""
    return str(type(fault).__struct_config__.tag)


def words(fault: AnyFault) -> str:
    """With what tells it from others of its name: `kill_worker decoding`, `frames corrupt`, `full_disk router`."""
    detail = getattr(fault, "phase", None) or getattr(fault, "trouble", None) or getattr(fault, "process", None)
    return f"{name_of(fault)} {detail}" if detail else name_of(fault)


def lasts_s(fault: AnyFault) -> float:
    """How long it lasts at most; 0 for what is over at once."""
    return float(getattr(fault, "for_s", 0.0))


def needs_board(fault: AnyFault) -> bool:
    """Whether it is about one board."""
    return isinstance(fault, KillWorker | FreezeWorker | TroubleFrames | StealLock) or getattr(fault, "process", None) == "worker"
