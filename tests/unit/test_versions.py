"""An alias moves from one artifact to another: every answer is from exactly one of them, and nobody's request is lost to it."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from builders_router import DIGEST, Desk, a_board, a_text, a_view

from calculet_core import history, wire
from calculet_core.history import Event
from calculet_core.wire import bucket_ms, bucket_of
from calculet_router import actions, events
from calculet_router.versions import Tally

GREEN = "9" * 64


def a_mixed_view(*boards: wire.BoardView, version: int, share: float, digest: str = DIGEST, temperature: float | None = None) -> wire.FleetView:
    view = a_view(*boards, version=version, digest=digest)
    other = msgspec.structs.replace(view.aliases[0], digest=GREEN, temperature=temperature)
    return msgspec.structs.replace(view, aliases=[msgspec.structs.replace(view.aliases[0], other=other, share=share)])


def two_versions(share: float) -> Desk:
    """board0 serves blue, board1 green."""
    desk = Desk("board0")
    desk.tell(events.ViewPublished(a_mixed_view(a_board(), a_board("board1", digest=GREEN, generation=8), version=2, share=share)))
    desk.hello("board1", digest=GREEN, generation=8)
    return desk


def swap(desk: Desk, version: int = 3) -> None:
    """The alias has moved: board0 leaves blue, board1 serves green."""
    boards = (a_board(draining=True), a_board("board1", digest=GREEN, generation=8))
    desk.tell(events.ViewPublished(a_view(*boards, version=version, digest=GREEN)))
    desk.hello("board1", digest=GREEN, generation=8)


# ---------------------------------------------------------------- shares
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_share_of_new_requests_goes_to_the_second_artifact_evenly_spread(share: float) -> None:
    desk = two_versions(share)
    for _ in range(100):
        desk.ask()
    digests = [submit.digest for submit in desk.sent()]
    assert abs(digests.count(GREEN) - 100 * share) <= 1
    places = [place for place, digest in enumerate(digests) if digest == GREEN]
    assert max(later - earlier for earlier, later in pairwise(places)) <= 1 / share + 1


def test_a_share_without_a_board_to_serve_it_is_served_by_the_first_artifact_and_the_other_way_round() -> None:
    desk = Desk("board0")
    desk.tell(events.ViewPublished(a_mixed_view(a_board(), version=2, share=0.5)))
    for _ in range(4):
        desk.ask()
    assert {submit.digest for submit in desk.sent()} == {DIGEST} and len(desk.sent()) == 4
    desk.tell(events.ViewPublished(a_mixed_view(a_board(digest=GREEN, generation=8), version=3, share=0.1)))
    desk.hello("board0", digest=GREEN, generation=8)
    desk.ask()
    assert desk.sent()[-1].digest == GREEN and desk.failures() == []


# ---------------------------------------------------------------- one artifact for one answer
def test_the_alias_moves_at_once_and_what_runs_ends_where_it_began() -> None:
    desk = Desk("board0")
    desk.ask()
    (old,) = desk.sent()
    desk.accept(old)
    desk.token(old)
    swap(desk)
    desk.ask()
    assert desk.sent()[-1].digest == GREEN
    desk.token(old, finish="stop", usage=wire.Usage(3, 2))
    assert desk.failures() == [] and len(desk.sent()) == 2


def test_a_request_that_waited_where_blue_left_begins_anew_on_green() -> None:
    desk = Desk("board0")
    desk.ask()
    (old,) = desk.sent()
    swap(desk)
    desk.refuse(old, "board0", "model_draining")
    new = desk.sent()[-1]
    assert (new.digest, new.generation, new.attempt) == (GREEN, 8, 2) and desk.board_of(new) == "board1"
    assert desk.failures() == []


def test_a_board_that_refused_as_blue_may_get_it_again_as_green() -> None:
    desk = Desk("board0")
    desk.ask()
    (old,) = desk.sent()
    desk.tell(events.ViewPublished(a_view(a_board(digest=GREEN, generation=8), version=2, digest=GREEN)))
    desk.hello("board0", digest=GREEN, generation=8)
    desk.refuse(old, "board0", "stale_view")
    assert desk.sent()[-1].digest == GREEN and desk.failures() == []


def test_nothing_begins_anew_once_something_was_written() -> None:
    desk = Desk("board0")
    client = desk.ask()
    (old,) = desk.sent()
    desk.accept(old)
    desk.token(old)
    swap(desk)
    desk.tell(events.WorkerEnded("board0", 1, "died"))
    assert desk.failures() == [(client, "worker_lost")]
    assert len(desk.sent()) == 1


def test_all_choices_of_a_call_move_together() -> None:
    desk = Desk("board0")
    desk.ask(a_text(n=3))
    old = desk.sent()
    desk.accept(old[0])
    desk.token(old[0], text="blue")
    swap(desk)
    desk.refuse(old[1], "board0", "model_draining")
    new = desk.sent()[3:]
    assert [submit.digest for submit in new] == [GREEN] * 3
    assert {cancel.request_id for cancel in desk.cancels("board0")} == {old[0].request_id, old[2].request_id}
    assert [action.index for action in desk.all(actions.Restart)] == [0], "what was kept of the blue answer is thrown away"
    for submit in new:
        desk.token(submit, "board1", finish="stop", usage=wire.Usage(3, 1))
    assert desk.failures() == [] and desk.dispatcher.inflight == 0


def test_two_artifacts_that_are_both_full_end_in_429() -> None:
    desk = two_versions(0.5)
    client = desk.ask()
    for _ in range(2):
        submit = desk.sent()[-1]
        desk.refuse(submit, desk.board_of(submit), "over_capacity", retry_after_s=3)
    assert desk.failures() == [(client, "over_capacity")]
    assert len(desk.sent()) == 2
    moves = [event for event in desk.done if isinstance(event, Event) and event.event == history.REQUEST_MOVED]
    assert len(moves) == 1, "it does not go back to who was full"


def test_the_defaults_of_the_artifact_that_answers_hold() -> None:
    desk = two_versions(0.5)
    desk.tell(events.ViewPublished(a_mixed_view(a_board(), a_board("board1", digest=GREEN, generation=8), version=4, share=0.5, temperature=0.25)))
    for _ in range(2):
        desk.ask()
    temperatures = {submit.digest: submit.sampling.temperature for submit in desk.sent()}
    assert temperatures[GREEN] == 0.25 != temperatures[DIGEST]


# ---------------------------------------------------------------- evidence
def test_both_artifacts_are_counted_while_there_are_two() -> None:
    desk = two_versions(0.5)
    for _ in range(4):
        desk.ask()
    for submit in desk.sent():
        board = desk.board_of(submit)
        desk.accept(submit, board)
        desk.clock.advance(10_000_000)
        desk.token(submit, board)
        desk.clock.advance(4_000_000)
        desk.token(submit, board, finish="stop", usage=wire.Usage(3, 3))
    reports = {report.digest: report for report in desk.dispatcher.tally.reports()}
    assert reports[DIGEST].requests == reports[GREEN].requests == 2
    assert sum(reports[GREEN].first.values()) == 2 and set(reports[GREEN].between) == {bucket_of(2.0)}


def test_a_request_that_green_lost_counts_against_green_although_blue_answered_it() -> None:
    desk = two_versions(0.99)
    desk.ask()
    desk.ask()
    green = desk.sent()[-1]
    assert green.digest == GREEN
    desk.tell(events.WorkerEnded("board1", 1, "died"))
    assert desk.sent()[-1].digest == DIGEST and desk.failures() == []
    assert {report.digest: report.failed for report in desk.dispatcher.tally.reports()} == {GREEN: 1}


def test_buckets_are_an_eighth_of_an_octave_and_old_artifacts_are_forgotten() -> None:
    for ms in (0.001, 0.5, 1, 7, 900, 60_000):
        assert ms <= bucket_ms(bucket_of(ms)) <= ms * 1.1 + 1e-6
    tally = Tally()
    for number in range(20):
        tally.add(f"{number}", False, 0, 1, 2, 2)
    assert len(tally.reports()) == 8
