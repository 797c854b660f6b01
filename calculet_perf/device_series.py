"""Device samples as columns of numbers: a day of samples every second is some tens of megabytes, not gigabytes.

Per board what leaks are judged by; over all boards what the chips were like while a request ran (acceptance §4, §8.7, §13).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from calculet_perf.records import DeviceRecord
from calculet_perf.stability import BREATHING, COUNTED
from calculet_perf.statistics import Floats

IDLE_PHASES = ("idle", "gap", "after")
"""Phases in which nothing runs."""
COLUMNS = (*COUNTED, *BREATHING, "cpu_s", "device_busy_s", "temperature_c", "power_w", "throttled", "reset_count")


def _doubles() -> dict[str, array[float]]:
    return {name: array("d") for name in COLUMNS}


@dataclass(slots=True)
class BoardSeries:
    """One board's samples in the order of their times."""

    times_ns: array[int] = field(default_factory=lambda: array("q"))
    before: array[int] = field(default_factory=lambda: array("b"))
    """1 in the idle phase before anything was measured."""
    idle: array[int] = field(default_factory=lambda: array("b"))
    """1 where nothing runs, by the phase and the board's own word."""
    load: array[int] = field(default_factory=lambda: array("b"))
    """1 while a cell is measured."""
    columns: dict[str, array[float]] = field(default_factory=_doubles)

    @property
    def seconds(self) -> Floats:
        """Times, float64 [n]."""
        return np.array(self.times_ns, np.float64) / 1e9

    def column(self, name: str) -> Floats:
        """One of `COLUMNS`, float64 [n], NaN where unknown."""
        return np.array(self.columns[name])

    def add(self, sample: DeviceRecord) -> None:
        """Take one; time does not go back."""
        self.times_ns.append(sample.monotonic_ns)
        self.before.append(sample.phase == "idle")
        waiting = (sample.resources.waiting_requests, sample.jobs.pending)
        self.idle.append(sample.phase in IDLE_PHASES and not any(waiting))
        self.load.append(sample.phase == "measure")
        flags = [chip.throttled for chip in sample.chips if chip.throttled is not None]
        values = {name: getattr(sample.resources, name) for name in (*COUNTED, "rss_bytes", "cpu_s", "device_busy_s")} | {
            "device_memory_bytes": _total(chip.memory_used_bytes for chip in sample.chips),
            "temperature_c": max((chip.temperature_c for chip in sample.chips if chip.temperature_c is not None), default=None),
            "power_w": _total(chip.power_w for chip in sample.chips),
            "throttled": float(any(flags)) if flags else None,
            "reset_count": sample.reset_count,
        }
        for name, value in values.items():
            self.columns[name].append(math.nan if value is None else value)


class DeviceSeries:
    """All boards."""

    def __init__(self, samples: Iterable[DeviceRecord] = ()) -> None:
        self.boards: dict[str, BoardSeries] = {}
        for sample in samples:
            self.boards.setdefault(sample.board, BoardSeries()).add(sample)

    def timeline(self) -> DeviceTimeline:
        """All boards' chips by time."""
        return DeviceTimeline(list(self.boards.values()))


class DeviceTimeline:
    """Samples of all boards by time, for what the chips were like while a request ran."""

    def __init__(self, boards: list[BoardSeries]) -> None:
        times = np.concatenate([np.array(board.times_ns, np.int64) for board in boards] or [np.empty(0, np.int64)])
        order = np.argsort(times, kind="stable")
        self.times_ns = times[order]
        self.throttled, self.temperature_c, self.power_w = (
            np.concatenate([board.column(name) for board in boards] or [np.empty(0)])[order]
            for name in ("throttled", "temperature_c", "power_w")
        )

    def was_throttled(self, begin_ns: int, end_ns: int) -> bool | None:
        """Whether any sample in the span, or the last one before it, shows a throttled chip; None: none tells."""
        known = self._span(self.throttled, begin_ns, end_ns)
        return bool(known.max() > 0) if len(known) else None

    def hottest_c(self, begin_ns: int, end_ns: int) -> float | None:
        """The hottest chip in the span; None: unknown."""
        known = self._span(self.temperature_c, begin_ns, end_ns)
        return float(known.max()) if len(known) else None

    def _span(self, column: Floats, begin_ns: int, end_ns: int) -> Floats:
        low = max(0, int(np.searchsorted(self.times_ns, begin_ns, "right")) - 1)
        part = column[low : int(np.searchsorted(self.times_ns, end_ns, "right"))]
        return part[np.isfinite(part)]


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
