"""The key file as the router follows it: looked at several times a second, taken when it changes.

A file that cannot be used (others may read it, it is torn, it is gone) changes nothing: the last good keys stay in force, and that
is logged and a metric. Nothing of a key, nor of its hash, is ever logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from calculet_core.errors import ConfigError
from calculet_core.keys import KeyFile
from calculet_core.shell.keys import read_keys

LOOK_S = 0.2
log = logging.getLogger("calculet.keys")


class KeyWatch:
    """`take` gets each new version. The first look is strict: a router does not start with a key file that it cannot use.

    Raises:
        ConfigError: the file is there and cannot be used.
    """

    def __init__(self, path: Path, take: Callable[[KeyFile | None], None]) -> None:
        self._path, self._take = path, take
        self.usable = True
        self._seen = self._signature()
        self._known = read_keys(path)
        take(self._known)

    def look(self) -> None:
        """Take the file if it changed."""
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            found = read_keys(self._path)
            if found is None and self._known is not None:
                raise ConfigError(f"{self._path}: it is gone")
        except ConfigError as error:
            self.usable = False
            log.error("%s; the keys that were last read stay in force", error)
            return
        self.usable, self._known = True, found
        self._take(found)
        log.info("keys version=%d", 0 if found is None else found.version)

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode, found.st_uid)
