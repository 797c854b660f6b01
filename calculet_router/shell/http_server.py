"""The HTTP server: all connections, and the limits that they share.

HTTP/1.1 on httptools and the bare event loop. What a loop pass produced for a connection leaves in one write: kernel calls are what
a front door pays for. Nobody can fill it from outside: when all connections are taken, the ones that have waited longest for
their client's next word give way to new ones (so a slowloris only ever evicts itself); large bodies share a budget, and the
slowest gives way; streams are counted; what a reader leaves unread is bounded here and in the kernel.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from heapq import nsmallest
from typing import Any

from calculet_core.config import RouterConfig
from calculet_core.errors import CalculetError, NoReadyWorker, OverCapacity
from calculet_router.shell.connection import Connection
from calculet_router.shell.exchange import Exchange

GIVE_WAY_SHARE = 64
"""One in so many connections gives way at once, so that a flood does not look through all of them for each newcomer."""
KEEPALIVE_PROBES = 3
log = logging.getLogger("calculet.http")


class HttpServer:
    """`handle` answers an exchange, `gone` hears that an unanswered one lost its reader, `limited` that a limit of the
    configuration took effect (its key), `refused` what was answered to a message that was refused while it was read."""

    def __init__(
        self,
        config: RouterConfig,
        handle: Callable[[Exchange], None],
        gone: Callable[[Exchange, str, str | None], None],
        limited: Callable[[str], None],
        refused: Callable[[CalculetError], None],
    ) -> None:
        self.handle, self.gone, self.limited, self.refused = handle, gone, limited, refused
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.draining = False
        self.date = b""
        self.streams = 0
        """Streams that have not ended."""
        self.body_bytes = 0
        """Of large bodies that are being received or wait on their connection."""
        self._addresses: Counter[str] = Counter()
        self._servers: list[asyncio.Server] = []
        self._dirty: list[Connection] = []
        self.take_config(config)
        self._sweep()

    def take_config(self, config: RouterConfig) -> None:
        """Other limits from now on; what a socket was given when it was opened stays its own."""
        self.config = config
        times = (config.header_timeout_s, config.body_timeout_s, config.idle_timeout_s, config.write_timeout_s)
        self._sweep_s = min(*times, config.ping_interval_s, 4.0) / 4

    async def listen(self, sockets: list[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        """Accept on bound sockets; references to the servers are kept. A handshake has the time of headers."""
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": self.config.header_timeout_s}
        for sock in sockets:
            tune(sock, self.config)
            self._servers.append(await self.loop.create_server(lambda: Connection(self), sock=sock, backlog=1024, **options))

    def stop_listening(self) -> None:
        """Accept nobody more. Connections go one by one, none of them under a request: see `drained`."""
        self.draining = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.expect_little()

    def drained(self, *, over: bool = False) -> bool:
        """Close what was idle for `drain_idle_s`, or, when the drain is over, whatever is idle; whether no connection is left."""
        now = math.inf if over else self.loop.time()
        for connection in list(self.connections):
            connection.close_if_overdue(now)
        return not self.connections

    def abort(self) -> None:
        """Cut every connection."""
        for connection in list(self.connections):
            connection.transport.abort()

    # ---------------------------------------------------------------- limits that all share
    def enter(self, connection: Connection) -> CalculetError | None:
        """A new connection; or why there is no place for it."""
        config = self.config
        if config.max_connections_per_address is not None and (peer := connection.transport.get_extra_info("peername")):
            address = str(peer[0])
            if self._addresses[address] >= config.max_connections_per_address:
                self.limited("max_connections_per_address")
                message = f"{config.max_connections_per_address} connections are open from {address}"
                return OverCapacity(f"{message} (router.max_connections_per_address)")
            self._addresses[address] += 1
            connection.address = address
        if len(self.connections) >= config.max_connections:
            self.limited("max_connections")
            if not self._make_room():
                return NoReadyWorker(f"{config.max_connections} connections are open (router.max_connections)")
        self.connections.add(connection)
        return None

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        self.connections.discard(connection)
        if (address := connection.address) is not None:
            connection.address = None
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    def _make_room(self) -> bool:
        """Close some of the connections that wait for their client, those that wait longest first."""
        count = max(1, self.config.max_connections // GIVE_WAY_SHARE)
        waiting = (connection for connection in self.connections if connection.can_give_way)
        chosen = nsmallest(count, waiting, key=lambda connection: connection.since)
        for connection in chosen:
            self.connections.discard(connection)
            connection.give_way()
        return bool(chosen)

    def relieve(self) -> None:
        """Too many bytes of bodies: those that began first, and so are the slowest, are refused until a quarter is free."""
        wanted = self.config.max_buffered_body_bytes * 3 // 4
        for connection in sorted((one for one in self.connections if one.held), key=lambda one: one.since):
            if self.body_bytes <= wanted:
                return
            self.limited("max_buffered_body_bytes")
            connection.give_up_body()

    def no_stream_left(self) -> CalculetError | None:
        """Why no further stream may be opened."""
        limit = self.config.max_open_streams
        if self.streams < limit:
            return None
        self.limited("max_open_streams")
        return OverCapacity(f"{self.streams} of {limit} streams are open (router.max_open_streams)")

    # ---------------------------------------------------------------- every loop pass, every so often
    def soil(self, connection: Connection) -> None:
        """Something is to be written at the end of this loop pass."""
        if not self._dirty:
            self.loop.call_soon(self._flush)
        self._dirty.append(connection)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()

    def _sweep(self) -> None:
        """Time-outs and pings, with a resolution of a quarter of the shortest."""
        self.date = formatdate(usegmt=True).encode()
        now = self.loop.time()
        for connection in list(self.connections):
            try:
                connection.time_passed(now)
            except Exception:
                log.exception("a connection's time-outs could not be handled")
        self.loop.call_later(self._sweep_s, self._sweep)


def tune(sock: socket.socket, config: RouterConfig) -> None:
    """What every accepted TCP connection inherits: no delay for small writes, a bound on what the kernel keeps unsent, and the
    end of a peer that is gone without a word (a lost host, a cut cable) or that acknowledges nothing."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, config.max_output_buffer_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_timeout_s * 1000))
    idle_s = max(1, round(config.tcp_keepalive_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // KEEPALIVE_PROBES))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
