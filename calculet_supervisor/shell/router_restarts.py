"""Routers that are to be replaced, one at a time: by an operator's word, or for what they take only at their start.

Level-triggered like all else: the word is a committed moment (routers that began before it are to be replaced), and what a router
started with is in its reports; so a supervisor that was killed goes on. The keeper starts a successor before the old one drains;
systemd starts a router again that has ended, and holds its connections meanwhile. Each is tried once for each reason: one that
stays as it was says why, and an operator's next word tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from calculet_core import history, wire
from calculet_core.clock import S
from calculet_core.shell.process import is_alive
from calculet_supervisor.shell.store import Act
from calculet_supervisor.world import Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

FLAG = "restart routers"
TELL_NS = 2 * S
"""Between two words to a router that does not drain yet; saying it again changes nothing."""
GOES_NS = 120 * S
"""How long one that was told may go on taking requests: its successor has to become ready before."""
COMES_NS = 60 * S
"""From the end of a router to the first report of the next."""
log = logging.getLogger("calculet.configuration")


class RouterRestarts:
    """One supervisor's. `version` and `is_stale` tell of the configuration in force, `is_file` whether the file still says it."""

    def __init__(
        self, supervisor: Supervisor, since: str | None, version: Callable[[], int | None],
        is_stale: Callable[[wire.RouterReport], bool], is_file: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._supervisor, self._version, self._is_stale, self._is_file = supervisor, version, is_stale, is_file
        self._since_s = float(since or 0)
        self._moving: wire.RouterReport | None = None
        self._told_ns = self._since_ns = self._count = 0
        self._looking = False
        self._tried: set[tuple[str, str]] = set()
        self.stays: str | None = None
        """Why the last one that was to be replaced was not."""

    async def order(self, act: Act) -> list[str]:
        """Replace every router that runs now; their names."""
        since_s = time.time()
        await self._supervisor.store.flag(FLAG, repr(since_s), act)
        self._since_s, self.stays = since_s, None
        self._tried.clear()
        return sorted(report.name or f"{report.router:08x}" for report in self.living())

    def living(self) -> list[wire.RouterReport]:
        """The last reports of routers whose processes are there."""
        return [seen.report for seen in self._supervisor.sightings.routers.values() if is_alive(seen.report.pid)]

    # ---------------------------------------------------------------- what is left to do
    def left(self) -> list[str]:
        """In words; a router that was tried in vain is among it only while it drains."""
        found = []
        for report in self.living():
            if report.draining:
                found.append(f"router {report.router:08x} drains")
            elif self._reason(report) is not None:
                found.append(f"router {report.router:08x} is to be replaced")
        if self._moving is not None and not found:
            is_there = any(report.router == self._moving.router for report in self.living())
            found.append(f"router {self._moving.router:08x} is being replaced" if is_there else "the next router is to report")
        return found

    def _reason(self, report: wire.RouterReport) -> str | None:
        reasons = []
        if 0 < report.began_s < self._since_s <= time.time():  # a clock that was set back makes nobody old for ever
            reasons.append(f"since {self._since_s}")
        if self._version() is not None and self._is_stale(report):
            reasons.append(f"version {self._version()}")
        return next((reason for reason in reasons if (report.name, reason) not in self._tried), None)

    # ---------------------------------------------------------------- doing it
    def tick(self, now_ns: int) -> bool:
        """The next step; whether a router is on its way."""
        living = self.living()
        if self._moving is not None:
            self._follow(living, now_ns)
        elif not any(report.draining for report in living) and not self._looking:
            for report in sorted(living, key=lambda one: one.name):
                if (reason := self._reason(report)) is not None:
                    self._begin(report, reason, len(living), now_ns)
                    break
        return self._moving is not None or self._looking or any(report.draining for report in living)

    def _begin(self, report: wire.RouterReport, reason: str, count: int, now_ns: int) -> None:
        if reason.startswith("version"):
            self._looking = True
            self._supervisor.begin(self._look(report, reason, count))
        else:
            self._move(report, reason, count, now_ns)

    async def _look(self, report: wire.RouterReport, reason: str, count: int) -> None:
        """A new router reads the file: only what was applied is worth a restart."""
        try:
            if await asyncio.to_thread(self._is_file):
                self._move(report, reason, count, time.monotonic_ns())
            else:
                self._tried.add((report.name, reason))
                self.stays = f"{self._supervisor.fleet.path} is not what was applied: it has changed since"
        finally:
            self._looking = False

    def _move(self, report: wire.RouterReport, reason: str, count: int, now_ns: int) -> None:
        self._tried.add((report.name, reason))
        self._moving, self._count, self._since_ns, self.stays = report, count, now_ns, None
        data = {"router": report.name, "version": self._version()}
        self._supervisor.note(Note(history.FLEET_CONFIGURED, "-", data=data))
        self._tell(now_ns)

    def _tell(self, now_ns: int) -> None:
        assert self._moving is not None
        self._told_ns = now_ns
        if self._supervisor.replace_router(self._moving.pid):
            return
        for identity, seen in self._supervisor.sightings.routers.items():
            if seen.report.router == self._moving.router:
                self._supervisor.send_to(identity, wire.RetireRouter())

    def _follow(self, living: list[wire.RouterReport], now_ns: int) -> None:
        assert self._moving is not None
        old = next((report for report in living if report.router == self._moving.router), None)
        waited_ns = now_ns - self._since_ns
        if old is not None and old.draining:
            self._since_ns = now_ns
        elif old is not None:
            if waited_ns > GOES_NS:
                self._stay(f"router {old.router:08x} was told to end {waited_ns // S} s ago and goes on")
            elif now_ns - self._told_ns > TELL_NS:
                self._tell(now_ns)
        elif sum(not report.draining for report in living) >= self._count:
            self._moving = None
        elif waited_ns > COMES_NS:
            self._stay(f"router {self._moving.router:08x} has ended, and nobody has reported in its place")

    def refused(self, pid: int, reason: str) -> None:
        """The keeper's word: no successor could take this router's place."""
        if self._moving is not None and self._moving.pid == pid:
            self._stay(f"router {self._moving.router:08x} stays as it was: {reason}")

    def _stay(self, why: str) -> None:
        log.error("%s", why)
        self._moving, self.stays = None, why
