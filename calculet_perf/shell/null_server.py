"""A server that costs almost nothing: what a client shows against it is the client's own.

`python -m calculet_perf.shell.null_server TICK_MS` prints its port and serves until its input ends. A stream's first event
comes at once, then one every tick; the events' `id` is this process's CLOCK_MONOTONIC at the first write, so that a client on
the same host can say how much later it saw it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import cast

import httptools
import msgspec
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"null","object":"model"}]}'


class _Body(msgspec.Struct):
    max_tokens: int = 1
    stream: bool = False


_decode = msgspec.json.Decoder(_Body).decode


class _Stream:
    """One answer on its way."""

    __slots__ = ("event", "left", "total", "transport")

    def __init__(self, transport: asyncio.Transport, tokens: int) -> None:
        self.transport, self.left, self.total = transport, tokens, tokens
        event = b'data: {"id":"%d","choices":[{"index":0,"text":" w","finish_reason":null}]}\n\n' % time.monotonic_ns()
        self.event = b"%x\r\n%b\r\n" % (len(event), event)


class NullConnection(asyncio.Protocol):
    """Reads requests and starts streams."""

    def __init__(self, streams: set[_Stream]) -> None:
        self._streams, self._body, self._url = streams, b"", b""
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing is buffered."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """To the parser; whatever is not HTTP ends the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.abort()

    def on_url(self, url: bytes) -> None:
        """The path."""
        self._url = url

    def on_body(self, data: bytes) -> None:
        """Of the request."""
        self._body += data

    def on_message_complete(self) -> None:
        """Answer."""
        body, self._body = self._body, b""
        transport = self._transport
        assert transport is not None
        if not body:
            transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS))
            return
        asked = _decode(body)
        stream = _Stream(transport, asked.max_tokens)
        if asked.stream:
            stream.left -= 1
            transport.write(_HEAD + stream.event)
            if stream.left:
                self._streams.add(stream)
            else:
                end(stream)
        else:
            text = b" w" * asked.max_tokens
            answer = b'{"id":"n","choices":[{"index":0,"text":"%b","finish_reason":"length"}],"usage":{"completion_tokens":%d}}'
            data = answer % (text, asked.max_tokens)
            transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))


def end(stream: _Stream) -> None:
    """Usage and the end."""
    last = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % stream.total
    stream.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


async def _serve(tick_s: float) -> None:
    streams: set[_Stream] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NullConnection(streams), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = loop.create_future()
    loop.add_reader(sys.stdin.fileno(), lambda: None if over.done() else over.set_result(None))
    while not over.done():
        await asyncio.wait([over], timeout=tick_s)
        for stream in list(streams):
            if stream.transport.is_closing():  # the client was interrupted
                streams.discard(stream)
                continue
            stream.left -= 1
            stream.transport.write(stream.event)
            if not stream.left:
                streams.discard(stream)
                end(stream)
    server.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business: it closes our input
    uvloop.run(_serve(float(sys.argv[1]) / 1000))
