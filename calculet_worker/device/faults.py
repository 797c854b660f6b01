"""Faults to inject, as data: one class per row of acceptance §12.2, and the plan that says when each fires.

A fault fires at a site, which is a hook of the device protocol and, where a job is concerned, its kind. Whether it fires depends on
the seed, the site and the how-manieth visit of that site it is, and on nothing else: adding a fault to a plan or a request to
a load moves no other firing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from calculet_core.jobs import JobKind, ReturnCode


class Hook(StrEnum):
    """Where in the device protocol a fault sits."""

    SUBMIT = "submit"
    COMPLETION = "completion"
    RELEASE = "release"
    CONFIGURE = "configure"
    RESET = "reset"


Site = tuple[Hook, JobKind | None]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="fault", kw_only=True):
    """Base. Fires at the visits `at`, counted from 0 at each site (prefill and decode jobs apart), and at a share `rate` of all."""

    hook: ClassVar[Hook]
    rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    at: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    job: JobKind | None = None
    """Only jobs of this kind; None: both. Of no meaning where no job is concerned."""


class Refusal(Fault, frozen=True):
    """Base of refused submissions: the device never sees the job."""

    hook = Hook.SUBMIT
    rc: ClassVar[ReturnCode]


class Busy(Refusal, frozen=True, tag="busy"):
    """Submit DeviceBusy, rc 17."""

    rc = ReturnCode.DEVICE_BUSY


class Unavailable(Refusal, frozen=True, tag="unavailable"):
    """Submit DeviceUnavailable, rc 18."""

    rc = ReturnCode.DEVICE_UNAVAILABLE


class InvalidShape(Refusal, frozen=True, tag="invalid_shape"):
    """Rc 21."""

    rc = ReturnCode.INVALID_SHAPE


class InvalidDtype(Refusal, frozen=True, tag="invalid_dtype"):
    """Rc 22."""

    rc = ReturnCode.INVALID_DTYPE


class OtherCode(Refusal, frozen=True, tag="other_code"):
    """A code without a row in the specification."""

    rc = ReturnCode.OTHER


class WaitTimeout(Fault, frozen=True, tag="wait_timeout"):
    """Wait timeout, rc 13: the completion does not come. It is dropped at the next reset."""

    hook = Hook.COMPLETION


class StaleCompletion(Fault, frozen=True, tag="stale_completion"):
    """The old job's completion comes, but only after the next reset and configuration."""

    hook = Hook.COMPLETION


class Slow(Fault, frozen=True, tag="slow"):
    """The completion comes later than the device finished it."""

    hook = Hook.COMPLETION
    delay_ms: Annotated[float, Meta(gt=0)]


class CcuException(Fault, frozen=True, tag="ccu_exception"):
    """CCU exception in the output status: of the whole job, which has no logits then, or only of the row `row` (modulo the job's
    active rows), whose logits are none."""

    hook = Hook.COMPLETION
    row: Annotated[int, Meta(ge=0)] | None = None


class BadNumbers(Fault, frozen=True):
    """Base of outputs with a number that is none, in the row `row` (modulo the job's rows)."""

    hook = Hook.COMPLETION
    value: ClassVar[float]
    row: Annotated[int, Meta(ge=0)] = 0


class NanOutput(BadNumbers, frozen=True, tag="nan_output"):
    """NaN in the logits."""

    value = float("nan")


class InfOutput(BadNumbers, frozen=True, tag="inf_output"):
    """Inf in the logits."""

    value = float("inf")


class ReleaseRefused(Fault, frozen=True, tag="release_refused"):
    """The runtime does not confirm that a lane is free."""

    hook = Hook.RELEASE


class ConfigureRefused(Fault, frozen=True, tag="configure_refused"):
    """The runtime does not take an artifact."""

    hook = Hook.CONFIGURE


class ResetFails(Fault, frozen=True, tag="reset_fails"):
    """The board does not come back from a reset."""

    hook = Hook.RESET


AnyFault = (
    Busy | Unavailable | InvalidShape | InvalidDtype | OtherCode | WaitTimeout | StaleCompletion | Slow | CcuException | NanOutput
    | InfOutput | ReleaseRefused | ConfigureRefused | ResetFails
)  # fmt: skip
"""What a board's option `faults` lists: `- {fault: busy, at: [3], job: decode}`."""


@dataclass(frozen=True, slots=True)
class Firing:
    """A fault that fired."""

    fault: AnyFault
    site: Site
    ordinal: int
    job_id: int | None


@dataclass(slots=True)
class FaultPlan:
    """Decides and remembers. At each visit of a site the first fault of the list that fires is the one. While `armed` says no,
    nothing fires and visits are not counted, so that ordinals count from the moment of arming."""

    faults: Sequence[AnyFault] = ()
    seed: int = 0
    firings: list[Firing] = field(default_factory=list)
    armed: Callable[[], bool] | None = None
    """None: always."""
    told: Callable[[Firing], None] | None = None
    """Hears of every firing."""
    _visits: dict[Site, int] = field(default_factory=dict)

    def visit(self, hook: Hook, kind: JobKind | None = None, job_id: int | None = None) -> AnyFault | None:
        """Count a visit of the site; the fault that fires there, or None."""
        if self.armed is not None and not self.armed():
            return None
        site = (hook, kind)
        ordinal = self._visits.get(site, 0)
        self._visits[site] = ordinal + 1
        for fault in self.faults:
            if fault.hook is hook and fault.job in (None, kind) and self._fires(fault, site, ordinal):
                firing = Firing(fault, site, ordinal, job_id)
                self.firings.append(firing)
                if self.told is not None:
                    self.told(firing)
                return fault
        return None

    def _fires(self, fault: AnyFault, site: Site, ordinal: int) -> bool:
        if ordinal in fault.at:
            return True
        if not fault.rate:
            return False
        name = f"{self.seed}/{type(fault).__name__}/{site[0]}/{site[1]}/{ordinal}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") < fault.rate * 2**64
