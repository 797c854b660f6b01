"""A request's story has every decision about it with its reason, whoever is alive to ask."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from calculet_core import history
from calculet_core.clock import MS
from calculet_core.history import Event
from calculet_core.ids import request_id_text
from calculet_core.shell.journal import Journal, Tail
from calculet_supervisor.cli import main
from calculet_supervisor.explaining import explain, words

REQUEST = 0xA414632700000001


def at(ms: float, event: str, **fields: Any) -> Event:
    names = {name: fields.pop(name) for name in ("request", "attempt", "board", "epoch", "generation") if name in fields}
    return Event(event, int(ms * MS), data=fields, **names)


OWN = [
    at(0, history.REQUEST_ACCEPTED, request=REQUEST, model="toy", tenant="default", label="mine"),
    at(0, history.REQUEST_SENT, request=REQUEST, attempt=1, board="board0", epoch=3, generation=7),
    at(5, history.ATTEMPT_ADMITTED, request=REQUEST, attempt=1, board="board0", lane=2, wait_ns=4 * MS, prompt_tokens=9, max_new_tokens=20),
    at(9, history.REQUEST_TROUBLE, request=REQUEST, attempt=1, board="board0", epoch=3, reason="worker_lost", code="worker_lost", message="died"),
    at(9, history.REQUEST_MOVED, request=REQUEST, attempt=1, digest="9" * 64, was="b" * 64),
    at(9, history.REQUEST_SENT, request=REQUEST, attempt=2, board="board1", epoch=1, generation=8),
    at(40, history.REQUEST_DONE, request=REQUEST, attempt=2, outcome="completed", tokens=20),
]
OTHERS = [
    at(8, history.BOARD_FAULT, board="board0", generation=7, kind="wait_timeout", detail="job 4 was lost"),
    at(8, history.BOARD_FAULT, board="board7", generation=9, kind="other", detail="not its business"),
    at(9, history.FLEET_ROLLOUT, board="-", rollout=3, alias="toy", text="the alias moves"),
    at(20, history.REQUEST_SENT, request=REQUEST + 1, attempt=1, board="board0"),
    at(90_000, history.BOARD_FAULT, board="board0", generation=7, kind="other", detail="long after"),
]


def test_the_story_is_in_order_and_says_why() -> None:
    story = explain(REQUEST, [OWN[6], *OWN[:6]], OTHERS)
    assert story is not None
    assert story.summary == (
        f"{request_id_text(REQUEST)}, model toy, tenant default: completed after 40.0 ms, 20 tokens; 2 attempts (board0, board1)"
    )
    texts = [(round(line.at_ns / MS), line.who, line.text) for line in story.lines]
    assert texts == [
        (0, "router", "accepted: model=toy tenant=default label=mine"),
        (0, "router", "sent to board0 (attempt 1, epoch 3, generation 7)"),
        (5, "board0", "admitted to lane 2 after waiting 4.0 ms: prompt 9, up to 20 tokens"),
        (8, "board0", "fault: wait_timeout: job 4 was lost"),
        (9, "router", "attempt 1 on board0 came to nothing: worker_lost (worker_lost: died)"),
        (9, "router", "begins anew with artifact 999999999999: no board serves bbbbbbbbbbbb to it"),
        (9, "router", "sent to board1 (attempt 2, epoch 1, generation 8)"),
        (9, "supervisor", "rollout 3 of toy: the alias moves"),
        (40, "router", "ended: completed, 20 tokens"),
    ]


def test_what_has_not_ended_or_is_not_known_says_so() -> None:
    story = explain(REQUEST, OWN[:3], [])
    assert story is not None and "not ended as far as the journals go" in story.summary
    assert explain(REQUEST, [], OTHERS) is None


@pytest.mark.parametrize(
    ("event", "fields", "said"),
    [
        (history.FLEET_WORKER_EXITED, {"signal": 9, "commanded": False, "retry_in_ms": 77}, "killed by signal 9; started again in 77 ms"),
        (history.FLEET_WORKER_EXITED, {"code": 70, "reason": "bug: KeyError", "quarantined": True}, "the worker ended with code 70 (bug: KeyError); not started again: its restart budget is spent"),
        (history.FLEET_WORKER_EXITED, {"code": 0, "commanded": True}, "the worker ended with code 0, as it was told"),
        (history.FLEET_WORKER_STARTED, {"pid": 12, "automatic": True}, "the worker runs as pid 12, started by itself"),
        (history.FLEET_WORKER_ADOPTED, {"pid": 12, "automatic": False}, "the worker, pid 12, was found alive"),
        (history.FLEET_WORKER_KILLED, {"reason": "silent for 5 s", "signal": "SIGABRT"}, "the worker gets SIGABRT: silent for 5 s"),
        (history.FLEET_RESET_GRANTED, {"fault": "wait_timeout", "reason": None, "left": 1}, "a reset after wait_timeout; 1 left in the budget"),
        (history.FLEET_RESET_DENIED, {"fault": "wait_timeout", "reason": "the breaker is open"}, "no reset after wait_timeout: the breaker is open"),
        (history.FLEET_ADMIN, {"verb": "drain", "uid": 0, "by_pid": 4, "detail": ""}, "drain by uid 0"),
    ],
)  # fmt: skip
def test_what_the_supervisor_did_is_told_in_words(event: str, fields: dict[str, Any], said: str) -> None:
    assert words(at(0, event, board="board0", **fields)) == said


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        json.dumps(
            {
                "schema": "calculet-fleet/v1", "run_dir": "run", "state_dir": "state", "log_dir": "log",
                "boards": [{"name": "board0", "device": "sim"}], "models": [{"alias": "toy", "package": "nowhere"}],
            }
        )
    )
    for name, events in (("router", OWN), ("worker-board0", OTHERS[:2]), ("supervisor", OTHERS[2:3])):
        journal = Journal(tmp_path / "log" / f"{name}.jsonl", 1 << 20, 3)
        for event in events:
            journal.append(event)
        journal.close()
    return path


@pytest.mark.parametrize("name", [request_id_text(REQUEST), f"chatcmpl-{request_id_text(REQUEST)}", "mine"])
def test_explain_reads_journals_without_any_process(config: Path, name: str) -> None:
    found = CliRunner().invoke(main, ["explain", name, "--config", str(config)])
    assert found.exit_code == 0, found.output
    assert "completed after 40.0 ms" in found.output and "fault: wait_timeout" in found.output
    whole = json.loads(CliRunner().invoke(main, ["explain", name, "--json", "--config", str(config)]).output)
    assert whole["requests"][0]["lines"][0]["who"] == "router"


def test_explain_of_something_unknown_fails_with_a_hint(config: Path) -> None:
    found = CliRunner().invoke(main, ["explain", "f" * 16, "--config", str(config)])
    assert found.exit_code == 1 and "size-capped" in found.output


def test_events_shows_boards_and_fleet_and_no_requests(config: Path) -> None:
    output = CliRunner().invoke(main, ["events", "--config", str(config)]).output
    assert "fault: wait_timeout: job 4 was lost" in output and "rollout 3 of toy" in output
    assert "accepted" not in output
    assert CliRunner().invoke(main, ["events", "--board", "board9", "--last", "9", "--config", str(config)]).output.count("\n") == 1
    line = CliRunner().invoke(main, ["events", "--json", "--last", "1", "--config", str(config)]).output
    assert json.loads(line)["event"] == history.FLEET_ROLLOUT


def test_following_a_journal_loses_nothing_to_its_rotation(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl", 2_000, 5)
    journal.append(at(0, "fleet.admin", number=0))
    journal.flush()
    tail = Tail(journal.path or tmp_path)
    seen = [event.data["number"] for event in tail.whole()]

    def write() -> None:
        for number in range(1, 200):
            journal.append(at(number, "fleet.admin", number=number))
            journal.flush()
            time.sleep(0.0005)

    writer = threading.Thread(target=write)
    writer.start()
    deadline = time.monotonic() + 60
    while len(seen) < 200 and time.monotonic() < deadline:
        seen += [event.data["number"] for event in tail.more()]
    writer.join()
    assert seen == list(range(200))


def test_faults_on_purpose_are_part_of_the_story_of_whom_they_hit() -> None:
    own = [Event(history.REQUEST_ACCEPTED, 0, 7), Event(history.REQUEST_SENT, 1, 7, 1, "board0", 3), Event(history.REQUEST_DONE, 900, 7, 1, data={"outcome": "failed"})]
    def fired(process: str, board: str | None, fault: str) -> Event:
        return Event(history.CHAOS_FIRED, 5, board=board, data={"order": "o1", "fault": fault, "process": process})

    others = [fired("worker-board0", "board0", "kill_worker decoding"), fired("worker-board1", "board1", "frames slow"), fired("router", None, "full_disk router")]
    story = explain(7, own, others)
    assert story is not None
    told = [(line.who, line.text) for line in story.lines if line.event.event == history.CHAOS_FIRED]
    assert told == [("worker-board0", "on purpose: kill_worker decoding (order o1)"), ("router", "on purpose: full_disk router (order o1)")]
    applied = Event(history.FLEET_CONFIGURED, 0, board="-", data={"version": 3, "changes": ["$.tenants[a].weight"], "uid": 0})
    assert words(applied) == "configuration version 3 was applied by uid 0: $.tenants[a].weight"
    broken = Event(history.FLEET_UNUSABLE, 0, board="-", data={"what": "configuration", "reason": "fleet.yaml: gone", "over": False})
    assert words(broken) == "the configuration cannot be used, what was in force goes on: fleet.yaml: gone"
