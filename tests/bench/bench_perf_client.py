"""What the measuring client costs, by its own process clock: CPU per request and per streamed token, and what it adds to a first token.

`bench_perf_client.py [--seconds 2]` offers load to a null server of its own at several rates; nothing but the client processes is
measured. Absolute figures are the machine's; compare them with `python -m timeit "pass"`-like constants of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import uvloop

from calculet_perf.shell.selftest import selftest

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
    import sys

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


async def measure(seconds: float) -> list[dict[str, float | bool | None]]:
    rows = []
    for rate in RATES:
        found = await selftest(rate, seconds=seconds)
        rows.append(
            {
                "requests_per_s": rate, "tokens_per_s": rate * 33, "us_per_request": found.cpu_us_per_request,
                "us_per_token": found.cpu_us_per_token, "added_p99_ms": found.added_p99_ms,
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
