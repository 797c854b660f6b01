"""Whatever clients, the supervisor and the board do, in whatever order: nobody gets wrong tokens, everybody one terminal, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from builders_engine import VOCABULARY, Driver, Fault, Told, a_manifest, a_scheduler, reference

from calculet_core import history, wire
from calculet_core.artifact import LANE_FAULT_ISOLATION, Proof
from calculet_core.clock import MS, S
from calculet_core.config import TenantConfig
from calculet_core.history import check
from calculet_core.jobs import OutputStatus, ReturnCode
from calculet_worker import events

TENANTS = (TenantConfig("default"), TenantConfig("a", weight=3.0, max_active=2), TenantConfig("b", max_waiting_tokens=40))
FAULTS = (
    Fault(refuse=ReturnCode.DEVICE_BUSY), Fault(refuse=ReturnCode.DEVICE_BUSY), Fault(refuse=ReturnCode.DEVICE_UNAVAILABLE),
    Fault(lose=ReturnCode.TIMEOUT), Fault(lose=ReturnCode.TIMEOUT, late_ns=3 * MS), Fault(lose=ReturnCode.TIMEOUT, late_ns=400 * MS),
    Fault(status=OutputStatus.CCU_EXCEPTION), Fault(bad_row=0),
)  # fmt: skip


LANE_FAULTS = (
    Fault(status=OutputStatus.CCU_EXCEPTION, failed_rows=(0,)), Fault(status=OutputStatus.CCU_EXCEPTION, failed_rows=(1,)),
    Fault(status=OutputStatus.CCU_EXCEPTION, failed_rows=(0, 1)), Fault(bad_row=0),
)  # fmt: skip
"""Rows that a job does not have make it the whole job's fault."""


class Storm:
    """One random life of a board; with `isolated` its faults are mostly those of single lanes."""

    def __init__(self, seed: int, fault_share: float, isolated: bool = False) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        lanes = rng.choice((1, 2, 4))
        sizes = tuple(size for size in (1, 2, 4) if size <= lanes)
        admission = {"max_waiting_requests": rng.choice((2, 20))}
        executor = {"max_inflight": rng.choice((1, 2)), "busy_max_tries": 4, "job_timeout_min_ms": 50, "max_prefill_tokens_per_job": 8}
        batch = {"batching_window_us": rng.choice((0, 4_000))}
        manifest = a_manifest(lanes, sizes, cut=rng.choice((None, 4)))
        self.kinds = FAULTS
        if isolated:
            proof = {**manifest.abilities, LANE_FAULT_ISOLATION: Proof("C0", "the toy board's own tests")}
            manifest, self.kinds = msgspec.structs.replace(manifest, abilities=proof), FAULTS + 4 * LANE_FAULTS
        self.driver = Driver(manifest, scheduler=a_scheduler(sizes, admission=admission, executor=executor, batch=batch), tenants=TENANTS)
        self.driver.ready()
        self.driver.faults = self.faults(fault_share)
        self.told: dict[int, tuple[Told, list[int], int]] = {}
        self.gone: set[int] = set()

    def faults(self, share: float) -> Iterator[Fault | None]:
        while True:
            yield self.rng.choice(self.kinds) if self.rng.random() < share else None

    def run(self, steps: int) -> None:
        for number in range(1, steps + 1):
            self.act(number)
            self.driver.run(self.rng.randrange(0, 30) * MS)
            self.supervise()
        self.driver.faults = iter(())
        self.driver.command(wire.ResumeBoard)
        for _ in range(500):
            self.driver.run(500 * MS)
            self.supervise()
            if all(told.ended or number in self.gone for number, (told, _, _) in self.told.items()) and self.driver.state == "READY":
                return

    def act(self, number: int) -> None:
        driver, rng = self.driver, self.rng
        kind = rng.random()
        if kind < 0.7:
            prompt = [rng.randrange(60) for _ in range(rng.randint(1, 20))]
            count = rng.randint(1, 12)
            fields = {"tenant": rng.choice(("default", "a", "b")), "router": rng.choice((7, 8))}
            if rng.random() < 0.2:
                fields |= {"deadline_ns": driver.now + rng.randint(1, 200) * MS, "deadline_asked": True}
            self.told[number] = (driver.submit(number, prompt, count, **fields), prompt, count)
        elif kind < 0.85 and self.told:
            self.cancel(rng.choice(list(self.told)))
        elif kind < 0.9:
            driver.command(rng.choice((wire.DrainBoard, wire.ResumeBoard)))
        elif kind < 0.92:
            self.gone |= {number for number, (told, _, _) in self.told.items() if not told.ended}
            driver.feed(events.RouterLost(7, "lease")), driver.feed(events.RouterLost(8, "lease"))
        elif kind < 0.94:
            driver.release_rcs.append(ReturnCode.DEVICE_BUSY)

    def cancel(self, number: int) -> None:
        self.driver.cancel(number)
        if not self.told[number][0].ended:
            self.gone.add(number)

    def supervise(self) -> None:
        report = self.driver.engine.report(self.driver.now)
        if report.wants_reset:
            self.driver.grant()
        elif report.state == "FAILED":
            self.driver.grant() if report.condemned else self.driver.load()

    def judge(self) -> None:
        driver = self.driver
        assert driver.state == "READY", driver.engine.report(driver.now)
        for number, (told, prompt, count) in self.told.items():
            expected = b"".join(VOCABULARY[token] for token in reference(prompt, count)).decode()
            assert expected.startswith(told.text), f"request {number} got somebody else's tokens"
            if told.finish is not None:
                assert told.text == expected
            assert told.ended or number in self.gone, f"request {number} was never answered"
        driver.run(5 * S)
        report = driver.engine.report(driver.now)
        assert (report.inflight, report.active, report.kv_tokens_reserved, report.waiting) == (0, 0, 0, 0)
        assert not driver.board.leased and driver.engine.load().cost == 0 and driver.exit is None
        assert check(driver.records, require_done=False) == []
        assert driver.engine.next_wakeup_ns() is None or driver.engine.next_wakeup_ns() > driver.now


@pytest.mark.parametrize("seed", range(40))
def test_a_storm_without_faults(seed: int) -> None:
    storm = Storm(seed, 0.0)
    storm.run(60)
    storm.judge()
    assert storm.driver.generation == 1


@pytest.mark.parametrize("seed", range(60))
def test_a_storm_with_faults(seed: int) -> None:
    storm = Storm(1_000 + seed, 0.04)
    storm.run(60)
    storm.judge()


@pytest.mark.parametrize("seed", range(40))
def test_a_storm_of_faults_of_single_lanes(seed: int) -> None:
    storm = Storm(2_000 + seed, 0.08, isolated=True)
    storm.run(60)
    storm.judge()


def test_the_storms_of_single_lanes_lose_lanes_of_boards_that_serve_on() -> None:
    alone = 0
    for seed in range(8):
        storm = Storm(2_000 + seed, 0.08, isolated=True)
        storm.run(60)
        names = [(event.event, event.data.get("state")) for event in storm.driver.records]
        for place, (name, _) in enumerate(names):
            alone += name == history.BOARD_LANE_LOST and (history.BOARD_GENERATION, "RECOVERING") not in names[max(0, place - 8) : place + 8]
    assert alone > 5


@pytest.mark.parametrize("seed", range(2))
def test_the_same_seed_gives_the_same_actions(seed: int) -> None:
    def life() -> list[str]:
        storm = Storm(seed, 0.05)
        storm.run(40)
        return [repr((record.event, record.t, record.request, record.job, record.data)) for record in storm.driver.records]

    assert life() == life()
