"""What operators may ask about the configuration that runs, and putting another one in force."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from calculet_core import history
from calculet_core.applying import Change, Leaves, Standing, alias_of, changes, decode, digest_of, leaves_of
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.fleet import Fleet, load_fleet, standing_of
from calculet_core.shell.packages import read_package
from calculet_core.states.model_generation import ModelState
from calculet_supervisor.shell.checking import configured_packages
from calculet_supervisor.shell.control import Caller, Refused, Verb
from calculet_supervisor.shell.ground import check_start
from calculet_supervisor.shell.store import Act
from calculet_supervisor.world import NOTHING_SEEN, Note

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

SCHEMA = "calculet-config/v1"
ANSWER_FIRST_S = 0.05
"""From the answer to being born again."""


class ConfigVerbs:
    """The verbs of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._applying = asyncio.Lock()

    def table(self) -> dict[str, Verb]:
        """Verb -> what it does."""
        return {"config": self.config, "config apply": self.apply, "restart routers": self.restart_routers}

    async def config(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """What is in force, who runs it, and what is left to do."""
        configuring = self._supervisor.configuring
        applied = configuring.applied
        standing = configuring.applied_standing or configuring.own
        return {
            "schema": SCHEMA, "file": str(self._supervisor.fleet.path), "version": applied.version if applied else None,
            "wall_s": applied.wall_s if applied else None, "digest": digest_of(leaves_of(standing)),
            "content": standing.encode(), "serving": self._serving(), "processes": list(configuring.processes()),
            "left": configuring.left(), "routers_left": configuring.routers.left(), "routers_stay": configuring.routers.stays,
            "elsewhere": configuring.elsewhere(), "under_systemd": self._supervisor.under_systemd,
        }  # fmt: skip

    async def restart_routers(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Replace every router, one at a time."""
        routers = self._supervisor.configuring.routers
        if not routers.living():
            raise Refused("no router reports: there is none to restart", "whoever keeps it starts it: see the router's log")
        try:
            names = await routers.order(Act("restart routers", None, caller.uid, caller.pid))
        except (sqlite3.Error, OSError) as error:
            raise Refused(f"it could not be saved and was not done: {error}", "is the disk full?") from None
        data = {"verb": "restart routers", "uid": caller.uid, "by_pid": caller.pid}
        self._supervisor.note(Note(history.FLEET_ADMIN, "-", data=data))
        self._supervisor.decide_soon()
        return {"routers": names}

    def _serving(self) -> dict[str, str | None]:
        """Alias -> digest of the artifact that it stands for."""
        rollouts = self._supervisor.rollouts
        found = {model.alias: rollouts.current(model.alias) for model in self._supervisor.fleet.config.models}
        return {alias: artifact.digest if artifact is not None else None for alias, artifact in found.items()}

    async def apply(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Put the file in force whose digest is `digest`: commit it, answer, and be born again with it. What follows is
        `configuring`'s."""
        async with self._applying:
            return await self._apply(arguments, caller)

    async def _apply(self, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        supervisor, configuring = self._supervisor, self._supervisor.configuring
        fleet, standing = await self._read()
        digest = digest_of(leaves_of(standing))
        if digest != arguments.get("digest"):
            raise Refused(f"{fleet.path} is not what was planned: it has changed since", "plan again")
        if supervisor.rollouts.live:
            busy = ", ".join(supervisor.rollouts.live)
            raise Refused(f"a model swap is under way ({busy})", "`calculet rollouts` shows it; apply when it is over")
        old = leaves_of(configuring.applied_standing or configuring.own)
        found = changes(old, leaves_of(standing), lambda alias: same_package(fleet, self._serving(), alias))
        if refused := [change for change in found if change.refused is not None]:
            raise Refused(f"nothing was changed: {refused[0].where}: {refused[0].refused}")
        allow_downtime = bool(arguments.get("allow_downtime"))
        if not allow_downtime and (why := self._downtime(found, leaves_of(standing))) is not None:
            raise Refused(f"nothing was changed: {why}", "--allow-downtime accepts that, or do it when another board serves")
        act = Act("configure", None, caller.uid, caller.pid, f"{len(found)} changes, digest {digest}")
        try:
            applied = await supervisor.store.configure(standing.encode(), allow_downtime, act)
        except (sqlite3.Error, OSError) as error:
            raise Refused(f"it could not be saved and was not done: {error}", "is the disk full?") from None
        configuring.take(applied)
        where = [change.where for change in found]
        data = {"version": applied.version, "digest": digest, "changes": where, "uid": caller.uid, "by_pid": caller.pid}
        supervisor.note(Note(history.FLEET_CONFIGURED, "-", data=data))
        asyncio.get_running_loop().call_later(ANSWER_FIRST_S, supervisor.be_born_again)
        return {"version": applied.version, "digest": digest, "changes": [shown(change) for change in found]}

    async def _read(self) -> tuple[Fleet, Standing]:
        """The file, as right as it has to be for a start.

        Raises:
            Refused: it is not.
        """
        versions = self._supervisor.rollouts.versions

        def read() -> tuple[Fleet, Standing]:
            fleet = load_fleet(self._supervisor.fleet.path)
            check_start(fleet)
            configured_packages(fleet, versions)
            return fleet, standing_of(fleet)

        try:
            return await asyncio.to_thread(read)
        except ConfigError as error:
            raise Refused(f"nothing was changed: {error}") from None

    def _downtime(self, found: list[Change], new: Leaves) -> str | None:
        """Why nobody of a model would serve for a while."""
        supervisor = self._supervisor
        for board in dict.fromkeys(board for change in found for board in change.boards):
            alias = alias_of(new, board)
            ready = [
                other
                for other in supervisor.boards
                if alias_of(new, other) == alias and supervisor.out(other) is None and self._is_ready(other)
            ]
            if ready == [board]:
                return f"{board} is to be restarted, and no other board of {alias} serves"
        return None

    def _is_ready(self, board: str) -> bool:
        report = self._supervisor.sightings.boards.get(board, NOTHING_SEEN).report
        return report is not None and report.state == ModelState.READY.name


def same_package(fleet: Fleet, serving: Mapping[str, str | None], alias: str) -> bool:
    """Whether the file names for an alias the artifact that it stands for anyway."""
    package = next(model.package for model in fleet.config.models if model.alias == alias)
    try:
        return read_package(fleet.resolve(package)).digest == serving.get(alias)
    except ArtifactError:
        return False


def shown(change: Change) -> dict[str, Any]:
    """For programs."""
    return {
        "where": change.where, "old": change.old, "new": change.new, "how": change.how, "live": change.live,
        "boards": list(change.boards), "routers": change.routers, "refused": change.refused,
    }  # fmt: skip


def plan(content: bytes, fleet: Fleet, serving: Mapping[str, str | None]) -> tuple[list[Change], str]:
    """What the file would change, and its digest.

    Raises:
        ConfigError: a scheduler file is wrong.
    """
    new = leaves_of(standing_of(fleet))
    check: Callable[[str], bool] = lambda alias: same_package(fleet, serving, alias)  # noqa: E731
    return changes(leaves_of(decode(content)), new, check), digest_of(new)
