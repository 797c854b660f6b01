"""The client's own test: against a null server, open loop, at twice the planned rate. What it shows is what it costs and adds."""

from __future__ import annotations

import asyncio
import random
import sys

from calculet_perf.assemble import nearest_rank
from calculet_perf.client.observation import Asked, Seen
from calculet_perf.plan import Plan
from calculet_perf.runinfo import SelfTest
from calculet_perf.shell.http import Target
from calculet_perf.shell.shards import Applied, Shards

SECONDS, TOKENS, TICK_MS = 2.0, 33, 2
LEAST_RATE, MOST_REQUESTS, LEAST_REQUESTS = 10.0, 4000, 20
RATE_TOLERANCE = 0.01
TRIES = 2
"""A machine that is busy for a moment is not a client that is too slow."""


def planned_rate(plan: Plan) -> float:
    """Requests per second that the self-test offers: twice the plan's highest open-loop rate, and at least 20/s."""
    return 2 * max([LEAST_RATE, *(item.cell.qps for item in plan.items if item.cell.qps)])


async def selftest(rate_qps: float, *, processes: int = 1, seconds: float = SECONDS, tokens: int = TOKENS) -> SelfTest:
    """Offer `rate_qps` requests a second, once with one token each and once with `tokens`.

    It passes when all were answered and sent at their rate within 1 %; tried twice at most.
    """
    command = [sys.executable, "-m", "calculet_perf.shell.null_server", str(TICK_MS)]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert server.stdout is not None and server.stdin is not None
    try:
        port = int(await server.stdout.readline())
        count = max(LEAST_REQUESTS, min(MOST_REQUESTS, round(rate_qps * seconds)))
        async with Shards(Target("127.0.0.1", port), "/v1/completions", 60, processes) as shards:
            await _offer(shards, rate_qps, min(count, 50), tokens)  # imports, connections, caches
            for _ in range(TRIES):
                one = await _offer(shards, rate_qps, count, 1)
                many = await _offer(shards, rate_qps, count, tokens)
                result = _result(rate_qps, count, tokens, one, many)
                if result.passed:
                    break
        return result
    finally:
        server.stdin.close()
        await server.wait()


async def _offer(shards: Shards, rate_qps: float, count: int, tokens: int) -> Applied:
    rng, offset, asked = random.Random(f"selftest/{tokens}"), 0.0, []
    body = b'{"model":"null","prompt":"x","stream":true,"max_tokens":%d}' % tokens
    for index in range(count):
        asked.append(Asked(index, body, f"selftest-{index}", True, round(offset * 1e9)))
        offset += rng.expovariate(rate_qps)
    return await shards.apply("scheduled", asked, concurrency=min(count, max(4, round(rate_qps * 0.2))))


def _result(rate_qps: float, count: int, tokens: int, one: Applied, many: Applied) -> SelfTest:
    seen = [*one.seen, *many.seen]
    delays = sorted(((each.client.request_start or 0) - (each.scheduled_ns or 0)) / 1e6 for each in seen)
    added = sorted(_added_ms(each) for each in seen if each.client.first_token is not None)
    ok = all(each.error_code is None and each.clock_complete for each in seen)
    per_token = (many.cpu_ns - one.cpu_ns) / (count * (tokens - 1)) / 1e3
    return SelfTest(
        rate_qps=rate_qps, requests=len(seen), tokens=count * (1 + tokens),
        cpu_us_per_request=max(0.0, one.cpu_ns / count / 1e3 - per_token), cpu_us_per_token=max(0.0, per_token),
        send_delay_p99_ms=nearest_rank(delays, 0.99), added_p99_ms=nearest_rank(added, 0.99),
        passed=ok and all(_in_time(run.seen) for run in (one, many)),
    )  # fmt: skip


def _added_ms(seen: Seen) -> float:
    """First token seen after its write began; the write itself is the server's."""
    return ((seen.client.first_token or 0) - int(seen.server_request_id or 0)) / 1e6


def _in_time(seen: list[Seen]) -> bool:
    """Sent at the rate that was asked for."""
    starts = sorted(each.client.request_start or 0 for each in seen)
    planned = sorted(each.scheduled_ns or 0 for each in seen)
    asked, took = planned[-1] - planned[0], starts[-1] - starts[0]
    return abs(took / asked - 1) <= RATE_TOLERANCE
