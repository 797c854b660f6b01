"""Reload is rebirth: the supervisor proves that the new configuration can be read, then becomes a new image with the same pid.

Nothing is patched in a living supervisor, so a reload cannot leave it half old and half new; it also takes an upgraded package.
It is the harmless crash by another name: workers and routers go on, and are adopted. Under systemd the manager is told RELOADING
before and READY by the new image; under the development keeper the process ends and is started again.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from calculet_core.errors import ConfigError
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.sd_notify import sd_notify
from calculet_supervisor.rollout import AliasVersion
from calculet_supervisor.shell.checking import configured_packages

log = logging.getLogger("calculet.supervisor")


class BornAgain(Exception):
    """This image has put everything down; `become_new` is next."""


def may_reload(path: Path, versions: Mapping[str, list[AliasVersion]]) -> bool:
    """Whether the configuration at `path` could be supervised; when it could not, the reload is refused and all stays as it is."""
    sd_notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
    try:
        configured_packages(load_fleet(path), versions)
    except ConfigError as error:
        log.error("the reload is refused, everything stays as it is: %s", error)
        sd_notify(f"READY=1\nSTATUS=a reload was refused: {error}")
        return False
    log.info("reloads %s", path)
    return True


def become_new() -> None:
    """Does not return: the same command, started afresh in this process. Descriptors are close-on-exec, locks go with them."""
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
