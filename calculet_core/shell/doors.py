"""Unix sockets that come back: one whose file was deleted while its process listens (a cleaner of /tmp, a slip of the hand) is
opened again at the same path, the folder with it.

The kernel tells nobody that a socket's file is gone: connections that are there live on, and nobody new finds the way. So each
process looks at its own sockets once a second. A path where something is listens to somebody: it is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

LOOK_S = 1.0
FOLDER_MODE = 0o750
Converse = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
log = logging.getLogger("calculet.doors")


class Door:
    """Watches one socket's file on the running loop; `reopen` makes it again. What is in the way is logged once and tried again."""

    def __init__(self, path: Path, reopen: Callable[[], Awaitable[None]]) -> None:
        self._path, self._reopen = path, reopen
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Look no more; twice is fine."""
        self._task.cancel()

    async def _watch(self) -> None:
        complained = False
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self._path.exists():
                    continue
                self._path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
                await self._reopen()
            except OSError as error:
                if not complained:
                    log.error("%s was deleted and cannot be opened again: %s", self._path, error)
                complained = True
                continue
            complained = False
            log.warning("%s was deleted; it is open again", self._path)


class UnixServer:
    """asyncio's Unix server at a path, mode 0600. Made by `serve_unix`."""

    def __init__(self, path: Path, converse: Converse) -> None:
        self._path, self._converse = path, converse
        self._servers: list[asyncio.Server] = []
        self._door: Door | None = None

    async def open(self) -> None:
        """Listen, in the place of whatever is at the path.

        Raises:
            OSError: the path cannot be bound.
        """
        self._path.unlink(missing_ok=True)
        self._servers.append(await asyncio.start_unix_server(self._converse, str(self._path)))
        self._path.chmod(0o600)
        while len(self._servers) > 1:
            self._servers.pop(0).close()
        if self._door is None:
            self._door = Door(self._path, self.open)

    def close(self) -> None:
        """Accept nobody more."""
        if self._door is not None:
            self._door.close()
        for server in self._servers:
            server.close()


async def serve_unix(path: Path, converse: Converse) -> UnixServer:
    """Listen at a path, and keep listening there.

    Raises:
        OSError: the path cannot be bound.
    """
    server = UnixServer(path, converse)
    await server.open()
    return server
