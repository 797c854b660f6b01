"""What follows from failures beyond the board itself: whose fault it is, who is set aside, and when everything automatic stops.

The verdicts are `attribution`'s and `breaker`'s. Each is committed before it has an effect, is told in the journal with its reason,
and can be undone by an operator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calculet_core import history
from calculet_core.clock import S
from calculet_supervisor.attribution import Blame, Failure, counts_as_failure
from calculet_supervisor.breaker import Breaker
from calculet_supervisor.shell.store import Act, Memory, Wanted
from calculet_supervisor.world import NOTHING_SEEN, Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

SAVE_RETRY_S, GLANCE_S, GLANCES = 1.0, 0.01, 500
BREAKER = "breaker"
"""Name of the flag in the store."""
log = logging.getLogger("calculet.recovery")


@dataclass(slots=True)
class _Owed:
    """Automatic acts about one board on their way to the disk; they count only on top of the version that they were made of."""

    over: int
    wanted: Wanted
    acts: list[Act]


class Recovery:
    """One supervisor's judgement of its boards."""

    def __init__(self, supervisor: Supervisor, memory: Memory) -> None:
        self._supervisor = supervisor
        config = supervisor.fleet.config
        self._probation_ns = int(config.recall.probation_s * S)
        boards, recall = len(config.boards), config.recall
        self.breaker = Breaker(boards, recall.breaker_share, recall.breaker_window_s, memory.flags.get(BREAKER))
        self._attribution = supervisor.reconciler.attribution
        self._owed: dict[str, _Owed] = {}
        """What is believed about boards and not saved yet."""
        self._counted: dict[str, tuple[int, str]] = {}
        """Board -> the generation and digest that a failure was counted for already."""

    # ---------------------------------------------------------------- what is seen
    def fault(self, note: Note) -> None:
        """A report showed a new fault."""
        kind, digest = note.data.get("fault"), str(note.data.get("digest") or "")
        if digest and counts_as_failure(kind):
            detail = note.data.get("detail")
            self._failed(note.board, note.generation or 0, digest, f"{kind}: {detail}" if detail else str(kind))

    def tick(self, now_ns: int) -> None:
        """Loads that failed, and boards that have proved themselves."""
        supervisor = self._supervisor
        for board, facts in supervisor.rollouts.facts(supervisor.boards).items():
            if facts.failed:
                report = supervisor.sightings.boards[board].report
                self._failed(board, report.generation if report else 0, facts.failed, facts.trouble or "it failed")
            report = supervisor.sightings.boards.get(board, NOTHING_SEEN).report
            wanted, life = supervisor.wanted.get(board, Wanted()), supervisor.reconciler.lives.get(board)
            if wanted.probation and not wanted.probation_reset and report and report.resets and report.epoch >= wanted.min_epoch:
                self._save(board, replace(wanted, probation_reset=True), history.FLEET_PROBATION, {"reset": True})
                continue
            serving_ns = life.health.serving_ns if life is not None else None
            if wanted.probation and serving_ns is not None and now_ns - serving_ns >= self._probation_ns:
                self._save(board, replace(wanted, probation=False), history.FLEET_PROBATION, {"passed": True})

    def _failed(self, board: str, generation: int, digest: str, what: str) -> None:
        if self._counted.get(board) == (generation, digest):
            return
        self._counted[board] = (generation, digest)
        supervisor, wall_s = self._supervisor, time.time()
        failure = Failure(board, digest, what, wall_s)
        self._attribution.add(failure)
        supervisor.begin(supervisor.store.failed(failure))
        placed, _ = supervisor.rollouts.placement(board)
        current = supervisor.rollouts.current(placed.alias) if placed is not None else None
        if current is not None and current.digest == digest and (reason := self.breaker.bad(board, wall_s)) is not None:
            log.error("automatic action stops: %s", reason)
            data = {"open": True, "reason": reason, "hint": "calculet breaker --close"}
            supervisor.note(Note(history.FLEET_BREAKER, board, data=data))
            supervisor.begin(supervisor.store.flag(BREAKER, reason, Act("breaker open", board, detail=reason)))
        wanted = supervisor.wanted.get(board, Wanted())
        if self.breaker.reason is not None or wanted.condemned is not None:
            return
        if wanted.probation:
            self.condemn(board, f"it failed on probation: {what}")
            return
        alias = supervisor.time_sharing.alias_of(board)
        facts = supervisor.rollouts.facts(supervisor.boards)
        serving = [name for name, seen in facts.items() if seen.serves and seen.digest == digest]
        if (blame := self._attribution.blame(board, digest, serving, wall_s)) is not None:
            self._set_aside(alias, blame)

    def _set_aside(self, alias: str, blame: Blame) -> None:
        if not blame.artifact:
            self.condemn(blame.board, blame.reason)
        elif blame.digest not in self._supervisor.quarantined:
            self._supervisor.begin(self._quarantine(alias, blame))

    # ---------------------------------------------------------------- acts
    def condemn(self, board: str, reason: str) -> None:
        """Set a board aside; its worker drains and ends."""
        wanted = self._supervisor.wanted.get(board, Wanted())
        self._save(board, replace(wanted, condemned=reason, probation=False), history.FLEET_CONDEMNED, {"reason": reason})

    def _save(self, board: str, wanted: Wanted, event: str, data: Mapping[str, object]) -> None:
        """The supervisor's own act: believed at once, so that it is decided once; saved beside that, and again when that fails. An
        operator's word that is committed first wins."""
        supervisor = self._supervisor
        base = supervisor.wanted.get(board, Wanted()).version
        supervisor.wanted[board] = wanted
        supervisor.note(Note(event, board, data={**data, "automatic": True}))
        act = Act(event.removeprefix("fleet."), board, detail=str(data["reason"]) if "reason" in data else _what(data))
        owed = self._owed.get(board)
        if owed is None:
            self._owed[board] = _Owed(base, wanted, [act])
            supervisor.begin(self._settle(board))
        else:
            owed.wanted = wanted
            owed.acts.append(act)
        supervisor.decide_soon()

    async def _settle(self, board: str) -> None:
        """Until everything automatic about the board is saved, or an operator's word has made it void."""
        supervisor = self._supervisor
        while (owed := self._owed.get(board)) is not None:
            wanted, acts, owed.acts = owed.wanted, owed.acts, []
            try:
                saved = await supervisor.store.want(board, wanted, acts, over=owed.over)
            except Exception as error:
                log.error("board %s: %s could not be saved, and is tried again: %s", board, acts[0].verb if acts else "it", error)
                owed.acts = acts + owed.acts
                await asyncio.sleep(SAVE_RETRY_S)
                continue
            if saved is None:
                del self._owed[board]
                await self._overruled(board, owed.wanted, acts + owed.acts)
            elif owed.wanted is wanted:
                del self._owed[board]
                if supervisor.wanted.get(board) is wanted:
                    supervisor.wanted[board] = saved
            else:
                owed.over = saved.version

    async def _overruled(self, board: str, wanted: Wanted, acts: list[Act]) -> None:
        """Somebody's word was committed since this was decided: it holds, and it is told what was not done because of it."""
        supervisor = self._supervisor
        for _ in range(GLANCES):
            if supervisor.wanted.get(board) is not wanted:
                break
            await asyncio.sleep(GLANCE_S)  # the word is on the disk, and its speaker about to believe it
        now = supervisor.wanted.get(board, Wanted())
        if (now.condemned, now.probation, now.probation_reset) == (wanted.condemned, wanted.probation, wanted.probation_reset):
            return  # it was spoken on top of this
        for act in acts:
            reason = f"{act.detail}: an operator's word came first" if act.detail else "an operator's word came first"
            supervisor.note(Note(history.FLEET_OVERRULED, board, data={"act": act.verb, "reason": reason}))
            await supervisor.store.record(replace(act, verb=f"{act.verb} overruled", detail=reason))

    async def _quarantine(self, alias: str, blame: Blame) -> None:
        supervisor, digest = self._supervisor, blame.digest
        supervisor.quarantined[digest] = blame.reason
        supervisor.note(
            Note(history.FLEET_QUARANTINED, blame.board, data={"digest": digest, "reason": blame.reason, "automatic": True})
        )
        await supervisor.store.quarantine(digest, blame.reason, Act("quarantine", blame.board, detail=f"{digest}: {blame.reason}"))
        current, previous = supervisor.rollouts.current(alias), supervisor.rollouts.previous(alias)
        if alias in supervisor.rollouts.live or current is None or current.digest != digest:
            return
        if previous is None or previous.digest in supervisor.quarantined:
            log.error("%s serves an artifact that fails everywhere, and there is nothing to go back to", alias)
            return
        await supervisor.rollouts.go_back(alias, f"its artifact was set aside: {blame.reason}")


def _what(data: Mapping[str, object]) -> str:
    """Of a probation's step, for the audit log."""
    return "it has proved itself" if data.get("passed") else "its reset is done"
