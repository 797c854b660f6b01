"""The development keeper as launcher: MessagePack objects over its Unix socket. It is the workers' parent, so it knows every exit.

To the keeper: `{"verb": "list"}`, `{"verb": VERB, "board": ...}` (VERB: start, stop, dump, abort, kill),
`{"verb": "tell", "boards": {...}}`, `{"verb": "replace", "router": pid}`.
From it: `{"listed": {board: pid}}`, `{"started": board, "pid": ...}`, `{"exited": board, "code", "signal", "reason"}`,
`{"router_stays": pid, "reason"}` when no successor could take its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calculet_core.shell.control_client import pack, unpacker
from calculet_supervisor.shell.launchers import Events
from calculet_supervisor.world import Exit

CHUNK_BYTES = 65_536
LIST_TIMEOUT_S = 5.0
CONNECT_S = 5.0
CONNECT_RETRY_S = 0.1


class KeeperLauncher:
    """Made by `connect`. When the connection ends the keeper is gone, and `on_lost` is called."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, events: Events, on_lost: Callable[[], None]
    ) -> None:
        self._writer, self._events, self._on_lost = writer, events, on_lost
        self._listed: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read(reader))
        self._task.add_done_callback(_raise)

    @classmethod
    async def connect(cls, path: Path, events: Events, on_lost: Callable[[], None]) -> KeeperLauncher:
        """Connect to the keeper, which opens a socket that somebody deleted again within a moment.

        Raises:
            OSError: nobody listens there within `CONNECT_S`.
        """
        deadline_s = time.monotonic() + CONNECT_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(path))
                return cls(reader, writer, events, on_lost)
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(CONNECT_RETRY_S)

    async def list(self) -> dict[str, int]:
        self._send(verb="list")
        return await asyncio.wait_for(asyncio.shield(self._listed), LIST_TIMEOUT_S)

    def start(self, board: str) -> None:
        self._send(verb="start", board=board)

    def stop(self, board: str) -> None:
        self._send(verb="stop", board=board)

    def dump(self, board: str) -> None:
        self._send(verb="dump", board=board)

    def abort(self, board: str) -> None:
        self._send(verb="abort", board=board)

    def kill(self, board: str) -> None:
        self._send(verb="kill", board=board)

    def tell(self, boards: dict[str, Any]) -> None:
        self._send(verb="tell", boards=boards)

    def replace_router(self, pid: int) -> bool:
        self._send(verb="replace", router=pid)
        return True

    def close(self) -> None:
        self._task.cancel()
        self._writer.close()

    def _send(self, **message: Any) -> None:
        self._writer.write(pack(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        incoming = unpacker()
        try:
            while data := await reader.read(CHUNK_BYTES):
                incoming.feed(data)
                for message in incoming:
                    self._take(message)
        except ConnectionError:
            pass
        self._on_lost()

    def _take(self, message: dict[str, Any]) -> None:
        if "listed" in message and not self._listed.done():
            self._listed.set_result(message["listed"])
        elif "started" in message:
            self._events.started(message["started"], message["pid"])
        elif "router_stays" in message:
            self._events.router_stays(message["router_stays"], message["reason"])
        elif "exited" in message:
            how = Exit(message.get("code"), message.get("signal"), message.get("reason"))
            self._events.exited(message["exited"], how)


def _raise(task: asyncio.Task[None]) -> None:
    """What went wrong in it is the loop's to know at once, not when the task is collected."""
    if not task.cancelled():
        task.result()
