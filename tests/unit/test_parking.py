"""Requests that wait for their model's turn on a time-shared board: nothing is lost, nothing waits for ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders_router import DIGEST, Desk, a_board, a_chat

from calculet_core import history, wire
from calculet_core.clock import S
from calculet_core.history import Checker, Event
from calculet_core.states.request import RequestState
from calculet_router import actions, events

RARE = "e" * 64


class SharedDesk(Desk):
    """One board that `qwen3` and `rare` share; `turn` is what the supervisor's next view and the worker's hello say."""

    def __init__(self, parks: int = 4, **config: Any) -> None:
        super().__init__(**config)
        self.parks, self.version, self.generation = parks, 0, 6
        self.turn("qwen3")

    def turn(self, alias: str | None, state: str = "READY", rare: str = RARE) -> None:
        self.version += 1
        self.generation += 1
        digest = "" if alias is None else DIGEST if alias == "qwen3" else rare
        given = {"state": state, "generation": self.generation, "digest": digest, "alias": alias or ""}
        aliases = [
            wire.AliasView("qwen3", DIGEST, 40_960, 1_700_000_000, parks=self.parks),
            wire.AliasView("rare", rare, 4_096, 1_700_000_000, parks=self.parks),
        ]
        self.tell(events.ViewPublished(wire.FleetView(self.version, [a_board(**given)], aliases)))
        self.hello("board0", **given)

    def call(self, model: str, **fields: Any) -> str:
        return self.ask(a_chat(stream=True, model=model, **fields))

    def waits(self) -> dict[str, int]:
        return {alias: wait.count for alias, wait in self.dispatcher.parking.waits().items()}

    def outcomes(self) -> dict[str, str]:
        return {event.data["outcome"]: event.data.get("code", "") for event in self.all(Event) if event.event == history.REQUEST_DONE}

    def history_holds(self) -> bool:
        checker = Checker()
        for event in self.all(Event):
            checker.see(event)
        return checker.finish() == []


def test_a_request_for_the_other_model_waits_and_the_supervisor_hears_of_the_first_one_at_once() -> None:
    desk = SharedDesk()
    desk.call("rare")
    desk.call("rare")
    assert desk.sent() == [] and desk.failures() == [] and desk.waits() == {"rare": 2}
    assert desk.all(actions.Parked) == [actions.Parked("rare")]
    assert desk.dispatcher.parking.waits()["rare"].oldest_ns == desk.clock.now_ns()
    assert [event.data for event in desk.all(Event) if event.event == history.REQUEST_WAITING] == [{"model": "rare", "for": "turn"}] * 2
    states = [flight.state for flight in desk.dispatcher.parking.all()]
    assert states == [RequestState.WAITING_MODEL] * 2


def test_a_stream_that_waits_for_its_model_may_be_kept_alive() -> None:
    desk = SharedDesk(parks=8)
    owners = [desk.call("rare") for _ in range(2)]
    assert [action.owner for action in desk.all(actions.Admitted)] == owners
    desk.ask(a_chat(model="rare"))
    several = desk.call("rare", n=2)
    assert [action.owner for action in desk.all(actions.Admitted)] == [*owners, several], "a call whose choices all wait; no whole answer"


def test_when_the_turn_comes_all_are_sent_in_the_order_of_their_arrival() -> None:
    desk = SharedDesk()
    owners = [desk.call("rare") for _ in range(3)]
    desk.clock.advance(5 * S)
    desk.turn(None, state="UNLOADED")
    assert desk.sent() == []
    desk.turn("rare")
    assert [submit.digest for submit in desk.sent()] == [RARE] * 3
    assert desk.waits() == {}
    assert {action.waited_ns for action in desk.all(actions.Unparked)} == {5 * S}
    for submit in desk.sent():
        desk.accept(submit)
        desk.token(submit, finish="stop")
    assert [action.owner for action in desk.all(actions.Deliver)] == owners
    assert desk.history_holds()


def test_the_resident_model_is_served_meanwhile() -> None:
    desk = SharedDesk()
    desk.call("rare")
    desk.call("qwen3")
    assert [submit.alias for submit in desk.sent()] == ["qwen3"]


def test_what_a_leaving_model_refuses_waits_for_its_next_turn_on_the_same_worker() -> None:
    desk = SharedDesk()
    owner = desk.call("qwen3")
    (first,) = desk.sent()
    desk.refuse(first, "board0", "model_draining")
    assert desk.waits() == {"qwen3": 1} and desk.failures() == []
    desk.turn("rare")
    assert desk.waits() == {"qwen3": 1}
    desk.turn("qwen3")
    second = desk.sent()[-1]
    assert (second.request_id, second.attempt) == (first.request_id, 2)
    desk.accept(second)
    desk.token(second, finish="stop")
    assert [action.owner for action in desk.all(actions.Deliver)] == [owner]
    assert desk.history_holds()


def test_a_worker_that_dies_loses_nobody_who_waits() -> None:
    desk = SharedDesk()
    desk.call("rare")
    desk.call("qwen3")
    desk.tell(events.WorkerEnded("board0", 1, "died"))
    assert desk.failures() == [] and desk.waits() == {"rare": 1, "qwen3": 1}


def test_more_than_the_limit_is_429_and_the_limit_is_per_model() -> None:
    desk = SharedDesk(parks=2)
    for _ in range(3):
        desk.call("rare")
    assert desk.failures() == [("client3", "over_capacity")]
    assert desk.waits() == {"rare": 2}


def test_a_full_worker_is_429_and_not_a_wait() -> None:
    desk = SharedDesk()
    desk.call("qwen3")
    desk.refuse(desk.sent()[0], "board0", "over_capacity", retry_after_s=1.0)
    assert desk.failures() == [("client1", "over_capacity")] and desk.waits() == {}


def test_a_client_that_leaves_and_a_deadline_end_the_wait() -> None:
    desk = SharedDesk()
    leaves = desk.call("rare")
    late = desk.ask(a_chat(stream=True, model="rare"), timeout_ms=1_000)
    desk.tell(events.ClientGone(leaves, "left"))
    assert desk.waits() == {"rare": 1}
    desk.pass_time(5_000)
    assert desk.failures() == [(late, "deadline_exceeded")] and desk.waits() == {}
    desk.turn("rare")
    assert desk.sent() == []
    assert desk.history_holds()


def test_a_board_that_will_not_come_ends_the_wait_with_503() -> None:
    desk = SharedDesk()
    owner = desk.call("rare")
    desk.parks = 0
    desk.turn("qwen3")
    assert desk.failures() == [(owner, "no_ready_worker")] and desk.waits() == {}
    assert [desk.call("rare")] and desk.failures()[-1][1] == "no_ready_worker"


def test_whose_model_was_replaced_while_it_waited_gets_the_new_one() -> None:
    desk = SharedDesk()
    desk.call("rare")
    newer = "f" * 64
    desk.turn("rare", rare=newer)
    assert [submit.digest for submit in desk.sent()] == [newer]
    assert desk.failures() == [] and desk.waits() == {}


def test_choices_of_one_call_wait_and_go_together() -> None:
    desk = SharedDesk()
    desk.ask(a_chat(model="rare", n=3))
    assert desk.waits() == {"rare": 3}
    desk.turn("rare")
    assert len(desk.sent()) == 3


def test_a_call_too_large_for_the_parking_leaves_nothing_behind() -> None:
    desk = SharedDesk(parks=2)
    desk.ask(a_chat(model="rare", n=3))
    assert desk.failures() == [("client1", "over_capacity")] and desk.waits() == {}
    assert desk.dispatcher.inflight == 0


@pytest.mark.parametrize("slept_s", [0, 60])
def test_waits_survive_the_wire(slept_s: int) -> None:
    wait = {"rare": wire.ModelWait(3, slept_s * S)}
    report = wire.RouterReport(1, 2, wire.PROTOCOL, 3, waiting=wait)
    kind, body = wire.encode(report)
    assert wire.decode(kind, body) == report
    assert msgspec.structs.asdict(report)["waiting"]["rare"].count == 3
