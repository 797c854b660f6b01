"""The measuring client: requests to one server over connections of its own (`connection`)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass

from calculet_perf.client.answers import AnswerReader
from calculet_perf.client.observation import Asked, Seen, seen
from calculet_perf.client.outcomes import TlsFailed, UnknownHost, of_os_error
from calculet_perf.records import ClientNs
from calculet_perf.shell.connection import Connection, Exchange
from calculet_perf.shell.tls import TlsSession, TlsSettings, context_of

CONNECT_TIMEOUT_S = 10.0
_now = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go; `root` is the path under which `/v1` lies, without a slash at its end."""

    host: str
    port: int
    root: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    tls: TlsSettings | None = None
    """None: the server speaks plain HTTP."""

    @property
    def authority(self) -> str:
        """Host and port, as a `host` header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def name(self) -> str:
        """For messages."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.root}"


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


class HttpClient:
    """Connections to one server. An idle one is used again; when all are busy a new one is opened, so that the pool never bounds
    how many requests are in flight."""

    def __init__(self, target: Target, *, timeout_s: float = 900, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.target, self.timeout_s = target, timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._heads: dict[str, bytes] = {}
        self._address: tuple[int, tuple[object, ...]] | None = None
        self._context: ssl.SSLContext | None = None
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
                raise AskError(of_os_error(error), f"{self.target.name}: {str(error) or type(error).__name__}") from None

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
            connection.catch_up()
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
        connection.catch_up()
        exchange.fail("client_timeout", f"not complete within {self.timeout_s:g} s")
        connection.close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> Connection:
        family, address = self._address or await self._resolve()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                tls = await asyncio.wait_for(self._open(sock, address), self._connect_timeout_s)
            except TimeoutError:
                what = "TLS session" if self.target.tls else "connection"
                raise TimeoutError(f"no {what} within {self._connect_timeout_s:g} s") from None
            _, connection = await self._loop.create_connection(lambda: Connection(self._loop, sock, tls), sock=sock)
        except BaseException:
            sock.close()
            raise
        self.opened += 1
        return connection

    async def _open(self, sock: socket.socket, address: tuple[object, ...]) -> TlsSession | None:
        await self._loop.sock_connect(sock, address)
        settings = self.target.tls
        if settings is None:
            return None
        if self._context is None:
            try:
                self._context = context_of(settings)
            except OSError as error:
                raise TlsFailed(f"{settings.ca_file}: {error.strerror or error}") from None
        session = TlsSession(self._context, settings.server_name or self.target.host)
        await session.handshake(self._loop, sock)
        return session

    async def _resolve(self) -> tuple[int, tuple[object, ...]]:
        try:
            found = await self._loop.getaddrinfo(self.target.host, self.target.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise UnknownHost(f"{self.target.host}: {error.strerror}") from None
        self._address = found[0][0], found[0][4]
        return self._address

    def _head(self, method: bytes, path: str, length: int, label: str | None) -> bytes:
        head = self._heads.get(path)
        if head is None:
            target, lines = self.target, [f"host: {self.target.authority}", "user-agent: calculet-perf"]
            lines += ["content-type: application/json", "accept: text/event-stream, application/json"]
            lines += [f"{name}: {value}" for name, value in target.headers]
            head = self._heads[path] = f"{target.root}{path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode("latin-1") + b"\r\n"
        extra = b"" if method == b"GET" else b"content-length: %d\r\n" % length
        if label is not None:
            extra += b"x-request-id: %b\r\n" % label.encode()
        return b"%b %b%b\r\n" % (method, head, extra)
