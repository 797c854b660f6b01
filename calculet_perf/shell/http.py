"""The measuring client: HTTP/1.1 and server-sent events straight on sockets.

Times are taken in the socket callback and nothing else happens there: what was read is put in an inbox with its time, and
parsed once the loop has emptied all sockets that were ready. So parsing the answer of one stream never delays the time stamp of
another, which is what would otherwise spread 64 tokens that arrive together over milliseconds. A request's bytes are written by
one direct `send`, so that t0 and t1 surround the system call and not a loop pass.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

from calculet_perf.client.answers import AnswerReader
from calculet_perf.client.observation import Asked, Seen, seen
from calculet_perf.client.outcomes import of_os_error
from calculet_perf.client.sse import EventParser, EventTooLarge
from calculet_perf.records import ClientNs

CONNECT_TIMEOUT_S = 10.0
_now = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go; `root` is the path under which `/v1` lies, without a slash at its end."""

    host: str
    port: int
    root: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        return f"http://{self.host}:{self.port}{self.root}"


@dataclass(slots=True)
class Whole:
    """A small answer read whole."""

    status: int
    headers: dict[str, str]
    body: bytes
    round_trip_ns: int


class AskError(Exception):
    """A small request failed; `code` is one of `outcomes.ERRORS`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Inbox:
    """What sockets delivered, with its time, until the loop pass is over."""

    __slots__ = ("_items", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[tuple[Connection, int, bytes | None, Exception | None]] = []

    def put(self, connection: Connection, at_ns: int, data: bytes | None, error: Exception | None = None) -> None:
        """Data, or None for the connection's end."""
        if not self._items:
            self._loop.call_soon(self._drain)
        self._items.append((connection, at_ns, data, error))

    def _drain(self) -> None:
        items, self._items = self._items, []
        for connection, at_ns, data, error in items:
            if data is None:
                connection.ended(at_ns, error)
            else:
                connection.parse(data, at_ns)


@dataclass(slots=True)
class Exchange:
    """One request on a connection; `future` is done when the answer is complete or lost."""

    future: asyncio.Future[None]
    answer: AnswerReader | None
    """None: a small request, whose body is kept."""
    client: ClientNs
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: list[bytes] = field(default_factory=list)
    events: EventParser | None = None
    failure: str | None = None
    detail: str | None = None
    touched: bool = False
    """At least one byte of the answer came."""

    def fail(self, code: str, detail: str | None = None) -> None:
        """The answer will not come; the first reason stays."""
        if not self.future.done():
            self.failure, self.detail = code, detail
            self.future.set_result(None)


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one exchange; also the callbacks of its parser."""

    def __init__(self, inbox: Inbox, sock: socket.socket) -> None:
        self._inbox, self._sock = inbox, sock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.exchange: Exchange | None = None
        self.open, self.used = True, False
        self._at, self._read, self._rest_sent = 0, 0, True

    # ---------------------------------------------------------------- asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Writes that do not fit the socket's buffer say when they are through."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own classes are not registered as asyncio's
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """Only the time and the bytes."""
        self._inbox.put(self, _now(), data)

    def connection_lost(self, exc: Exception | None) -> None:
        """In order after what was read before."""
        self._inbox.put(self, _now(), None, exc)

    def resume_writing(self) -> None:
        """The rest of a large request has gone to the kernel."""
        if not self._rest_sent and self.exchange is not None:
            self._rest_sent = True
            self.exchange.client.headers_sent = _now()

    # ---------------------------------------------------------------- requests
    def send(self, exchange: Exchange, data: bytes) -> None:
        """Write a request: at once as far as the socket takes it."""
        self.exchange, self._rest_sent = exchange, True
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.open = False
            exchange.fail(of_os_error(error), str(error))
            return
        self.used = True
        if sent == len(data):
            exchange.client.headers_sent = _now()
        else:
            assert self._transport is not None
            self._rest_sent = False
            self._transport.write(memoryview(data)[sent:])

    def close(self) -> None:
        """Twice is fine."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # ---------------------------------------------------------------- what came
    def parse(self, data: bytes, at_ns: int) -> None:
        """Bytes of the answer, read at `at_ns`."""
        exchange = self.exchange
        if exchange is None:
            self.close()  # bytes that nobody asked for: the connection is not in step any more
            return
        self._at, exchange.touched = at_ns, True
        self._read += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            exchange.fail("bad_http", str(error))
        except EventTooLarge as error:
            self.close()
            exchange.fail("bad_event", str(error))

    def ended(self, at_ns: int, error: Exception | None) -> None:
        """The connection is gone."""
        self.open = False
        exchange = self.exchange
        if exchange is None or exchange.future.done():
            return
        until_close = exchange.status is not None and not {"content-length", "transfer-encoding"} & set(exchange.headers)
        if error is None and until_close:
            self._at = at_ns
            self.on_message_complete()
        else:
            code = of_os_error(error) if isinstance(error, OSError) else "connection_reset"
            exchange.fail(code, str(error) if error else "the server closed the connection before the answer's end")

    # ---------------------------------------------------------------- httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        """Names are compared in lower case."""
        if self.exchange is not None:
            self.exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """t2; interim answers (1xx) are none."""
        exchange, status = self.exchange, self._parser.get_status_code()
        if exchange is None or status < 200:
            return
        exchange.status = status
        exchange.client.response_headers = self._at
        if exchange.answer is not None and exchange.headers.get("content-type", "").startswith("text/event-stream"):
            exchange.events = EventParser()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.events is None:
            exchange.body.append(data)
            return
        answer = exchange.answer
        assert answer is not None
        for payload in exchange.events.feed(data):
            answer.event(payload, self._at, self._read)

    def on_message_complete(self) -> None:
        """t6."""
        exchange = self.exchange
        if exchange is None or exchange.status is None:
            if exchange is not None:
                exchange.headers.clear()
            return
        exchange.client.response_end = self._at
        answer = exchange.answer
        if answer is not None:
            if exchange.events is None:
                answer.body(b"".join(exchange.body), exchange.status, self._at)
            else:
                answer.end_of_stream()
        self.exchange = None
        if not self._parser.should_keep_alive():
            self.close()
        if not exchange.future.done():
            exchange.future.set_result(None)


