"""Host time of one decode tick: completion, KV, selection and the next batch, at B16 with 1,000 waiting requests of 20 tenants.

Sampling is a plain argmax over a vocabulary of 64 and is part of the figure; text is made after the next job was submitted, and
is measured apart. Times are CPU of this thread, since machines are shared.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from builders_engine import Driver, a_manifest, a_package, a_scheduler

from calculet_core.config import TenantConfig
from calculet_core.jobs import Completion, EngineBank, JobTimings, OutputStatus
from calculet_worker import actions, events

LANES, WAITING, TENANTS, TICKS = 16, 1_000, 20, 2_000


def main() -> None:
    manifest = a_manifest(lanes=LANES, profiles=(1, 16), context=1 << 15)
    scheduler = a_scheduler(profiles=(1, 16), admission={"max_waiting_requests": 2_000, "max_waiting_prompt_tokens": 1 << 24})
    tenants = tuple(TenantConfig(f"t{index}") for index in range(TENANTS))
    driver = Driver(manifest, a_package(manifest), scheduler, tenants=tenants).ready()
    for number in range(1, LANES + WAITING + 1):
        driver.submit(number, [number % 50, 2, 3, 4], 20_000, tenant=f"t{number % TENANTS}")
    driver.until(lambda: len(driver.board.jobs[-1].token_ids) == LANES)
    engine, job, now = driver.engine, driver.board.jobs[-1], driver.now
    assert engine.report(now).waiting == WAITING
    logits = np.random.default_rng(1).random((LANES, 64), np.float32)
    logits[:, -1] = 0.0
    tick_us, text_us = [], []
    for _ in range(TICKS):
        now += 10_000_000
        completion = Completion(job.job_id, job.generation, OutputStatus.DONE, logits, EngineBank.PING, JobTimings(wait_ns=1), 0)
        start = time.thread_time_ns()
        done = engine.handle(events.JobCompleted(completion), now)
        middle = time.thread_time_ns()
        job = next(action.job for action in done if isinstance(action, actions.SubmitJob))
        again = time.thread_time_ns()
        said = engine.handle(events.JobSubmitted(job.job_id, EngineBank.PING), now)
        end = time.thread_time_ns()
        tick_us.append((middle - start) / 1e3)
        text_us.append((end - again) / 1e3)
        assert len(job.token_ids) == LANES and sum(len(action.pieces) for action in said if isinstance(action, actions.ToRouter)) == LANES
    for name, values in (("completion to next job", tick_us), ("submitted: KV and text", text_us)):
        quantiles = statistics.quantiles(values, n=100)
        print(f"{name}: median {quantiles[49]:.0f} us, p99 {quantiles[98]:.0f} us, n={len(values)}")


if __name__ == "__main__":
    main()
