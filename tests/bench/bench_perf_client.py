"""What the measuring client costs, by its own process clock: CPU per request and per streamed token, and what it adds to a first token.

`bench_perf_client.py [--seconds 2]` offers load to a null server of its own at several rates; nothing but the client processes is
measured. Absolute figures are the machine's. So each rate has a *floor* beside it: a client on the same event loop, timer and sockets
that sends and is woken, and does nothing else. What a client of any kind pays for being woken at low rates is in it; what is
calculet-perf's own is the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time

import uvloop

from calculet_perf.shell.selftest import TICK_MS, TOKENS, selftest
from calculet_perf.shell.timer import Timer

RATES = (20.0, 100.0, 150.0)
"""150 requests/s of 33 tokens are 5,000 tokens/s."""


def yardstick_us() -> float:
    """A fixed piece of Python on this machine: parsing one event's JSON, which every streamed token needs at least."""
    import msgspec

    event = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" w","finish_reason":null}]}'
    decode, count = msgspec.json.Decoder().decode, 20_000
    begin = time.process_time()
    for _ in range(count):
        decode(event)
    return (time.process_time() - begin) / count * 1e6


async def saturated(requests: int = 3000, users: int = 16) -> float:
    """CPU us per one-token request when answers come as fast as they are asked for, so that no wake-up from idle is in it."""
    from calculet_perf.client.observation import Asked
    from calculet_perf.shell.http import Target
    from calculet_perf.shell.shards import Shards

    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "calculet_perf.shell.null_server", "2", stdin=pipe, stdout=pipe
    )
    assert server.stdin is not None and server.stdout is not None
    body = b'{"model":"null","prompt":"x","stream":true,"max_tokens":1}'
    async with Shards(Target("127.0.0.1", int(await server.stdout.readline())), "/v1/completions", 60) as shards:
        for _ in range(2):  # the first time warms up
            applied = await shards.apply("closed", [Asked(n, body, f"r{n}", True) for n in range(requests)], concurrency=users)
    server.stdin.close()
    await server.wait()
    return applied.cpu_ns / requests / 1e3


class _Bare(asyncio.Protocol):
    """Takes the time of what comes, and is idle again at its end."""

    def __init__(self, idle: list[_Bare], sock: socket.socket) -> None:
        self.idle, self.sock, self.at_ns = idle, sock, 0

    def data_received(self, data: bytes) -> None:
        self.at_ns = time.monotonic_ns()
        if data.endswith(b"0\r\n\r\n"):
            self.idle.append(self)


async def bare_us(rate: float, seconds: float, tokens: int) -> float:
    """CPU us per request of the floor."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "calculet_perf.shell.null_server", str(TICK_MS)]
    server = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert server.stdin is not None and server.stdout is not None
    loop, port, count = asyncio.get_running_loop(), int(await server.stdout.readline()), round(rate * seconds)
    body = b'{"model":"null","prompt":"x","stream":true,"max_tokens":%d}' % tokens
    data = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    idle: list[_Bare] = []
    made = max(8, round(rate * 0.5))
    for _ in range(made):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        await loop.create_connection(lambda sock=sock: idle.append(_Bare(idle, sock)) or idle[-1], sock=sock)  # type: ignore[misc]
    rng, offset, due = random.Random("floor"), 0.0, []
    for _ in range(count):
        due.append(round(offset * 1e9))
        offset += rng.expovariate(rate)
    start, place, over = time.monotonic_ns() + 50_000_000, 0, loop.create_future()

    def fire() -> None:
        nonlocal place
        while place < count and start + due[place] <= time.monotonic_ns() and idle:
            idle.pop(0).sock.send(data)
            place += 1
        if place < count:
            timer.at(start + due[place])
        elif not over.done():
            over.set_result(None)

    timer = Timer(loop, fire)
    begin = time.process_time()
    fire()
    await over
    while len(idle) < made:
        await asyncio.sleep(0.05)
    spent = time.process_time() - begin
    timer.close()
    server.stdin.close()
    await server.wait()
    return spent / count * 1e6


async def measure(seconds: float) -> list[dict[str, float | bool | None]]:
    rows = []
    for rate in RATES:
        found = await selftest(rate, seconds=seconds)
        one, many = await bare_us(rate, seconds, 1), await bare_us(rate, seconds, TOKENS)
        rows.append(
            {
                "requests_per_s": rate, "tokens_per_s": rate * 33, "us_per_request": found.cpu_us_per_request,
                "us_per_token": found.cpu_us_per_token, "added_p99_ms": found.added_p99_ms,
                "floor_us_per_request": one, "floor_us_per_token": (many - one) / (TOKENS - 1),
                "send_delay_p99_ms": found.send_delay_p99_ms, "passed": found.passed,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows, full = runner.run(measure(options.seconds)), runner.run(saturated())
    print(json.dumps({"yardstick_us": round(yardstick_us(), 3), "saturated_us_per_request": round(full, 1), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
