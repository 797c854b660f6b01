"""Whose device turn it is (scheduling §6)."""

from __future__ import annotations

from itertools import repeat

import pytest

from calculet_core.clock import MS, S
from calculet_core.config import QueuesConfig
from calculet_worker.scheduling.arbiter import TURNS, Arbiter, Turn

ALL = [1, 1, 1, 1]


def serve(arbiter: Arbiter, ready: list[int], cost_ns: dict[Turn, int], jobs: int) -> dict[Turn, int]:
    """Device time of each class over so many jobs."""
    spent = dict.fromkeys(TURNS, 0)
    for _ in range(jobs):
        turn = arbiter.choose(ready)
        assert turn is not None and ready[turn]
        arbiter.take(turn, cost_ns[turn])
        arbiter.settle(turn, cost_ns[turn], cost_ns[turn])
        spent[turn] += cost_ns[turn]
    return spent


@pytest.mark.parametrize("costs", [(15, 15, 15, 15), (15, 40, 300, 3_000), (1, 1, 1, 1), (40, 5, 5, 5)])
def test_device_time_is_shared_eight_four_two_one_whatever_a_job_costs(costs: tuple[int, ...]) -> None:
    cost_ns = {turn: cost * MS for turn, cost in zip(TURNS, costs, strict=True)}
    spent = serve(Arbiter(QueuesConfig()), ALL, cost_ns, 20_000)
    total = sum(spent.values())
    for turn, weight in zip(TURNS, (8, 4, 2, 1), strict=True):
        allowed = 0.02 + cost_ns[turn] / total
        assert abs(spent[turn] / total - weight / 15) < allowed, spent


def test_a_class_that_is_alone_always_has_its_turn() -> None:
    arbiter = Arbiter(QueuesConfig())
    for turn in TURNS:
        ready = [int(turn is other) for other in TURNS]
        serve(arbiter, ready, dict.fromkeys(TURNS, 5 * S), 10)


def test_nothing_ready_means_no_turn() -> None:
    assert Arbiter(QueuesConfig()).choose([0, 0, 0, 0]) is None


def test_idleness_saves_up_no_credit() -> None:
    arbiter, cost = Arbiter(QueuesConfig()), dict.fromkeys(TURNS, 10 * MS)
    serve(arbiter, [1, 0, 0, 0], cost, 5_000)
    spent = serve(arbiter, [1, 0, 0, 1], cost, 90)
    assert 8 <= spent[Turn.LONG] // (10 * MS) <= 12, "one of nine, and no back pay for the time before"


