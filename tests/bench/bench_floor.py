"""What no front of this kind can be below on a machine: CPU per one-token request of servers that do nothing but carry bytes.

`echo`: uvloop and httptools, a fixed answer. `relay`: the same with a ZeroMQ message to a worker and one back for each request, the
body decoded into a struct, a request packed, an answer unpacked: no limits, time-outs, journal, usage or recovery. Of each the
least and the median of some rounds.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httptools
import msgspec
import uvloop
import zmq
from bench_router import ROUNDS, cpu_s
from builders_fleet import free_port

REQUESTS = 2_000
BODY = b'{"id":"cmpl-0123456789abcdef","object":"text_completion","choices":[{"index":0,"text":" token","finish_reason":"length"}],"usage":{"n":1}}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


class Asked(msgspec.Struct):
    """As much of a body as a front must look at."""

    model: str
    prompt: str
    max_tokens: int


class Server(asyncio.Protocol):
    """One connection; with a `relay` each request goes through it."""

    def __init__(self, relay: Relay | None) -> None:
        self.relay, self.parser = relay, httptools.HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body = data

    def on_message_complete(self) -> None:
        if self.relay is None:
            self.transport.write(ANSWER)
        else:
            self.relay.ask(self, self.body)


class Relay:
    """Requests to a worker over a DEALER, and its answers back."""

    def __init__(self, path: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(path)
        self.decode, self.encode = msgspec.json.Decoder(Asked).decode, msgspec.msgpack.Encoder().encode
        self.unpack = msgspec.msgpack.Decoder().decode
        self.waiting: dict[int, Server] = {}
        self.number = 0
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.socket.getsockopt(zmq.FD), self.drain)

    def ask(self, server: Server, body: bytes) -> None:
        asked = self.decode(body)
        self.number += 1
        self.waiting[self.number] = server
        self.socket.send(self.encode((self.number, asked.model, asked.prompt, asked.max_tokens)), zmq.NOBLOCK)
        self.loop.call_soon(self.drain)

    def drain(self) -> None:
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            for number, _ in self.unpack(self.socket.recv(zmq.NOBLOCK)):
                self.waiting.pop(number).transport.write(ANSWER)


def worker(path: str) -> None:
    """Answers everything that is there with one message, as fast as it can."""
    sock = zmq.Context.instance().socket(zmq.ROUTER)
    sock.bind(path)
    while True:
        identity, body = sock.recv_multipart()
        answers = [(msgspec.msgpack.decode(body)[0], " token")]
        while sock.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            answers.append((msgspec.msgpack.decode(sock.recv_multipart()[1])[0], " token"))
        sock.send_multipart([identity, msgspec.msgpack.encode(answers)])


async def serve(port: int, path: str) -> None:
    """Until killed."""
    loop = asyncio.get_running_loop()
    relay = Relay(path) if path else None
    await loop.create_server(lambda: Server(relay), "127.0.0.1", port)
    await asyncio.Event().wait()


def measure(path: str) -> list[float]:
    """Microseconds of CPU a request, round by round."""
    port = free_port()
    children = [subprocess.Popen([sys.executable, __file__, "serve", str(port), path])]
    if path:
        children.append(subprocess.Popen([sys.executable, __file__, "worker", path]))
    try:
        _until_listening(port)
        client = [sys.executable, str(Path(__file__).with_name("bench_router.py")), "client", str(port), str(REQUESTS), "1", "0"]
        costs = []
        for _ in range(ROUNDS):
            before = cpu_s(children[0].pid)
            subprocess.run(client, check=True)
            costs.append((cpu_s(children[0].pid) - before) / REQUESTS * 1e6)
        return costs
    finally:
        for child in children:
            child.kill()
            child.wait()


def _until_listening(port: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit("the server does not listen")


def main() -> None:
    role, *arguments = sys.argv[1:] or [""]
    if role == "serve":
        uvloop.run(serve(int(arguments[0]), arguments[1]))
    elif role == "worker":
        worker(arguments[0])
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = {"echo": measure(""), "relay": measure(f"ipc://{folder}/worker.sock")}
        print(json.dumps({f"{name}_us": [round(min(costs), 1), round(statistics.median(costs), 1)] for name, costs in found.items()}))


if __name__ == "__main__":
    main()
