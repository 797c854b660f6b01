"""Does a process wait, or does it spin (scheduling §19 M0, acceptance §12.1)?

A process that waits for its device or for room as it should uses next to no CPU while nothing runs; one that polls in a loop uses a
core. So its CPU time over wall time is taken from the device samples, apart for moments in which nothing runs and for moments under
load. An engine that computes on the host's CPU uses it under load by nature: there only the idle share says anything. So it
is with routers and the supervisor, whose work is on the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np

from calculet_perf.device_series import IDLE_PHASES, BoardSeries, DeviceSeries
from calculet_perf.records import ProcessRecord
from calculet_perf.statistics import Floats


class BusyWait(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits, in the rules."""

    idle_share: float
    """Of one core, while nothing runs."""
    least_idle_s: float
    """So much idle time must have been seen."""
    load_share: float
    """Of one core, under load: a process that spins for its device reaches 1."""
    host_engines: tuple[str, ...] = ()
    """Backends that compute on the host: their load share is shown and judges nothing."""


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One process. Shares are of one core; null: no such time was seen."""

    board: str
    """The board, or the process by its own name: `router`, `supervisor`."""
    role: Literal["board", "other"] = "board"
    idle_share: float | None
    idle_s: float
    load_share: float | None
    load_s: float
    utilisation: float | None = None
    """Share of the time under load in which the device has a job (acceptance §14.3); null: not told."""


def cpu_use(series: DeviceSeries) -> list[CpuUse]:
    """Every board whose process tells its CPU time, or its device's."""
    found = []
    for name, board in sorted(series.boards.items()):
        if np.isfinite(board.column("cpu_s")).any() or np.isfinite(board.column("device_busy_s")).any():
            idle, idle_s = _share(board, "cpu_s", np.array(board.idle, bool))
            load, load_s = _share(board, "cpu_s", np.array(board.load, bool))
            busy, _ = _share(board, "device_busy_s", np.array(board.load, bool))
            found.append(
                CpuUse(board=name, idle_share=idle, idle_s=idle_s, load_share=load, load_s=load_s, utilisation=busy)
            )
    return found


def process_use(samples: Iterable[ProcessRecord]) -> list[CpuUse]:
    """Every other process that tells its CPU time. Routers that share an address answer in turns: growth is only taken within one
    process's life, and those of one name are summed."""
    lives: dict[tuple[str, float | None], tuple[array[float], array[float], list[str]]] = {}
    for sample in samples:
        if sample.cpu_s is not None:
            at, spent, phases = lives.setdefault((sample.process, sample.start_s), (array("d"), array("d"), []))
            at.append(sample.monotonic_ns / 1e9)
            spent.append(sample.cpu_s)
            phases.append(sample.phase)
    found: dict[str, list[CpuUse]] = {}
    for (process, _), (at, spent, phases) in sorted(lives.items(), key=lambda item: item[0][0]):
        idle, idle_s = _spent(np.array(at), np.array(spent), np.array([phase in IDLE_PHASES for phase in phases]))
        load, load_s = _spent(np.array(at), np.array(spent), np.array([phase == "measure" for phase in phases]))
        use = CpuUse(board=process, role="other", idle_share=idle, idle_s=idle_s, load_share=load, load_s=load_s)
        found.setdefault(process, []).append(use)
    return [_together(uses) for uses in found.values()]


def _together(uses: list[CpuUse]) -> CpuUse:
    """Several lives of one name: the shares of all the time that was seen, so that a start of a second weighs a second."""
    idle, idle_s = _mean((use.idle_share, use.idle_s) for use in uses)
    load, load_s = _mean((use.load_share, use.load_s) for use in uses)
    return msgspec.structs.replace(uses[0], idle_share=idle, idle_s=idle_s, load_share=load, load_s=load_s)


def _mean(shares: Iterable[tuple[float | None, float]]) -> tuple[float | None, float]:
    known = [(share, seconds) for share, seconds in shares if share is not None]
    total = sum(seconds for _, seconds in known)
    return (sum(share * seconds for share, seconds in known) / total if known else None), total


def _share(board: BoardSeries, column: str, wanted: np.ndarray) -> tuple[float | None, float]:
    """(counted seconds per second, seconds) between neighbouring samples that are both of the wanted kind; a counter that went back
    is another process's, and that pair is left out."""
    known = np.isfinite(board.column(column))
    return _spent(board.seconds[known], board.column(column)[known], wanted[known])


def _spent(at: Floats, spent: Floats, wanted: np.ndarray) -> tuple[float | None, float]:
    pairs = wanted[1:] & wanted[:-1] & (np.diff(spent) >= 0)
    seconds = float(np.diff(at)[pairs].sum())
    return (float(np.diff(spent)[pairs].sum()) / seconds if seconds > 0 else None), seconds