class HttpClient:
    """Connections to one server. An idle one is used again; when all are busy a new one is opened, so that the pool never bounds
    how many requests are in flight."""

    def __init__(self, target: Target, *, timeout_s: float = 900, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.target, self.timeout_s = target, timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._heads: dict[str, bytes] = {}
        self._address: tuple[int, tuple[object, ...]] | None = None
        self.opened = 0

    async def prepare(self, connections: int) -> None:
        """Open connections until so many are idle.

        Raises:
            AskError: one of them could not be opened.
        """
        self._idle = [connection for connection in self._idle if connection.open]
        while len(self._idle) < connections:
            try:
                self._idle.append(await self._connect())
            except OSError as error:
                raise AskError(of_os_error(error), f"{self.target.name}: {error or type(error).__name__}") from None

    async def ask(self, asked: Asked, path: str, scheduled_ns: int | None = None) -> Seen:
        """Send a request and watch its answer to the end; never raises for what the server or the network do."""
        answer, client = AnswerReader(), ClientNs(request_start=_now())
        exchange = await self._exchange(b"POST", path, asked.body, answer, client, asked.request_id)
        if exchange.failure is not None:
            answer.error_code = answer.error_code or exchange.failure
            answer.error_message = answer.error_message or exchange.detail
        return seen(asked, answer, client, exchange.status, exchange.headers.get("x-request-id"), scheduled_ns)

    async def fetch(self, path: str, body: bytes | None = None, timeout_s: float = 10) -> Whole:
        """A small request, read whole.

        Raises:
            AskError: no complete answer in time.
        """
        client = ClientNs(request_start=_now())
        method = b"GET" if body is None else b"POST"
        exchange = await self._exchange(method, path, body or b"", None, client, None, timeout_s)
        if exchange.failure is not None:
            raise AskError(exchange.failure, f"{self.target.name}{path}: {exchange.detail or exchange.failure}")
        assert client.response_end is not None and client.request_start is not None and exchange.status is not None
        return Whole(exchange.status, exchange.headers, b"".join(exchange.body), client.response_end - client.request_start)

    def interrupt(self) -> None:
        """Give up what is in flight: those requests end as `client_interrupted`."""
        for connection in list(self._busy):
            if connection.exchange is not None:
                connection.exchange.fail("client_interrupted")
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        self.interrupt()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    # ---------------------------------------------------------------- inside
    async def _exchange(
        self, method: bytes, path: str, body: bytes, answer: AnswerReader | None, client: ClientNs, label: str | None,
        timeout_s: float | None = None,
    ) -> Exchange:  # fmt: skip
        data = self._head(method, path, len(body), label) + body
        while True:
            exchange = Exchange(self._loop.create_future(), answer, client)
            try:
                connection = self._take() or await self._connect()
            except OSError as error:
                exchange.fail(of_os_error(error), str(error) or type(error).__name__)
                return exchange
            reused = connection.used
            self._busy.add(connection)
            limit = self.timeout_s if timeout_s is None else timeout_s
            timeout = self._loop.call_later(limit, self._too_late, connection, exchange)
            try:
                connection.send(exchange, data)
                await exchange.future
            finally:
                timeout.cancel()
                self._busy.discard(connection)
                if connection.open and exchange.future.done() and exchange.failure is None:
                    self._idle.append(connection)
                else:
                    connection.close()
            if exchange.failure == "connection_reset" and reused and not exchange.touched:
                continue  # the server had closed the idle connection: what was sent was never taken
            return exchange

    def _too_late(self, connection: Connection, exchange: Exchange) -> None:
        exchange.fail("client_timeout")
        connection.close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> Connection:
        if self._address is None:
            found = await self._loop.getaddrinfo(self.target.host, self.target.port, type=socket.SOCK_STREAM)
            self._address = found[0][0], found[0][4]
        family, address = self._address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(self._loop.sock_connect(sock, address), self._connect_timeout_s)
            _, connection = await self._loop.create_connection(lambda: Connection(self._inbox, sock), sock=sock)
        except BaseException:
            sock.close()
            raise
        self.opened += 1
        return connection

    def _head(self, method: bytes, path: str, length: int, label: str | None) -> bytes:
        head = self._heads.get(path)
        if head is None:
            target, lines = self.target, [f"host: {self.target.host}:{self.target.port}", "user-agent: calculet-perf"]
            lines += ["content-type: application/json", "accept: text/event-stream, application/json"]
            lines += [f"{name}: {value}" for name, value in target.headers]
            head = self._heads[path] = f"{target.root}{path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode("latin-1") + b"\r\n"
        extra = b"" if method == b"GET" else b"content-length: %d\r\n" % length
        if label is not None:
            extra += b"x-request-id: %b\r\n" % label.encode()
        return b"%b %b%b\r\n" % (method, head, extra)
