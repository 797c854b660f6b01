"""The simulated board in real time: `SimBoard` behind the device protocol.

One lock; `wait_any` sleeps on it until the next job is due, and `submit` wakes it when that changes. Nobody spins.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from calculet_core.artifact import Package
from calculet_core.capacity import GIB
from calculet_core.clock import S
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
    ReturnCode,
)
from calculet_worker.device.base import DeviceLimits, Inspection
from calculet_worker.device.sim_board import SimBoard


class SimOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`boards[].options` of a `sim` board."""

    serial: str | None = None
    """None: made from the board's name."""
    driver: str = "1.4.0-sim"
    firmware: str = "2.2.1-sim"
    power_mode: Literal["eco", "balanced", "performance"] = "balanced"
    chips: Annotated[int, Meta(ge=1, le=8)] = 2
    seed: int = 0
    """Of the jitter."""
    ambient_c: Annotated[float, Meta(ge=-40, le=120)] = 35.0
    reset_ms: Annotated[int, Meta(ge=0, le=60_000)] = 200
    """How long a reset takes."""
    unconfigures: bool = True
    """False: as a runtime whose `reset_configuration` is unverified."""


def open_sim(board: BoardConfig) -> SimDevice:
    """The factory of `BACKENDS`.

    Raises:
        ConfigError: `board.options` is wrong.
    """
    try:
        options = msgspec.convert(board.options, SimOptions)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ConfigError(f"board {board.name}: $.options{path.rstrip('`')}: {message}") from None
    versions = DeviceVersions(
        device="sim",
        serial=options.serial or f"SIM-{board.name}",
        runtime="0.7.6-sim",
        driver=options.driver,
        firmware=options.firmware,
        chips=options.chips,
        power_mode=options.power_mode,
    )
    sim_board = SimBoard(versions, int(board.dram_gib * GIB), options.seed, options.ambient_c)
    return SimDevice(sim_board, options.reset_ms * 1_000_000, options.unconfigures)


class SimDevice:
    """See the module's theory. `open_sim` makes one."""

    def __init__(self, board: SimBoard, reset_ns: int = 0, unconfigures: bool = True) -> None:
        self._board, self._reset_ns, self._unconfigures = board, reset_ns, unconfigures
        self._changed = threading.Condition()
        self._done: list[Completion] = []
        """Completed at the same moment as one that `wait_any` returned."""

    # ---------------------------------------------------------------- who, how much
    def versions(self) -> DeviceVersions:
        """By the options."""
        return self._board.versions()

    def limits(self) -> DeviceLimits:
        """As the board says."""
        with self._changed:
            return dataclasses.replace(self._board.limits(), unconfigures=self._unconfigures, polls=True)

    def counters(self) -> DeviceCounters:
        """A completion that waits for its reader is still pending."""
        with self._changed:
            found, waiting = self._board.counters(), len(self._done)
            return DeviceCounters(found.pending + waiting, found.finished - waiting, found.left - waiting, found.resets)

    def telemetry(self) -> tuple[ChipTelemetry, ...]:
        """Both chips, now."""
        with self._changed:
            return self._board.telemetry(time.monotonic_ns())

    # ---------------------------------------------------------------- configuration
    def configure(self, package: Package, generation: int) -> ReturnCode:
        """Takes the artifact's `configure_ns`.

        Raises:
            ConfigError: the manifest's `backend_options` are wrong.
        """
        with self._changed:
            rc, took_ns = self._board.configure(package, generation), self._board.configure_ns
        if rc is ReturnCode.OK:
            time.sleep(took_ns / S)
        return rc

    def inspect(self) -> Inspection:
        """As the board says."""
        with self._changed:
            return self._board.inspect()

    def reset_configuration(self) -> ReturnCode:
        """As the board says."""
        with self._changed:
            return self._board.reset_configuration()

    def reset(self) -> ReturnCode:
        """Takes the option `reset_ms`."""
        with self._changed:
            for completion in self._done:
                self._board.give_back(completion)
            self._done.clear()
            rc = self._board.reset()
        if rc is ReturnCode.OK:
            time.sleep(self._reset_ns / S)
        return rc

    def close(self) -> None:
        """The board is gone; whoever waits is told."""
        with self._changed:
            self._board.close()
            self._changed.notify_all()

    # ---------------------------------------------------------------- lanes and jobs
    def can_allocate(self, sequences: int) -> bool:
        """As the board says."""
        with self._changed:
            return self._board.can_allocate(sequences)

    def release(self, lane: int) -> ReturnCode:
        """As the board says."""
        with self._changed:
            return self._board.release(lane)

    def submit(self, job: Job, engine: EngineBank = EngineBank.AUTO) -> JobHandle | ReturnCode:
        """As the board says."""
        with self._changed:
            answer = self._board.submit(job, engine, time.monotonic_ns())
            if isinstance(answer, JobHandle):
                self._changed.notify()
        return answer

    def wait_any(self, timeout_ns: int) -> Completion | ReturnCode:
        """Also `DEVICE_UNAVAILABLE` once closed."""
        end_ns = time.monotonic_ns() + timeout_ns
        with self._changed:
            while not self._board.closed:
                now_ns = time.monotonic_ns()
                self._done += self._board.collect(now_ns)
                if self._done:
                    return self._done.pop(0)
                if now_ns >= end_ns:
                    return ReturnCode.TIMEOUT
                due_ns = self._board.next_done_ns()
                until_ns = end_ns if due_ns is None else min(end_ns, due_ns)
                self._changed.wait((until_ns - now_ns) / S)
        return ReturnCode.DEVICE_UNAVAILABLE

    def give_back(self, completion: Completion) -> None:
        """As the board says."""
        with self._changed:
            self._board.give_back(completion)
