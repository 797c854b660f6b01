"""Boards that several models share in time: whose turn it is, committed before anything follows from it.

`turns` decides; what a board shall hold follows from the committed answer, so that a switch is the same drain, unload, verified
load and golden cases as any other change of a model, and a supervisor that was killed anywhere goes on with it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from calculet_core import history
from calculet_core.clock import S
from calculet_core.config import TimeSharedConfig
from calculet_core.states.model_generation import ModelState
from calculet_core.wire import ModelWait
from calculet_supervisor.health import SERVING
from calculet_supervisor.shell.store import Act, Memory
from calculet_supervisor.turns import Resident, Switch, next_turn
from calculet_supervisor.world import NOTHING_SEEN, Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

IDLE_NS = 1 * S
"""Without a request and a step for so long, a model has nothing to do."""
FLAG = "resident:"
"""Of the board's flag in the store."""
log = logging.getLogger("calculet.time_sharing")


class TimeSharing:
    """All time-shared boards of one supervisor."""

    def __init__(self, supervisor: Supervisor, memory: Memory) -> None:
        self._supervisor, fleet = supervisor, supervisor.fleet
        self._boards: dict[str, tuple[TimeSharedConfig, tuple[str, ...]]] = {
            board.name: (board.time_shared, tuple(model.alias for model in fleet.models_of(board.name)))
            for board in fleet.config.boards
            if board.time_shared is not None
        }
        self._resident: dict[str, str] = {}
        for board, (_, aliases) in self._boards.items():
            kept = memory.flags.get(FLAG + board)
            self._resident[board] = kept if kept in aliases else aliases[0]
        self._sour: dict[str, int] = {}
        """Alias -> until when it is not tried again, since it could not be loaded."""
        self._busy_ns: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        """When the board was seen working for the last time, and how far it was then."""
        self._committing: set[str] = set()
        self.switches: Counter[str] = Counter()
        """By board."""

    # ---------------------------------------------------------------- what follows
    def alias_of(self, board: str) -> str:
        """The model whose turn it is there; on any other board the only one."""
        return self._resident.get(board) or self._supervisor.fleet.model_of(board).alias

    def shares(self, board: str) -> bool:
        """Whether models take turns there."""
        return board in self._boards

    def parks(self, alias: str) -> int:
        """How many requests may wait for it at a router while another model has its board; 0: nobody would come for them."""
        for board, (config, aliases) in self._boards.items():
            if alias in aliases:
                seen = self._supervisor.reconciler.lives.get(board)
                given_up = seen is not None and seen.state.name == "QUARANTINED"
                hopeless = given_up or self._is_sour(alias) or self._supervisor.out(board) is not None or self._condemned(board)
                return 0 if hopeless else config.max_waiting_requests
        return 0

    def status(self, board: str) -> dict[str, Any] | None:
        """For `calculet status`; None: one model has the board."""
        if board not in self._boards:
            return None
        config, aliases = self._boards[board]
        waits, now_ns = self.waits(), time.monotonic_ns()
        waiting = {
            alias: {"requests": waits[alias].count, "oldest_s": round((now_ns - waits[alias].oldest_ns) / S, 3)}
            for alias in aliases
            if alias in waits
        }
        return {
            "aliases": list(aliases), "resident": self._resident[board], "waiting": waiting, "switches": self.switches[board],
            "min_residence_s": config.min_residence_s, "max_wait_s": config.max_wait_s,
        }  # fmt: skip

    def residents(self) -> dict[tuple[str, str], bool]:
        """(board, alias) -> whether it is the alias's turn there."""
        return {(board, alias): alias == self._resident[board] for board, (_, aliases) in self._boards.items() for alias in aliases}

    def waits(self) -> dict[str, ModelWait]:
        """What all routers together have waiting, by alias."""
        found: dict[str, ModelWait] = {}
        for seen in self._supervisor.sightings.routers.values():
            for alias, wait in seen.report.waiting.items():
                known = found.get(alias, ModelWait(0, wait.oldest_ns))
                found[alias] = ModelWait(known.count + wait.count, min(known.oldest_ns, wait.oldest_ns))
        return found

    def _is_sour(self, alias: str) -> bool:
        return time.monotonic_ns() < self._sour.get(alias, 0)

    def _condemned(self, board: str) -> bool:
        report = self._supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        return report is not None and report.condemned is not None

    # ---------------------------------------------------------------- going on
    def tick(self, now_ns: int) -> None:
        """Whose turn is it?"""
        if not self._boards:
            return
        waits = self.waits()
        for board, (config, aliases) in self._boards.items():
            if board in self._committing or self._supervisor.recovery.breaker.reason is not None:
                continue
            resident = self._see(board, now_ns)
            able = [alias for alias in aliases if self._supervisor.rollouts.current(alias) is not None and not self._is_sour(alias)]
            if (switch := next_turn(config, resident, able, waits, self._forced(aliases), now_ns)) is not None:
                self._committing.add(board)
                self._supervisor.begin(self._commit(board, resident.alias, switch))

    def _see(self, board: str, now_ns: int) -> Resident:
        supervisor, alias = self._supervisor, self._resident[board]
        report, life = supervisor.sightings.boards.get(board, NOTHING_SEEN).report, supervisor.reconciler.lives.get(board)
        if report is None or life is None:
            return Resident(alias, None, False)
        idle = report.state == ModelState.UNLOADED.name
        refused = idle and report.command_error is not None and life.load_digest == supervisor.rollouts.digest_of(alias)
        failed = report.condemned is None and (refused or (report.state == ModelState.FAILED.name and report.alias == alias))
        if failed and not self._is_sour(alias):
            self._sour[alias] = now_ns + int(supervisor.fleet.config.supervision.restart.half_open_after_s * S)
        if report.state in SERVING and report.alias == alias:
            self._sour.pop(alias, None)
            if report.active or report.waiting or report.steps != self._steps.get(board):
                self._busy_ns[board], self._steps[board] = now_ns, report.steps
            return Resident(alias, life.health.serving_ns, now_ns - self._busy_ns.get(board, 0) < IDLE_NS)
        return Resident(alias, None, False, failed)

    def _forced(self, aliases: tuple[str, ...]) -> str | None:
        """The alias whose rollout needs the board; the older one first."""
        staged = [rollout for alias in aliases if (rollout := self._supervisor.rollouts.staged(alias)) is not None]
        return min(staged, key=lambda rollout: rollout.id).alias if staged else None

    async def _commit(self, board: str, was: str, switch: Switch) -> None:
        supervisor = self._supervisor
        try:
            detail = f"{was} -> {switch.alias}: {switch.reason}"
            await supervisor.store.flag(FLAG + board, switch.alias, Act("switch", board, detail=detail))
            self._resident[board] = switch.alias
            self.switches[board] += 1
            supervisor.note(Note(history.FLEET_SWITCH, board, data={"alias": switch.alias, "was": was, "reason": switch.reason}))
        except Exception as error:
            log.error("board %s: the switch to %s could not be saved, and is decided again: %s", board, switch.alias, error)
        finally:
            self._committing.discard(board)
            supervisor.decide_soon()


