"""What the router knows of its workers: views, links, eligibility."""

from __future__ import annotations

from typing import Any

import pytest
from builders_router import DIGEST, Desk, a_board, a_hello, a_view

from calculet_router import actions, events
from calculet_router.fleet import LinkState, Roster


def eligible(desk: Desk, digest: str = DIGEST) -> list[str]:
    return [worker.board for worker in desk.dispatcher.roster.eligible("qwen3", digest)]


def publish(desk: Desk, *boards: Any, version: int) -> list[actions.Action]:
    return desk.tell(events.ViewPublished(a_view(*boards, version=version)))


def test_a_board_is_connected_and_eligible_after_its_hello() -> None:
    desk = Desk()
    assert publish(desk, a_board(), version=1) == [actions.OpenLink(a_board())]
    assert eligible(desk) == []
    desk.hello("board0")
    assert eligible(desk) == ["board0"]


def test_an_older_view_is_ignored_and_a_newer_one_taken() -> None:
    desk = Desk("board0")
    publish(desk, a_board(), version=5)
    assert publish(desk, version=4) == publish(desk, version=5) == []
    assert eligible(desk) == ["board0"]
    assert desk.dispatcher.roster.version == 5


def test_the_first_view_may_have_version_zero() -> None:
    roster = Roster()
    assert roster.take(a_view(a_board(), version=0), 0) is not None


@pytest.mark.parametrize(
    "view", [{"draining": True}, {"state": "WARMING"}, {"generation": 8}, {"digest": "e" * 64}, {"alias": "other"}]
)
def test_a_board_that_the_view_does_not_offer_gets_nothing(view: dict[str, Any]) -> None:
    desk = Desk("board0")
    publish(desk, a_board(**view), version=2)
    assert eligible(desk) == []


@pytest.mark.parametrize("hello", [{"state": "DRAINING"}, {"state": "RECOVERING"}, {"generation": 8}, {"digest": "e" * 64}])
def test_a_worker_whose_hello_contradicts_the_view_gets_nothing(hello: dict[str, Any]) -> None:
    desk = Desk("board0")
    desk.hello("board0", **hello)
    assert eligible(desk) == []
    desk.hello("board0")
    assert eligible(desk) == ["board0"]


def test_the_alias_decides_which_artifact_serves() -> None:
    desk = Desk()
    blue, green = a_board("board0"), a_board("board1", digest="e" * 64)
    desk.tell(events.ViewPublished(a_view(blue, green, version=1)))
    desk.hello("board0")
    desk.hello("board1", digest="e" * 64)
    desk.ask()
    assert {desk.board_of(submit) for submit in desk.sent()} == {"board0"}
    desk.tell(events.ViewPublished(a_view(blue, green, version=2, digest="e" * 64)))
    desk.ask()
    assert desk.board_of(desk.sent()[-1]) == "board1"


def test_a_hello_of_somebody_else_is_ignored_and_counted() -> None:
    desk = Desk("board0")
    desk.tell(events.HelloArrived("board0", 1, a_hello("board1", state="DRAINING")))
    desk.tell(events.HelloArrived("board0", 1, a_hello("board0", 2, state="DRAINING")))
    desk.tell(events.HelloArrived("board9", 1, a_hello("board9")))
    assert eligible(desk) == ["board0"]
    assert len(desk.all(actions.Ignored)) == 3


def test_another_epoch_closes_the_old_link_and_opens_a_new_one() -> None:
    desk = Desk("board0")
    out = publish(desk, a_board(epoch=2), version=2)
    assert out == [actions.CloseLink("board0", 1), actions.OpenLink(a_board(epoch=2))]
    assert eligible(desk) == []
    desk.hello("board0", epoch=2)
    assert eligible(desk) == ["board0"]


def test_an_older_epoch_in_a_newer_view_changes_nothing() -> None:
    desk = Desk("board0")
    publish(desk, a_board(epoch=2), version=2)
    assert publish(desk, a_board(epoch=1), version=3) == []
    assert desk.dispatcher.roster.workers["board0"].epoch == 2


def test_silence_makes_a_link_suspect_and_a_message_brings_it_back() -> None:
    desk = Desk("board0", worker_silence_ms=5_000)
    desk.pass_time(5_000)
    assert eligible(desk) == ["board0"]
    desk.pass_time(1)
    assert eligible(desk) == []
    assert desk.dispatcher.roster.links() == {"board0": LinkState.SUSPECT.value}
    desk.hello("board0")
    assert eligible(desk) == ["board0"]
    desk.pass_time(5_001)
    desk.tick("board0")
    assert eligible(desk) == ["board0"]


def test_a_board_that_leaves_the_view_may_finish_what_it_has() -> None:
    desk = Desk("board0")
    client = desk.ask()
    submit = desk.sent()[0]
    assert publish(desk, version=2) == []
    assert eligible(desk) == []
    desk.token(submit, finish="stop")
    assert [(action.owner, action.piece.finish) for action in desk.all(actions.Deliver)] == [(client, "stop")]
    assert desk.all(actions.CloseLink) == [actions.CloseLink("board0", 1)]


def test_an_idle_board_that_leaves_the_view_is_forgotten() -> None:
    desk = Desk("board0", "board1")
    assert publish(desk, a_board("board1"), version=2) == [actions.CloseLink("board0", 1)]
    assert desk.dispatcher.roster.links() == {"board1": "up"}


def test_an_empty_fleet_recovers_on_the_first_worker() -> None:
    desk = Desk()
    desk.ask()
    assert [code for _, code in desk.failures()] == ["no_ready_worker"]
    publish(desk, a_board(), version=1)
    desk.hello("board0")
    desk.ask()
    assert len(desk.sent("board0")) == 1


def test_a_dead_worker_stays_dead_whatever_it_or_an_old_view_says() -> None:
    desk = Desk("board0")
    desk.tell(events.WorkerEnded("board0", 1, "died"))
    publish(desk, a_board(), version=2)
    desk.hello("board0")
    assert eligible(desk) == []
    assert desk.dispatcher.roster.links() == {"board0": "lost"}
