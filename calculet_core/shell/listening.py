"""Listening addresses: a router binds its own, or is given one that its keeper holds, so that no restart refuses a connection."""

from __future__ import annotations

import socket
from typing import Any


def listens_at(sock: socket.socket, listen: str) -> bool:
    """Whether a bound socket is at HOST:PORT; a host that is a name counts by its addresses."""
    found_host, found_port = sock.getsockname()[:2]
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if int(port) not in (0, found_port):
        return False
    try:
        return host == found_host or any(found_host == address[4][0] for address in socket.getaddrinfo(host, None))
    except OSError:
        return False


def bind(listen: str) -> socket.socket:
    """A bound, not yet listening socket for HOST:PORT.

    Raises:
        OSError: the address is in use, or is not one of this host.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, int(port)))
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
