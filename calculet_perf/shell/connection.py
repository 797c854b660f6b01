"""One keep-alive connection of the measuring client: HTTP/1.1 and server-sent events straight on a socket.

Times are taken in the socket callback and nearly nothing else happens there: what was read is kept with its time and parsed later,
so that parsing the answer of one stream never delays the time stamp of another, which is what would otherwise spread 64 tokens
that arrive together over milliseconds. Of a stream only what somebody waits for (its head, its end, a lost connection) is parsed
when the loop has emptied all sockets that were ready; the events between are parsed some at a time, while they are still warm,
because a wake-up costs more than the event that it brings. A request's bytes are written by one direct `send`, so that t0 and t1
surround the system call and not a loop pass.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

from calculet_perf.client.answers import AnswerReader
from calculet_perf.client.outcomes import TlsFailed, of_os_error
from calculet_perf.client.sse import EventParser, EventTooLarge
from calculet_perf.records import ClientNs
from calculet_perf.shell.tls import TlsSession

READS_TOGETHER = 8
"""Reads of a stream that are parsed in one go; more would hold up other streams' time stamps."""
_END, _SHORTEST_END = b"\r\n\r\n", 5
"""A chunked answer ends with these bytes, in a read of its own when it is shorter than `0\\r\\n\\r\\n`."""
_now = time.monotonic_ns


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

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tls: TlsSession | None = None) -> None:
        self._loop, self._sock, self._tls = loop, sock, tls
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.exchange: Exchange | None = None
        self.open, self.used = True, False
        self._kept: list[tuple[int, bytes]] = []
        """Reads that are not parsed yet, with their times."""
        self._end: tuple[int, Exception | None] | None = None
        """When and why the connection was lost, until that is told."""
        self._due, self._waited_for = False, True
        self._at, self._read, self._rest_sent = 0, 0, True

    # ---------------------------------------------------------------- asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Writes that do not fit the socket's buffer say when they are through."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own classes are not registered as asyncio's
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """Keep the time and the bytes; parse soon what somebody waits for."""
        at_ns = _now()
        if self._tls is not None:
            data = self._decrypted(data)
            if not data:
                return
        kept = self._kept
        kept.append((at_ns, data))
        if self._due:
            return
        if self._waited_for or len(kept) >= READS_TOGETHER or len(data) < _SHORTEST_END or data.endswith(_END):
            self._due = True
            self._loop.call_soon(self.catch_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """In order after what was read before."""
        self._end = _now(), exc
        if not self._due:
            self._due = True
            self._loop.call_soon(self.catch_up)

    def resume_writing(self) -> None:
        """The rest of a large request has gone to the kernel."""
        if not self._rest_sent and self.exchange is not None:
            self._rest_sent = True
            self.exchange.client.headers_sent = _now()

    # ---------------------------------------------------------------- requests
    def send(self, exchange: Exchange, data: bytes) -> None:
        """Write a request: at once as far as the socket takes it."""
        self.exchange, self._rest_sent, self._waited_for = exchange, True, True
        if self._tls is not None:
            data = self._tls.encrypt(data)
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
    def catch_up(self) -> None:
        """Parse what was kept."""
        self._due = False
        kept, self._kept = self._kept, []
        for at_ns, data in kept:
            self._parse(data, at_ns)
        if self._end is not None:
            (at_ns, error), self._end = self._end, None
            self._ended(at_ns, error)

    def _decrypted(self, data: bytes) -> bytes:
        assert self._tls is not None
        try:
            found = self._tls.decrypt(data)
        except TlsFailed as error:
            self.catch_up()
            self.close()
            if self.exchange is not None:
                self.exchange.fail(of_os_error(error), str(error))
            return b""
        if (said := self._tls.answer()) and self._transport is not None:
            self._transport.write(said)
        return found

    def _parse(self, data: bytes, at_ns: int) -> None:
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

    def _ended(self, at_ns: int, error: Exception | None) -> None:
        """The connection is gone."""
        self.open = False
        exchange = self.exchange
        if exchange is None or exchange.future.done():
            return
        until_close = exchange.status is not None and not {"content-length", "transfer-encoding"} & set(exchange.headers)
        cut = self._tls is not None and not self._tls.ended  # anybody on the way can cut, but not say that it is the end
        if error is None and until_close and not cut:
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
            self._waited_for = "content-length" in exchange.headers  # else its end shows in its bytes, or in the connection's

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
        self.exchange, self._waited_for = None, True
        if not self._parser.should_keep_alive():
            self.close()
        if not exchange.future.done():
            exchange.future.set_result(None)
