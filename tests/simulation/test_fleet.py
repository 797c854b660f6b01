"""The whole fleet in virtual time: rough minutes of many seeds, ordinary hours, and the same run again under another hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from calculet_core.clock import S
from simulation.scenario import DEVICE_FAULTS, HOST_FAULTS, Fault, Scenario, Traffic, applies, corners, day, rough, swaps
from simulation.search import Outcome, judge, search
from simulation.world import World

SEEDS, SECONDS = 200, 30.0
SOMETIMES = {
    "a commit failed: the disk is full", "a moment was shuffled", "a limit took effect: max_output_buffer_bytes",
    "a request went to another pool", "a request went to its pool", "a router lost its keeper", "a view could not be saved", "a slow reader was dropped", "an act was refused",
    "an action failed and is decided again", "an answer began again", "another keeper took over", "board fault: bad_numbers", "board fault: ccu_exception",
    "board fault: device_busy", "board fault: device_unavailable", "board fault: invalid_dtype", "board fault: invalid_shape",
    "board fault: other", "board fault: wait_timeout", "board reset", "burst", "call cancelled", "call completed",
    "client got artifact_rejected", "client got bad_output", "client got deadline_exceeded", "client got model_recovering",
    "client got no_ready_worker", "client got over_capacity", "client got tenant_quota", "client got tenant_rate_limited",
    "client got worker_lost", "client tried again", "configure found the board busy", "fairness was judged", "golden failed",
    "job lost", "lane lost", "messages were lost with a connection", "operator: apply", "operator: drain", "operator: restart", "operator: resume",
    "operator: start", "operator: stop", "resent: failed", "resent: message_lost", "resent: refused", "resent: silent",
    "resent: unanswered", "resent: unsent", "resent: worker_lost", "question answered", "question no_ready_worker", "reset denied", "reset granted", "router ignored: foreign", "router ignored: late", "router ignored: malformed",
    "router saw a gap", "supervisor ignored a message: malformed", "worker ignored a message: malformed", "stale completion dropped", "router stood still", "supervisor stood still", "supervisor aborted a worker", "supervisor killed a worker", "worker adopted",
    "worker could not send", "worker lost a router: lease", "worker stood still",
    "worker replaced: jobs in flight and no step", "worker replaced: no heartbeat",
}  # fmt: skip
"""Recovery branches that the seeds must have run: a search proves nothing about a branch that never ran."""


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """The rough runs, on two processes, and a few for what they reach seldom."""
    return list(search([*corners(1), *(rough(seed, SECONDS) for seed in range(SEEDS))], 2))


@pytest.mark.timeout(2400)
def test_rough_minutes_of_many_seeds_hold_every_promise(outcomes: list[Outcome]) -> None:
    assert [f"seed {one.scenario.seed}: {one.worst()}" for one in outcomes if one.violations] == []
    assert sum(one.requests for one in outcomes) > 8_000
    assert sum(one.completed for one in outcomes) > 4_000


@pytest.mark.timeout(2400)
def test_every_fault_fired_and_every_recovery_branch_ran(outcomes: list[Outcome]) -> None:
    fired, sometimes = Counter[str](), Counter[str]()
    for one in outcomes:
        fired.update(one.fired)
        sometimes.update(one.sometimes)
    assert {*DEVICE_FAULTS, *HOST_FAULTS} - set(fired) == set()
    assert SOMETIMES - set(sometimes) == set()


@pytest.mark.timeout(2400)
def test_two_ordinary_hours_hold_every_promise() -> None:
    outcome = judge(day(7, hours=2.0, boards=2, per_s=0.3))
    assert outcome.worst() is None
    assert outcome.completed > 0.95 * outcome.requests > 2_000


def test_swaps_under_fire_come_to_an_end_and_mix_no_answers() -> None:
    outcomes = [judge(swaps(seed)) for seed in range(6)]
    assert [f"seed {one.scenario.seed}: {one.worst()}" for one in outcomes if one.violations] == []
    ends = sum((one.sometimes for one in outcomes), Counter[str]())
    assert min(ends[f"rollout {state}"] for state in ("shifting", "done", "rolling_back", "rolled_back", "refused")) > 0


def test_a_configuration_is_applied_under_load_and_no_client_notices() -> None:
    outcomes = [judge(applies(seed, 40.0)) for seed in range(6)]
    assert [f"seed {one.scenario.seed}: {one.worst()}" for one in outcomes if one.violations] == []
    assert sum(one.sometimes["operator: apply"] for one in outcomes) >= 12
    assert sum(one.completed for one in outcomes) > 1_000


def test_a_crash_loop_is_quarantined_and_the_board_comes_back() -> None:
    killed = tuple(Fault(int(second * S), "kill_worker") for second in (3, 5, 7, 9, 12, 16, 21, 27, 34))
    outcome = judge(Scenario(1, 40.0, 1, faults=killed))
    assert outcome.worst() is None
    assert outcome.sometimes["worker quarantined"] and outcome.virtual_s > 16 + 60, "it is tried again a minute later"


def test_a_board_that_was_refused_a_reset_gets_it_when_the_window_allows_it() -> None:
    faults = tuple(Fault(int(second * S), "ccu_exception") for second in (5, 12, 19))
    world = World(Scenario(1, 700.0, 1, traffic=Traffic(per_s=0.5, burst_every_s=None), faults=faults)).run()
    assert world.checker.violations == []
    assert (world.sometimes["reset granted"], world.sometimes["reset denied"]) == (3, 1)
    assert world.keeper.workers["board0"].engine.life.state.name == "READY"


def trace_of(seed: int, hash_seed: str) -> str:
    script = f"from simulation.search import judge; from simulation.scenario import rough; print(judge(rough({seed}, 20.0)).trace_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout


def test_the_same_seed_gives_the_same_history_under_another_hash_seed() -> None:
    first = trace_of(11, "0")
    assert first == trace_of(11, "1") == judge(rough(11, 20.0)).trace_hash + "\n"
    assert first != trace_of(12, "0")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_whole_day_holds_every_promise() -> None:
    outcome = judge(day(7))
    assert outcome.worst() is None
    assert outcome.virtual_s >= 24 * 3600 and outcome.requests > 80_000
