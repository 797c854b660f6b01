"""A swap keeps its floor, ends whole or back where it was, and goes on from its record alone."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
from builders_rollout import BLUE, GREEN, Swap, a_rollout

from calculet_core.config import RolloutConfig
from calculet_core.states.rollout import RolloutState
from calculet_supervisor.canary import Opinion, Verdict
from calculet_supervisor.planner import BoardFacts, unfit
from calculet_supervisor.rollout import Rollout, abort

ALL_GREEN = {f"board{index}": GREEN.digest for index in range(4)}
ALL_BLUE = dict.fromkeys(ALL_GREEN, BLUE.digest)


def states(swap: Swap) -> list[str]:
    names = [rollout.state for rollout in swap.history]
    return [names[0], *(after for before, after in pairwise(names) if after != before)]


def test_a_swap_stages_half_moves_the_alias_once_and_then_the_rest() -> None:
    swap = Swap(a_rollout())
    assert swap.run().state == "DONE"
    assert states(swap) == ["STAGING", "SHIFTING", "DRAINING_BLUE", "DONE"]
    assert swap.held() == ALL_GREEN
    assert swap.fewest == 2
    assert [after.on_green for before, after in pairwise(swap.history) if after.on_green != before.on_green] == [True]
    assert not any(rollout.share for rollout in swap.history)


def test_one_board_at_a_time_leaves_unless_more_are_allowed() -> None:
    swap = Swap(a_rollout())
    assert max(sum(not seen.serves for seen in swap.facts.values()) for _ in range(40) if swap.step() is None) == 1
    swap = Swap(a_rollout(max_unavailable=2))
    swap.step()
    assert len(swap.rollout.assigned) == 2


@pytest.mark.parametrize("boards", [2, 3, 4, 7])
@pytest.mark.parametrize("unavailable", [1, 3])
def test_capacity_never_falls_below_the_floor(boards: int, unavailable: int) -> None:
    for floor in range(1, boards):
        swap = Swap(a_rollout(boards, floor=floor, max_unavailable=unavailable))
        assert swap.run().state == "DONE"
        assert swap.fewest >= floor, f"floor {floor} of {boards}"


def test_above_half_new_requests_are_shared_while_the_alias_moves() -> None:
    swap = Swap(a_rollout(floor=3))
    swap.run()
    shares = [rollout.share for rollout in swap.history if rollout.share]
    assert shares and shares == sorted(shares)
    assert swap.fewest == 3


def test_a_board_that_is_down_counts_as_missing_and_follows_later() -> None:
    swap = Swap(a_rollout())
    swap.see("board3", out="stopped", digest=None, state=None, serves=False)
    for _ in range(5):
        swap.step()
    assert swap.rollout.assigned == (), "one is down already, and one may be down"
    swap.see("board3", out=None)
    assert swap.run().state == "DONE"
    swap = Swap(a_rollout(max_unavailable=2, floor=1))
    swap.see("board3", out="stopped", digest=None, state=None, serves=False)
    rollout = swap.run()
    assert rollout.state == "DONE" and "board3 (stopped)" in rollout.log[-1].text
    assert rollout.wanted("board3") == GREEN


def test_a_board_counts_as_moved_only_when_every_router_reaches_it() -> None:
    swap = Swap(a_rollout(2, floor=1))
    swap.step()
    (first,) = swap.rollout.assigned
    swap.see(first, reached=False)
    for _ in range(10):
        swap.step()
    assert swap.facts[first].digest == GREEN.digest and swap.facts[first].serves
    assert swap.rollout.state == "STAGING" and swap.rollout.assigned == (first,), "the alias would move to a board that routers miss"
    swap.see(first, reached=True)
    assert swap.run().state == "DONE" and swap.fewest >= 1


@pytest.mark.parametrize("bad", range(4))
def test_the_first_failure_of_green_restores_blue_everywhere(bad: int) -> None:
    swap = Swap(a_rollout(), fails=lambda board, artifact: artifact == GREEN and board == f"board{bad}")
    rollout = swap.run()
    assert rollout.state == "ROLLED_BACK"
    assert rollout.failed_board == f"board{bad}" and rollout.reason == f"board{bad}: golden: wrong"
    assert swap.held() == ALL_BLUE and not rollout.on_green
    assert swap.fewest >= 2


def test_green_that_keeps_killing_its_worker_goes_back() -> None:
    swap = Swap(a_rollout())
    swap.step()
    (board,) = swap.rollout.assigned
    swap.see(board, digest=None, state=None, serves=False, exits=1)
    swap.decide()
    assert swap.rollout.state == "STAGING"
    swap.see(board, exits=2)
    swap.decide()
    assert swap.rollout.state == "ROLLING_BACK" and "died 2 times" in (swap.rollout.reason or "")


def test_a_swap_that_cannot_move_goes_back_instead_of_hanging() -> None:
    swap = Swap(a_rollout(), RolloutConfig(stall_timeout_s=5.0))
    swap.step()
    (board,) = swap.rollout.assigned
    swap.see(board, out=None, state="VALIDATING", serves=False)
    swap.clock.advance(6_000_000_000)
    swap.decide()
    assert swap.rollout.state == "ROLLING_BACK" and "nothing has moved for 5 s" in (swap.rollout.reason or "")
    assert swap.run().state == "ROLLED_BACK"


def test_a_board_that_has_not_reported_yet_is_not_taken_for_one_that_does_not_serve() -> None:
    swap = Swap(a_rollout())
    swap.step()
    before = dict(swap.facts)
    swap.crash()
    for board in swap.facts:  # a new supervisor: workers live, and none has reported
        swap.see(board, digest=None, state=None, serves=False, unknown=True)
    for _ in range(50):
        assert not swap.decide()
    swap.facts = before
    assert swap.run().state == "DONE" and swap.fewest >= 2


def test_the_alias_has_moved_only_when_every_router_says_so() -> None:
    swap = Swap(a_rollout())
    swap.run(lambda rollout: rollout.state == "SHIFTING")
    for _ in range(3):
        assert not swap.decide(acked=False)
    swap.decide(acked=True)
    assert swap.rollout.state == "DRAINING_BLUE"


@pytest.mark.parametrize("state", ["STAGING", "SHIFTING", "DRAINING_BLUE"])
def test_an_operator_can_go_back_from_every_state_and_the_floor_holds(state: str) -> None:
    swap = Swap(a_rollout())
    swap.run(lambda rollout: rollout.state == state)
    swap.rollout = abort(swap.rollout, 1.0, "an operator said so")
    assert swap.run().state == "ROLLED_BACK"
    assert swap.held() == ALL_BLUE
    assert swap.fewest >= 2


def test_an_operator_gets_blue_back_in_one_message_while_one_blue_board_is_left() -> None:
    swap = Swap(a_rollout())
    swap.run(lambda rollout: rollout.state == "DRAINING_BLUE")
    assert len(swap.rollout.assigned) == 3
    swap.rollout = abort(swap.rollout, 1.0, "an operator said so", urgent=True)
    assert swap.decide() and not swap.rollout.on_green
    for _ in range(3):
        assert not swap.decide(acked=False), "a router that still sends to green must find it"
    assert swap.decide(acked=True) and swap.rollout.acknowledged and swap.rollout.assigned
    assert swap.decide() and swap.rollout.assigned == ()


@pytest.mark.parametrize("fails", [False, True])
def test_the_record_alone_is_enough_to_go_on_from_every_step(fails: bool) -> None:
    def broken(board: str, artifact: object) -> bool:
        return fails and artifact == GREEN and board == "board2"

    whole = Swap(a_rollout(), fails=broken)
    whole.run()
    for step in range(len(whole.history)):
        swap = Swap(a_rollout(), fails=broken)
        swap.run(lambda rollout, swap=swap, step=step: len(swap.history) > step)  # type: ignore[misc]
        swap.crash()
        for board in swap.facts:  # kill -9 of everything: the boards come back empty
            swap.see(board, digest=None, state="UNLOADED", serves=False)
        assert swap.run().state == ("ROLLED_BACK" if fails else "DONE")
        for _ in range(5):
            swap.obey()
        assert set(swap.held().values()) == {BLUE.digest if fails else GREEN.digest}


def test_random_deaths_never_leave_it_hanging_or_mixed() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        config = RolloutConfig(stall_timeout_s=30.0)
        swap = Swap(a_rollout(rng.randint(2, 5)), config, lambda board, artifact, rng=rng: rng.random() < 0.1)  # type: ignore[misc]
        for _ in range(60):
            swap.step()
            if rng.random() < 0.3:
                board = rng.choice(list(swap.facts))
                swap.see(board, digest=None, state="UNLOADED", serves=False, exits=swap.facts[board].exits + 1, trouble=None, failed=None)
            if rng.random() < 0.1:
                swap.crash()
        swap.fails = lambda board, artifact: False
        rollout = swap.run(limit=2000)
        wanted = GREEN if rollout.state == "DONE" else BLUE
        assert rollout.serving == wanted, f"seed {seed}"
        for _ in range(10):
            swap.obey()
        assert set(swap.held().values()) == {wanted.digest}, f"seed {seed}"


# ------------------------------------------------------------------------------------------------ one board, none, canary
def test_one_board_tells_how_long_nobody_served() -> None:
    swap = Swap(a_rollout(1, floor=0, allow_downtime=True))
    rollout = swap.run()
    assert rollout.state == "DONE" and rollout.dark_s > 0 and rollout.dark_since is None
    assert f"nobody served for {rollout.dark_s:.3f} s" in rollout.log[-1].text


def test_an_unloaded_alias_is_loaded_everywhere_without_a_floor() -> None:
    swap = Swap(a_rollout(blue=None, floor=0, max_unavailable=4))
    assert swap.run().state == "DONE"
    assert swap.held() == ALL_GREEN
    bad = Swap(a_rollout(blue=None, floor=0), fails=lambda board, artifact: True)
    assert bad.run().state == "ROLLED_BACK"
    assert set(bad.held().values()) == {None}


def test_a_canary_waits_for_an_opinion_and_then_goes_on() -> None:
    swap = Swap(a_rollout(canary=0.1), RolloutConfig(stall_timeout_s=5.0))
    swap.run(lambda rollout: rollout.share == 0.1)
    swap.opinion = Opinion(Verdict.WAIT, "3 of 100 requests")
    for _ in range(100):
        swap.step()
    assert swap.rollout.state == "STAGING" and len(swap.rollout.assigned) == 1
    swap.opinion = Opinion(Verdict.GOOD, "100 requests, 0 failed")
    assert swap.run().state == "DONE"
    assert swap.held() == ALL_GREEN


def test_a_bad_canary_gets_nothing_more_in_the_same_step() -> None:
    swap = Swap(a_rollout(canary=0.25))
    swap.run(lambda rollout: rollout.share == 0.25)
    swap.opinion = Opinion(Verdict.BAD, "9 of 100 requests failed")
    swap.decide()
    assert swap.rollout.state == "ROLLING_BACK" and swap.rollout.share == 0
    assert swap.run().state == "ROLLED_BACK"
    assert swap.rollout.reason == "canary: 9 of 100 requests failed"
    assert swap.held() == ALL_BLUE


def test_a_board_where_green_failed_before_does_not_go_first() -> None:
    swap = Swap(a_rollout(avoid=("board0", "board1")))
    swap.step()
    assert swap.rollout.assigned == ("board2",)


# ------------------------------------------------------------------------------------------------ before it begins
def facts(serving: int, out: int = 0) -> dict[str, BoardFacts]:
    seen = [BoardFacts(BLUE.digest, "READY", True)] * serving + [BoardFacts(out="stopped")] * out
    return {f"board{index}": fact for index, fact in enumerate(seen)}


@pytest.mark.parametrize(
    ("serving", "out", "floor", "unavailable", "downtime", "words"),
    [
        (4, 0, 2, 1, False, None),
        (4, 0, 4, 1, False, "moving one leaves 3, below the floor of 4"),
        (3, 1, 2, 1, False, r"1 of 4 boards are out already: board3 \(stopped\); max-unavailable is 1"),
        (3, 1, 2, 2, False, None),
        (1, 0, 0, 1, False, "only board0 serves: it cannot be moved without a time in which nobody answers"),
        (1, 0, 0, 1, True, None),
        (0, 2, 0, 1, True, "no board can take part"),
    ],
)
def test_what_cannot_hold_its_floor_does_not_begin(
    serving: int, out: int, floor: int, unavailable: int, downtime: bool, words: str | None
) -> None:
    seen = facts(serving, out)
    found = unfit(tuple(seen), seen, floor, unavailable, downtime)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found), found


def test_terminal_states_are_over_and_say_when() -> None:
    rollout = Swap(a_rollout()).run()
    assert rollout.over and rollout.ended is not None
    assert not any(Rollout(1, "toy", "load", ("board0",), state=state.name).over for state in (RolloutState.STAGING, RolloutState.SHIFTING))
