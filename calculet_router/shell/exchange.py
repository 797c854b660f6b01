"""One HTTP request and its answer, whole or as a stream of events.

A stream's headers are held until there is something to say; until then a failure is a proper HTTP status. Afterwards it is an
error event without `[DONE]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calculet_core.errors import CalculetError
from calculet_router.actions import Ticket
from calculet_router.sse import PING, error_body, error_event

if TYPE_CHECKING:
    from calculet_router.shell.connection import Connection

REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed",
    408: b"Request Timeout", 413: b"Content Too Large", 415: b"Unsupported Media Type", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 500: b"Internal Server Error", 503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip
JSON = b"application/json"
MAX_LABEL = 128
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\ndate: %b\r\n"
)


class Exchange:
    """A parsed request being answered; exactly one of `respond`, `fail` or `stream` + `end_stream` completes it.

    With `error` it is a request that was refused while it was read.
    """

    __slots__ = (
        "_started", "body", "connection", "error", "finished", "headers", "held", "http10", "idle_since", "keep_alive", "label",
        "may_ping", "method", "owner", "streaming", "target", "ticket",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        method: bytes = b"",
        target: bytes = b"",
        headers: dict[bytes, bytes] | None = None,
        body: bytes = b"",
        keep_alive: bool = False,
        error: CalculetError | None = None,
    ) -> None:
        self.connection, self.method, self.target, self.body, self.error = connection, method, target, body, error
        self.headers = headers = headers or {}
        self.keep_alive = keep_alive
        self.streaming = self.may_ping = self.finished = self.http10 = self._started = False
        self.label: bytes | None = clean_label(headers[b"x-request-id"]) if b"x-request-id" in headers else None
        """For `x-request-id`: the client's, else ours once it is minted."""
        self.owner: Any = None
        """Who produces the answer, while it does."""
        self.ticket: Ticket | None = None
        """Of a call: what the head says of the tenant's limits."""
        self.idle_since = 0.0
        self.held = 0
        """Bytes of its body that count against `max_buffered_body_bytes` until it is answered."""

    def begin_stream(self) -> None:
        """The answer will be a stream, unless it fails before its first byte."""
        self.streaming = True
        self.connection.server.streams += 1

    def abandon(self) -> None:
        """Nobody will read the answer."""
        self.finished, self.owner = True, None
        if self.streaming:
            self.streaming = False
            self.connection.server.streams -= 1

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """A whole answer; `headers` are complete lines. HEAD gets the headers alone."""
        if self.finished:
            return
        self.abandon()
        connection = self.connection
        if self.ticket is not None:
            headers += self.ticket.headers
        self.keep_alive = self.keep_alive and not connection.says_goodbye
        if not self.keep_alive:
            headers += b"connection: close\r\n"
        if self.label is not None:
            headers += b"x-request-id: %b\r\n" % self.label
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\ndate: %b\r\n%b\r\n" % (
            status, REASONS[status], content_type, len(body), connection.server.date, headers,
        )  # fmt: skip
        connection.write(head if self.method == b"HEAD" else head + body)
        connection.done(self)

    def fail(self, error: CalculetError, headers: bytes = b"") -> None:
        """An OpenAI-shaped error: a status before the first byte of an answer, an event after it."""
        if self.finished:
            return
        if self._started:
            self.stream(error_event(error))
            self.end_stream()
        else:
            self.respond(error.http_status, error_body(error), headers=headers + retry_after(error))

    def stream(self, data: bytes) -> None:
        """Events; the first sends the headers. Nothing follows an end: the connection may be answering somebody else by then."""
        if self.finished:
            return
        if not self._started:
            self._start()
        connection = self.connection
        connection.events.append(data)
        connection.soil()
        self.idle_since = 0.0

    def end_stream(self) -> None:
        """No more events."""
        if self.finished:
            return
        self.abandon()
        if not self.http10:
            self.connection.write(b"0\r\n\r\n")
        self.connection.done(self)

    def time_passed(self, now: float) -> None:
        """A comment once the stream has been silent for the ping interval, if the answer may begin at all."""
        if not self.streaming or not self.may_ping:
            return
        if self.idle_since == 0.0:
            self.idle_since = now
        elif now - self.idle_since >= self.connection.server.config.ping_interval_s:
            self.stream(PING)

    def _start(self) -> None:
        self._started = True
        head = _STREAM_HEAD % self.connection.server.date
        if self.ticket is not None:
            head += self.ticket.headers
        if self.label is not None:
            head += b"x-request-id: %b\r\n" % self.label
        if not self.http10:
            head += b"transfer-encoding: chunked\r\n"
        self.keep_alive = self.keep_alive and not self.connection.says_goodbye
        if not self.keep_alive:
            head += b"connection: close\r\n"
        self.connection.write(head + b"\r\n")


def error_response(error: CalculetError, date: bytes) -> bytes:
    """A whole error answer outside any exchange; the connection closes after it."""
    body = error_body(error)
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\ndate: %b\r\n%bconnection: close\r\n\r\n%b" % (
        error.http_status, REASONS[error.http_status], JSON, len(body), date, retry_after(error), body,
    )  # fmt: skip


def retry_after(error: CalculetError) -> bytes:
    """429 and 503 always carry it, in whole seconds, at least one."""
    if error.retry_after_s is None:
        return b""
    return b"retry-after: %d\r\n" % max(1, min(120, -int(-error.retry_after_s // 1)))


def clean_label(label: bytes) -> bytes | None:
    """A client's request id as it may be echoed and logged: printable ASCII, bounded; None when nothing is left."""
    return bytes(byte for byte in label[:MAX_LABEL] if 33 <= byte <= 126) or None
