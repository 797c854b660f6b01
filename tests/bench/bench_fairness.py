"""Who is served how much, and how long the short wait: the whole engine in virtual time, so that the figures are the scheduler's alone.

Two tenants of weight 3 and 1 that always have requests waiting, 10,000 requests in all; the same while the light one asks for short
deadlines. Then short requests beside a stream of 40,000-token prompts: on a board as the simulated qwen3 (one lane, prompts never
cut), and on one with lanes to spare whose prompts may be cut, as the CPU engine's. Waits are compared with one long job and a tick.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter

import numpy as np
from builders_engine import VOCAB, Driver, Told, a_manifest, a_package, a_scheduler

from calculet_core import history
from calculet_core.clock import MS, S
from calculet_core.config import TenantConfig
from calculet_core.jobs import JobKind

REQUESTS, BACKLOG = 10_000, 12
STEP_NS, TOKEN_NS = 15 * MS, 400_000
LONG, SHORTS = 40_000, 300


def shares(asks_for_deadlines: bool) -> tuple[float, float]:
    """Served cost of weight 3 over that of weight 1, and their tokens generated likewise."""
    tenants = (TenantConfig("default"), TenantConfig("three", weight=3.0), TenantConfig("one", weight=1.0))
    driver = Driver(a_manifest(lanes=8, profiles=(1, 8), context=512), scheduler=a_scheduler((1, 8)), tenants=tenants).ready()
    rng, number, waiting = random.Random(4), 0, Counter[str]()
    served, tokens, seen = Counter[str](), Counter[str](), 0
    while seen < REQUESTS:
        for tenant in ("three", "one"):
            while waiting[tenant] < BACKLOG:
                number += 1
                waiting[tenant] += 1
                soon = {"deadline_ns": driver.now + 60 * S, "deadline_asked": True} if asks_for_deadlines and tenant == "one" else {}
                driver.submit(number, [number % 50] * rng.randint(1, 200), rng.randint(1, 40), tenant=tenant, **soon)
        driver.step()
        for event in driver.records:
            if event.event == history.ATTEMPT_ADMITTED:
                waiting[event.data["tenant"]] -= 1
                served[event.data["tenant"]] += event.data["prompt_tokens"] + event.data["max_new_tokens"]
                seen += 1
            elif event.event == history.ATTEMPT_DONE:
                tokens[event.data["tenant"]] += event.data["tokens"]
        driver.records.clear()
        driver.actions.clear()
        driver.board.jobs = driver.board.jobs[-1:]
    return served["three"] / served["one"], tokens["three"] / tokens["one"]


def waits(lanes: int, cut: int | None, output: int) -> tuple[list[float], float]:
    """(seconds from a short request's arrival to its prompt's job, each), and one long job in seconds."""
    manifest = a_manifest(lanes=lanes, profiles=(1,) if lanes == 1 else (1, lanes), context=40_960, cut=cut)
    scheduler = a_scheduler(tuple(manifest.compiled_batches), executor={"max_prefill_tokens_per_job": cut or 512})
    driver = Driver(manifest, a_package(manifest), scheduler, tenants=(TenantConfig("default"), TenantConfig("long")))
    driver.board.step_ns, driver.board.token_ns = STEP_NS, TOKEN_NS
    driver.ready()
    logits = np.zeros((lanes, VOCAB), np.float32)
    driver.board._rows = lambda rows: logits[: len(rows)]  # type: ignore[method-assign]  # what it says is of no interest here
    rng, number, longs, found = random.Random(5), 0, list[Told](), list[float]()
    while len(found) < SHORTS:
        longs = [told for told in longs if not told.ended]
        while len(longs) < 2 * lanes:
            number += 1
            longs.append(driver.submit(number, [3] * LONG, output, tenant="long", deadline_ns=driver.now + 10**6 * S))
        driver.run(rng.randrange(1, 40) * S)
        number, asked = number + 1, driver.now
        told = driver.submit(number, [1, 2, 3], 1, deadline_ns=driver.now + 10**6 * S)
        driver.until(lambda told=told: told.ended, 10**5 * S)  # type: ignore[misc]
        prefill_ns = 3 * TOKEN_NS
        found.append((driver.now - prefill_ns - asked) / S)
        driver.records.clear()
        driver.actions.clear()
        driver.board.jobs = [job for job in driver.board.jobs[-1:] if job.kind is not JobKind.PREFILL]
    return found, (cut or LONG) * TOKEN_NS / S


def main() -> None:
    for asks in (False, True):
        cost, tokens = shares(asks)
        how = "the light one asks for short deadlines" if asks else "saturating"
        print(f"weight 3 over weight 1, {how}, {REQUESTS} requests: served cost {cost:.3f}, tokens {tokens:.3f}")
    for label, lanes, cut, output in (
        ("one lane, never cut", 1, None, 1), ("8 lanes, never cut", 8, None, 40), ("8 lanes, cut at 512", 8, 512, 40),
    ):  # fmt: skip
        found, job_s = waits(lanes, cut, output)
        p99 = statistics.quantiles(found, n=100)[98]
        bound = job_s + STEP_NS / S
        print(f"short beside 40,000-token prompts, {label}: wait median {statistics.median(found):.2f} s, P99 {p99:.2f} s; bound {bound:.2f} s")


if __name__ == "__main__":
    main()
