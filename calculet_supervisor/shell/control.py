"""The operators' channel, server side: one MessagePack object a request, answered once, in order.

Who may speak is decided by the socket's mode (0600). A peer that sends something that is no request loses its connection, nobody
else does. The protocol is `calculet_core.shell.control_client`'s.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from calculet_core.shell.control_client import pack, unpacker
from calculet_core.shell.doors import UnixServer, serve_unix
from calculet_core.shell.process import in_words, is_machines

CHUNK_BYTES = 65_536
log = logging.getLogger("calculet.control")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the kernel tells it."""

    uid: int | None
    pid: int | None


class Refused(Exception):
    """The answer is no; `hint` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


Verb = Callable[[Mapping[str, Any], Caller], Awaitable[dict[str, Any]]]


async def serve_control(path: Path, verbs: Mapping[str, Verb], on_bad: Callable[[], None] = lambda: None) -> UnixServer:
    """Answer requests on the socket, each by the verb it names; `on_bad` hears of connections that sent no request."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = _caller(writer.get_extra_info("socket"))
        incoming = unpacker()
        try:
            while data := await reader.read(CHUNK_BYTES):
                incoming.feed(data)
                for request in incoming:
                    writer.write(await _answer(verbs, request, caller))
                    await writer.drain()
        except (msgpack.UnpackException, msgpack.BufferFull, ValueError) as error:
            log.warning("a control connection (pid %s) is closed: not a request: %s", caller.pid, error)
            on_bad()
        except ConnectionError:
            pass
        finally:
            writer.close()

    return await serve_unix(path, converse)


async def _answer(verbs: Mapping[str, Verb], request: Any, caller: Caller) -> bytes:
    """The answer's bytes; whatever goes wrong in a verb, or in packing what it says, is the answer and nobody's end."""
    if not isinstance(request, dict) or not isinstance(request.get("verb"), str):
        raise ValueError("a request is a map with a verb")
    verb = verbs.get(request["verb"])
    if verb is None:
        known = f"known: {', '.join(sorted(verbs))}"
        return pack({"ok": False, "error": f"unknown verb {request['verb'][:64]!r}", "hint": known})
    try:
        return pack({"ok": True, **await verb(request, caller)})
    except Refused as refusal:
        return pack({"ok": False, "error": refusal.message, "hint": refusal.hint})
    except Exception as error:
        if isinstance(error, OSError) and is_machines(error):
            log.error("verb %s failed: %s", request["verb"], in_words(error))
            hint = "a shortage of the machine, or a limit of the supervisor's process: `calculet doctor` looks for it"
            return pack({"ok": False, "error": f"the supervisor cannot do it now: {in_words(error)}", "hint": hint})
        log.exception("verb %s failed", request["verb"])
        hint = "this is a bug; see the supervisor's log"
        return pack({"ok": False, "error": f"{type(error).__name__}: {error}", "hint": hint})


def _caller(sock: Any) -> Caller:
    try:
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    except (OSError, AttributeError):
        return Caller(None, None)
    return Caller(uid, pid)
