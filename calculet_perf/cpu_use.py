"""Does a board's process wait, or does it spin (scheduling §19 M0, acceptance §12.1)?

A process that waits for its device or for room as it should uses next to no CPU while nothing runs; one that polls in a loop uses a
core. So its CPU time over wall time is taken from the device samples, apart for moments in which nothing runs and for moments under
load. An engine that computes on the host's CPU uses it under load by nature: there only the idle share says anything.
"""

from __future__ import annotations

import msgspec
import numpy as np

from calculet_perf.device_series import BoardSeries, DeviceSeries


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
    """One board's process. Shares are of one core; null: no such time was seen."""

    board: str
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


def _share(board: BoardSeries, column: str, wanted: np.ndarray) -> tuple[float | None, float]:
    """(counted seconds per second, seconds) between neighbouring samples that are both of the wanted kind; a counter that went back
    is another process's, and that pair is left out."""
    known = np.isfinite(board.column(column))
    at, spent, wanted = board.seconds[known], board.column(column)[known], wanted[known]
    pairs = wanted[1:] & wanted[:-1] & (np.diff(spent) >= 0)
    seconds = float(np.diff(at)[pairs].sum())
    return (float(np.diff(spent)[pairs].sum()) / seconds if seconds > 0 else None), seconds
