"""What the router costs: CPU per 1-token request and per streamed token, by its own process clock, and its memory.

`bench_router.py` starts a real router, one process with two fake workers (one message per 5 ms tick for all lanes, 32 lanes
each) and, for each mode, one with the client. Nothing but the router is measured; the others only have to be fast enough.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop
import zmq
from builders_router import FakeWorker, RouterProcess, a_view, until

from calculet_core import wire

BOARDS, LANES, TICK_S, STREAMS = ("board0", "board1"), 32, 0.005, 64
ROUNDS = 8
"""Each is measured by itself: what other processes do to a busy machine's caches only ever adds."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 5
HEADERS = "host: 127.0.0.1\r\ncontent-type: application/json\r\nuser-agent: bench\r\naccept: */*\r\n"


class TickingWorker:
    """Gives each of its lanes one token per tick, all in one message; what does not fit waits."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker, self.lanes, self.waiting = worker, {}, deque[wire.Submit]()
        self.accepted: list[wire.Acceptance] = []
        worker.on_submit = self.submitted

    def submitted(self, worker: FakeWorker, submit: wire.Submit) -> None:
        self.accepted.append(wire.Acceptance(submit.request_id, submit.attempt, 50, submit.max_new_tokens or 1))
        self.waiting.append(submit)

    def tick(self) -> None:
        for cancel in self.worker.cancels:
            self.lanes.pop(cancel.request_id, None)
        self.worker.cancels.clear()
        self.worker.submits.clear()
        lanes = self.lanes
        while self.waiting and len(lanes) < LANES:
            submit = self.waiting.popleft()
            lanes[submit.request_id] = [submit.max_new_tokens or 1, submit.attempt, submit.max_new_tokens or 1]
        pieces = []
        for request_id, lane in list(lanes.items()):
            lane[0] -= 1
            if lane[0]:
                pieces.append(wire.Piece(request_id, lane[1], 1, " token"))
            else:
                usage = wire.Usage(50, lane[2])
                pieces.append(wire.Piece(request_id, lane[1], 1, " token", "length", usage=usage))
                del lanes[request_id]
        if pieces or self.accepted:
            load = wire.Load(len(lanes), LANES, len(self.waiting), 0, sum(50.0 + lane[0] for lane in lanes.values()))
            self.worker.tick(pieces=pieces, accepted=self.accepted, load=load)
            self.accepted = []


async def workers(folder: Path) -> None:
    """Both workers, until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ticking = [TickingWorker(FakeWorker(context, folder / "run" / f"w-{board}-1.sock", board)) for board in BOARDS]
    (folder / "state" / "fleet-view.json").write_bytes(wire.msgspec.json.encode(a_view(*(one.worker.view() for one in ticking))))
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + TICK_S, loop.time())
        await asyncio.sleep(due - loop.time())
        for one in ticking:
            one.tick()


class Client(asyncio.Protocol):
    """One connection that asks again as soon as it has its answer; answers are only searched for their end."""

    def __init__(self, request: bytes, stream: bool, again: Callable[[], bool]) -> None:
        self.request, self.again = request, again
        self.end = b"\r\n0\r\n\r\n" if stream else b"}}"
        self.tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        if self.again():
            self.transport.write(self.request)
        else:
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        seen = self.tail + data
        if seen.endswith(self.end):
            if b"finish_reason\":\"length" not in seen:
                raise SystemExit(f"not an answer: {seen!r}")
            self.tail = b""
            self.ask()
        else:
            self.tail = seen[-600:]


async def client(port: int, requests: int, tokens: int, stream: bool) -> None:
    """`requests` calls over `STREAMS` connections."""
    body = json.dumps({"model": "qwen3", "prompt": PROMPT, "max_tokens": tokens, "stream": stream, "temperature": 0}).encode()
    request = f"POST /v1/completions HTTP/1.1\r\n{HEADERS}content-length: {len(body)}\r\n\r\n".encode() + body
    left = requests

    def again() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Client(request, stream, again), "127.0.0.1", port) for _ in range(STREAMS)]
    await asyncio.gather(*(protocol.done for _, protocol in made))


@contextmanager
def a_process(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, __file__, *map(str, arguments)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """The process's CPU clock, all its threads together."""
    return time.clock_gettime((~pid << 3) | 2)


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def measure(router: RouterProcess, requests: int, tokens: int, stream: bool) -> tuple[float, float]:
    """(router CPU seconds, seconds) of one client run."""
    before, start = cpu_s(router.process.pid), time.monotonic()
    with a_process("client", router.port, requests, tokens, int(stream)) as process:
        if process.wait():
            raise SystemExit("the client failed")
    return cpu_s(router.process.pid) - before, time.monotonic() - start


def bench(requests: int, tokens: int) -> dict[str, float]:
    """All figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        router = RouterProcess(folder, BOARDS)
        with a_process("workers", folder):
            try:
                asyncio.run(until(lambda: (folder / "state" / "fleet-view.json").exists()))
                router.start()
                asyncio.run(router.listening())
                idle_mb = rss_mb(router.process.pid)
                measure(router, 500, 1, False)
                part, some = requests // ROUNDS, tokens // ROUNDS
                answers = [measure(router, part, 1, False) for _ in range(ROUNDS)]
                streams = [measure(router, STREAMS, some, True)[0] / (STREAMS * some) * 1e6 for _ in range(ROUNDS)]
                costs = [cpu / part * 1e6 for cpu, _ in answers]
                return {
                    "us_per_request": statistics.median(costs),
                    "us_per_request_least": min(costs),
                    "requests_per_s": part / min(seconds for _, seconds in answers),
                    "us_per_streamed_token": statistics.median(streams),
                    "us_per_streamed_token_least": min(streams),
                    "rss_mb_idle": idle_mb,
                    "rss_mb_after": rss_mb(router.process.pid),
                }
            finally:
                router.kill()


def main() -> None:
    role, *arguments = sys.argv[1:] or [""]
    if role == "workers":
        uvloop.run(workers(Path(arguments[0])))
    elif role == "client":
        port, requests, tokens, stream = map(int, arguments)
        uvloop.run(client(port, requests, tokens, bool(stream)))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--requests", type=int, default=20_000)
        parser.add_argument("--tokens", type=int, default=400, help="per stream")
        options = parser.parse_args()
        print(json.dumps({name: round(value, 2) for name, value in bench(options.requests, options.tokens).items()}, indent=1))


if __name__ == "__main__":
    main()
