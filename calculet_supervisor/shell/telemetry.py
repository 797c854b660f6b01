"""The supervisor's metrics: gauges read from what it sees when somebody scrapes, counters from its actions."""

from __future__ import annotations

from collections import Counter

from calculet_core import history
from calculet_core.shell.telemetry import Collectors
from calculet_core.states.worker_process import ProcessState
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.shell.sightings import Sightings
from calculet_supervisor.world import Note


class Telemetry:
    """Collects for `/metrics`."""

    def __init__(self, reconciler: Reconciler, sightings: Sightings) -> None:
        self._reconciler, self._sightings = reconciler, sightings
        self._collectors = Collectors("supervisor")

    def note(self, note: Note) -> None:
        """Count what was decided."""
        if note.event == history.FLEET_WORKER_STARTED and note.data["automatic"]:
            self._collectors("calculet_supervisor_restarts", board=note.board).inc()
        elif note.event == history.FLEET_RESET_GRANTED:
            self._collectors("calculet_supervisor_resets", board=note.board).inc()
        elif note.event == history.FLEET_RESET_DENIED:
            self._collectors("calculet_supervisor_resets_denied", board=note.board).inc()

    def bad_message(self, reason: str) -> None:
        """Bytes that were no message for us."""
        self._collectors("calculet_supervisor_bad_messages", reason=reason).inc()

    def exposition(self, view_version: int) -> bytes:
        """The scrape's text."""
        collectors, lives = self._collectors, self._reconciler.lives
        states = Counter(life.state for life in lives.values())
        for state in ProcessState:
            collectors("calculet_supervisor_workers", state=state.name.lower()).set(states[state])
        for board, seen in self._sightings.boards.items():
            up, ready = seen.report is not None, seen.report is not None and seen.report.state == "READY"
            collectors("calculet_supervisor_worker_up", board=board).set(int(up))
            collectors("calculet_supervisor_board_ready", board=board).set(int(ready))
        collectors("calculet_supervisor_view_version").set(view_version)
        collectors("calculet_supervisor_routers").set(len(self._sightings.routers))
        return collectors.exposition()
