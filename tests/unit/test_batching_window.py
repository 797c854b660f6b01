"""The batching window (scheduling §7.2.4, §7.2.5, §17.1): who is waited for, how long, and whom nobody waits for. Fake clock."""

from __future__ import annotations

from builders_engine import Driver, a_manifest, a_package, a_scheduler

from calculet_core.clock import MS
from calculet_core.config import QueuesConfig
from calculet_core.jobs import Job, JobKind

TOKEN_MS, STEP_MS = 1, 10
"""What the fake board takes for a prompt's token and for a step."""
WINDOW_MS = 40


def a_driver(window_ms: int = WINDOW_MS, max_inflight: int = 1, **batch: object) -> Driver:
    """A board of four lanes that is Ready, knows what its jobs take, and has nothing to do."""
    manifest = a_manifest(lanes=4, profiles=(1, 4), context=256)
    scheduler = a_scheduler(
        batch={"batching_window_us": window_ms * 1_000, **batch}, executor={"max_inflight": max_inflight},
        queues=QueuesConfig(short_prefill_max_tokens=16, medium_prefill_max_tokens=64),
    )  # fmt: skip
    driver = Driver(manifest, a_package(manifest), scheduler).ready()
    driver.board.jobs.clear()
    return driver


def kinds(driver: Driver) -> str:
    """p or d with its rows, for each job in order."""
    return " ".join("p" if job.kind is JobKind.PREFILL else f"d{len(job.lanes)}" for job in driver.board.jobs)


def steps(driver: Driver) -> list[Job]:
    return [job for job in driver.board.jobs if job.kind is JobKind.DECODE]


def until_step(driver: Driver, number: int = 1) -> int:
    """Run until so many steps were submitted; when the last was."""
    driver.until(lambda: len(steps(driver)) >= number)
    return driver.now


# ------------------------------------------------------------------------------------------------ §7.2.4 who is waited for
def test_a_step_waits_for_a_prompt_that_will_be_in_kv_within_the_window() -> None:
    driver = a_driver()
    for number in (1, 2, 3):
        driver.submit(number, [number] * 5)
    until_step(driver)
    assert kinds(driver) == "p p p d3"


def test_without_a_window_turns_decide() -> None:
    driver = a_driver(window_ms=0)
    for number in (1, 2, 3):
        driver.submit(number, [number] * 5)
    until_step(driver)
    assert kinds(driver) != "p p p d3"


def test_a_full_step_waits_for_nobody() -> None:
    driver = a_driver()
    for number in range(1, 6):
        driver.submit(number, [number] * 5)
    until_step(driver)
    assert kinds(driver) == "p p p p d4"


def test_a_step_waits_for_a_request_that_is_being_tokenized_but_not_beyond_its_window() -> None:
    driver = a_driver()
    driver.submit(1, [1] * 5, 8)
    driver.hold_tokenizing = True
    driver.submit(2, [2] * 5)
    driver.until(lambda: driver.told[1, 1].pieces)
    ready = driver.now
    driver.call_at(ready + 20 * MS, lambda: driver.feed(driver.tokenized(driver.tokenizing.pop())))
    assert until_step(driver) == ready + 25 * MS and kinds(driver) == "p p d2"
    driver.submit(3, [3] * 5)
    second = until_step(driver, 2)
    assert second == ready + (25 + STEP_MS + WINDOW_MS) * MS, "whom nobody hears of is waited for until the window ends"


def test_nobody_is_waited_for_when_no_lane_is_free_for_him() -> None:
    driver = a_driver()
    driver.engine.serving.kv.max_sequences = 1  # type: ignore[union-attr]
    driver.submit(1, [1] * 5)
    driver.hold_tokenizing = True
    driver.submit(2, [2] * 5)
    driver.until(lambda: driver.told[1, 1].pieces)
    assert kinds(driver) == "p d1"


