"""The operators' channel: MessagePack objects on a Unix stream socket, a request and its answers.

A request is a map `{"verb": ..., **arguments}`; an answer is `{"ok": true, ...}` or `{"ok": false, "error": ..., "hint": ...}`.
A verb that takes long sends `{"progress": ...}` maps first. The socket's permissions decide who may speak (mode 0600).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 16 << 20


class ControlError(Exception):
    """The supervisor refused, or could not be reached; `hint` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class SupervisorUnreachable(ControlError):
    """Nobody listens, or no answer came; nothing is known about what was asked."""


def unpacker() -> msgpack.Unpacker:
    """A bounded streaming decoder: `feed` bytes, iterate whole objects."""
    return msgpack.Unpacker(raw=False, strict_map_key=True, max_buffer_size=MAX_MESSAGE_BYTES)


def pack(message: Mapping[str, Any]) -> bytes:
    """One object as bytes."""
    packed: bytes = msgpack.packb(message, use_bin_type=True)
    return packed


def call(
    path: Path,
    verb: str,
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
    on_progress: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Send a verb and return its answer; `timeout_s` bounds every wait for the next bytes.

    Raises:
        SupervisorUnreachable: nobody listens, or the answer does not come.
        ControlError: it is a refusal.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
            sock.sendall(pack({"verb": verb, **(arguments or {})}))
            incoming = unpacker()
            while data := sock.recv(65_536):
                incoming.feed(data)
                for answer in incoming:
                    if "progress" in answer:
                        if on_progress:
                            on_progress(answer["progress"])
                        continue
                    if answer.get("ok"):
                        return dict(answer)
                    raise ControlError(str(answer.get("error", "refused")), answer.get("hint"))
        except TimeoutError:
            message = f"no answer from the supervisor within {timeout_s:g} s"
            raise SupervisorUnreachable(message, "is it stopped or stuck? see its log") from None
        except (FileNotFoundError, ConnectionRefusedError):
            hint = "start it with `calculet up` or systemctl; `calculet doctor` says what keeps it from starting"
            raise SupervisorUnreachable(f"no supervisor listens at {path}", hint) from None
        except PermissionError:
            raise SupervisorUnreachable(f"{path}: permission denied", "run as the user that Calculet runs as") from None
        except OSError as error:
            raise SupervisorUnreachable(f"{path}: {error.strerror or error}") from None
    raise SupervisorUnreachable("the supervisor closed the connection without an answer", "it may be restarting: try again")
