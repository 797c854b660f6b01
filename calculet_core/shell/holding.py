"""What a worker or a router holds of the configuration, and how it takes another while it runs.

The file is read on a thread. It is taken when it is what the supervisor has committed (or, at a signal, when it is right); else
what was held goes on, and the reason is in the next report.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from calculet_core.applying import Standing, leaves_of, live_with, started_with
from calculet_core.errors import ConfigError
from calculet_core.shell.fleet import Fleet, load_fleet, standing_of

log = logging.getLogger("calculet.configuration")


class Holding:
    """One process's; `start`, `live` and `error` are for its reports.

    Raises:
        ConfigError: a scheduler file is missing or wrong.
    """

    def __init__(self, fleet: Fleet, role: str, board: str | None = None) -> None:
        self._path, self._role = fleet.path, role
        leaves = leaves_of(standing_of(fleet))
        self.start, self.live = started_with(leaves, role, board), live_with(leaves, role)
        self.error: str | None = None
        self._reading = False

    async def read(self, wanted: str | None = None) -> Standing | None:
        """The file's configuration, to be taken live at once; None: it is held already, is being read, or cannot be taken.

        Args:
            wanted: the live digest that it must have; None: whatever the file says.
        """
        if self._reading or (wanted is not None and wanted == self.live):
            return None
        self._reading = True
        try:
            standing, live = await asyncio.to_thread(_read, self._path, self._role)
        except ConfigError as error:
            self.error = str(error)
            log.error("the configuration is not taken, what was held goes on: %s", error)
            return None
        finally:
            self._reading = False
        if wanted is not None and live != wanted:
            self.error = f"{self._path} is not what was applied: it has changed since"
            log.error("the configuration is not taken: %s", self.error)
            return None
        self.error = None
        if live == self.live:
            return None
        self.live = live
        log.info("takes the configuration, live digest=%s", live)
        return standing


def _read(path: Path, role: str) -> tuple[Standing, str]:
    standing = standing_of(load_fleet(path))
    return standing, live_with(leaves_of(standing), role)
