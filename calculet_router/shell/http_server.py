"""HTTP/1.1 on httptools and the bare event loop.

A connection parses whatever comes, queues whole messages, and answers them one at a time in their order. What a loop pass
produced for a connection leaves in one write: kernel calls are what a front door pays for. Every limit and time-out is ours:
header and body sizes and times, idle time, connections, pipelined messages, and what a reader may leave unread.

`httptools` hides the exceptions of its callbacks, so callbacks only collect; what goes wrong in answering is answered with 500.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, cast

import httptools

from calculet_core.config import RouterConfig
from calculet_core.errors import (
    CalculetError,
    HeadersTooLarge,
    InternalError,
    InvalidValue,
    NoReadyWorker,
    RequestTimeout,
    RequestTooLarge,
)
from calculet_router.shell.exchange import Exchange, error_response

MAX_PIPELINED = 32
"""Whole messages that may wait on one connection; reading pauses above it."""
DISCARD_BYTES = 4 << 20
"""What is read and thrown away after a refusal, so that the client can read the answer before the connection closes."""
DISCARD_S = 2.0
log = logging.getLogger("calculet.http")


class HttpServer:
    """All connections; `handle` answers an exchange, `gone` hears that an unanswered one lost its reader."""

    def __init__(
        self,
        config: RouterConfig,
        handle: Callable[[Exchange], None],
        gone: Callable[[Exchange, str, str | None], None],
    ) -> None:
        self.config, self.handle, self.gone = config, handle, gone
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.draining = False
        self.date = b""
        self._servers: list[asyncio.Server] = []
        self._dirty: list[Connection] = []
        shortest = min(config.header_timeout_s, config.body_timeout_s, config.idle_timeout_s, config.ping_interval_s, 4.0)
        self._sweep_s = shortest / 4
        self._sweep()

    async def listen(self, sockets: list[socket.socket]) -> None:
        """Accept on bound sockets; references to the servers are kept."""
        for sock in sockets:
            self._servers.append(await self.loop.create_server(lambda: Connection(self), sock=sock, backlog=1024))

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


class Connection(asyncio.Protocol):
    """One client. `exchange` is the message being answered; later ones wait in their order."""

    __slots__ = (
        "_body", "_closing", "_dirty", "_discarded", "_discarding", "_due", "_fed", "_headers", "_idle", "_in_headers", "_last",
        "_next_running", "_pairs", "_parser", "_paused", "_queue", "_raw", "_refused", "_url", "events", "exchange", "on_body",
        "on_header", "on_url", "server", "transport",
    )  # fmt: skip

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.exchange: Exchange | None = None
        self.events: list[bytes] = []
        """A stream's events of this loop pass; they leave as one chunk."""
        self._raw: list[bytes] = []
        self._queue: deque[Exchange] = deque()
        self._url: list[bytes] = []
        self._pairs: dict[bytes, bytes] = {}
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self.on_url, self.on_header, self.on_body = self._url.append, self._pairs.__setitem__, self._body.append
        """Of httptools, without a frame of ours for each header; a repeated header keeps its last value."""
        self._parser = httptools.HttpRequestParser(self)
        self._in_headers = self._idle = True
        self._closing = self._dirty = self._discarding = self._last = self._next_running = self._paused = False
        self._refused: CalculetError | None = None
        self._discarded = self._fed = 0
        self._due = server.loop.time() + server.config.header_timeout_s

    # ---------------------------------------------------------------- transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self.transport = cast(asyncio.Transport, transport)
        if (sock := transport.get_extra_info("socket")) and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = self.server
        self.transport.set_write_buffer_limits(high=server.config.max_output_buffer_bytes)
        if len(server.connections) >= server.config.max_connections:
            self._turn_away()
            return
        server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio. Whoever still answers is told at once."""
        self.server.connections.discard(self)
        self._queue.clear()
        self._lose("client left", None)

    def pause_writing(self) -> None:
        """Of asyncio: the output buffer is full. A stream's reader is too slow for it; a whole answer may take its time."""
        if self.exchange is not None and self.exchange.streaming:
            self._lose("its output buffer was full", "slow_reader")
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        if self._closing:
            return
        if self._discarding:
            self._discarded += len(data)
            if self._discarded > DISCARD_BYTES:
                self.transport.abort()
            return
        if self._idle:
            self._idle = False
            self._due = self.server.loop.time() + self.server.config.header_timeout_s
        config = self.server.config
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._last = True  # no upgrades here: the message is answered as it is, and is the last one
        except httptools.HttpParserCallbackError:
            log.exception("a parser callback failed")
            self._refuse(InternalError("internal error"))
        except httptools.HttpParserError as error:
            self._refuse(InvalidValue(f"not a valid HTTP request: {error}"))
        if self._fed > (config.max_header_bytes if self._in_headers else config.max_header_bytes + config.max_body_bytes):
            self._refuse(_too_large(config, self._in_headers))
        if self._refused is not None and not self._discarding:
            self._discarding = True
            self._queue.append(Exchange(self, error=self._refused))
        if self._queue and self.exchange is None:
            self._next()
        elif self._due == 0.0 and not self._idle:
            self._due = self.server.loop.time() + config.body_timeout_s
        if len(self._queue) > MAX_PIPELINED and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _lose(self, reason: str, code: str | None) -> None:
        """Nobody will read the answer that is being produced."""
        self._closing = True
        if (exchange := self.exchange) is not None:
            self.exchange = None
            self.server.gone(exchange, reason, code)
            exchange.finished, exchange.owner = True, None

    def _turn_away(self) -> None:
        """One connection too many: 503, and no more than that."""
        limit = self.server.config.max_connections
        error = NoReadyWorker(f"{limit} connections are open (router.max_connections)")
        self.transport.write(error_response(error, self.server.date))
        self._discarding = True
        self.transport.write_eof()
        self.server.loop.call_later(DISCARD_S, self.transport.abort)

    # ---------------------------------------------------------------- parser callbacks: they only collect
    def on_headers_complete(self) -> None:
        """Of httptools."""
        config, pairs, fed = self.server.config, self._pairs, self._fed
        self._in_headers = self._idle = False
        self._due = 0.0
        self._headers = headers = {name.lower(): value for name, value in pairs.items()}
        pairs.clear()
        limit = config.max_header_bytes
        if (fed == 0 or fed > limit) and sum(map(len, headers)) + sum(map(len, headers.values())) > limit:
            self._refuse(_too_large(config, in_headers=True))
        elif b"content-length" in headers and int(headers[b"content-length"]) > config.max_body_bytes:
            self._refuse(_too_large(config, in_headers=False))
        elif b"expect" in headers and self.exchange is None and not self._queue:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_message_complete(self) -> None:
        """Of httptools."""
        parser, parts = self._parser, self._body
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        target = self._url[0] if len(self._url) == 1 else b"".join(self._url)
        if len(body) > self.server.config.max_body_bytes:
            self._refuse(_too_large(self.server.config, in_headers=False))
        if self._refused is None:
            exchange = Exchange(self, parser.get_method(), target, self._headers, body, parser.should_keep_alive())
            if parser.get_http_version() == "1.0":
                exchange.http10, exchange.keep_alive = True, False
            self._queue.append(exchange)
        parts.clear()
        self._url.clear()
        self._pairs.clear()  # trailers are not the next message's headers
        self._in_headers, self._idle, self._fed, self._due = True, True, 0, 0.0

    def _refuse(self, error: CalculetError) -> None:
        """The message being read is refused; it is answered in its turn, and is the last one."""
        if self._refused is None:
            self._refused = error

    # ---------------------------------------------------------------- answering
    def _next(self) -> None:
        """Answer the waiting messages until one has to wait for its tokens."""
        if self._next_running:
            return
        self._next_running = True
        server = self.server
        while self._queue and self.exchange is None and not self._closing:
            self.exchange = exchange = self._queue.popleft()
            if self._last and not self._queue:
                exchange.keep_alive = False
            try:
                if exchange.error is not None:
                    exchange.fail(exchange.error)
                else:
                    server.handle(exchange)
            except Exception:
                log.exception("a request could not be answered")
                exchange.fail(InternalError("internal error"))
        self._next_running = False
        if self._paused and len(self._queue) <= MAX_PIPELINED:
            self._paused = False
            self.transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Bytes as they are, behind what already waits."""
        if self.events:
            self._frame()
        self._raw.append(data)
        if not self._dirty:
            self.soil()

    def soil(self) -> None:
        """See `HttpServer.soil`."""
        if not self._dirty:
            self._dirty = True
            self.server.soil(self)

    def done(self, exchange: Exchange) -> None:
        """The exchange's answer is complete."""
        if self.exchange is not exchange:
            return
        if self.events:
            self._frame()
        self.exchange = None
        if self._idle or self._due == 0.0:
            config = self.server.config
            idle_s = config.drain_idle_s if self.server.draining else config.idle_timeout_s
            self._due = self.server.loop.time() + (idle_s if self._idle else config.body_timeout_s)
        if exchange.error is not None:
            self._linger()
        elif not exchange.keep_alive:
            self.flush()
            self._close()
        elif self._queue:
            self._next()

    def flush(self) -> None:
        """Write everything of this loop pass at once."""
        self._dirty = False
        if self._closing:
            self.events.clear()
            return
        if self.events:
            if not self._raw and not self.exchange_is_http10:
                events = self.events
                data = events[0] if len(events) == 1 else b"".join(events)
                self.events = []
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
                return
            self._frame()
        if self._raw:
            raw, self._raw = self._raw, []
            self.transport.write(raw[0] if len(raw) == 1 else b"".join(raw))

    @property
    def exchange_is_http10(self) -> bool:
        """Such a client knows no chunks: its stream ends with the connection."""
        return self.exchange is not None and self.exchange.http10

    def _frame(self) -> None:
        """Events so far become one chunk of the answer."""
        data = b"".join(self.events)
        self.events = []
        self._raw.append(data if self.exchange_is_http10 else b"%x\r\n%b\r\n" % (len(data), data))

    def _linger(self) -> None:
        """Say no more, but read on a little: closing with unread input would reset the answer away."""
        self.flush()
        self._discarding, self._idle = True, False
        self._due = self.server.loop.time() + DISCARD_S
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # ---------------------------------------------------------------- time
    @property
    def says_goodbye(self) -> bool:
        """Whether the answer that begins now is the last one here. A client that was not told so may send again: it is served."""
        return self.server.draining and not self._queue

    def expect_little(self) -> None:
        """The server drains: what is idle now will not wait long for a request."""
        if self.exchange is None and not self._queue and self._idle:
            self._due = self.server.loop.time() + self.server.config.drain_idle_s

    def close_if_overdue(self, now: float) -> None:
        """The server drains, and no request came in time."""
        if self.exchange is None and not self._queue and self._idle and not self._closing and now >= self._due:
            self._close()

    def _close(self) -> None:
        """Close once everything is written, and not much later."""
        self._closing = True
        self._due = self.server.loop.time() + self.server.config.body_timeout_s
        self.transport.close()

    def time_passed(self, now: float) -> None:
        """Pings for a silent stream; 408 for a message that does not end; good-bye to an idle connection."""
        exchange = self.exchange
        if exchange is not None:
            exchange.time_passed(now)
        elif now >= self._due > 0:
            if self._discarding or self._closing:
                self.transport.abort()
            elif self._idle:
                self._close()
            elif self._refused is None:
                what = "headers" if self._in_headers else "body"
                self._refuse(RequestTimeout(f"the request's {what} did not arrive in time"))
                self._queue.append(Exchange(self, error=self._refused))
                self._discarding = True
                self._next()


def _too_large(config: RouterConfig, in_headers: bool) -> CalculetError:
    if in_headers:
        return HeadersTooLarge(f"the headers are larger than {config.max_header_bytes} bytes")
    return RequestTooLarge(f"the body is larger than {config.max_body_bytes} bytes")


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