def test_with_two_in_flight_a_step_waits_for_the_other_jobs_sequences() -> None:
    driver = a_driver(max_inflight=2)
    driver.submit(1, [1] * 5, 20)
    until_step(driver)
    driver.submit(2, [2] * 5, 20)
    driver.until(lambda: len(steps(driver)[-1].lanes) == 2)
    assert "d2" in kinds(driver)


# ------------------------------------------------------------------------------------------------ §7.2.4 no SLA is broken for it
def test_no_step_waits_for_a_prompt_that_takes_longer_than_the_window() -> None:
    def order(window_ms: int) -> tuple[str, int]:
        driver = a_driver(window_ms)
        began = driver.now
        told = driver.submit(1, [1] * 5, 40)
        until_step(driver, 3)
        for number in range(2, 5):
            driver.submit(number, [number] * (WINDOW_MS // TOKEN_MS + 10))
        driver.until(lambda: told.ended)
        return kinds(driver), driver.now - began

    assert order(WINDOW_MS) == order(0), "turns decide, and nothing idles, as without a window"
    assert "p p p" not in order(0)[0]


def test_a_long_prompt_does_not_take_the_turn_that_a_step_gave_to_a_short_one() -> None:
    driver = a_driver()
    driver.submit(1, [1] * 5, 20)
    driver.submit(2, [2] * 100)
    driver.submit(3, [3] * 5)
    driver.until(lambda: len(driver.board.jobs) == 3)
    assert [len(job.token_ids) for job in driver.board.jobs[:2]] == [5, 5]


def test_a_long_prompt_gets_its_turns_whatever_windows_give_to_short_ones() -> None:
    driver = a_driver()
    running = driver.submit(1, [1] * 5, 200)
    driver.until(lambda: running.pieces)
    driver.submit(2, [2] * 100)

    def come(number: int) -> None:
        driver.submit(number, [number % 50] * 5, 2)
        driver.call_at(driver.now + 7 * MS, lambda: come(number + 1))

    come(3)
    began = driver.now
    driver.until(lambda: any(len(job.token_ids) == 100 for job in driver.board.jobs))
    assert driver.now - began <= 2 * (STEP_MS + WINDOW_MS) * MS


def test_a_window_makes_no_deadline_pass() -> None:
    driver = a_driver()
    told = driver.submit(1, [1] * 5, 2, deadline_ns=driver.now + (5 * TOKEN_MS + STEP_MS + 6) * MS, deadline_asked=True)
    driver.hold_tokenizing = True
    driver.submit(2, [2] * 5)
    driver.until(lambda: told.ended)
    assert told.finish == "length" and kinds(driver) == "p d1"


def test_the_time_between_tokens_is_kept() -> None:
    driver = a_driver(token_sla_ms=STEP_MS + 8)
    driver.submit(1, [1] * 5, 8)
    driver.hold_tokenizing = True
    driver.submit(2, [2] * 5)
    driver.until(lambda: driver.told[1, 1].pieces)
    ready = driver.now
    until_step(driver, 2)
    assert driver.now <= ready + 2 * (STEP_MS + 8) * MS


# ------------------------------------------------------------------------------------------------ §7.2.5, §17.1
def test_alone_nobody_waits_for_whom_nobody_knows() -> None:
    driver = a_driver()
    told, begun = driver.submit(1, [1] * 5, 9), driver.now
    driver.until(lambda: told.ended)
    assert driver.now - begun == (5 * TOKEN_MS + 8 * STEP_MS) * MS
    assert kinds(driver) == "p" + " d1" * 8


def test_at_the_end_of_its_window_the_step_goes_whoever_keeps_coming() -> None:
    driver = a_driver()
    driver.submit(1, [1] * 5, 20)
    driver.until(lambda: driver.told[1, 1].pieces)
    driver.hold_tokenizing = True
    for number in range(2, 40):
        driver.submit(number, [number] * 5)
    before, seen = driver.now, len(steps(driver))
    for _ in range(3):
        seen += 1
        assert until_step(driver, seen) - before <= (STEP_MS + WINDOW_MS) * MS
        before = driver.now
    driver.until(lambda: driver.told[1, 1].ended)
