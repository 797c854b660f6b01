"""A request for which some board is about to be reached waits for it a moment, and never longer: nothing of the fleet is known late."""

from __future__ import annotations

import msgspec
import pytest
from builders_router import Desk, a_board, a_text, a_view

from calculet_core import history
from calculet_core.history import Checker, Event
from calculet_router import actions, events
from calculet_router.fleet import LinkState

COMES, GOES = a_board("board0", 2, generation=8), a_board("board1", draining=True)


def rolling(*, hello: bool = False, reach_wait_ms: int = 1_000) -> Desk:
    """board0 is back and ready in the view and has not been greeted; board1, which served, is drained."""
    desk = Desk("board0", "board1", reach_wait_ms=reach_wait_ms)
    desk.tell(events.ViewPublished(a_view(COMES, a_board("board1"), version=2)))
    if hello:
        desk.hello("board0", 2, generation=8)
    return desk


def held(desk: Desk) -> list[bool]:
    return [action.reached for action in desk.all(actions.Held)]


def history_holds(desk: Desk) -> bool:
    checker = Checker()
    for event in desk.all(Event):
        checker.see(event)
    return checker.finish() == []


def test_refused_by_a_board_that_stops_it_waits_for_the_one_that_is_being_greeted() -> None:
    desk = rolling()
    client = desk.ask()
    (submit,) = desk.sent("board1")
    desk.refuse(submit, "board1", "shutting_down")
    assert desk.failures() == [] and desk.dispatcher.parking.count("qwen3") == 1
    assert desk.dispatcher.parking.waits() == {}, "it waits for nobody's turn"
    desk.pass_time(300)
    desk.hello("board0", 2, generation=8)
    assert [one.attempt for one in desk.sent("board0")] == [2] and held(desk) == [True]
    desk.token(desk.sent("board0")[0], finish="stop")
    assert desk.failures() == [] and desk.dispatcher.inflight == 0 and history_holds(desk), client
    assert [event.data["for"] for event in desk.all(Event) if event.event == history.REQUEST_WAITING] == ["link"]


def test_a_new_request_waits_too_for_every_choice_of_it() -> None:
    desk = rolling()
    desk.tell(events.ViewPublished(a_view(COMES, GOES, version=3)))
    desk.ask(a_text(prompt=["a", "b"], n=2))
    assert desk.sent() == [] and desk.dispatcher.parking.count("qwen3") == 4
    desk.hello("board0", 2, generation=8)
    assert len(desk.sent("board0")) == 4 and desk.dispatcher.parking.count("qwen3") == 0 and history_holds(desk) is False
    for submit in desk.sent("board0"):
        desk.token(submit, finish="stop")
    assert history_holds(desk)


def test_it_waits_no_longer_than_the_limit_in_all() -> None:
    desk = rolling()
    client = desk.ask()
    desk.refuse(desk.sent("board1")[0], "board1", "shutting_down")
    desk.pass_time(900)
    desk.hello("board0", 2, generation=8)
    desk.refuse(desk.sent("board0")[0], "board0", "model_recovering")
    assert desk.failures() == [(client, "model_recovering")], "nobody is near any more"
    desk = rolling()
    client = desk.ask()
    desk.refuse(desk.sent("board1")[0], "board1", "shutting_down")
    desk.pass_time(900)
    assert desk.failures() == []
    desk.pass_time(100)
    assert desk.failures() == [(client, "shutting_down")] and held(desk) == [False]
    assert desk.dispatcher.inflight == 0 and not desk.dispatcher.parking and history_holds(desk)


def test_nobody_waits_where_nobody_is_near_or_waiting_is_switched_off() -> None:
    for desk, view in (
        (rolling(reach_wait_ms=0), a_view(COMES, GOES, version=3)),
        (rolling(), a_view(a_board("board0", 2, state="RECOVERING"), GOES, version=3)),
        (rolling(), a_view(a_board("board0", 2, draining=True), GOES, version=3)),
        (rolling(), a_view(a_board("board0", 2, alias="other"), GOES, version=3)),
        (rolling(), a_view(a_board("board0", 2, digest="e" * 64), GOES, version=3)),
        (rolling(), a_view(GOES, version=3)),
    ):
        desk.tell(events.ViewPublished(view))
        desk.ask()
        assert [code for _, code in desk.failures()] == ["no_ready_worker"], view


def test_full_beats_near() -> None:
    desk = rolling()
    client = desk.ask()
    desk.refuse(desk.sent("board1")[0], "board1", "over_capacity", retry_after_s=3)
    assert desk.failures() == [(client, "over_capacity")]


@pytest.mark.parametrize("state", ["READY", "WARMING"])
def test_a_workers_word_may_come_before_the_view_and_after_it(state: str) -> None:
    """The view says WARMING while its worker said READY, or the reverse."""
    desk = rolling()
    view = msgspec.structs.replace(COMES, state="WARMING" if state == "READY" else "READY")
    desk.tell(events.ViewPublished(a_view(view, GOES, version=3)))
    desk.hello("board0", 2, generation=8, state=state)
    desk.ask()
    assert desk.sent() == [] and desk.failures() == []
    desk.tell(events.ViewPublished(a_view(COMES, GOES, version=4)))
    desk.hello("board0", 2, generation=8)
    assert len(desk.sent("board0")) == 1 and desk.failures() == []


def test_a_board_that_failed_by_its_own_word_is_not_near() -> None:
    desk = rolling()
    desk.tell(events.ViewPublished(a_view(COMES, GOES, version=3)))
    desk.hello("board0", 2, generation=8, state="RECOVERING")
    desk.ask()
    assert [code for _, code in desk.failures()] == ["no_ready_worker"]


def test_a_silent_board_is_given_the_same_moment_and_a_dead_one_none() -> None:
    desk = Desk("board0")
    desk.pass_time(6_000)
    assert desk.dispatcher.roster.workers["board0"].link is LinkState.SUSPECT
    desk.ask()
    desk.tick("board0")
    assert len(desk.sent()) == 1 and desk.failures() == []
    desk.tell(events.WorkerEnded("board0", 1, "died"))
    assert [code for _, code in desk.failures()] == ["worker_lost"]


def test_a_client_that_leaves_while_it_waits_is_gone() -> None:
    desk = rolling()
    desk.tell(events.ViewPublished(a_view(COMES, GOES, version=3)))
    client = desk.ask()
    desk.tell(events.ClientGone(client, "the client left"))
    desk.hello("board0", 2, generation=8)
    assert desk.sent() == [] and held(desk) == [False] and desk.dispatcher.inflight == 0 and history_holds(desk)


def test_reached_is_what_would_get_a_request() -> None:
    desk = rolling()
    assert desk.dispatcher.roster.reached() == {"board1": 7}
    desk.hello("board0", 2, generation=8)
    assert desk.dispatcher.roster.reached() == {"board0": 8, "board1": 7}
    desk.tell(events.ViewPublished(a_view(COMES, GOES, version=3)))
    assert desk.dispatcher.roster.reached() == {"board0": 8}
