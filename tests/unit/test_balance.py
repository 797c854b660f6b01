"""Least outstanding cost; ties rotate."""

from __future__ import annotations

from collections import Counter

import pytest
from builders_router import a_board, a_view

from calculet_core import wire
from calculet_core.requests import Prompt
from calculet_router.balance import UNKNOWN_OUTPUT_TOKENS, Balance, estimate_cost
from calculet_router.fleet import LinkState, Roster, Worker


def workers(*costs: float) -> list[Worker]:
    found = [Worker(a_board(f"board{index}"), 0) for index in range(len(costs))]
    for worker, cost in zip(found, costs, strict=True):
        worker.settled = cost
    return found


def test_the_least_loaded_worker_is_chosen() -> None:
    some = workers(30, 10, 20)
    assert {Balance().choose(some) for _ in range(5)} == {some[1]}


def test_equals_take_turns() -> None:
    some, balance = workers(5, 5, 5), Balance()
    chosen = Counter(worker.board for worker in (balance.choose(some) for _ in range(300)) if worker)
    assert set(chosen.values()) == {100}


def test_what_is_in_flight_counts_beside_the_last_report() -> None:
    some = workers(10, 10)
    some[0].unanswered = 1
    assert Balance().choose(some) is some[1]


def test_a_heavier_board_takes_more() -> None:
    some = workers(15, 10)
    some[0].weight = 2.0
    assert Balance().choose(some) is some[0]


def test_the_excluded_are_not_chosen() -> None:
    some = workers(1, 2)
    assert Balance().choose(some, {some[0].key}) is some[1]
    assert Balance().choose(some, {worker.key for worker in some}) is None
    assert Balance().choose([]) is None


def test_a_burst_between_two_reports_is_spread() -> None:
    some, balance = workers(0, 0), Balance()
    for _ in range(10):
        worker = balance.choose(some)
        assert worker is not None
        worker.unanswered += 100
    assert [worker.unanswered for worker in some] == [500, 500]


def test_costs_are_tokens_as_far_as_one_can_know() -> None:
    assert estimate_cost(Prompt(token_ids=(1, 2, 3)), 7) == 10
    assert estimate_cost(Prompt(text="x" * 40), 7) == 17
    assert estimate_cost(Prompt(messages=[{"role": "user", "content": "x" * 8}]), None) == 2 + UNKNOWN_OUTPUT_TOKENS


# ------------------------------------------------------------------------------------------------ pools (scheduling §8)
def a_roster(*pools: str) -> Roster:
    roster = Roster()
    roster.take(a_view(*[a_board(f"board{index}", pool=pool) for index, pool in enumerate(pools)]), 0)
    for worker in roster.workers.values():
        worker.link = LinkState.UP
        view = worker.view
        worker.hello = wire.WorkerHello(
            view.board, view.epoch, view.pid, view.generation, view.digest, view.alias, view.state
        )
    return roster


def names(workers: list[Worker]) -> list[str]:
    return [worker.board for worker in workers]


@pytest.mark.parametrize(
    ("traffic_class", "first", "others"),
    [
        ("latency", ["board0"], ["board1", "board2"]),
        ("throughput", ["board1"], ["board0", "board2"]),
        ("", ["board2"], ["board0", "board1"]),
    ],
)
def test_a_tenants_class_asks_its_own_pool_first_and_any_other_after(traffic_class: str, first: list[str], others: list[str]) -> None:
    roster = a_roster("latency", "throughput", "")
    view = roster.workers["board0"].view
    assert tuple(map(names, roster.pools(view.alias, view.digest, traffic_class))) == (first, others)


def test_a_board_that_is_not_ready_leaves_its_pool() -> None:
    roster = a_roster("latency", "")
    view = roster.workers["board0"].view
    roster.workers["board0"].link = LinkState.SUSPECT
    roster.changed()
    assert tuple(map(names, roster.pools(view.alias, view.digest, "latency"))) == ([], ["board1"])
