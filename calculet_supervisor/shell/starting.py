"""From a fleet's file to a supervisor that runs: its lock, its memory, the packages it starts with.

A package that was swapped for another one may be gone from where the configuration names it, and nobody shall be woken for that:
it is read from where it is kept to go back to.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace

import msgspec

from calculet_core import wire
from calculet_core.artifact import Package
from calculet_core.errors import ArtifactError, ConfigError, ExitCode
from calculet_core.shell.death_pipe import VARIABLE
from calculet_core.shell.files import FileLock
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.packages import read_package
from calculet_supervisor.rollout import AliasVersion
from calculet_supervisor.shell.app import Supervisor
from calculet_supervisor.shell.artifacts import ArtifactStore, artifacts_of
from calculet_supervisor.shell.store import Memory, open_store

log = logging.getLogger("calculet.supervisor")


async def serve(fleet: Fleet) -> int:
    """Be the fleet's supervisor; the exit code.

    Raises:
        ConfigError: the configuration, a package or the store is wrong, or nobody is there who could start workers.
        LockHeld: another supervisor has this fleet.
    """
    if VARIABLE not in os.environ and "INVOCATION_ID" not in os.environ:
        raise ConfigError("neither `calculet up` nor systemd has started this supervisor: nobody could start workers for it")
    lock = FileLock(fleet.supervisor_lock)
    try:
        store = await open_store(fleet.store)
    except BaseException:
        lock.release()
        raise
    try:
        memory = await store.recall()
        packages = configured_packages(fleet, memory)
        if (on_disk := _view_on_disk(fleet)) is not None and on_disk.version > memory.view.version:
            memory = replace(memory, view=on_disk)  # the store was moved away: go on above what routers have seen
        await Supervisor(fleet, packages, store, memory).run()
    finally:
        store.close()
        lock.release()
    return ExitCode.OK


def configured_packages(fleet: Fleet, memory: Memory) -> dict[str, Package]:
    """Alias -> the package that the configuration names, read and not verified: a worker verifies before it loads.

    Raises:
        ConfigError: a package cannot be read, and no operator has moved its alias to another.
    """
    kept, packages = artifacts_of(fleet), {}
    for index, model in enumerate(fleet.config.models):
        try:
            packages[model.alias] = read_package(fleet.resolve(model.package))
        except ArtifactError as error:
            found = _kept(kept, memory.versions.get(model.alias, []))
            if found is None:
                raise ConfigError(f"{fleet.path}: $.models[{index}].package: {error}") from None
            log.warning("%s: $.models[%d].package: %s; %s is used as it is kept", fleet.path, index, error, found.digest[:12])
            packages[model.alias] = found
    return packages


def _kept(kept: ArtifactStore, versions: list[AliasVersion]) -> Package | None:
    """What the configuration named when the alias was moved, else what it was moved to."""
    if not versions:
        return None
    digests = [versions[-1].configured, *([versions[-1].artifact.digest] if versions[-1].artifact else [])]
    for digest in digests:
        with suppress(ArtifactError):
            return read_package(kept.path(digest))
    return None


def _view_on_disk(fleet: Fleet) -> wire.FleetView | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(fleet.fleet_view.read_bytes(), type=wire.FleetView)
    return None
