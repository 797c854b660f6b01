"""Whose fault is it? A failure belongs to a board and to the artifact it ran; what else has happened tells which of the two.

An artifact that failed on one board is tried on another. When it has failed on two and nobody serves it, it is set aside. When
another board serves it well and this one fails again after two failures, the board is. The rule is a pure function of what is
remembered (`Failure`s are kept in the store) and of who serves now, so it says the same after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from calculet_core.faults import FaultKind
from calculet_core.wire import WorkerReport

FAILURES = 2
"""On one board, before the next one condemns it; over two boards, before the artifact is set aside."""
WINDOW_S = 3600.0
"""What is older tells nothing about today."""
class Failure(msgspec.Struct, frozen=True):
    """An artifact failed on a board: at its load, its golden cases, or while it served."""

    board: str
    digest: str
    what: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class Blame:
    """What is to be set aside: the board, or the artifact on it (`artifact` True), and why."""

    board: str
    digest: str
    artifact: bool
    reason: str


class Attribution:
    """Counts each fault once: when a worker's report first shows it, not with every heartbeat after."""

    __slots__ = ("_current", "by_artifact", "by_board", "failures")

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        self.by_board: Counter[str] = Counter()
        self.by_artifact: Counter[str] = Counter()
        """By artifact digest."""
        self.failures: list[Failure] = list(failures)
        """Of the last hour, oldest first."""
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

    def add(self, failure: Failure) -> None:
        """Remember one; a board that was busy is not a failure of anything."""
        self.failures = [old for old in self.failures if failure.wall_s - old.wall_s < WINDOW_S]
        self.failures.append(failure)

    def forget(self, board: str | None = None, digest: str | None = None) -> None:
        """An operator's word: what was held against the board, or the artifact, is forgotten."""
        self.failures = [old for old in self.failures if old.board != board and old.digest != digest]

    def failed_on(self, digest: str) -> tuple[str, ...]:
        """Boards where the artifact has failed lately."""
        return tuple(sorted({failure.board for failure in self.failures if failure.digest == digest}))

    def blame(self, board: str, digest: str, served_by: Collection[str], wall_s: float) -> Blame | None:
        """What follows from the newest failure of `digest` on `board`; `served_by` are boards that serve it well now."""
        recent = [one for one in self.failures if one.digest == digest and wall_s - one.wall_s < WINDOW_S]
        here = [one for one in recent if one.board == board]
        elsewhere = {one.board: one for one in recent if one.board != board}
        last = here[-1].what if here else ""
        healthy = [other for other in served_by if other != board]
        if elsewhere and not healthy:
            others = ", ".join(sorted(elsewhere))
            return Blame(board, digest, True, f"it failed on {board} and on {others}: {last}")
        if len(here) > FAILURES and healthy:
            reason = f"{len(here)} failures in an hour, and {healthy[0]} serves the same artifact: {last}"
            return Blame(board, digest, False, reason)
        return None


def counts_as_failure(kind: str | None) -> bool:
    """A busy board is asked again; every other fault is held against somebody."""
    return kind is not None and kind != FaultKind.DEVICE_BUSY
