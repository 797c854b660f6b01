"""What a person at `calculet up` wants to know: that it is ready and where, or which board cannot start and why.

The supervisor tells how each board is; once all are settled the router is asked whether it serves, and one line says so. After that
only what goes wrong is said.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from calculet_core.errors import ExitCode
from calculet_core.shell.fleet import Fleet

GLANCE_S = 0.03
READY, FAILED = "ready", "failed"
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Watch:
    """Follows a start; `end` is called with an exit code when it is hopeless."""

    def __init__(
        self, fleet: Fleet, say: Callable[[str], None], complain: Callable[[str], None], end: Callable[[int], None]
    ) -> None:
        self._fleet, self._say, self._complain, self._end = fleet, say, complain, end
        self._boards: dict[str, dict[str, Any]] = {}
        self._complained: dict[str, str] = {}
        self._asking: asyncio.Task[None] | None = None
        self._tls: ssl.SSLContext | None = None
        if fleet.config.router.tls.certificate is not None:
            self._tls = ssl.create_default_context()  # it is asked how it is, not who it is
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self.ready = False
        """Whether the fleet has served."""

    def see(self, boards: dict[str, dict[str, Any]]) -> None:
        """How each board is now: `{"state": "ready" | "starting" | "failed", "why": ..., "code": ...}`."""
        self._boards = boards
        for board, seen in boards.items():
            if seen["state"] == FAILED and self._complained.get(board) != seen["why"]:
                self._complained[board] = seen["why"]
                path = self._fleet.log_dir / f"worker-{board}.log"
                self._complain(f"{board} does not serve: {seen['why']} (log: {path})")
            elif seen["state"] == READY and self._complained.pop(board, None):
                self._complain(f"{board} serves again")
        if self.ready:
            return
        states = [seen["state"] for seen in boards.values()]
        if all(seen["code"] == ExitCode.CONFIG and seen["state"] == FAILED for seen in boards.values()):
            self._end(ExitCode.CONFIG)
        elif "starting" not in states and READY in states and self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask_router())

    def close(self) -> None:
        """Stop following."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask_router(self) -> None:
        while not await self._router_is_ready():
            await asyncio.sleep(GLANCE_S)
        self.ready = True
        ready = [board for board, seen in self._boards.items() if seen["state"] == READY]
        models = [model.alias for model in self._fleet.config.models]
        address, options = f"{'https' if self._tls else 'http'}://{self._address()}", "-kN" if self._tls else "-N"
        self._say(f"Calculet serves {', '.join(models)} at {address}/v1 ({len(ready)} of {len(self._boards)} boards ready)")
        self._say(
            f"  curl {options} {address}/v1/chat/completions -H 'content-type: application/json' \\\n"
            f'    -d \'{{"model":"{models[0]}","stream":true,"messages":[{{"role":"user","content":"Why is the sky blue?"}}]}}\''
        )

    async def _router_is_ready(self) -> bool:
        host, _, port = self._address().rpartition(":")
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=self._tls)
                writer.write(f"GET /readyz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
                line = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):  # an ssl.SSLError is one
            return False
        return line.split()[1:2] == [b"200"]

    def _address(self) -> str:
        host, _, port = self._fleet.config.router.listen.rpartition(":")
        return f"{_ANYWHERE.get(host, host)}:{port}"
