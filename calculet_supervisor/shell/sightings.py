"""What is seen of workers and routers, kept by the shell as immutable records that it replaces.

A report counts only when it comes from the process that the launcher knows to live: a late report of a dead worker changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from calculet_core import wire
from calculet_core.clock import S
from calculet_supervisor.world import NOTHING_SEEN, BoardSeen, Exit, Observed

ROUTER_SILENCE_NS = 3 * S
"""A router that has not reported for so long is gone."""


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """A router's last report."""

    report: wire.RouterReport
    heard_ns: int


class Sightings:
    """The latest of everything, and where to answer it."""

    def __init__(self) -> None:
        self.boards: dict[str, BoardSeen] = {}
        self.routers: dict[bytes, RouterSeen] = {}
        """By ZeroMQ identity."""
        self.identities: dict[str, bytes] = {}
        """Board -> ZeroMQ identity of its living worker."""
        self.generation = 0
        """Highest that was seen in use."""

    def observed(self) -> Observed:
        """For the reconciler."""
        return Observed(dict(self.boards))

    def started(self, board: str, pid: int) -> None:
        """Its process exists."""
        seen = self._board(board)
        if seen.pid != pid:
            self.boards[board] = replace(seen, pid=pid, report=None)

    def exited(self, board: str, how: Exit) -> None:
        """Its process is gone."""
        seen = self._board(board)
        self.boards[board] = replace(seen, pid=None, report=None, exits=seen.exits + 1, last_exit=how)
        self.identities.pop(board, None)

    def heard_worker(self, identity: bytes, report: wire.WorkerReport, now_ns: int) -> bool:
        """Whether the report counts."""
        seen = self._board(report.board)
        if seen.pid != report.pid:
            return False
        self.boards[report.board] = replace(seen, report=report, report_ns=now_ns)
        self.identities[report.board] = identity
        self.generation = max(self.generation, report.generation)
        return True

    def heard_router(self, identity: bytes, report: wire.RouterReport, now_ns: int) -> bool:
        """A router lives; whether it reaches other generations than it last said."""
        before = self.routers.get(identity)
        self.routers[identity] = RouterSeen(report, now_ns)
        return before is None or before.report.serves != report.serves

    def unreached_by(self, board: str) -> list[str]:
        """Routers that would not send a request to the board's generation, or not yet: to them it does not serve, whatever its
        worker reports. A router that does not say is not among them."""
        report = self._board(board).report
        if report is None:
            return []
        routers = (seen.report for seen in self.routers.values())
        return [
            f"{router.router:08x}" for router in routers
            if router.serves is not None and router.serves.get(board) != report.generation
        ]  # fmt: skip

    def forget_silent_routers(self, now_ns: int, lives: Callable[[int], bool]) -> None:
        """Drop routers that are gone; one that drained at once, when its process does not live any more."""
        for identity, seen in list(self.routers.items()):
            if now_ns - seen.heard_ns > ROUTER_SILENCE_NS or (seen.report.draining and not lives(seen.report.pid)):
                del self.routers[identity]

    def _board(self, board: str) -> BoardSeen:
        return self.boards.get(board, NOTHING_SEEN)
