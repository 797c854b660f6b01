"""Questions about tokens: any worker will do, and each gets its answer or its error once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders_router import DIGEST, Desk, a_board

from calculet_core import wire
from calculet_core.clock import MS
from calculet_core.errors import CalculetError
from calculet_router import actions, events
from calculet_router.lookups import Lookups, Question, parse_detokenize, parse_tokenize


class Table(Desk):
    """A desk that also answers questions."""

    def __init__(self, *boards: str, **config: Any) -> None:
        super().__init__(*boards, **config)
        self.lookups = Lookups(self.config, self.dispatcher.roster, self.dispatcher.aliases, self.dispatcher.tenants)

    def tell_lookups(self, event: events.Event) -> list[actions.Action]:
        return self.lookups.handle(event, self.clock.now_ns())

    def question(self, owner: str = "client", **fields: Any) -> tuple[str, wire.Lookup]:
        question = parse_tokenize(json.dumps({"model": "qwen3", "prompt": "hi", **fields}).encode())
        (action,) = self.tell_lookups(events.LookupAsked(owner, question, self.dispatcher.tenants.anonymous))
        if not isinstance(action, actions.Send):
            raise AssertionError(action)
        assert isinstance(action.message, wire.Lookup)
        return action.board, action.message

    def answer(self, board: str, message: wire.Lookup, **fields: Any) -> list[actions.Action]:
        return self.tell_lookups(events.LookupAnswered(board, 1, wire.LookupAnswer(message.request_id, 1, **fields)))


def failed(found: list[actions.Action]) -> str:
    (action,) = found
    assert isinstance(action, actions.Fail)
    return action.error.code


def test_a_question_goes_to_one_worker_and_its_answer_back() -> None:
    table = Table("board0")
    board, message = table.question(return_token_strs=True)
    assert (board, message.digest, message.prompt.text if message.prompt else None, message.want_pieces) == ("board0", DIGEST, "hi", True)
    (told,) = table.answer(board, message, token_ids=[104, 105], pieces=[b"h", b"\xff"])
    assert isinstance(told, actions.Told) and told.owner == "client"
    assert json.loads(told.body) == {"count": 2, "max_model_len": 40_960, "tokens": [104, 105], "token_strs": ["h", "\ufffd"]}
    assert len(table.lookups) == 0
    assert isinstance(table.answer(board, message)[0], actions.Ignored), "a second answer is nobody's"


def test_it_goes_elsewhere_when_its_worker_ends_or_has_another_artifact() -> None:
    table = Table("board0", "board1")
    first, message = table.question()
    (again,) = table.tell_lookups(events.WorkerEnded(first, 1, "died"))
    assert isinstance(again, actions.Send) and again.board != first
    stale = wire.ErrorInfo("stale_view", "another artifact")
    assert failed(table.answer(again.board, message, error=stale)) == "stale_view"
    assert len(table.lookups) == 0


def test_a_late_answer_of_the_first_worker_is_nobodys() -> None:
    table = Table("board0", "board1")
    first, message = table.question()
    table.tell_lookups(events.WorkerEnded(first, 1, "died"))
    assert isinstance(table.answer(first, message, token_ids=[1])[0], actions.Ignored)
    assert len(table.lookups) == 1


def test_an_error_that_is_its_own_goes_to_the_client() -> None:
    table = Table("board0", "board1")
    board, message = table.question()
    assert failed(table.answer(board, message, error=wire.ErrorInfo("invalid_value", "no", "prompt"))) == "invalid_value"


def test_time_ends_it() -> None:
    table = Table("board0", lookup_timeout_ms=500)
    table.question()
    assert table.tell_lookups(events.TimePassed()) == []
    table.clock.advance(500 * MS)
    assert failed(table.tell_lookups(events.TimePassed())) == "no_ready_worker"


def test_a_router_that_stood_still_gives_the_answer_its_time() -> None:
    table = Table("board0", lookup_timeout_ms=500)
    table.question()
    table.clock.advance(60_000 * MS)
    assert table.tell_lookups(events.Overslept(60_000 * MS)) == []
    assert table.tell_lookups(events.TimePassed()) == []
    table.clock.advance(500 * MS)
    assert failed(table.tell_lookups(events.TimePassed())) == "no_ready_worker"


def test_their_number_is_bounded_and_without_workers_there_is_no_answer() -> None:
    table = Table("board0", max_lookups=1)
    table.question()
    asked = events.LookupAsked("x", Question("qwen3"), table.dispatcher.tenants.anonymous)
    assert failed(table.tell_lookups(asked)) == "over_capacity"
    assert failed(Table().tell_lookups(asked)) == "no_ready_worker"
    unknown = events.LookupAsked("x", Question("nope"), table.dispatcher.tenants.anonymous)
    assert failed(table.tell_lookups(unknown)) == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m"}', "prompt"),
        (b'{"model":"m","prompt":"a","messages":[{"role":"user","content":"a"}]}', "prompt"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":[{"role":"user","content":"a"}],"add_generation_prompt":false}', "add_generation_prompt"),
        (b'{"prompt":"a"}', "model"),
    ],
)
def test_a_bad_question_names_the_parameter(body: bytes, param: str) -> None:
    with pytest.raises(CalculetError) as caught:
        parse_tokenize(body)
    assert caught.value.param == param and caught.value.http_status == 400


def test_ids_are_checked_before_they_go_anywhere() -> None:
    assert parse_detokenize(b'{"model":"m","tokens":[1,2]}').token_ids == (1, 2)
    for body in (b'{"model":"m","tokens":[-1]}', b'{"model":"m","tokens":"x"}', b'{"model":"m"}'):
        with pytest.raises(CalculetError) as caught:
            parse_detokenize(body)
        assert (caught.value.param or "").startswith("tokens")


def test_while_an_alias_has_two_artifacts_the_other_ones_boards_answer_when_its_own_are_gone() -> None:
    table = Table()
    green = "e" * 64
    first = wire.AliasView("qwen3", DIGEST, 40_960, 1)
    both = wire.AliasView("qwen3", DIGEST, 40_960, 1, other=wire.AliasView("qwen3", green, 40_960, 1), share=0.5)
    table.tell(events.ViewPublished(wire.FleetView(1, [a_board("board0", digest=green)], [both])))
    table.hello("board0", digest=green)
    assert table.question()[1].digest == green
    table.tell(events.ViewPublished(wire.FleetView(2, [a_board("board0", digest=green)], [first])))
    asked = events.LookupAsked("x", Question("qwen3"), table.dispatcher.tenants.anonymous)
    assert failed(table.tell_lookups(asked)) == "no_ready_worker"
