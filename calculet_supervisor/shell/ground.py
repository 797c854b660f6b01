"""What a supervisor stands on: what the file says, or, as far as that cannot be used, what was in force.

A supervisor that is started again while something is broken that served (the file, a scheduler file, a package) manages what serves
all the same. What is broken is said everywhere; once it is mended the supervisor is born again with it. Nothing here is trusted
for that: a worker verifies every package that it loads, with the keys and the file as they are then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from calculet_core import history
from calculet_core.artifact import Package
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.fleet import Fleet, load_fleet, standing_of
from calculet_core.shell.packages import load_keys, read_package
from calculet_core.shell.standing import goes_on, held, is_left, leave_standing
from calculet_supervisor.shell.artifacts import artifacts_of, recall
from calculet_supervisor.shell.checking import configured_packages, kept_of
from calculet_supervisor.shell.store import Memory
from calculet_supervisor.world import Note, Placement

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

LOOK_S = 1.0
"""Between two looks whether everything is mended, and whether what is in force is left still."""
RETRY_S = 1.0
log = logging.getLogger("calculet.supervisor")


@dataclass(frozen=True, slots=True)
class Broken:
    """Of a package: why what the configuration names cannot be used, and whether a complete copy is kept, which is used instead."""

    reason: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Ground:
    """The configuration and the packages to supervise with; `broken` by alias."""

    fleet: Fleet
    packages: dict[str, Package]
    broken: Mapping[str, Broken]


def find_ground(fleet: Fleet, memory: Memory) -> Ground:
    """What the configuration names; what cannot be used of it, as it was in force since the boot or `calculet up`.

    Raises:
        ConfigError: something cannot be used, and nothing is known that was in force: a first start, say.
    """
    if not goes_on(fleet):
        return Ground(fleet, configured_packages(fleet, memory.versions), {})
    try:
        return _at_hand(fleet, memory)
    except ConfigError as error:
        before = held(fleet.path, str(error), fleet.run_dir) if fleet.held is None else None
        if before is None:
            raise
        return _at_hand(before, memory)


def _at_hand(fleet: Fleet, memory: Memory) -> Ground:
    packages: dict[str, Package] = {}
    broken: dict[str, Broken] = {}
    for index, model in enumerate(fleet.config.models):
        root = fleet.resolve(model.package)
        try:
            packages[model.alias] = read_package(root)
        except ArtifactError as error:
            reason = f"{fleet.path}: $.models[{index}].package: {error}"
            moved = kept_of(artifacts_of(fleet), memory.versions.get(model.alias, []))
            if moved is not None:  # an operator has moved the alias: what the file names is history
                log.warning("%s; %s is used as it is kept", reason, moved.digest[:12])
                packages[model.alias] = moved
                continue
            found = _known(fleet, memory, model.alias)
            if found is None:
                raise ConfigError(reason) from None
            kept = found.root == artifacts_of(fleet).path(found.digest)
            packages[model.alias] = found if kept else replace(found, root=root)
            broken[model.alias] = Broken(reason, kept)
    return Ground(fleet, packages, broken)


def _known(fleet: Fleet, memory: Memory, alias: str) -> Package | None:
    """What the configuration named when the alias was moved, else what it served: as it is kept, else its manifest alone."""
    versions, served = memory.versions.get(alias, []), [view.digest for view in memory.view.aliases if view.alias == alias]
    digests = [versions[-1].configured, *([versions[-1].artifact.digest] if versions[-1].artifact else [])] if versions else []
    for digest in (*digests, *served):
        with suppress(ArtifactError):
            found = read_package(artifacts_of(fleet).path(digest))
            if found.digest == digest:
                return found
        if (remembered := recall(fleet, digest)) is not None:
            return remembered
    return None


def _no_start(path: Path, placed: Placement | None) -> str | None:
    try:
        check_start(load_fleet(path))
        if placed is None:
            return None
        root = Path(placed.package)
        if read_package(root).digest != placed.digest:
            return f"{root}: holds another package than {placed.digest[:12]}, which is served"
    except (ConfigError, ArtifactError) as error:
        return str(error)
    return None


def check_start(fleet: Fleet) -> None:
    """What a process needs beside the fleet's file in order to start.

    Raises:
        ConfigError: a scheduler file or a trusted key cannot be used.
    """
    standing_of(fleet)
    load_keys([fleet.resolve(path) for path in fleet.config.trusted_keys])


class Standing:
    """One supervisor's: it leaves what is in force for its successor, or waits until what is broken is mended."""

    def __init__(self, supervisor: Supervisor, broken: Mapping[str, Broken]) -> None:
        self._supervisor = supervisor
        self.configuration = supervisor.fleet.held
        """Why the file cannot be used; None: it is."""
        self.broken = dict(broken)
        self._gone = supervisor.rollouts.gone

    @property
    def whole(self) -> bool:
        """Whether everything that the configuration names is used."""
        return self.configuration is None and not self.broken and not self._gone

    async def no_start(self, placed: Placement | None) -> str | None:
        """Why a worker that is started now would not serve what is placed on its board; None: nothing speaks against it. The file,
        the trusted keys and the package are looked at as they are now; the package's hashes are the worker's to judge."""
        return await asyncio.to_thread(_no_start, self._supervisor.fleet.path, placed)

    def status(self) -> dict[str, object]:
        """For operators."""
        packages = {alias: one.reason for alias, one in self.broken.items()}
        packages |= {digest[:12]: reason for digest, reason in self._gone.items()}
        return {"configuration": self.configuration, "packages": packages}

    @property
    def packages(self) -> int:
        """How many cannot be used."""
        return len(self.broken) + len(self._gone)

    async def stand(self) -> None:
        """Say what is broken and wait for its end; leave for a successor what is in force, again where somebody deleted it."""
        self._tell(over=False)
        if self.configuration is None:
            await self._leave()
        while True:
            await asyncio.sleep(LOOK_S)
            if not is_left(self._supervisor.fleet):
                await self._leave()
            if not self.whole and await asyncio.to_thread(self._is_mended):
                self._tell(over=True)
                self._supervisor.be_born_again()
                return

    def _tell(self, over: bool) -> None:
        for what, reason in self._reasons():
            if not over:
                log.error("what was in force goes on: %s", reason)
            self._supervisor.note(Note(history.FLEET_UNUSABLE, "-", data={"what": what, "reason": reason, "over": over}))

    def _reasons(self) -> list[tuple[str, str]]:
        found = [("configuration", self.configuration)] if self.configuration is not None else []
        found += [(f"package of {alias}", one.reason) for alias, one in self.broken.items()]
        return found + [(f"package {digest[:12]}", reason) for digest, reason in self._gone.items()]

    async def _leave(self) -> None:
        fleet, standing, said = self._supervisor.fleet, self._supervisor.configuring.own, False
        while True:
            try:
                await asyncio.to_thread(leave_standing, fleet, standing)
                return
            except OSError as error:
                if not said:
                    log.error("what is in force cannot be left for a successor, and is tried again: %s", error)
                said = True
                await asyncio.sleep(RETRY_S)

    def _is_mended(self) -> bool:
        with suppress(ConfigError, ArtifactError):
            fleet, rollouts = load_fleet(self._supervisor.fleet.path), self._supervisor.rollouts
            standing_of(fleet)
            configured_packages(fleet, rollouts.versions)
            return all(read_package(rollouts.place_of(digest)).digest == digest for digest in self._gone)
        return False
