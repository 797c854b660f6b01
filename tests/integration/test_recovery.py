"""Boards that fail are set aside and come back by words that survive the supervisor; when many fail at once, nothing automatic happens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import Fleet, Packages, until
from builders_swap import ask

from calculet_core.history import check
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.journal import read_journal
from calculet_core.shell.packages import read_package

FAULTY = {"board0": 600, "board1": 1_200}
"""Board -> its decode job that goes wrong: one is long back from its reset when the other goes bad."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    """Three boards; the first two have one CCU exception each once they have worked for a while."""
    fleet = Fleet(
        tmp_path_factory.mktemp("recovery") / "fleet", packages.get("sim-batch", "--step-ms", "1"), packages.key.with_suffix(".pub"),
        boards=3, fault_injection=True, recall={"probation_s": 1.0, "breaker_window_s": 600.0},
    )  # fmt: skip
    config = json.loads(fleet.config.read_text())
    for board in config["boards"]:
        if board["name"] in FAULTY:
            board["options"] = {"faults": [{"fault": "ccu_exception", "at": [FAULTY[board["name"]]], "job": "decode"}]}
    fleet.config.write_text(json.dumps(config))
    with fleet:
        yield fleet


def row(fleet: Fleet, board: str) -> dict[str, Any]:
    status = until(fleet.status, "the supervisor")
    return next(found for found in status["boards"] if found["board"] == board)


def weight(fleet: Fleet, board: str) -> float | None:
    view = json.loads(load_fleet(fleet.config).fleet_view.read_bytes())
    return next((found["weight"] for found in view["boards"] if found["board"] == board and found["state"] == "READY"), None)


def test_a_condemned_board_stays_aside_whoever_asks_and_comes_back_on_probation(fleet: Fleet) -> None:
    assert fleet.cli("condemn", "board2", "--reason", "it smells burnt").returncode == 0
    until(lambda: row(fleet, "board2")["pid"] is None, "its worker ends")
    assert row(fleet, "board2")["why"] == "set aside: it smells burnt"
    for verb in ("start", "restart"):
        done = fleet.cli(verb, "board2")
        assert done.returncode == 1 and "it smells burnt" in done.stderr and "calculet probation board2" in done.stderr
    assert "condemned already" in fleet.cli("condemn", "board2").stderr
    dead = fleet.kill("supervisor")
    until(lambda: fleet.pid("supervisor") not in (dead, None), "the keeper starts it again")
    until(lambda: row(fleet, "board0")["state"] == "READY", "it knows its boards")
    assert (row(fleet, "board2")["pid"], row(fleet, "board2")["condemned"]) == (None, "it smells burnt")
    assert all(fleet.completion().status == 200 for _ in range(4))
    done = fleet.cli("probation", "board2")
    assert done.returncode == 0 and "it smells burnt" in done.stdout
    until(lambda: weight(fleet, "board2") == 0.1, "a small share of work")
    assert row(fleet, "board2")["resets"] == 1, "it was reset before anything was loaded"
    until(lambda: weight(fleet, "board2") == 1.0, "it has proved itself")
    assert not row(fleet, "board2")["probation"]
    acts = [(act["verb"], act["detail"]) for act in ask(fleet, "audit")["acts"]]
    assert acts[:4] == [
        ("probation", "it has proved itself"), ("probation", "its reset is done"), ("probation", "it smells burnt"),
        ("condemn", "it smells burnt"),
    ]  # fmt: skip


def test_a_board_that_serves_is_not_reset_and_the_refusal_says_what_to_do(fleet: Fleet) -> None:
    done = fleet.cli("reset", "board2")
    assert done.returncode == 1
    assert "board2 is READY" in done.stderr and "calculet drain board2 --wait" in done.stderr
    assert fleet.cli("probation", "board2").returncode == 1


def test_when_half_the_boards_go_bad_at_once_everything_automatic_stops_until_an_operator_says_so(fleet: Fleet) -> None:
    def work() -> bool:
        assert fleet.completion("x" * 40, max_tokens=60).status == 200, "the third board serves"
        return all(row(fleet, board)["faults"] for board in FAULTY)

    until(work, "a fault on two of three boards")
    stopped = until(lambda: (fleet.status() or {}).get("breaker"), "the breaker")
    assert stopped.startswith("2 of 3 boards went bad within 600 s: board0, board1")
    assert stopped in fleet.cli("breaker").stdout
    until(lambda: row(fleet, "board0")["state"] == "READY", "the first one was reset")
    waiting = [board for board in FAULTY if row(fleet, board)["state"] == "RECOVERING"]
    assert waiting == ["board1"], "the second waits"
    dead = fleet.kill("supervisor")
    until(lambda: fleet.pid("supervisor") not in (dead, None) and fleet.status(), "the keeper starts it again")
    until(lambda: row(fleet, "board2")["state"] == "READY", "it knows its boards")
    assert fleet.cli("breaker").stdout.strip().endswith(stopped), "it is remembered"
    assert row(fleet, waiting[0])["state"] == "RECOVERING"
    done = fleet.cli("reset", waiting[0])
    assert done.returncode == 0, "an operator's word passes the breaker"
    until(lambda: row(fleet, waiting[0])["state"] == "READY", "it serves again")
    assert fleet.cli("breaker", "--close").returncode == 0
    assert (fleet.status() or {})["breaker"] is None
    assert "automatic action goes on" in fleet.cli("breaker").stdout
    shown = fleet.cli("events").stdout
    assert "boards went bad within 600 s" in shown and "fault: ccu_exception" in shown and "reset by uid" in shown


def test_the_story_of_a_request_that_a_fault_hit_has_the_fault_in_it(fleet: Fleet) -> None:
    events = read_journal(fleet.folder / "log" / "router.jsonl")
    hit = next(event.request for event in events if event.event == "request.trouble" and event.board in FAULTY)
    assert hit is not None
    done = fleet.cli("explain", f"{hit:016x}")
    assert done.returncode == 0
    assert "came to nothing: failed (model_recovering" in done.stdout and "fault: ccu_exception" in done.stdout
    assert "completed" in done.stdout.splitlines()[0], done.stdout


def test_the_journals_of_all_this_hold_every_promise(fleet: Fleet) -> None:
    assert fleet.stop() == 0
    events = sorted((event for path in (fleet.folder / "log").glob("*.jsonl") for event in read_journal(path)), key=lambda event: event.t)
    assert check(events) == []


@pytest.mark.long
def test_a_board_that_keeps_failing_while_another_serves_the_same_is_set_aside_by_itself(tmp_path: Path, packages: Packages) -> None:
    package = packages.get("sim-batch", "--step-ms", "1")
    fleet = Fleet(tmp_path / "fleet", package, packages.key.with_suffix(".pub"), fault_injection=True, recovery={"max_resets_per_10min": 9})
    config = json.loads(fleet.config.read_text())
    config["boards"][0]["options"] = {"faults": [{"fault": "ccu_exception", "at": [600, 1200, 1800, 2400], "job": "decode"}]}
    fleet.config.write_text(json.dumps(config))
    with fleet:

        def condemned() -> Any:
            assert fleet.completion("x" * 40, max_tokens=60).status == 200, "the other board serves"
            return row(fleet, "board0")["condemned"]

        why = until(condemned, "a verdict")
        assert why.startswith("3 failures in an hour, and board1 serves the same artifact: ccu_exception")
        until(lambda: row(fleet, "board0")["pid"] is None, "its worker ends")
        assert "condemned" in [act["verb"] for act in ask(fleet, "audit")["acts"]]


@pytest.mark.long
def test_an_artifact_that_fails_everywhere_is_set_aside_and_its_alias_goes_back_by_itself(tmp_path: Path, packages: Packages) -> None:
    blue, green = packages.get("sim-batch", "--step-ms", "1"), packages.get("sim-b1", "--step-ms", "1", "--lanes", "8")
    never = {"breaker_window_s": 0.001}
    fleet = Fleet(tmp_path / "fleet", blue, packages.key.with_suffix(".pub"), fault_injection=True, recall=never)
    config = json.loads(fleet.config.read_text())
    for board in config["boards"]:
        board["options"] = {"faults": [{"fault": "ccu_exception", "at": [1500], "job": "decode"}], "reset_ms": 8000}
    fleet.config.write_text(json.dumps(config))
    with fleet:
        assert fleet.cli("load", "toy", str(green), "--yes").returncode == 0

        def quarantined() -> Any:
            fleet.completion("x" * 40, max_tokens=60)
            return ask(fleet, "generations")["quarantined"]

        (aside,) = until(quarantined, "a verdict")
        assert aside["digest"] == read_package(green).digest and "it failed on board" in aside["reason"]
        until(lambda: {row["digest"] for row in ask(fleet, "generations")["boards"]} == {read_package(blue).digest}, "blue everywhere")
        newest = ask(fleet, "rollouts")["rollouts"][0]
        assert (newest["verb"], newest["uid"]) == ("rollback", None) and "by itself" in newest["log"][0]["text"]
        until(lambda: fleet.completion().status == 200, "blue serves")
        assert "was set aside" in fleet.cli("load", "toy", str(green), "--yes").stderr
