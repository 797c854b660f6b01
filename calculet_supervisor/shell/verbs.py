"""What operators may ask of a running supervisor. An act is answered after its commit, and takes effect by what is wanted."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from calculet_core import history, wire
from calculet_core.shell.process import rss_bytes
from calculet_core.states.model_generation import ModelState
from calculet_supervisor.shell.control import Caller, Refused, Verb
from calculet_supervisor.shell.status import SCHEMA, board_status, rollout_status, router_status
from calculet_supervisor.shell.store import Act, Wanted
from calculet_supervisor.world import NOTHING_SEEN, Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

ANSWER_S, GLANCE_S = 10.0, 0.05
"""How long a worker may take to answer a word, and how often its report is looked at."""
VERSION = version("calculet")
"""Read once: it must be known when no file can be opened, too."""


class Verbs:
    """The verbs of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._saving: set[str] = set()
        """Boards about which something is being committed."""

    def table(self) -> dict[str, Verb]:
        """Verb -> what it does."""
        return {
            "status": self.status,
            "audit": self.audit,
            "drain": self.drain,
            "resume": self.resume,
            "stop": self.stop,
            "start": self.start,
            "restart": self.restart,
            "pingpong": self.pingpong,
        }

    async def status(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Everything that is known (`calculet_supervisor.shell.status`)."""
        supervisor, now_ns = self._supervisor, time.monotonic_ns()
        seen = supervisor.sightings.boards
        boards = [
            board_status(
                board, supervisor.time_sharing.alias_of(board.name), supervisor.wish(board.name),
                seen.get(board.name, NOTHING_SEEN), supervisor.reconciler, supervisor.resets, now_ns,
                supervisor.wanted.get(board.name, Wanted()).condemned, supervisor.time_sharing.status(board.name),
                supervisor.sightings.unreached_by(board.name),
            )
            for board in supervisor.fleet.config.boards
        ]  # fmt: skip
        own = {
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - supervisor.started_s, 3),
            "view_version": supervisor.view.version,
            "rss_bytes": rss_bytes(),
        }
        return {
            "schema": SCHEMA, "config": str(supervisor.fleet.path), "version": VERSION, "supervisor": own,
            "breaker": supervisor.recovery.breaker.reason, "unusable": supervisor.standing.status(),
            "rollouts": [rollout_status(one) for one in supervisor.rollouts.live.values()],
            "boards": boards, "routers": [router_status(seen) for seen in supervisor.sightings.routers.values()],
        }  # fmt: skip

    async def audit(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """The newest administrative acts."""
        return {"acts": await self._supervisor.store.audit()}

    async def drain(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Finish what runs, take nothing new; until `resume`."""
        board, wanted = self.board(arguments)
        return await self.want("drain", board, replace(wanted, draining=True), caller)

    async def resume(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Take requests again."""
        board, wanted = self.board(arguments)
        return await self.want("resume", board, replace(wanted, draining=False), caller)

    async def stop(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """End the board's worker after its drain, and keep it down until `start`."""
        board, wanted = self.board(arguments)
        return await self.want("stop", board, replace(wanted, up=False), caller)

    async def start(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Let the board's worker run again."""
        board, wanted = self.board(arguments)
        self._refuse_condemned(board, wanted)
        return await self.want("start", board, replace(wanted, up=True), caller)

    async def restart(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Replace the board's worker after its drain, whatever the restart budget says."""
        board, wanted = self.board(arguments)
        self._refuse_condemned(board, wanted)
        if not wanted.up:
            raise Refused(f"{board} is stopped", f"`calculet start {board}` lets it run")
        await self._refuse_loss(board)
        board, wanted = self.board(arguments)  # as it is by now
        min_epoch = self._supervisor.last_epoch(board) + 1
        answer = await self.want("restart", board, replace(wanted, min_epoch=min_epoch), caller)
        await self._supervisor.store.forgive("restart", board)
        return answer

    async def pingpong(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Allow a second job in flight again, or forbid it (scheduling §14); holds for the life of the worker."""
        supervisor, allowed = self._supervisor, bool(arguments.get("allowed"))
        board, wanted = self.board(arguments)
        report = supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        if report is None or board not in supervisor.reconciler.lives:
            raise Refused(f"{board} has no living worker", f"`calculet start {board}` or `calculet restart {board}`")
        send = supervisor.reconciler.word(board, report, lambda seq: wire.SetPingPong(seq, allowed))
        await self.want("pingpong", board, wanted, caller, "allowed" if allowed else "forbidden")
        supervisor.send(board, send.message)
        assert isinstance(send.message, wire.SetPingPong)
        for _ in range(int(ANSWER_S / GLANCE_S)):
            report = supervisor.sightings.boards.get(board, NOTHING_SEEN).report
            if report is not None and report.command_seq >= send.message.seq:
                if report.command_error:
                    raise Refused(f"{board}: {report.command_error}")
                return {"board": board, "max_inflight": report.max_inflight, "pingpong_off": report.pingpong_off}
            await asyncio.sleep(GLANCE_S)
        raise Refused(f"{board}: the worker did not answer within {ANSWER_S:g} s", f"`calculet status` shows how {board} is")

    def _refuse_condemned(self, board: str, wanted: Wanted) -> None:
        if wanted.condemned is not None:
            raise Refused(f"{board} was set aside: {wanted.condemned}", f"`calculet probation {board}` lets it prove itself")

    async def _refuse_loss(self, board: str) -> None:
        """A worker that serves is not given away for one that could not."""
        supervisor = self._supervisor
        report = supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        if report is None or report.state != ModelState.READY.name:
            return
        if (why := await supervisor.standing.no_start(supervisor.rollouts.placement(board)[0])) is not None:
            raise Refused(f"{board} serves, and a new worker could not: {why}", "mend that first; `calculet config check` shows it")

    def board(self, arguments: Mapping[str, Any]) -> tuple[str, Wanted]:
        """The named board, and what is wanted of it.

        Raises:
            Refused: there is none.
        """
        names = [board.name for board in self._supervisor.fleet.config.boards]
        board = arguments.get("board")
        if board not in names:
            raise Refused(f"there is no board {board!r}", f"boards: {', '.join(names)}")
        return board, self._supervisor.wanted.get(board, Wanted())

    async def want(
        self, verb: str, board: str, wanted: Wanted, caller: Caller, detail: str | None = None
    ) -> dict[str, Any]:
        """Commit what is wanted of a board, with who said so, and act on it. `wanted` was made of what holds now, so a second word
        has to wait until the first one does."""
        supervisor = self._supervisor
        already = wanted == supervisor.wanted.get(board, Wanted())
        if board in self._saving:
            raise Refused(f"{verb} {board} was not done: another word about {board} is just being saved", "ask again")
        self._saving.add(board)
        try:
            saved = await supervisor.store.want(board, wanted, Act(verb, board, caller.uid, caller.pid, detail))
        except (sqlite3.Error, OSError) as error:
            raise Refused(f"{verb} {board} could not be saved and was not done: {error}", "is the disk full?") from None
        finally:
            self._saving.discard(board)
        assert saved is not None, "only what depends on a version can come too late"
        supervisor.wanted[board] = saved  # whatever was decided by itself meanwhile
        data = {"verb": verb, "uid": caller.uid, "by_pid": caller.pid, "detail": detail}
        supervisor.note(Note(history.FLEET_ADMIN, board, data=data))
        supervisor.decide_soon()
        return {"board": board, "up": wanted.up, "draining": wanted.draining, "already": already}
