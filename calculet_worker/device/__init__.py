"""Boards. Each backend is one file and one line in `BACKENDS`; the contract suite runs over all of them."""

from __future__ import annotations

from calculet_core.config import BoardConfig
from calculet_worker.device.base import BoardUnavailable, Device, DeviceFactory
from calculet_worker.device.faulty import FAULTS_OPTION, without_faults, wrap_if_configured
from calculet_worker.device.sim import open_sim

__all__ = ["BACKENDS", "FAULTS_OPTION", "open_device", "open_llamacpp"]


def open_llamacpp(board: BoardConfig) -> Device:
    """The CPU engine; its library is loaded only here.

    Raises:
        BoardUnavailable: the library is missing or does not load.
        ConfigError: `board.options` is wrong.
    """
    try:
        from calculet_worker.device import llamacpp
    except ImportError as error:
        raise BoardUnavailable(
            f"board {board.name}: the CPU engine is not installed ({error}); `make engine` builds it, given a C++ compiler"
        ) from None
    return llamacpp.open_llamacpp(board)


BACKENDS: dict[str, DeviceFactory] = {"sim": open_sim, "llamacpp": open_llamacpp}


def open_device(board: BoardConfig, fault_injection: bool = False) -> Device:
    """The board's device, with the faults that its option `faults` asks for around it.

    Raises:
        BoardUnavailable: it cannot be opened.
        ConfigError: `board.options` is wrong, or it asks for faults and the fleet does not allow any.
    """
    return wrap_if_configured(BACKENDS[board.device](without_faults(board)), board, fault_injection)
