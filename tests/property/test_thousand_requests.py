"""A thousand requests at once, with cancels, deadlines and a shutdown, on a device that completes out of order (scheduling §17.3).

The race detector of a single-threaded actor is a rule about who writes: `SequenceState` only by the registry, `KvSequence` only
by the KV manager. Every write of the run is checked for where it comes from.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from builders_engine import VOCABULARY, Driver, Told, a_manifest, a_scheduler, reference

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.history import check
from calculet_core.kv import KvSequence
from calculet_core.requests import SequenceState

REQUESTS, LANES = 1_000, 16
WRITERS = {SequenceState: "registry.py", KvSequence: "kv.py"}


@pytest.fixture(autouse=True)
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Let nobody else write."""
    seen: Counter[str] = Counter()

    def guard(kind: type, owner: str) -> None:
        plain = kind.__setattr__

        def checked(self: object, name: str, value: object) -> None:
            code = sys._getframe(1).f_code
            assert code.co_name == "__init__" or code.co_filename.endswith(f"calculet_worker/{owner}"), f"{code.co_filename} writes {name}"
            seen[owner] += 1
            plain(self, name, value)

        monkeypatch.setattr(kind, "__setattr__", checked)

    for kind, owner in WRITERS.items():
        guard(kind, owner)
    yield seen


def a_board(rng: random.Random) -> Driver:
    admission = {"max_waiting_requests": REQUESTS, "max_waiting_prompt_tokens": 1 << 20}
    scheduler = a_scheduler((1, 4, 8, 16), admission=admission, executor={"max_inflight": 2})
    driver = Driver(a_manifest(LANES, (1, 4, 8, 16)), scheduler=scheduler).ready()
    driver.board.delay_ns = lambda: rng.randrange(0, 60) * MS
    return driver


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shutdown", [False, True], ids=["to the end", "stopped midway"])
def test_every_request_ends_once_with_its_own_tokens(seed: int, shutdown: bool, writes: Counter[str]) -> None:
    rng = random.Random(seed)
    driver = a_board(rng)
    asked: dict[int, tuple[Told, list[int], int]] = {}
    for number in range(1, REQUESTS + 1):
        prompt, count = [rng.randrange(60) for _ in range(rng.randint(1, 12))], rng.randint(1, 6)
        late = {"deadline_ns": driver.now + rng.randint(5, 4_000) * MS, "deadline_asked": True} if rng.random() < 0.1 else {}
        asked[number] = (driver.submit(number, prompt, count, **late), prompt, count)
    cancelled = rng.sample(sorted(asked), 150)
    gone = set()
    for number in cancelled:
        driver.run(rng.randrange(0, 60) * MS)
        if not asked[number][0].ended:
            gone.add(number)
        driver.cancel(number)
        driver.cancel(number)  # idempotent
        if shutdown and number == cancelled[100]:
            driver.command(wire.StopWorker, deadline_ms=50)
    driver.run(120 * S)
    unanswered = {number for number, (told, _, _) in asked.items() if not told.ended}
    assert unanswered == gone
    for told, prompt, count in (asked[number] for number in asked if number not in gone):
        expected = b"".join(VOCABULARY[token] for token in reference(prompt, count)).decode()
        assert expected.startswith(told.text)
        assert told.finish is None or told.text == expected
    finishes = Counter(told.finish or told.error for told, _, _ in asked.values() if told.ended)
    assert finishes["length"] > (20 if shutdown else 500), finishes
    assert bool(finishes["shutting_down"]) == shutdown
    assert (driver.exit is not None) == shutdown
    done = [event.request for event in driver.records if event.event == history.ATTEMPT_DONE]
    assert len(done) == len(set(done)) == REQUESTS
    assert check(driver.records, require_done=False) == []
    report = driver.engine.report(driver.now)
    assert (report.inflight, report.active, report.kv_tokens_reserved, report.waiting) == (0, 0, 0, 0) and not driver.board.leased
    order = [event.job for event in driver.records if event.event == history.BOARD_JOB and event.job is not None]
    assert order != sorted(order), "completions came out of order"
    assert writes["registry.py"] > REQUESTS and writes["kv.py"] > REQUESTS
