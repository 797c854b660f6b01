"""What operators may ask about models: load, roll back, unload, and see what is under way. Answered after the commit.

A load is answered when its record is safe; verification and everything after follow, and `rollouts` tells how it goes. So a caller
that goes away, or a supervisor that is killed, changes nothing about it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core.states.rollout import RolloutEvent, RolloutState
from calculet_supervisor.planner import unfit
from calculet_supervisor.rollout import Artifact, Rollout, abort, advance, refuse
from calculet_supervisor.shell.control import Caller, Refused, Verb
from calculet_supervisor.shell.examining import no_room
from calculet_supervisor.shell.store import Act
from calculet_supervisor.world import NOTHING_SEEN

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

ROLLOUTS_SHOWN = 20
SCHEMA = "calculet-generations/v1"


class RolloutVerbs:
    """The verbs of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def table(self) -> dict[str, Verb]:
        """Verb -> what it does."""
        return {
            "load": self.load,
            "rollback": self.rollback,
            "promote": self.promote,
            "unload": self.unload,
            "rollouts": self.show,
            "generations": self.generations,
        }

    # ---------------------------------------------------------------- acts
    async def load(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Begin a swap of `alias` to the package at `package`."""
        alias, package = _text(arguments, "alias"), _text(arguments, "package")
        if not Path(package).is_absolute():
            raise Refused(f"{package}: not an absolute path")
        if (why := self._supervisor.standing.configuration) is not None:
            raise Refused(f"the file says whom to trust, and cannot be used: {why}", "mend it first: `calculet config check`")
        rollouts = self._supervisor.rollouts
        if alias not in self._aliases():
            raise Refused(no_room(self._supervisor.fleet, alias, Path(package), rollouts.resident()))
        rollout = self._begin(alias, "load", arguments, caller, package=package)
        words = f"{alias} {package}" + (" --override" if rollout.override else "")
        return await self._open(rollout, Act("load", None, caller.uid, caller.pid, words))

    async def rollback(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Go back to what the alias stood for before: the rollout that is under way is turned round, else a new one begins."""
        alias = self._alias(arguments)
        rollouts, act = self._supervisor.rollouts, Act("rollback", None, caller.uid, caller.pid, alias)
        while (rollout := rollouts.live.get(alias)) is not None:
            state = RolloutState[rollout.state]
            if state is RolloutState.ROLLING_BACK:
                return {"rollout": rollout.id, "state": rollout.state}
            words = f"an operator (uid {caller.uid}) asked for it"
            if state < RolloutState.STAGING:
                following = refuse(rollout, time.time(), f"{words} before anything was changed")
            else:
                following = abort(rollout, time.time(), words, urgent=True)
            if await self._save(rollouts.commit(rollout, following, act)):
                return {"rollout": rollout.id, "state": following.state}
        previous = rollouts.previous(alias)
        if previous is None:
            raise Refused(f"{alias} has no previous artifact", "`calculet load` moves it to another one")
        return await self._open(self._begin(alias, "rollback", arguments, caller, green=previous), act)

    async def promote(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """A canary has been looked at long enough."""
        alias = self._alias(arguments)
        rollouts, act = self._supervisor.rollouts, Act("promote", None, caller.uid, caller.pid, alias)
        while (rollout := rollouts.live.get(alias)) is not None and rollout.canary and not rollout.promoted:
            following = advance(rollout, time.time(), f"an operator (uid {caller.uid}) promotes the canary", promoted=True)
            if await self._save(rollouts.commit(rollout, following, act)):
                return {"rollout": rollout.id, "state": following.state}
        raise Refused(f"{alias} has no canary that waits")

    async def unload(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """The alias stands for nothing from here on; its boards are drained and emptied."""
        alias = self._alias(arguments)
        rollouts = self._supervisor.rollouts
        self._refuse_second(alias)
        current = rollouts.current(alias)
        if current is None:
            raise Refused(f"{alias} is not loaded")
        await self._save(rollouts.unload(alias, Act("unload", None, caller.uid, caller.pid, f"{alias} {current}")))
        return {"alias": alias, "boards": list(self._supervisor.rollouts.boards(alias))}

    def _begin(self, alias: str, verb: str, arguments: Mapping[str, Any], caller: Caller, **fields: Any) -> Rollout:
        """A rollout that is fit to begin.

        Raises:
            Refused: why it is not.
        """
        self._refuse_second(alias)
        rollouts, boards = self._supervisor.rollouts, self._supervisor.rollouts.boards(alias)
        blue = rollouts.current(alias)
        canary = float(arguments.get("canary") or 0.0)
        if not 0 <= canary < 1:
            raise Refused(f"a canary gets a share between 0 and 1, not {canary:g}")
        given = arguments.get("floor")
        floor = len(boards) // 2 if given is None else int(given)
        unavailable = int(arguments.get("max_unavailable") or 1)
        downtime, facts = bool(arguments.get("allow_downtime")), rollouts.facts(boards, alias)
        if blue is None or downtime:
            floor = min(floor, max(0, sum(seen.serves for seen in facts.values()) - 1))
        if why := unfit(boards, facts, floor, unavailable, downtime):
            hint = "--allow-downtime accepts that, and reports how long it was" if not downtime and "only" in why else None
            raise Refused(f"{alias} cannot be moved now: {why}", hint or "see --floor and --max-unavailable")
        rollout = Rollout(
            0, alias, verb, boards, blue=blue, floor=floor, max_unavailable=unavailable, canary=canary if blue else 0.0,
            allow_downtime=downtime, override=bool(arguments.get("override")), uid=caller.uid, begun=time.time(), **fields,
        )  # fmt: skip
        what = fields.get("package") or fields.get("green")
        return advance(rollout, time.time(), f"{verb} {alias} {what} (uid {caller.uid})", RolloutEvent.BEGIN)

    async def _open(self, rollout: Rollout, act: Act) -> dict[str, Any]:
        try:
            opened = await self._save(self._supervisor.rollouts.open(rollout, act))
        except sqlite3.IntegrityError:
            self._refuse_second(rollout.alias)
            raise Refused(f"another rollout of {rollout.alias} was faster") from None
        return {"rollout": opened.id, "state": opened.state}

    async def _save(self, work: Any) -> Any:
        try:
            return await work
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.Error, OSError) as error:
            raise Refused(f"it could not be saved and was not done: {error}", "is the disk full?") from None

    def _refuse_second(self, alias: str) -> None:
        rollout = self._supervisor.rollouts.live.get(alias)
        if rollout is not None:
            raise Refused(
                f"rollout {rollout.id} of {alias} is under way ({rollout.state}, begun by uid {rollout.uid})",
                f"`calculet rollouts {rollout.id} --follow` watches it, `calculet rollback {alias}` ends it",
            )

    # ---------------------------------------------------------------- looks
    async def show(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """The newest rollouts, newest first; or the one with that id."""
        supervisor = self._supervisor
        number = arguments.get("rollout")
        found = await supervisor.store.rollouts(ROLLOUTS_SHOWN if number is None else 1_000)
        rows = []
        for rollout in found:
            if number in (None, rollout.id):
                live = supervisor.rollouts.live.get(rollout.alias)
                row = msgspec.to_builtins(live if live is not None and live.id == rollout.id else rollout)
                row["canary_words"] = supervisor.rollouts.canary_words(rollout)
                facts = supervisor.rollouts.facts(rollout.boards, rollout.alias)
                row["boards_seen"] = {board: seen.state or seen.out or "no worker" for board, seen in facts.items()}
                rows.append(row)
        if number is not None and not rows:
            raise Refused(f"there is no rollout {number}")
        return {"rollouts": rows}

    async def generations(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """What each board holds and shall hold, and what each alias has stood for."""
        supervisor, rollouts = self._supervisor, self._supervisor.rollouts
        boards = []
        for board in supervisor.fleet.config.boards:
            report = supervisor.sightings.boards.get(board.name, NOTHING_SEEN).report
            placed, _ = rollouts.placement(board.name)
            held = report.alias if report is not None and report.generation else None
            boards.append(
                {
                    "board": board.name, "alias": held or supervisor.time_sharing.alias_of(board.name),
                    "generation": report.generation or None if report else None, "state": report.state if report else None,
                    "digest": report.digest or None if report else None, "wanted_digest": placed.digest if placed else None,
                    "out": supervisor.out(board.name),
                }
            )  # fmt: skip
        aliases = [
            {
                "alias": alias, "artifact": _shown(rollouts.current(alias)), "previous": _shown(rollouts.previous(alias)),
                "configured": rollouts.decided(alias) is None,
                "versions": [msgspec.to_builtins(version) for version in rollouts.versions.get(alias, [])],
            }
            for alias in self._aliases()
        ]  # fmt: skip
        quarantined = [{"digest": digest, "reason": reason} for digest, reason in supervisor.quarantined.items()]
        return {"schema": SCHEMA, "boards": boards, "aliases": aliases, "quarantined": quarantined}

    # ---------------------------------------------------------------- arguments
    def _aliases(self) -> list[str]:
        return [model.alias for model in self._supervisor.fleet.config.models]

    def _alias(self, arguments: Mapping[str, Any]) -> str:
        alias = _text(arguments, "alias")
        if alias not in self._aliases():
            raise Refused(f"there is no model {alias!r}", f"models: {', '.join(self._aliases())}")
        return alias



def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(f"{name} is missing")
    return value


def _shown(artifact: Artifact | None) -> dict[str, Any] | None:
    return msgspec.to_builtins(artifact) if artifact is not None else None
