"""One client's connection: HTTP/1.1 by httptools, its messages answered one at a time in their order.

`httptools` hides the exceptions of its callbacks, so callbacks only collect; what goes wrong in answering is answered with 500.
Every limit and time-out of the server shows here: what was refused is answered readably and read on for a little, so that the
answer is not reset away; whoever does not read is cut off. A client that closes its sending side counts as gone: from here the
two cannot be told apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from calculet_core.config import RouterConfig
from calculet_core.errors import (
    CalculetError,
    HeadersTooLarge,
    InternalError,
    InvalidValue,
    NoReadyWorker,
    OverCapacity,
    RequestTimeout,
    RequestTooLarge,
)
from calculet_router.shell.exchange import Exchange, error_response

if TYPE_CHECKING:
    from calculet_router.shell.http_server import HttpServer

DISCARD_BYTES = 4 << 20
"""What is read and thrown away after a refusal, so that the client can read the answer before the connection closes."""
DISCARD_S = 2.0
LARGE_BODY_BYTES = 65_536
"""A body above it counts against `max_buffered_body_bytes` while it is received."""
log = logging.getLogger("calculet.http")


class Connection(asyncio.Protocol):
    """One client. `exchange` is the message being answered; later ones wait in their order."""

    __slots__ = (
        "_body", "_closing", "_dirty", "_discarded", "_discarding", "_due", "_fed", "_headers", "_idle", "_in_headers", "_last",
        "_next_running", "_offered", "_pairs", "_parser", "_paused", "_queue", "_queued_bytes", "_raw", "_refused", "_stalled_at",
        "_url", "address", "events", "exchange", "held", "on_body", "on_header", "on_url", "server", "since", "transport",
    )  # fmt: skip

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.exchange: Exchange | None = None
        self.address: str | None = None
        """The client's, where addresses are counted."""
        self.events: list[bytes] = []
        """A stream's events of this loop pass; they leave as one chunk."""
        self.held = 0
        """Bytes of a large body that is being received."""
        self._raw: list[bytes] = []
        self._queue: deque[Exchange] = deque()
        self._queued_bytes = 0
        self._url: list[bytes] = []
        self._pairs: dict[bytes, bytes] = {}
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self.on_url, self.on_header, self.on_body = self._url.append, self._pairs.__setitem__, self._body.append
        """Of httptools, without a frame of ours for each header; a repeated header keeps its last value."""
        self._parser = httptools.HttpRequestParser(self)
        self._in_headers = self._idle = True
        self._closing = self._dirty = self._discarding = self._last = self._next_running = self._offered = self._paused = False
        self._refused: CalculetError | None = None
        self._discarded = self._fed = 0
        self._stalled_at = 0.0
        """Since when the client takes nothing of what is written; 0 while it does."""
        self.since = server.loop.time()
        """When the present phase began: idle, headers, body or answer."""
        self._due = self.since + server.config.header_timeout_s

    # ---------------------------------------------------------------- transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self.server.config.max_output_buffer_bytes)
        if error := self.server.enter(self):
            self._turn_away(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio. Whoever still answers is told at once."""
        self.server.leave(self)
        self._drop_bodies()
        self._lose("client left", None)

    def pause_writing(self) -> None:
        """Of asyncio: the output buffer is full. A stream's reader is too slow for it; a whole answer may take its time."""
        if self.exchange is not None and self.exchange.streaming:
            self.server.limited("max_output_buffer_bytes")
            self._lose("its output buffer was full", "slow_reader")
            self.transport.abort()
        else:
            self._stalled_at = self.server.loop.time()

    def resume_writing(self) -> None:
        """Of asyncio: the client reads again."""
        self._stalled_at = 0.0
        if self._queue and self.exchange is None:
            self._next()

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        if self._closing:
            return
        if self._discarding:
            self._discarded += len(data)
            if self._discarded > DISCARD_BYTES:
                self.transport.abort()
            return
        config = self.server.config
        if self._idle:
            self._idle = False
            self.since = now = self.server.loop.time()
            self._due = now + config.header_timeout_s
        self._fed += len(data)
        self._parse(data)
        if self._fed > (config.max_header_bytes if self._in_headers else config.max_header_bytes + config.max_body_bytes):
            self._refuse_size(self._in_headers)
        if self._refused is not None:
            self._give_up()
            return
        if self._fed > LARGE_BODY_BYTES and not self._in_headers:
            self.server.body_bytes += self._fed - self.held
            self.held = self._fed
            if self.server.body_bytes > config.max_buffered_body_bytes:
                self.server.relieve()
        if self._queue and self.exchange is None:
            self._next()
        elif self._due == 0.0 and not self._idle:
            self.since = now = self.server.loop.time()
            self._due = now + config.body_timeout_s
        if self._queue and not self._paused:
            too_many = len(self._queue) > config.max_pipelined_requests or self._queued_bytes > config.max_body_bytes
            if too_many and not self._closing:
                self._paused = True
                self.transport.pause_reading()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offered:
                self._decline(data[upgrade.args[0] :])
            else:
                self._last = True  # CONNECT: it is answered, and what follows is no HTTP
        except httptools.HttpParserCallbackError:
            log.exception("a parser callback failed")
            self._refuse(InternalError("internal error"))
        except httptools.HttpParserError as error:
            reason = "HTTP/2 is not spoken here, only HTTP/1.1" if "PRI" in str(error) else str(error)
            self._refuse(InvalidValue(f"not a valid HTTP request: {reason}"))

    def _decline(self, rest: bytes) -> None:
        """No upgrades here, and an offer of one (clients that would rather speak HTTP/2 make it with each request) is to be passed
        over: the message is read anew as if it had not been made, since the parser takes the body for the other protocol."""
        self._offered = False
        method, target, headers = self._parser.get_method(), b"".join(self._url), self._headers
        tokens = [token.strip().lower() for token in headers[b"connection"].split(b",")]
        headers[b"connection"] = b", ".join(token for token in tokens if token not in (b"upgrade", b"http2-settings"))
        lines = [b"%b: %b\r\n" % pair for pair in headers.items() if pair[0] != b"upgrade"]
        self._url.clear()
        self._pairs.clear()
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, b"".join(lines)))
        if rest and self._refused is None:
            self._parse(rest)

    def _lose(self, reason: str, code: str | None) -> None:
        """Nobody will read the answer that is being produced."""
        self._closing = True
        if (exchange := self.exchange) is not None:
            self.exchange = None
            self.server.gone(exchange, reason, code)
            exchange.abandon()

    def _turn_away(self, error: CalculetError) -> None:
        """One connection too many: an error, and no more than that."""
        self.transport.write(error_response(error, self.server.date))
        self._discarding = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.server.loop.call_later(DISCARD_S, self.transport.abort)

    # ---------------------------------------------------------------- giving way to others
    @property
    def can_give_way(self) -> bool:
        """It waits for its client: nothing is lost but what the client may send again."""
        return self.exchange is None and not self._queue and not self._closing and not self._discarding

    def give_way(self) -> None:
        """Close for a new connection's sake; one that has sent something is told why."""
        if not self._idle:
            limit = self.server.config.max_connections
            error = NoReadyWorker(f"{limit} connections are open (router.max_connections) and this one took too long")
            self.transport.write(error_response(error, self.server.date))
        self._closing = True
        self._drop_bodies()
        self.transport.close()
        self.server.loop.call_later(DISCARD_S, self.transport.abort)

    def give_up_body(self) -> None:
        """Too much is being received by all connections together, and this one is the slowest."""
        limit = self.server.config.max_buffered_body_bytes
        self._refuse(OverCapacity(f"more than {limit} bytes of bodies are being received (router.max_buffered_body_bytes)"))
        self._give_up()

    def _drop_bodies(self) -> None:
        self.server.body_bytes -= self.held + self._queued_bytes
        self.held = self._queued_bytes = 0
        self._body.clear()
        self._queue.clear()

    # ---------------------------------------------------------------- parser callbacks: they only collect
    def on_headers_complete(self) -> None:
        """Of httptools."""
        config, pairs, fed = self.server.config, self._pairs, self._fed
        self._in_headers = self._idle = False
        self._due = 0.0
        self._headers = headers = {name.lower(): value for name, value in pairs.items()}
        pairs.clear()
        self._offered = b"upgrade" in headers and b"connection" in headers and self._parser.should_upgrade()
        if self._offered and self._parser.get_method() != b"CONNECT":
            return
        self._offered = False
        limit = config.max_header_bytes
        if (fed == 0 or fed > limit) and sum(map(len, headers)) + sum(map(len, headers.values())) > limit:
            self._refuse_size(in_headers=True)
        elif b"content-length" in headers and int(headers[b"content-length"]) > config.max_body_bytes:
            self._refuse_size(in_headers=False)
        elif b"transfer-encoding" in headers and headers[b"transfer-encoding"].lower() != b"chunked":
            self._refuse(InvalidValue("Transfer-Encoding: only chunked is understood", param="Transfer-Encoding"))
        elif b"expect" in headers and self.exchange is None and not self._queue and self._parser.get_http_version() == "1.1":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_message_complete(self) -> None:
        """Of httptools."""
        if self._offered:
            return
        parser, parts = self._parser, self._body
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        target = self._url[0] if len(self._url) == 1 else b"".join(self._url)
        if len(body) > self.server.config.max_body_bytes:
            self._refuse_size(in_headers=False)
        if self._refused is None:
            exchange = Exchange(self, parser.get_method(), target, self._headers, body, parser.should_keep_alive())
            if parser.get_http_version() == "1.0":
                exchange.http10, exchange.keep_alive = True, False
            self._queue.append(exchange)
            if self.held:
                exchange.held, self.held = self.held, 0
                self._queued_bytes += exchange.held
        parts.clear()
        self._url.clear()
        self._pairs.clear()  # trailers are not the next message's headers
        self._in_headers, self._idle, self._fed, self._due = True, True, 0, 0.0

    def _refuse(self, error: CalculetError) -> None:
        """The message being read is refused; it is answered in its turn, and is the last one."""
        if self._refused is None:
            self._refused = error

    def _refuse_size(self, in_headers: bool) -> None:
        if self._refused is None:
            self._refused = _too_large(self.server.config, in_headers)
            self.server.limited("max_header_bytes" if in_headers else "max_body_bytes")

    def _give_up(self) -> None:
        """Nothing more is read from this client; its refusal is answered in its turn."""
        assert self._refused is not None
        self.server.body_bytes -= self.held
        self.held = 0
        self._body.clear()
        self._discarding = True
        self._queue.append(Exchange(self, error=self._refused))
        if self.exchange is None:
            self._next()

    # ---------------------------------------------------------------- answering
    def _next(self) -> None:
        """Answer the waiting messages until one has to wait for its tokens, or the client for reading."""
        if self._next_running:
            return
        self._next_running = True
        server = self.server
        while self._queue and self.exchange is None and not self._closing and not self._stalled_at:
            self.exchange = exchange = self._queue.popleft()
            if exchange.held:
                server.body_bytes -= exchange.held
                self._queued_bytes -= exchange.held
            if self._last and not self._queue:
                exchange.keep_alive = False
            try:
                if exchange.error is not None:
                    server.refused(exchange.error)
                    exchange.fail(exchange.error)
                else:
                    server.handle(exchange)
            except Exception:
                log.exception("a request could not be answered")
                exchange.fail(InternalError("internal error"))
        self._next_running = False
        if self._paused and len(self._queue) <= server.config.max_pipelined_requests and not self._queued_bytes:
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
            self.since = now = self.server.loop.time()
            idle_s = config.drain_idle_s if self.server.draining else config.idle_timeout_s
            self._due = now + (idle_s if self._idle else config.body_timeout_s)
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
        self._due = self.server.loop.time() + self.server.config.write_timeout_s
        self.transport.close()

    def time_passed(self, now: float) -> None:
        """Pings for a silent stream; 408 for a message that does not end; good-bye to who is idle or does not read."""
        exchange = self.exchange
        if self._stalled_at and now >= self._stalled_at + self.server.config.write_timeout_s:
            self.server.limited("write_timeout_s")
            self.transport.abort()
        elif exchange is not None:
            exchange.time_passed(now)
        elif now >= self._due > 0 and not self._stalled_at:
            if self._discarding:
                self.transport.abort()
            elif self._closing:
                self.server.limited("write_timeout_s")
                self.transport.abort()
            elif self._idle:
                self.server.limited("idle_timeout_s")
                self._close()
            elif self._refused is None:
                what, limit = ("headers", "header_timeout_s") if self._in_headers else ("body", "body_timeout_s")
                self.server.limited(limit)
                self._refuse(RequestTimeout(f"the request's {what} did not arrive in time (router.{limit})"))
                self._give_up()


def _too_large(config: RouterConfig, in_headers: bool) -> CalculetError:
    if in_headers:
        return HeadersTooLarge(f"the headers are larger than {config.max_header_bytes} bytes (router.max_header_bytes)")
    return RequestTooLarge(f"the body is larger than {config.max_body_bytes} bytes (router.max_body_bytes)")
