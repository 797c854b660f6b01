"""What the shell adds to the engine's report: the board's versions and chips, and the process's memory."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import msgspec

from calculet_core import wire
from calculet_core.shell.holding import Holding
from calculet_core.shell.process import rss_bytes
from calculet_worker.device.base import Device
from calculet_worker.shell.constraints import AVAILABLE

_SERIAL_SALT = b"calculet/board-serial/"
"""Reports tell boards apart without saying which they are."""


class Reporter:
    """Fills the fields that the engine leaves at their defaults."""

    def __init__(self, device: Device) -> None:
        self._device = device
        versions = device.versions()
        self._versions = {
            "device": versions.device,
            "serial_hash": serial_hash(versions.serial) if versions.serial is not None else None,
            "runtime": versions.runtime,
            "driver": versions.driver,
            "firmware": versions.firmware,
            "power_mode": versions.power_mode,
        }

    def introduce(self, hello: wire.WorkerHello, seq: int) -> wire.WorkerHello:
        """The whole greeting; `seq` is the number of the last tick for that router."""
        chips = len(self._device.telemetry())
        return msgspec.structs.replace(hello, versions=self._versions, chips=chips, constrains=AVAILABLE, seq=seq)

    def complete(self, report: wire.WorkerReport, lost_messages: int, holding: Holding) -> wire.WorkerReport:
        """The whole report; `lost_messages` counts sends to routers that ZeroMQ refused."""
        chips = [wire.ChipReport(**asdict(chip)) for chip in self._device.telemetry()]
        return msgspec.structs.replace(
            report, **self._versions, chips=chips, rss_bytes=rss_bytes(), lost_messages=lost_messages,
            config_start=holding.start, config_live=holding.live, config_error=holding.error,
        )  # fmt: skip


def serial_hash(serial: str) -> str:
    """Sixteen hexadecimal digits."""
    return hashlib.sha256(_SERIAL_SALT + serial.encode()).hexdigest()[:16]
