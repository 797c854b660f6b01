"""A fault that follows an artifact is the artifact's, one that stays is the board's, and many at once are nobody's."""

from __future__ import annotations

from calculet_supervisor.attribution import Attribution, Failure, counts_as_failure
from calculet_supervisor.breaker import Breaker

D, E = "d" * 64, "e" * 64


def seen(*failures: tuple[str, str, float]) -> Attribution:
    attribution = Attribution()
    for board, digest, at_s in failures:
        attribution.add(Failure(board, digest, "golden", at_s))
    return attribution


def test_one_failure_tells_nothing() -> None:
    assert seen(("board0", D, 0)).blame("board0", D, ["board1"], 1) is None
    assert seen(("board0", D, 0)).blame("board0", D, [], 1) is None


def test_a_fault_that_follows_the_artifact_to_a_second_board_sets_the_artifact_aside() -> None:
    blame = seen(("board0", D, 0), ("board1", D, 60)).blame("board1", D, [], 60)
    assert blame is not None and blame.artifact and "on board1 and on board0" in blame.reason


def test_an_artifact_that_others_serve_is_not_set_aside() -> None:
    assert seen(("board0", D, 0), ("board1", D, 60)).blame("board1", D, ["board2"], 60) is None


def test_a_fault_that_stays_after_two_failures_condemns_the_board_when_others_serve_the_same() -> None:
    failures = [("board0", D, 0.0), ("board0", D, 60.0), ("board0", D, 120.0)]
    assert seen(*failures[:2]).blame("board0", D, ["board1"], 60) is None
    blame = seen(*failures).blame("board0", D, ["board1"], 120)
    assert blame is not None and not blame.artifact and blame.board == "board0" and "board1 serves the same" in blame.reason
    assert seen(*failures).blame("board0", D, [], 120) is None, "nobody else serves it: nothing tells the two apart"


def test_failures_of_another_artifact_and_of_long_ago_do_not_count() -> None:
    assert seen(("board0", E, 0), ("board0", E, 1), ("board0", D, 2)).blame("board0", D, ["board1"], 2) is None
    assert seen(("board0", D, 0), ("board0", D, 1), ("board0", D, 4_000)).blame("board0", D, ["board1"], 4_000) is None


def test_what_an_operator_forgives_is_forgotten() -> None:
    attribution = seen(("board0", D, 0), ("board1", D, 1), ("board1", E, 2))
    assert attribution.failed_on(D) == ("board0", "board1")
    attribution.forget(board="board0")
    assert attribution.failed_on(D) == ("board1",)
    attribution.forget(digest=E)
    assert [failure.digest for failure in attribution.failures] == [D]


def test_a_busy_board_is_no_failure() -> None:
    assert [counts_as_failure(kind) for kind in (None, "device_busy", "wait_timeout", "other")] == [False, False, True, True]


# ------------------------------------------------------------------------------------------------ the breaker
def test_half_the_boards_within_five_minutes_open_the_breaker_until_an_operator_closes_it() -> None:
    breaker = Breaker(4, 0.5, 300)
    assert breaker.bad("board0", 0) is None
    assert breaker.bad("board0", 10) is None, "the same board twice is one board"
    assert breaker.bad("board1", 200) == "2 of 4 boards went bad within 300 s: board0, board1"
    assert breaker.bad("board2", 201) is None, "it is said once"
    assert breaker.reason is not None
    breaker.close()
    assert breaker.reason is None and breaker.bad("board3", 9_999) is None


def test_slow_failures_and_a_single_board_never_open_it() -> None:
    breaker = Breaker(4, 0.5, 300)
    for number in range(8):
        assert breaker.bad(f"board{number % 4}", number * 301.0) is None
    assert Breaker(1, 0.5, 300).bad("board0", 0) is None
    small = Breaker(2, 0.5, 300)
    assert small.bad("board0", 0) is None and small.bad("board1", 1) is not None
