"""A client's connection: the server's side is what asyncio shows a protocol, the client's side reads the bytes of answers.

The client reads with the parser of an HTTP library of its own and takes server-sent events apart; what it has read is compared with
what the router meant to write. A slow reader takes so many bytes a second: what it has not taken fills the server's buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools
import msgspec

from calculet_core.clock import S

if TYPE_CHECKING:
    from simulation.clients import Client
    from simulation.questions import Question
    from simulation.router import RouterHost

DONE = "[DONE]"


class Choice(msgspec.Struct):
    """Of a `text_completion`, whole or a chunk of one."""

    index: int
    text: str
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """At the end of a whole answer."""

    prompt_tokens: int
    completion_tokens: int


class Trouble(msgspec.Struct):
    """What went wrong."""

    code: str
    message: str


class Said(msgspec.Struct):
    """Any body."""

    id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Trouble | None = None


_decode = msgspec.json.Decoder(Said).decode
_encode = msgspec.json.Encoder().encode


def post_bytes(path: str, key: str, body: dict[str, Any], timeout_ms: int | None = None) -> bytes:
    """A request with a JSON body."""
    content = _encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: fleet\r\nauthorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n"
    if timeout_ms is not None:
        head += f"x-request-timeout-ms: {timeout_ms}\r\n"
    return head.encode() + b"\r\n" + content


class Reading:
    """An answer as far as it was read. `over` is told once it is complete."""

    def __init__(self, choices: int, over: Callable[[], None]) -> None:
        self.texts = [""] * choices
        self.finished = [False] * choices
        self.status = 0
        self.error: Trouble | None = None
        self.usage: Usage | None = None
        self.retry_after_s: float | None = None
        self.complete = self.said_done = self._streams = False
        self._over, self._rest = over, b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Bytes have come.

        Raises:
            httptools.HttpParserError: they are no answer.
            msgspec.DecodeError: they are no JSON of ours.
        """
        self._parser.feed_data(data)

    # ---------------------------------------------------------------- of httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        if name == b"content-type":
            self._streams = value.startswith(b"text/event-stream")
        elif name == b"retry-after":
            self.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._rest += body
        if self._streams:
            *events, self._rest = self._rest.split(b"\n\n")
            for event in events:
                self._event(event)

    def on_message_complete(self) -> None:
        if not self._streams:
            self._take(_decode(self._rest))
        self.complete = True
        self._over()

    # ---------------------------------------------------------------- what it says
    def _event(self, event: bytes) -> None:
        if event.startswith(b":"):
            return
        assert event.startswith(b"data: ") and not self.said_done, event
        if event == b"data: [DONE]":
            self.said_done = True
        else:
            self._take(_decode(event[6:]))

    def _take(self, said: Said) -> None:
        for choice in said.choices:
            assert not self.finished[choice.index], "text after a choice's end"
            self.texts[choice.index] += choice.text
            self.finished[choice.index] = choice.finish_reason is not None
        self.usage = said.usage or self.usage
        self.error = said.error or self.error


class Accepted:
    """A connection as the server's protocol sees it: its transport."""

    def __init__(self, router: RouterHost, client: Client | Question, protocol: Any) -> None:
        self.router, self.client, self._protocol = router, client, protocol
        self._timeline = router.timeline
        self.closed = False
        self._high = 65_536
        self._unread, self._read_at = 0.0, 0
        self._paused = False

    def made(self) -> None:
        """It is accepted."""
        self._protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        """The client has written."""
        if not self.closed:
            self._protocol.data_received(data)

    def hang_up(self) -> None:
        """The client has closed."""
        if not self.closed:
            self.closed = True
            self._protocol.connection_lost(None)
            self.client.forget(self)

    # ---------------------------------------------------------------- of asyncio
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = self._high if high is None else high

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        self.client.read(data)
        if self.client.reads_per_s is not None and not self.closed:
            self._fill(len(data), self.client.reads_per_s)

    def _fill(self, size: int, per_s: float) -> None:
        now = self._timeline.now
        self._unread = max(0.0, self._unread - per_s * (now - self._read_at) / S) + size
        self._read_at = now
        if self._unread > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()
            if not self.closed and self.client.outcome is None and self.client.stream:
                self.router.world.broken("output_is_bounded", f"{self._unread:.0f} bytes wait for a stream's reader, at most {self._high} may")
            self.router.later(int((self._unread - self._high / 4) / per_s * S), self._resume)

    def _resume(self) -> None:
        self._paused = False
        if not self.closed:
            self._protocol.resume_writing()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.router.later(0, self._protocol.connection_lost, None)
            self.client.cut_off()

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Nothing more is written here."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        """A client of ours writes one request."""

    resume_reading = pause_reading
