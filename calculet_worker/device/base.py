"""The device protocol: what the worker may ask of a board. Kept to what a small C ABI over CalRT could offer.

Threads. `submit`, `give_back`, `release`, `can_allocate`, `counters` and `telemetry` never block and are called from the actor's
thread. `configure`, `inspect`, `reset_configuration`, `reset`, `wait_any` and `close` may block and are called from the one
device thread; `wait_any` may run while the others are called. Where `DeviceLimits.polls` says so, `wait_any(0)` is also called
from the actor's thread, at times when the device thread is not in the device. `counters` and `telemetry` are also called from the
device thread, before `configure` and after `reset_configuration`, and may run while the others do. Apart from that no two calls
overlap.

Completions may come out of order. A completion leases its output buffer until `give_back`; a device with no free output
buffer answers `submit` with `DEVICE_BUSY`. A submitted job's input arrays belong to the device until the job completes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from calculet_core.artifact import Package
from calculet_core.batches import BatchProfile
from calculet_core.config import BoardConfig
from calculet_core.jobs import (
    ChipTelemetry,
    Completion,
    DeviceCounters,
    DeviceVersions,
    EngineBank,
    Job,
    JobHandle,
    ReturnCode,
)


class BoardUnavailable(Exception):
    """The board cannot be opened (absent, its library missing, in use); the process exits 75."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the configured graph really has; compared with the manifest (scheduling §11 step 8)."""

    profiles: tuple[BatchProfile, ...]
    lanes: int
    context: int
    vocab_size: int
    reserved_bytes: int | None
    """DRAM taken; None where the device cannot tell."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """How many jobs may be in flight, and whether they may overlap."""

    max_inflight: int
    output_buffers: int
    overlap: bool
    """True: two jobs in flight really compute at once; a trace must show it."""
    on_host: bool = False
    """It computes on the host's own processors, which are busy rather than asleep while it does."""
    polls: bool = False
    """`wait_any(0)` takes microseconds, whatever runs, and may be called from any thread; see above."""
    unconfigures: bool = True
    """True: it is verified that `reset_configuration` gives everything back (the contract suite, for what we can run). False: an
    unload ends the process instead, and the next one begins empty (scheduling §12)."""


class Device(Protocol):
    """One VirtualDevice."""

    def versions(self) -> DeviceVersions:
        """Who the board is."""
        ...

    def limits(self) -> DeviceLimits:
        """Before and after `configure`."""
        ...

    def configure(self, package: Package, generation: int) -> ReturnCode:
        """Open a verified package; replaces nothing: the device must be unconfigured.

        Afterwards every lane is empty and free.
        """
        ...

    def inspect(self) -> Inspection:
        """After `configure` only."""
        ...

    def reset_configuration(self) -> ReturnCode:
        """Undo `configure`; with jobs in flight it is `DEVICE_BUSY`."""
        ...

    def can_allocate(self, sequences: int) -> bool:
        """The runtime's own hint whether so many more sequences fit; our accounting stands beside it."""
        ...

    def submit(self, job: Job, engine: EngineBank = EngineBank.AUTO) -> JobHandle | ReturnCode:
        """Queue a job. Never blocks.

        `DEVICE_BUSY`: full, try later. `DEVICE_UNAVAILABLE`: the board is gone. `INVALID_SHAPE` and `INVALID_DTYPE`: the
        arrays do not fit the profile; nothing was queued.
        """
        ...

    def wait_any(self, timeout_ns: int) -> Completion | ReturnCode:
        """The next completion in the order of completion; `TIMEOUT` when none came within `timeout_ns`."""
        ...

    def give_back(self, completion: Completion) -> None:
        """End the lease on the completion's output buffer.

        Raises:
            ValueError: it was given back before.
        """
        ...

    def release(self, lane: int) -> ReturnCode:
        """Free a lane's KV. `OK` is the runtime's confirmation; a lane of a job in flight is `DEVICE_BUSY`."""
        ...

    def reset(self) -> ReturnCode:
        """Reset the board: jobs in flight are lost, lanes are empty, the configuration is gone."""
        ...

    def counters(self) -> DeviceCounters:
        """Queue counters."""
        ...

    def telemetry(self) -> tuple[ChipTelemetry, ...]:
        """One entry per chip; None values where the device cannot tell."""
        ...

    def close(self) -> None:
        """Give everything back. Twice is fine."""
        ...


DeviceFactory = Callable[[BoardConfig], Device]
"""Raises `BoardUnavailable` when the board cannot be opened and `ConfigError` for wrong options."""
