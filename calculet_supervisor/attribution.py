"""Whose fault is it? Faults are counted by board and by artifact, so that one that follows an artifact from board to board can be
told from one that stays with its board."""

from __future__ import annotations

from collections import Counter

from calculet_core.wire import WorkerReport


class Attribution:
    """Counts each fault once: when a worker's report first shows it, not with every heartbeat after."""

    __slots__ = ("_current", "by_artifact", "by_board")

    def __init__(self) -> None:
        self.by_board: Counter[str] = Counter()
        self.by_artifact: Counter[str] = Counter()
        """By artifact digest."""
        self._current: dict[str, tuple[int, int, str] | None] = {}

    def see(self, report: WorkerReport) -> str | None:
        """The fault's name when the report shows a new one."""
        fault = (report.epoch, report.generation, report.fault) if report.fault else None
        if fault == self._current.get(report.board):
            return None
        self._current[report.board] = fault
        if fault is None:
            return None
        self.by_board[report.board] += 1
        self.by_artifact[report.digest] += 1
        return report.fault
