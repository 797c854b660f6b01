"""What operators may say about boards that failed: reset, condemn, probation; the breaker; artifacts that were set aside."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from calculet_core import history
from calculet_core.states.model_generation import ModelState
from calculet_supervisor.shell.control import Caller, Refused, Verb
from calculet_supervisor.shell.recovery import BREAKER
from calculet_supervisor.shell.store import Act
from calculet_supervisor.shell.verbs import Verbs
from calculet_supervisor.world import NOTHING_SEEN, Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

RESETTABLE = (ModelState.RECOVERING.name, ModelState.FAILED.name)


class RecoveryVerbs:
    """The verbs of one supervisor."""

    def __init__(self, supervisor: Supervisor, verbs: Verbs) -> None:
        self._supervisor, self._verbs = supervisor, verbs

    def table(self) -> dict[str, Verb]:
        """Verb -> what it does."""
        return {
            "reset": self.reset,
            "condemn": self.condemn,
            "probation": self.probation,
            "breaker": self.breaker,
            "release": self.release,
        }

    async def reset(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Reset a board that fails or recovers, whatever the budget says."""
        board, wanted = self._verbs.board(arguments)
        report = self._supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        if report is None:
            raise Refused(f"{board} has no living worker", f"`calculet start {board}` or `calculet restart {board}`")
        if report.state not in RESETTABLE:
            hint = f"`calculet drain {board} --wait`, then `calculet restart {board}`, gives it a fresh start"
            raise Refused(f"{board} is {report.state}: only a board that is FAILED or RECOVERING is reset", hint)
        left = self._supervisor.resets.left(board, time.monotonic_ns())
        detail = f"generation {report.generation}, {left} resets left in the budget"
        await self._verbs.want("reset", board, replace(wanted, reset_generation=report.generation), caller, detail)
        return {"board": board, "generation": report.generation, "resets_left": left}

    async def condemn(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Set a board aside: it drains, its worker ends, and nothing brings it back but `probation`."""
        board, wanted = self._verbs.board(arguments)
        reason = str(arguments.get("reason") or f"by an operator (uid {caller.uid})")
        if wanted.condemned is not None:
            raise Refused(f"{board} is condemned already: {wanted.condemned}")
        return await self._verbs.want("condemn", board, replace(wanted, condemned=reason, probation=False), caller, reason)

    async def probation(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Let a board that was set aside come back: reset, golden cases, a small share of work until it has proved itself."""
        board, wanted = self._verbs.board(arguments)
        report = self._supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        if wanted.condemned is None and (report is None or report.state not in RESETTABLE):
            raise Refused(f"{board} was not set aside, and has not failed")
        min_epoch = self._supervisor.last_epoch(board) + 1
        changed = replace(
            wanted, condemned=None, probation=True, probation_reset=False, up=True, min_epoch=min_epoch, reset_generation=0
        )
        answer = await self._verbs.want("probation", board, changed, caller, wanted.condemned)
        self._supervisor.reconciler.attribution.forget(board=board)
        await self._supervisor.store.forgive("restart", board)
        return {**answer, "was": wanted.condemned, "probation_s": self._supervisor.fleet.config.recall.probation_s}

    async def breaker(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Whether automatic action is stopped, and why; `close` lets it go on."""
        supervisor, reason = self._supervisor, self._supervisor.recovery.breaker.reason
        if arguments.get("close") and reason is not None:
            await supervisor.store.flag(BREAKER, None, Act("breaker close", None, caller.uid, caller.pid, reason))
            supervisor.recovery.breaker.close()
            supervisor.note(Note(history.FLEET_BREAKER, "-", data={"open": False, "uid": caller.uid, "by_pid": caller.pid}))
            supervisor.decide_soon()
        return {"was": reason, "reason": supervisor.recovery.breaker.reason}

    async def release(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Take back that an artifact was set aside; `digest` may be its beginning."""
        supervisor, given = self._supervisor, str(arguments.get("digest") or "")
        found = [digest for digest in supervisor.quarantined if given and digest.startswith(given)]
        if len(found) != 1:
            known = ", ".join(digest[:12] for digest in supervisor.quarantined) or "none"
            raise Refused(f"{len(found)} artifacts that were set aside begin with {given!r}", f"set aside: {known}")
        await supervisor.store.quarantine(found[0], None, Act("release", None, caller.uid, caller.pid, found[0]))
        reason = supervisor.quarantined.pop(found[0])
        supervisor.reconciler.attribution.forget(digest=found[0])
        return {"digest": found[0], "was": reason}
