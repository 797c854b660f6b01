"""The supervisor's metrics: gauges read from what it sees when somebody scrapes, counters from its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import fields

from calculet_core import history
from calculet_core.config import FleetConfig
from calculet_core.shell.telemetry import Collectors
from calculet_core.states.rollout import ROLLOUT, RolloutState
from calculet_core.states.worker_process import ProcessState
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.rollout import Rollout
from calculet_supervisor.shell.crashes import CrashBundles
from calculet_supervisor.shell.sightings import Sightings
from calculet_supervisor.world import Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.ground import Standing

_OVER = frozenset(state.name for state in ROLLOUT.terminal)


class Telemetry:
    """Collects for `/metrics`."""

    def __init__(self, reconciler: Reconciler, sightings: Sightings, crashes: CrashBundles, config: FleetConfig) -> None:
        self._reconciler, self._sightings, self._crashes = reconciler, sightings, crashes
        self._collectors = Collectors("supervisor")
        limits: dict[str, float] = {"crashes.keep": config.crashes.keep, "crashes.max_bytes": config.crashes.max_bytes}
        limits["chaos.max_fault_s"] = config.chaos.max_fault_s
        sections = {
            "supervision": config.supervision, "supervision.restart": config.supervision.restart, "recovery": config.recovery,
            "rollout": config.rollout,
        }  # fmt: skip
        for where, section in sections.items():
            for field in fields(section):
                value = getattr(section, field.name)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    limits[f"{where}.{field.name}"] = value
        for board in config.boards:
            if board.time_shared is not None:
                for field in fields(board.time_shared):
                    limits[f"{board.name}.time_shared.{field.name}"] = getattr(board.time_shared, field.name)
        for name, value in limits.items():
            self._collectors("calculet_supervisor_limit", limit=name).set(value)
        self._collectors("calculet_supervisor_chaos_enabled").set(config.chaos.enabled)

    def note(self, note: Note) -> None:
        """Count what was decided."""
        if note.event == history.FLEET_WORKER_EXITED and not note.data["commanded"] and not note.data["quarantined"]:
            # When it is decided, not at its first word: a worker that dies before it speaks is restarted, too.
            self._collectors("calculet_supervisor_restarts", board=note.board).inc()
        elif note.event == history.FLEET_ROLLOUT and note.data["state"] in _OVER:
            self._collectors("calculet_supervisor_rollouts_ended", state=note.data["state"].lower()).inc()
        elif note.event == history.FLEET_SWITCH:
            self._collectors("calculet_supervisor_switches", board=note.board).inc()
        elif note.event == history.FLEET_RESET_GRANTED:
            self._collectors("calculet_supervisor_resets", board=note.board).inc()
        elif note.event == history.FLEET_RESET_DENIED:
            self._collectors("calculet_supervisor_resets_denied", board=note.board).inc()

    def bad_message(self, reason: str) -> None:
        """Bytes that were no message for us."""
        self._collectors("calculet_supervisor_bad_messages", reason=reason).inc()

    def chaos_ordered(self, fault: str) -> None:
        """A fault on purpose."""
        self._collectors("calculet_supervisor_chaos_orders", fault=fault).inc()

    def exposition(
        self, view_version: int, rollouts: Iterable[Rollout], condemned: Mapping[str, bool], quarantined: int, breaker: bool,
        residents: Mapping[tuple[str, str], bool], standing: Standing,
    ) -> bytes:  # fmt: skip
        """The scrape's text. `condemned` has every board, `residents` every model of a time-shared board."""
        collectors, lives = self._collectors, self._reconciler.lives
        states = Counter(life.state for life in lives.values())
        for state in ProcessState:
            collectors("calculet_supervisor_workers", state=state.name.lower()).set(states[state])
        for board, seen in self._sightings.boards.items():
            up, ready = seen.report is not None, seen.report is not None and seen.report.state == "READY"
            collectors("calculet_supervisor_worker_up", board=board).set(int(up))
            collectors("calculet_supervisor_board_ready", board=board).set(int(ready))
        collectors("calculet_supervisor_crash_bundles", result="written").set(self._crashes.written)
        collectors("calculet_supervisor_crash_bundles", result="failed").set(self._crashes.failed)
        swaps = Counter(rollout.state for rollout in rollouts)
        for name in (state.name for state in RolloutState if state not in ROLLOUT.terminal):
            collectors("calculet_supervisor_rollouts", state=name.lower()).set(swaps[name])
        for board, aside in condemned.items():
            collectors("calculet_supervisor_board_condemned", board=board).set(int(aside))
        for (board, model), here in residents.items():
            collectors("calculet_supervisor_resident", board=board, model=model).set(int(here))
        collectors("calculet_supervisor_unusable", what="configuration").set(standing.configuration is not None)
        collectors("calculet_supervisor_unusable", what="packages").set(standing.packages)
        collectors("calculet_supervisor_artifacts_quarantined").set(quarantined)
        collectors("calculet_supervisor_breaker_open").set(int(breaker))
        collectors("calculet_supervisor_view_version").set(view_version)
        collectors("calculet_supervisor_routers").set(len(self._sightings.routers))
        return collectors.exposition()
