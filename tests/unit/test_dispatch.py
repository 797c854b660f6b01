"""Who gets a request, what becomes of it when a worker fails it, and when the client hears of what."""

from __future__ import annotations

import pytest
from builders_router import DIGEST, Desk, a_board, a_chat, a_text, a_view

from calculet_core import history, wire
from calculet_core.clock import MS
from calculet_core.config import TenantConfig
from calculet_core.history import Checker, Event
from calculet_core.ids import parse_request_id
from calculet_router import actions, events
from calculet_router.retry import RETRY, Trouble

WHOLE = a_chat()
STREAM = a_chat(stream=True)


def texts(desk: Desk) -> list[str]:
    return [action.piece.text for action in desk.all(actions.Deliver)]


def journal(desk: Desk) -> list[Event]:
    return [action for action in desk.done if isinstance(action, Event)]


def check_history(desk: Desk) -> None:
    checker = Checker()
    for event in journal(desk):
        checker.see(event)
    assert checker.finish() == []


# ---------------------------------------------------------------- the plain way
def test_a_call_gets_an_id_is_sent_answered_and_journalled() -> None:
    desk = Desk("board0")
    client = desk.ask(STREAM, label="mine")
    submit = desk.sent()[0]
    assert (submit.attempt, submit.epoch, submit.generation, submit.digest, submit.tenant) == (1, 1, 7, DIGEST, "default")
    opened = desk.all(actions.Opened)[0]
    assert parse_request_id(f"chatcmpl-{opened.ticket.name}") == submit.request_id and opened.ticket.digest == DIGEST
    desk.accept(submit)
    assert desk.all(actions.Admitted) == [actions.Admitted(client)]
    desk.token(submit, text="a")
    desk.token(submit, text="b", finish="stop", usage=wire.Usage(3, 2))
    assert texts(desk) == ["a", "b"]
    names = [event.event for event in journal(desk)]
    assert names == [history.REQUEST_ACCEPTED, history.REQUEST_SENT, history.REQUEST_TOKENS, history.REQUEST_DONE]
    assert journal(desk)[0].data == {"model": "qwen3", "tenant": "default", "label": "mine"}
    assert journal(desk)[-1].data == {"outcome": "completed", "prompt_tokens": 3, "tokens": 2}
    ended = desk.all(actions.Ended)[0]
    assert (ended.outcome, ended.prompt_tokens, ended.generated_tokens) == ("completed", 3, 2)
    assert desk.dispatcher.inflight == desk.dispatcher.calls == 0
    check_history(desk)


def test_ids_are_never_reused_and_choices_have_their_own() -> None:
    desk = Desk("board0")
    desk.ask(a_text(prompt=["p", "q"], n=2, seed=5))
    desk.ask()
    assert len({submit.request_id for submit in desk.sent()}) == 5
    assert [submit.prompt.text for submit in desk.sent()[:4]] == ["p", "p", "q", "q"]
    assert [submit.sampling.seed for submit in desk.sent()[:4]] == [5, 6, 5, 6], "answers to one prompt differ"


def test_usage_of_several_choices_counts_a_prompt_once() -> None:
    desk = Desk("board0")
    desk.ask(a_text(n=2))
    for submit in desk.sent():
        desk.token(submit, finish="stop", usage=wire.Usage(10, 4))
    ended = desk.all(actions.Ended)
    assert [(one.prompt_tokens, one.generated_tokens) for one in ended] == [(10, 8)]


def test_a_burst_is_spread_and_reports_correct_the_guess() -> None:
    desk = Desk("board0", "board1")
    for _ in range(10):
        desk.ask()
    assert len(desk.sent("board0")) == len(desk.sent("board1")) == 5
    desk.tick("board0", load=wire.Load(5, 16, 0, 0, 90_000.0))
    for _ in range(4):
        desk.ask()
    assert len(desk.sent("board1")) == 9


