"""Host time of one decode tick: completion, KV, selection and the next batch, at B16 with 1,000 and 10,000 waiting requests of 20
tenants; and of one admission decision.

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

LANES, WAITING, TENANTS, TICKS = 16, (1_000, 10_000), 20, 2_000


def a_board(waiting: int) -> Driver:
    """All lanes decode, and so many requests wait for one."""
    manifest = a_manifest(lanes=LANES, profiles=(1, 16), context=1 << 15)
    limits = {"max_waiting_requests": 2 * waiting, "max_waiting_prompt_tokens": 1 << 28}
    tenants = tuple(TenantConfig(f"t{index}") for index in range(TENANTS))
    driver = Driver(manifest, a_package(manifest), a_scheduler(profiles=(1, 16), admission=limits), tenants=tenants).ready()
    for number in range(1, LANES + waiting + 1):
        driver.submit(number, [number % 50, 2, 3, 4], 20_000, tenant=f"t{number % TENANTS}")
    driver.until(lambda: len(driver.board.jobs[-1].token_ids) == LANES)
    assert driver.engine.report(driver.now).waiting == waiting
    return driver


def ticks(driver: Driver) -> tuple[list[float], list[float]]:
    """Microseconds of CPU (completion to next job, text of the step) for each tick."""
    engine, job, now = driver.engine, driver.board.jobs[-1], driver.now
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
    return tick_us, text_us


def admissions(driver: Driver) -> list[float]:
    """Microseconds of CPU from a tokenized prompt to the decision, behind all that waits."""
    found = []
    driver.hold_tokenizing = True
    for number in range(500_000, 500_500):
        driver.submit(number, [1, 2, 3], 4, tenant=f"t{number % TENANTS}")
        event = driver.tokenized(driver.tokenizing.pop())
        start = time.thread_time_ns()
        driver.engine.attempts.tokenized(event, driver.now, [])
        found.append((time.thread_time_ns() - start) / 1e3)
    return found


def main() -> None:
    medians = []
    for waiting in WAITING:
        driver = a_board(waiting)
        tick_us, text_us = ticks(driver)
        for name, values in (("completion to next job", tick_us), ("submitted: KV and text", text_us), ("admission", admissions(driver))):
            quantiles = statistics.quantiles(values, n=100)
            print(f"{waiting} waiting, {name}: median {quantiles[49]:.0f} us, p99 {quantiles[98]:.0f} us, n={len(values)}")
        medians.append(statistics.median(tick_us))
    print(f"tick with {WAITING[1]} waiting / with {WAITING[0]}: {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    main()
