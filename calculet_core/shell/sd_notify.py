"""systemd's two small protocols: readiness notification and inherited listening sockets."""

from __future__ import annotations

import os
import socket
from functools import cache

_FIRST_FD = 3
KEPT = "CALCULET_LISTEN_FD"


def sd_notify(state: str) -> bool:
    """Send `READY=1` or the like; False when no service manager listens."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return False
    try:
        _socket().sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
    except OSError:
        return False
    return True


@cache
def _socket() -> socket.socket:
    """Kept open: a process without descriptors still tells that it lives."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


def listen_fds() -> dict[str, list[int]]:
    """Descriptors that the service manager passed, by name; made close-on-exec and forgotten from the environment. A keeper passes
    the one that it holds by its number alone (`KEPT`): it does not know its child's process id before there is one."""
    kept = os.environ.pop(KEPT, None)
    if kept is not None:
        os.set_inheritable(int(kept), False)
        return {"http": [int(kept)]}
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, list[int]] = {}
    for index in range(int(os.environ.get("LISTEN_FDS", "0"))):
        os.set_inheritable(_FIRST_FD + index, False)
        found.setdefault(names[index] if index < len(names) and names[index] else "unknown", []).append(_FIRST_FD + index)
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    return found


def watchdog_interval_s() -> float | None:
    """Half of the watchdog's time-out: how often to send `WATCHDOG=1`; None without a watchdog."""
    usec = os.environ.get("WATCHDOG_USEC")
    if not usec or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(usec) / 2e6


STRIPPED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
"""Environment variables that no spawned child may inherit."""
