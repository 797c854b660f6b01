"""From a fleet's file to a supervisor that runs: its lock, its memory, the packages it starts with."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

import msgspec

from calculet_core import wire
from calculet_core.errors import ConfigError, ExitCode
from calculet_core.shell.death_pipe import VARIABLE
from calculet_core.shell.files import FileLock
from calculet_core.shell.fleet import Fleet
from calculet_supervisor.shell.app import Supervisor
from calculet_supervisor.shell.ground import find_ground
from calculet_supervisor.shell.reloading import BornAgain
from calculet_supervisor.shell.store import open_store


async def serve(fleet: Fleet) -> int:
    """Be the fleet's supervisor; the exit code.

    Raises:
        ConfigError: the configuration, a package or the store is wrong, or nobody is there who could start workers.
        LockHeld: another supervisor has this fleet.
        BornAgain: it is to be reloaded, and everything is put down.
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
        ground = find_ground(fleet, memory)
        if (on_disk := _view_on_disk(fleet)) is not None and on_disk.version > memory.view.version:
            memory = replace(memory, view=on_disk)  # the store was moved away: go on above what routers have seen
        supervisor = Supervisor(ground.fleet, ground.packages, store, memory, ground.broken)
        await supervisor.run()
    finally:
        store.close()
        lock.release()
    if supervisor.reloads:
        raise BornAgain
    return ExitCode.OK


def _view_on_disk(fleet: Fleet) -> wire.FleetView | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(fleet.fleet_view.read_bytes(), type=wire.FleetView)
    return None
