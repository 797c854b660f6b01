"""Two models on one board, judged: a turn lasts as long as it was promised, and who waits for one gets it in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calculet_core import history
from calculet_core.clock import MS, S
from calculet_core.history import Event

if TYPE_CHECKING:
    from simulation.world import World

LOAD_SLACK_NS = 3 * S
"""A drain's last step, an unload, a load with its golden cases, and the words between."""
FORCED = ("could not be loaded", "is unloaded", "a rollout of")


class Turns:
    """Feed events with `see`; what is broken is told to the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._serves_ns: dict[str, int] = {}
        """Alias -> when it began to serve in its present turn."""
        self._waits_ns: dict[int, int] = {}
        """Request -> since when it waits for a turn."""
        config, self._rollout = world.settings.time_shared, world.settings.rollout
        self._stays_ns = int(config.min_residence_s * S)
        self._waits_at_most_ns = max(self._stays_ns, int(config.max_wait_s * S)) + self._rollout.drain_timeout_ms * MS + LOAD_SLACK_NS
        self._aliases = {package.digest: alias for alias, package in world.placed.items()}

    def see(self, event: Event, source: Any) -> None:
        """Take one event."""
        kind = event.event
        if kind == history.BOARD_GENERATION and event.data.get("state") == "READY":
            alias = self._aliases[self._world.digests[event.generation or 0]]
            self._serves_ns.setdefault(alias, event.t)
        elif kind == history.FLEET_SWITCH:
            self._switched(event)
        elif kind == history.REQUEST_WAITING:
            self._world.saw("a request waited for its model's turn" if event.data["for"] == "turn" else "a request waited for a link")
            if event.data["for"] == "turn":
                self._waits_ns[event.request or 0] = event.t
        elif kind in (history.REQUEST_SENT, history.REQUEST_DONE):
            since_ns = self._waits_ns.pop(event.request or 0, event.t)
            if self._world.undisturbed and event.t - since_ns > self._waits_at_most_ns:
                self._world.broken("waits_its_turn", f"request {event.request:x} waited {(event.t - since_ns) / S:.1f} s for its model")

    def _switched(self, event: Event) -> None:
        was, reason, since_ns = event.data["was"], event.data["reason"], self._serves_ns.get(event.data["was"])
        self._serves_ns.clear()
        self._world.saw("a turn began")
        if any(words in reason for words in FORCED):
            self._world.saw("a turn began since a model could not serve")
        elif since_ns is None or event.t - since_ns < self._stays_ns:
            how_long = "has not served at all" if since_ns is None else f"has served for {(event.t - since_ns) / S:.2f} s"
            self._world.broken("keeps_its_turn", f"{was} {how_long} and has to go: {reason}")
