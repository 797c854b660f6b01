"""Bringing what runs to the configuration that was applied: live where that is possible, else one worker after another.

An apply is one commit; nothing else is remembered. Every process tells the digests of what it holds, so what is left to do follows
from what is seen: routers and workers that hold something else live are told to read the file, and a board whose worker started
with something else is restarted after its drain, when every other board is well and every router reaches it: a board that is ready
and that no router has greeted yet serves nobody. Killed anywhere, a supervisor goes on from there.
It brings the fleet only to a configuration that somebody applied: a file that was merely edited moves nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core import history, wire
from calculet_core.applying import Leaves, Standing, alias_of, decode, digest_of, holds, leaves_of, live_with, started_with
from calculet_core.clock import S
from calculet_core.errors import ConfigError
from calculet_core.shell.fleet import load_fleet, standing_of
from calculet_core.states.model_generation import ModelState
from calculet_supervisor.shell.router_restarts import FLAG, RouterRestarts
from calculet_supervisor.shell.sightings import ROUTER_SILENCE_NS
from calculet_supervisor.shell.store import Act, Applied, Memory, Wanted
from calculet_supervisor.world import NOTHING_SEEN, Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

TELL_NS, TELL_AGAIN_NS = 2 * S, 30 * S
"""Between two words to a process that has not taken the configuration; to one that has said why."""
LOOK_AGAIN_S = 5.0
"""After the file was found to be another than what was applied."""
READY = ModelState.READY.name
log = logging.getLogger("calculet.configuration")


class Configuring:
    """One supervisor's."""

    def __init__(self, supervisor: Supervisor, memory: Memory) -> None:
        self._supervisor = supervisor
        self.own: Standing = standing_of(supervisor.fleet)
        self.leaves: Leaves = leaves_of(self.own)
        self.digest = digest_of(self.leaves)
        self.applied: Applied | None = None
        self.applied_standing: Standing | None = None
        self.applied_digest: str | None = None
        if memory.applied is not None:
            self.take(memory.applied)
        self._told: dict[bytes, int] = {}
        self._restarting: set[str] = set()
        """Boards whose restart is being saved."""
        self._restarted: dict[str, int] = {}
        """Board -> version that it was restarted for: once, whatever comes of it."""
        self._live = {role: live_with(self.leaves, role) for role in ("worker", "router")}
        self._started = {board: started_with(self.leaves, "worker", board) for board in supervisor.boards}
        self._router_started = started_with(self.leaves, "router")
        self.routers = RouterRestarts(
            supervisor, memory.flags.get(FLAG), lambda: self.applied.version if self.applied and self.in_force else None,
            lambda report: holds(report.config_start, self._router_started) is False, self._is_file,
        )  # fmt: skip

    def take(self, applied: Applied) -> None:
        """What was committed last. What an older version has kept and cannot be read any more is no configuration to go to."""
        self.applied = applied
        try:
            self.applied_standing = decode(applied.body)
        except (ValueError, KeyError, msgspec.ValidationError) as error:
            log.warning("configuration version %d is of another version of Calculet: %s", applied.version, error)
            self.applied_standing = self.applied_digest = None
            return
        self.applied_digest = digest_of(leaves_of(self.applied_standing))

    async def begin(self) -> None:
        """The first start is the first version: a plan has something to compare with from then on."""
        if self.applied is None:
            self.take(await self._supervisor.store.configure(self.own.encode(), False, Act("configure", detail="first start")))

    @property
    def in_force(self) -> bool:
        """Whether this supervisor runs what was applied; else it brings nobody anywhere."""
        return self.digest == self.applied_digest

    # ---------------------------------------------------------------- what is left to do
    def processes(self) -> Iterator[dict[str, Any]]:
        """Each process that tells: whether it holds what was applied, live and since its start; null: it does not say."""
        yield {"process": "supervisor", "live": self.in_force, "start": self.in_force, "error": None, "state": None}
        for router in self.routers.living():
            if router.draining:
                continue  # it ends, whatever it holds
            yield {
                "process": f"router {router.router:08x}", "live": holds(router.config_live, self._live["router"]),
                "start": holds(router.config_start, self._router_started), "error": router.config_error, "state": None,
            }  # fmt: skip
        for board in self._supervisor.boards:
            report = self._supervisor.sightings.boards.get(board, NOTHING_SEEN).report
            yield {
                "process": f"worker-{board}", "live": None if report is None else holds(report.config_live, self._live["worker"]),
                "start": None if report is None else holds(report.config_start, self._started[board]),
                "error": report.config_error if report is not None else None, "state": report.state if report is not None else None,
            }  # fmt: skip

    def left(self) -> list[str]:
        """What is still to be done for what was applied, in words; a router that was restarted in vain is not among it."""
        if not self.in_force:
            return ["the supervisor does not run it: the file has changed since, or it is just being born again"]
        found = []
        if not self._knows_routers():
            found.append("routers may still be about to report")
        for one in self.processes():
            if one["live"] is False:
                found.append(f"{one['process']} has not taken it live" + (f": {one['error']}" if one["error"] else ""))
            if one["start"] is False and one["process"].startswith("worker-"):
                board = one["process"].removeprefix("worker-")
                again = self._is_tried(board) and board not in self._restarting
                found.append(f"{one['process']} " + ("started with something else again" if again else "is to be restarted"))
        found += self.routers.left()
        boards = self._supervisor.sightings.boards
        for board in self._supervisor.boards:
            seen = boards.get(board, NOTHING_SEEN)
            if self._is_to_serve(board) and (seen.report is None or seen.report.state != READY):
                found.append(f"{board} is not ready: {seen.report.state if seen.report else 'no worker reports'}")
            elif self._is_to_serve(board) and (routers := self._supervisor.sightings.unreached_by(board)):
                found.append(f"{board} is ready, and not reached yet by router {', '.join(routers)}")
        gone = [board for board, seen in boards.items() if board not in self._supervisor.boards and seen.pid is not None]
        return found + [f"{board} drains and ends" for board in gone]

    def _is_to_serve(self, board: str) -> bool:
        """Nobody has taken it out, and its model is not unloaded: it is waited for."""
        return self._supervisor.out(board) is None and self._supervisor.rollouts.placement(board)[0] is not None

    def _knows_routers(self) -> bool:
        """Whether every router that lives has had time to report to this supervisor."""
        return time.monotonic() - self._supervisor.started_s >= ROUTER_SILENCE_NS / S

    def _is_tried(self, board: str) -> bool:
        """Whether it was restarted for this version, and its next life has reported since."""
        report = self._supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        wanted = self._supervisor.wanted.get(board, Wanted())
        tried = self.applied is not None and self._restarted.get(board) == self.applied.version
        return tried and report is not None and report.epoch >= wanted.min_epoch

    # ---------------------------------------------------------------- doing it
    def tick(self, now_ns: int) -> None:
        """The next thing, if there is one: routers before boards."""
        routers_move = self.routers.tick(now_ns)
        if self.applied is None or not self.in_force:
            return
        self._tell_live(now_ns)
        if routers_move:
            return
        board = self._next_restart()
        if board is not None:
            self._restarting.add(board)
            self._supervisor.begin(self._restart(board, self.applied.version))

    def _tell_live(self, now_ns: int) -> None:
        assert self.applied is not None
        sightings = self._supervisor.sightings
        behind: list[tuple[bytes, str, str | None]] = []
        for identity, seen in sightings.routers.items():
            if self._is_behind(seen.report, "router"):
                behind.append((identity, "router", seen.report.config_error))
        for board, identity in sightings.identities.items():
            report = sightings.boards.get(board, NOTHING_SEEN).report
            if report is not None and self._is_behind(report, "worker"):
                behind.append((identity, "worker", report.config_error))
        for identity, role, error in behind:
            told_ns = self._told.get(identity)
            if told_ns is None or now_ns - told_ns >= (TELL_NS if error is None else TELL_AGAIN_NS):
                self._told[identity] = now_ns
                self._supervisor.send_to(identity, wire.TakeConfiguration(self.applied.version, self._live[role]))

    def _is_file(self) -> bool:
        return _digest_of_file(self._supervisor.fleet.path) == self.applied_digest

    def elsewhere(self) -> list[str]:
        """Routers that hold the configuration and listen at another address than it says, in words with the remedy."""
        config, found = self.own.fleet.router, []
        wanted = f"{'https' if config.tls.certificate else 'http'}://{config.listen}"
        remedy = "`calculet restart router` once the address is free"
        if self._supervisor.under_systemd:
            remedy = "as root, `calculet install`, then `systemctl restart calculet-router.socket`"
        for report in self.routers.living():
            if not report.draining and report.url != wanted and holds(report.config_start, self._router_started):
                found.append(f"router {report.router:08x} listens at {report.url}, router.listen says {config.listen}: {remedy}")
        return found

    def _is_behind(self, report: wire.WorkerReport | wire.RouterReport, role: str) -> bool:
        return holds(report.config_live, self._live[role]) is False

    def _next_restart(self) -> str | None:
        """A board whose worker started with something else, when its turn has come: nobody is on its way, and another board of its
        model serves as every router sees it, or downtime was allowed."""
        supervisor = self._supervisor
        allows_downtime = self.applied is not None and self.applied.allow_downtime
        reports = {board: supervisor.sightings.boards.get(board, NOTHING_SEEN).report for board in supervisor.boards}
        if self._restarting or not self._knows_routers():
            return None
        stale = []
        for board, report in reports.items():
            wanted = supervisor.wanted.get(board, Wanted())
            if supervisor.out(board) is not None and report is None:
                continue  # nothing runs there; it starts with what is in force
            if report is None or report.epoch < wanted.min_epoch:
                return None  # somebody is on its way
            if holds(report.config_start, self._started[board]) is False:
                stale.append(board)
            elif self._is_to_serve(board) and not allows_downtime and not self._serves(board):
                return None
        for board in stale:
            if self._is_tried(board):
                continue
            alias = alias_of(self.leaves, board)
            alone = not any(
                other != board and alias_of(self.leaves, other) == alias and self._serves(other) for other in supervisor.boards
            )
            if not alone or not self._serves(board, reached=False) or allows_downtime:
                return board
        return None

    def _serves(self, board: str, *, reached: bool = True) -> bool:
        """Whether a request may go there; `reached`: from every router."""
        supervisor = self._supervisor
        report = supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        ready = report is not None and report.state == READY and supervisor.out(board) is None
        return ready and not (reached and supervisor.sightings.unreached_by(board))

    async def _restart(self, board: str, version: int) -> None:
        """As `calculet restart` does: after its drain. A new worker reads the file: while that is another than what was applied, a
        restart would bring it somewhere else, again and again."""
        supervisor = self._supervisor
        try:
            if await asyncio.to_thread(_digest_of_file, supervisor.fleet.path) != self.applied_digest:
                log.warning("board %s is not restarted: %s is not what was applied", board, supervisor.fleet.path)
                await asyncio.sleep(LOOK_AGAIN_S)
                return
            wanted = replace(supervisor.wanted.get(board, Wanted()), min_epoch=supervisor.last_epoch(board) + 1)
            await supervisor.store.want(board, wanted, Act("configure", board, detail=f"restart for version {version}"))
            supervisor.wanted[board] = wanted
            self._restarted[board] = version
            supervisor.note(Note(history.FLEET_CONFIGURED, board, data={"version": version}))
            supervisor.decide_soon()
        finally:
            self._restarting.discard(board)


def _digest_of_file(path: Path) -> str | None:
    try:
        return digest_of(leaves_of(standing_of(load_fleet(path))))
    except ConfigError:
        return None