def test_debt_is_paid_off_while_others_run() -> None:
    arbiter, cost = Arbiter(QueuesConfig()), {**dict.fromkeys(TURNS, 15 * MS), Turn.LONG: 2 * S}
    serve(arbiter, [0, 0, 0, 1], cost, 1)
    serve(arbiter, [1, 0, 0, 0], cost, 16 * S // (15 * MS) + 100)
    assert Turn.LONG in {turn for turn, spent in serve(arbiter, [1, 0, 0, 1], cost, 3).items() if spent}


def test_a_stream_of_long_prompts_does_not_starve_decode() -> None:
    arbiter = Arbiter(QueuesConfig())
    cost = {**dict.fromkeys(TURNS, 15 * MS), Turn.LONG: 500 * MS}
    waited, worst = 0, 0
    for ready in repeat([1, 0, 0, 1], 2_000):
        turn = arbiter.choose(ready)
        assert turn is not None
        arbiter.take(turn, cost[turn])
        arbiter.settle(turn, cost[turn], cost[turn])
        waited = 0 if turn is Turn.DECODE else waited + cost[turn]
        worst = max(worst, waited)
    assert worst <= 500 * MS, "never two long jobs in a row while a step is ready"


def test_a_job_that_took_longer_than_expected_is_charged_what_it_took() -> None:
    arbiter, spent = Arbiter(QueuesConfig()), dict.fromkeys(TURNS, 0)
    for _ in range(5_000):
        turn = arbiter.choose([1, 0, 0, 1])
        assert turn is not None
        took = 900 * MS if turn is Turn.LONG else 15 * MS
        arbiter.take(turn, 1)
        arbiter.settle(turn, 1, took)
        spent[turn] += took
    assert abs(spent[Turn.LONG] / sum(spent.values()) - 1 / 9) < 0.03


def test_weights_come_from_the_configuration() -> None:
    config = QueuesConfig(decode_weight=1, long_prefill_weight=1)
    spent = serve(Arbiter(config), [1, 0, 0, 1], {**dict.fromkeys(TURNS, 10 * MS), Turn.LONG: 100 * MS}, 2_200)
    assert abs(spent[Turn.DECODE] - spent[Turn.LONG]) <= 200 * MS


def test_lanes_fill_before_steps_run() -> None:
    config = QueuesConfig(short_prefill_fills_lanes=True)
    cost = dict.fromkeys(TURNS, 10 * MS)
    few = serve(Arbiter(config), [1, 15, 0, 0], cost, 1_000)
    assert abs(few[Turn.DECODE] / few[Turn.SHORT] - (8 / 16) / 4) < 0.05
    nearly_full = serve(Arbiter(config), [15, 1, 0, 0], cost, 1_000)
    assert abs(nearly_full[Turn.DECODE] / nearly_full[Turn.SHORT] - (8 * 15 / 16) / 4) < 0.1


def test_long_prompts_do_not_count_as_lanes_to_fill() -> None:
    spent = serve(Arbiter(QueuesConfig(short_prefill_fills_lanes=True)), [1, 0, 0, 15], dict.fromkeys(TURNS, 10 * MS), 900)
    assert abs(spent[Turn.DECODE] / spent[Turn.LONG] - 8) < 0.2


@pytest.mark.parametrize("loser", TURNS)
def test_no_weights_bring_a_class_under_the_least_share(loser: Turn) -> None:
    names = ("decode_weight", "short_prefill_weight", "medium_prefill_weight", "long_prefill_weight")
    weights = {name: 1 if turn is loser else 1_000 for turn, name in zip(TURNS, names, strict=True)}
    spent = serve(Arbiter(QueuesConfig(min_share=0.1, **weights)), ALL, dict.fromkeys(TURNS, 10 * MS), 5_000)
    assert spent[loser] / sum(spent.values()) >= 0.09, "a tenth, less what the floor itself adds to the whole"


def test_a_flood_of_short_prompts_leaves_decode_its_least_share() -> None:
    config = QueuesConfig(short_prefill_fills_lanes=True, min_share=0.1, decode_weight=1, short_prefill_weight=8)
    spent = serve(Arbiter(config), [1, 1_000, 0, 0], dict.fromkeys(TURNS, 10 * MS), 5_000)
    assert spent[Turn.DECODE] / sum(spent.values()) >= 0.09


def test_debt_is_one_job_even_where_two_went_out_on_one_credit() -> None:
    """Two in flight, neither measured: together they cost two jobs, and the class owes one."""
    arbiter = Arbiter(QueuesConfig())
    for _ in range(2):
        assert arbiter.choose([1, 0, 0, 0]) is Turn.DECODE
        arbiter.take(Turn.DECODE, 0)
    for _ in range(2):
        arbiter.settle(Turn.DECODE, 0, 100 * MS)
    cost = {**dict.fromkeys(TURNS, 10 * MS), Turn.DECODE: 1 * MS}
    assert arbiter._credit[Turn.DECODE] == -100 * MS
    served = serve(arbiter, [1, 1, 0, 0], cost, 8)
    assert served[Turn.DECODE], "100 ms of debt at 8 of 12 are paid off beside 50 ms of the others"


def test_who_becomes_ready_without_debt_waits_for_the_job_that_runs_and_the_turns_before_its_own() -> None:
    """A short prompt comes while long prompts and decode steps go on: not until their credit is spent."""
    cost = {**dict.fromkeys(TURNS, 15 * MS), Turn.LONG: 200 * MS, Turn.SHORT: 1 * MS}
    arbiter = Arbiter(QueuesConfig())
    for start in range(40):
        serve(arbiter, [1, 0, 0, 1], cost, 7 + start)
        before = []
        while (turn := arbiter.choose([1, 1, 0, 1])) is not Turn.SHORT:
            assert turn is not None
            before.append(turn)
            arbiter.take(turn, cost[turn])
            arbiter.settle(turn, cost[turn], cost[turn])
        assert before.count(Turn.LONG) <= 1 and len(before) <= 2, before
        arbiter.take(Turn.SHORT, cost[Turn.SHORT])
        arbiter.settle(Turn.SHORT, cost[Turn.SHORT], cost[Turn.SHORT])


def test_coming_and_going_earns_no_more_than_staying() -> None:
    """A class that is ready for one job at a time, again and again, gets no larger share of the device than its weight's and one turn."""
    cost = {**dict.fromkeys(TURNS, 15 * MS), Turn.SHORT: 100 * MS}
    arbiter, spent = Arbiter(QueuesConfig()), dict.fromkeys(TURNS, 0)
    for number in range(6_000):
        turn = arbiter.choose([1, number % 2, 0, 0])
        assert turn is not None
        arbiter.take(turn, cost[turn])
        arbiter.settle(turn, cost[turn], cost[turn])
        spent[turn] += cost[turn]
    assert spent[Turn.SHORT] / sum(spent.values()) < 4 / 12 + 0.03