def test_deadlines_are_the_default_or_what_was_asked_up_to_the_maximum() -> None:
    desk = Desk("board0")
    now = desk.clock.now_ns()
    desk.ask()
    desk.ask(timeout_ms=1_500)
    desk.ask(timeout_ms=10**9)
    assert [(submit.deadline_ns - now) // 10**6 for submit in desk.sent()] == [120_000, 1_500, 600_000]
    assert [submit.deadline_asked for submit in desk.sent()] == [False, True, True]


# ---------------------------------------------------------------- nobody can
def test_an_unknown_model_is_404_and_a_known_one_without_workers_503() -> None:
    desk = Desk()
    desk.ask(a_chat(model="gpt-9"))
    desk.ask()
    assert [code for _, code in desk.failures()] == ["model_not_found", "no_ready_worker"]
    desk.tell(events.ViewPublished(a_view(a_board(state="WARMING"), version=2)))
    desk.ask()
    assert desk.failures()[-1][1] == "no_ready_worker"
    assert all(action.error.retry_after_s for action in desk.all(actions.Fail)[1:])


def test_429_comes_only_after_every_eligible_worker_has_refused_with_the_smallest_retry_after() -> None:
    desk = Desk("board0", "board1")
    client = desk.ask()
    first = desk.sent()[0]
    desk.refuse(first, desk.board_of(first), "over_capacity", retry_after_s=9)
    assert desk.failures() == []
    second = desk.sent()[1]
    assert second.attempt == 2 and desk.board_of(second) != desk.board_of(first)
    desk.refuse(second, desk.board_of(second), "over_capacity", retry_after_s=3)
    assert desk.failures() == [(client, "over_capacity")]
    assert desk.all(actions.Fail)[0].error.retry_after_s == 3
    assert desk.dispatcher.inflight == 0
    check_history(desk)


def test_a_refusal_that_is_the_requests_own_fault_goes_nowhere_else() -> None:
    desk = Desk("board0", "board1")
    client = desk.ask()
    submit = desk.sent()[0]
    desk.refuse(submit, desk.board_of(submit), "context_length_exceeded", retryable=False)
    assert desk.failures() == [(client, "context_length_exceeded")]
    assert len(desk.sent()) == 1


def test_a_full_worker_beside_a_recovering_one_is_429() -> None:
    desk = Desk("board0", "board1")
    desk.ask()
    for code in ("over_capacity", "model_recovering"):
        submit = desk.sent()[-1]
        desk.refuse(submit, desk.board_of(submit), code)
    assert [code for _, code in desk.failures()] == ["over_capacity"]


def test_too_many_in_flight_is_429_naming_the_limit() -> None:
    desk = Desk("board0", max_inflight_requests=2)
    desk.ask(a_text(n=2))
    desk.ask()
    error = desk.all(actions.Fail)[0].error
    assert error.code == "over_capacity" and "max_inflight_requests" in error.message


def test_a_tenants_rate_and_actives_are_kept_and_given_back() -> None:
    desk = Desk("board0", tenant=TenantConfig(name="default", requests_per_s=2, max_active=3))
    desk.ask()
    desk.ask()
    desk.ask()
    assert desk.failures()[-1][1] == "tenant_rate_limited"
    assert 0 < desk.all(actions.Fail)[-1].error.retry_after_s <= 0.5
    desk.clock.advance(10**9)
    desk.ask(a_text(n=2))
    assert desk.failures()[-1][1] == "tenant_quota"
    for submit in desk.sent():
        desk.token(submit, finish="stop")
    desk.ask(a_text(n=2))
    assert len(desk.failures()) == 2


# ---------------------------------------------------------------- workers that fail
def test_a_lost_worker_before_the_first_token_costs_the_client_nothing() -> None:
    desk = Desk("board0", "board1")
    client = desk.ask(STREAM)
    submit = desk.sent()[0]
    lost = desk.board_of(submit)
    desk.accept(submit, lost)
    desk.tell(events.WorkerEnded(lost, 1, "died"))
    again = desk.sent()[1]
    assert (again.request_id, again.attempt) == (submit.request_id, 2) and desk.board_of(again) != lost
    desk.token(again, desk.board_of(again), finish="stop")
    assert desk.failures() == [] and desk.all(actions.Deliver)[0].owner == client
    assert desk.all(actions.Resent) == [actions.Resent("worker_lost")]
    check_history(desk)


def test_a_lost_worker_after_the_first_written_token_is_an_error() -> None:
    desk = Desk("board0", "board1")
    client = desk.ask(STREAM)
    submit = desk.sent()[0]
    board = desk.board_of(submit)
    desk.token(submit, board)
    desk.tell(events.WorkerEnded(board, 1, "died"))
    assert desk.failures() == [(client, "worker_lost")]
    assert len(desk.sent()) == 1


def test_generated_but_unwritten_tokens_do_not_forbid_a_resend() -> None:
    desk = Desk("board0", "board1")
    desk.ask(STREAM)
    submit = desk.sent()[0]
    board = desk.board_of(submit)
    desk.token(submit, board, text="")
    desk.tell(events.WorkerEnded(board, 1, "died"))
    assert len(desk.sent()) == 2 and desk.failures() == []
    again = desk.sent()[1]
    desk.token(again, desk.board_of(again), finish="stop")
    assert journal(desk)[-1].data["tokens"] == 1, "tokens of the lost attempt are not the client's"


def test_a_whole_answer_starts_again_until_it_is_complete() -> None:
    desk = Desk("board0", "board1")
    client = desk.ask(WHOLE)
    submit = desk.sent()[0]
    desk.token(submit, desk.board_of(submit), text="half")
    desk.tell(events.WorkerEnded(desk.board_of(submit), 1, "died"))
    assert desk.all(actions.Restart) == [actions.Restart(client, 0)]
    again = desk.sent()[1]
    desk.token(again, desk.board_of(again), text="whole", finish="stop")
    assert desk.failures() == []


def test_a_request_that_outlives_two_resends_is_suspected_poison() -> None:
    desk = Desk("board0", "board1", "board2", "board3")
    client = desk.ask(STREAM)
    for _ in range(3):
        desk.tell(events.WorkerEnded(desk.board_of(desk.sent()[-1]), 1, "died"))
    assert len(desk.sent()) == 3
    assert desk.failures() == [(client, "worker_lost")]
    assert journal(desk)[-1].data["suspected_poison"] is True
    assert desk.all(actions.Fail)[0].error.retry_after_s is not None


def test_only_the_dead_workers_requests_move() -> None:
    desk = Desk("board0", "board1")
    for _ in range(4):
        desk.ask(STREAM)
    desk.tell(events.WorkerEnded("board0", 1, "died"))
    moved = [submit for submit in desk.sent() if submit.attempt == 2]
    assert {submit.request_id for submit in moved} == {submit.request_id for submit in desk.sent("board0")}
    assert {desk.board_of(submit) for submit in moved} == {"board1"}


def test_an_unanswered_admission_goes_elsewhere_and_is_cancelled_where_it_was() -> None:
    desk = Desk("board0", "board1", accept_timeout_ms=3_000)
    client = desk.ask()
    submit = desk.sent()[0]
    board = desk.board_of(submit)
    desk.pass_time(2_999)
    assert len(desk.sent()) == 1
    desk.pass_time(1)
    assert [(cancel.request_id, cancel.attempt) for cancel in desk.cancels(board)] == [(submit.request_id, 1)]
    second = desk.sent()[1]
    assert desk.board_of(second) != board
    desk.pass_time(3_000)
    assert desk.failures() == [(client, "no_ready_worker")]


def test_an_accepted_request_may_wait_longer_than_the_acceptance_deadline() -> None:
    desk = Desk("board0", "board1", accept_timeout_ms=3_000, worker_silence_ms=60_000)
    desk.ask()
    submit = desk.sent()[0]
    desk.accept(submit, desk.board_of(submit))
    desk.pass_time(10_000)
    assert len(desk.sent()) == 1


def test_a_submission_that_the_link_cannot_take_goes_elsewhere_and_nobody_else_follows_it() -> None:
    desk = Desk("board0", "board1")
    desk.ask()
    submit = desk.sent()[0]
    board = desk.board_of(submit)
    desk.tell(events.Unsent(board, 1, submit.request_id, submit.attempt))
    assert desk.board_of(desk.sent()[1]) != board
    desk.ask()
    assert desk.board_of(desk.sent()[2]) != board
    desk.tell(events.Unsent(board, 1, submit.request_id, submit.attempt))
    assert len(desk.sent()) == 3, "the first attempt is over: nothing follows from it twice"


def test_a_failed_attempt_moves_when_it_is_the_workers_fault_and_nothing_was_written() -> None:
    desk = Desk("board0", "board1")
    desk.ask(STREAM)
    submit = desk.sent()[0]
    board = desk.board_of(submit)
    desk.token(submit, board, text="", error=wire.ErrorInfo("model_recovering", "rc 13"))
    assert desk.board_of(desk.sent()[1]) != board and desk.failures() == []


@pytest.mark.parametrize("code", ["bad_output", "artifact_rejected", "deadline_exceeded", "code_of_a_newer_peer"])
def test_a_failure_that_would_repeat_is_the_clients(code: str) -> None:
    desk = Desk("board0", "board1")
    desk.ask(STREAM)
    submit = desk.sent()[0]
    desk.token(submit, desk.board_of(submit), text="", error=wire.ErrorInfo(code, "no"))
    assert len(desk.failures()) == 1 and len(desk.sent()) == 1


def test_a_gap_in_the_sequence_is_counted_and_fails_over_what_was_in_flight() -> None:
    desk = Desk("board0")
    begun, fresh = desk.ask(STREAM), desk.ask(STREAM)
    first, second = desk.sent()
    desk.token(first)
    desk.tick(seq=3, pieces=[wire.Piece(first.request_id, 1, 1, "after the gap")])
    assert [(lost.expected, lost.got) for lost in desk.all(actions.LostMessages)] == [(2, 3)]
    assert desk.failures() == [(begun, "worker_lost")]
    assert texts(desk) == ["x"]
    again = desk.sent()[2]
    assert (again.request_id, again.attempt) == (second.request_id, 2), "the worker lives: it may have it again"
    assert {cancel.request_id for cancel in desk.cancels()} == {first.request_id, second.request_id}
    desk.token(again, finish="stop")
    assert [action.owner for action in desk.all(actions.Deliver)][-1] == fresh


def test_a_first_tick_that_is_lost_is_a_gap_too() -> None:
    desk = Desk()
    desk.tell(events.ViewPublished(a_view(a_board("board0"))))
    desk.hello("board0", seq=4)
    client = desk.ask(STREAM)
    submit = desk.sent()[0]
    desk.tick(seq=6, accepted=[wire.Acceptance(submit.request_id, 1, 3, 10)], pieces=[wire.Piece(submit.request_id, 1, 1, "second")])
    assert [(lost.expected, lost.got) for lost in desk.all(actions.LostMessages)] == [(5, 6)]
    assert texts(desk) == [], "the first token is missing"
    again = desk.sent()[1]
    assert (again.request_id, again.attempt) == (submit.request_id, 2)
    desk.hello("board0", seq=6)
    desk.token(again, text="x", finish="stop")
    assert [action.owner for action in desk.all(actions.Deliver)] == [client]
    assert len(desk.all(actions.LostMessages)) == 1, "a later greeting says nothing new"


def test_a_silent_worker_loses_what_it_has_not_begun() -> None:
    desk = Desk("board0", "board1", worker_silence_ms=5_000)
    desk.ask(STREAM)
    desk.ask(STREAM)
    one, other = desk.sent()
    desk.token(one, desk.board_of(one))
    desk.accept(other, desk.board_of(other))
    desk.clock.advance(5_001 * 10**6)
    desk.tick(desk.board_of(one))
    desk.tell(events.TimePassed())
    assert [submit.request_id for submit in desk.sent()[2:]] == [other.request_id]
    assert desk.board_of(desk.sent()[2]) == desk.board_of(one)


def test_a_replaced_worker_is_a_lost_worker() -> None:
    desk = Desk("board0", "board1")
    desk.ask(STREAM)
    board = desk.board_of(desk.sent()[0])
    other = "board1" if board == "board0" else "board0"
    desk.tell(events.ViewPublished(a_view(a_board(board, epoch=2), a_board(other), version=2)))
    assert desk.board_of(desk.sent()[1]) == other


# ---------------------------------------------------------------- late and foreign messages
def test_messages_of_a_past_attempt_are_dropped_and_counted() -> None:
    desk = Desk("board0", "board1")
    desk.ask(STREAM)
    submit = desk.sent()[0]
    board = desk.board_of(submit)
    desk.pass_time(3_000)
    late = wire.Acceptance(submit.request_id, 1, 3, 9)
    refused = wire.Refusal(submit.request_id, 1, wire.ErrorInfo("over_capacity", "full"), True)
    desk.tick(board, pieces=[wire.Piece(submit.request_id, 1, 1, "ghost")], accepted=[late], refused=[refused])
    assert texts(desk) == [] and len(desk.sent()) == 2
    assert desk.all(actions.Ignored) == [actions.Ignored("late", 3)]


def test_messages_of_another_life_are_ignored() -> None:
    desk = Desk("board0")
    desk.ask(STREAM)
    submit = desk.sent()[0]
    desk.tell(events.TickArrived("board0", 9, wire.Tick(9, 1, [wire.Piece(submit.request_id, 1, 1, "ghost")])))
    desk.tell(events.TickArrived("board0", 1, wire.Tick(9, 1, [wire.Piece(submit.request_id, 1, 1, "ghost")])))
    assert texts(desk) == [] and len(desk.all(actions.Ignored)) == 2


def test_nothing_is_delivered_after_a_terminal() -> None:
    desk = Desk("board0")
    desk.ask(STREAM)
    submit = desk.sent()[0]
    desk.token(submit, finish="stop")
    desk.token(submit, text="ghost")
    assert texts(desk) == ["x"]
    check_history(desk)


# ---------------------------------------------------------------- clients that leave, time that passes
def test_a_client_that_leaves_cancels_at_once_in_every_state() -> None:
    for steps in range(3):
        desk = Desk("board0")
        client = desk.ask(STREAM)
        submit = desk.sent()[0]
        if steps > 0:
            desk.accept(submit)
        if steps > 1:
            desk.token(submit)
        desk.tell(events.ClientGone(client, "client left"))
        assert desk.cancels() == [wire.Cancel(submit.request_id, 1, 1, "client left")]
        desk.tell(events.ClientGone(client, "client left"))
        assert len(desk.cancels()) == 1 and desk.dispatcher.inflight == 0
        assert journal(desk)[-1].data["outcome"] == "cancelled"
        assert desk.dispatcher.roster.workers["board0"].flights == {}
        check_history(desk)


def test_all_choices_of_a_client_that_leaves_are_cancelled() -> None:
    desk = Desk("board0", "board1")
    client = desk.ask(a_text(n=3, stream=True))
    desk.token(desk.sent()[0], desk.board_of(desk.sent()[0]), finish="stop")
    desk.tell(events.ClientGone(client, "its output buffer was full", "slow_reader"))
    assert {cancel.request_id for cancel in desk.cancels()} == {submit.request_id for submit in desk.sent()[1:]}
    assert journal(desk)[-1].data["code"] == "slow_reader"


def test_a_choice_that_fails_ends_its_call_and_cancels_the_others() -> None:
    desk = Desk("board0")
    client = desk.ask(a_text(n=2, stream=True))
    one, other = desk.sent()
    desk.token(one, text="", error=wire.ErrorInfo("bad_output", "NaN"))
    assert desk.failures() == [(client, "bad_output")]
    assert [cancel.request_id for cancel in desk.cancels()] == [other.request_id]
    assert desk.dispatcher.inflight == desk.dispatcher.calls == 0
    check_history(desk)


def test_a_dead_worker_cannot_hang_a_request_past_its_deadline() -> None:
    desk = Desk("board0", accept_timeout_ms=10**6, worker_silence_ms=10**6)
    client = desk.ask(STREAM, timeout_ms=1_000)
    desk.token(desk.sent()[0])
    desk.pass_time(2_900)
    assert desk.failures() == [], "the worker has a grace to say so itself"
    desk.pass_time(400)
    assert desk.failures() == [(client, "deadline_exceeded")]
    assert len(desk.cancels()) == 1


def test_loads_return_to_what_they_were() -> None:
    desk = Desk("board0", "board1")
    clients = [desk.ask(STREAM) for _ in range(6)]
    for submit in desk.sent()[:3]:
        desk.accept(submit, desk.board_of(submit))
    desk.token(desk.sent()[0], desk.board_of(desk.sent()[0]), finish="stop")
    for client in clients:
        desk.tell(events.ClientGone(client, "client left"))
    for worker in desk.dispatcher.roster.workers.values():
        assert (worker.settled, worker.unanswered, worker.flights) == (0.0, 0.0, {})


def test_the_policy_has_a_row_for_every_trouble() -> None:
    assert set(RETRY) == set(Trouble)


# ---------------------------------------------------------------- a router that stood still
def test_a_router_that_stood_still_blames_no_worker_before_it_has_read_what_was_said() -> None:
    desk = Desk("board0", worker_silence_ms=5_000, accept_timeout_ms=3_000)
    begun, waiting = desk.ask(), desk.ask()
    first, second = desk.sent()
    desk.accept(first)
    desk.clock.advance(60_000 * MS)
    desk.tell(events.Overslept(60_000 * MS))
    desk.tell(events.TimePassed())
    assert desk.failures() == [] and desk.cancels() == []
    late = desk.ask()
    assert len(desk.sent()) == 3, "who comes now is sent on, too"
    desk.accept(second)
    for submit in desk.sent():
        desk.token(submit, finish="stop")
    assert {action.owner for action in desk.all(actions.Ended) if action.outcome != "completed"} == set()
    assert {begun, waiting, late} == {action.owner for action in desk.all(actions.Deliver)}


def test_silence_after_waking_is_silence() -> None:
    desk = Desk("board0", "board1", worker_silence_ms=5_000)
    desk.ask()
    (submit,) = desk.sent()
    desk.tell(events.Overslept(60_000 * MS))
    other = "board1" if desk.board_of(submit) == "board0" else "board0"
    desk.clock.advance(60_000 * MS)
    desk.tick(other)
    desk.pass_time(5_001)
    assert [desk.board_of(sent) for sent in desk.sent()][1:] == [other]


def test_a_clients_deadline_is_its_own_however_long_the_router_stood_still() -> None:
    desk = Desk("board0")
    owner = desk.ask(timeout_ms=1_000)
    desk.clock.advance(60_000 * MS)
    desk.tell(events.Overslept(60_000 * MS))
    desk.tell(events.TimePassed())
    assert desk.failures() == [(owner, "deadline_exceeded")]


# ---------------------------------------------------------------- generations
def test_a_request_stays_with_the_generation_that_it_was_sent_to_while_its_alias_moves_on() -> None:
    desk = Desk("board0")
    desk.ask()
    (first,) = desk.sent()
    desk.accept(first)
    green = "e" * 64
    newer = a_board("board1", generation=8, digest=green)
    desk.tell(events.ViewPublished(a_view(a_board("board0"), newer, version=2, digest=green)))
    desk.hello("board1", generation=8, digest=green)
    desk.ask()
    second = desk.sent()[-1]
    assert (first.generation, first.digest, desk.board_of(first)) == (7, DIGEST, "board0")
    assert (second.generation, second.digest, desk.board_of(second)) == (8, green, "board1")
    for text in ("a", "b"):
        desk.token(first, "board0", text=text)
    desk.token(first, "board0", text="c", finish="stop")
    assert texts(desk) == ["a", "b", "c"] and desk.sent() == [first, second]
