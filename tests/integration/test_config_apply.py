"""`calculet config plan` and `apply` on a fleet that serves: nothing in flight is lost, and what was committed comes about whatever is killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders_fleet import BIN, Fleet, Packages, until

from calculet_core.history import check
from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.journal import read_journal


@pytest.fixture
def fleet(tmp_path: Path, packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "5")
    with Fleet(tmp_path / "fleet", package, packages.key.with_suffix(".pub"), tenants=[{"name": "default"}]) as fleet:
        yield fleet


def edit(fleet: Fleet, **sections: Any) -> None:
    fleet.config.write_text(json.dumps({**json.loads(fleet.config.read_text()), **sections}))



def plan(fleet: Fleet) -> tuple[int, dict[str, str]]:
    done = config(fleet, "plan", "--json")
    return done.returncode, {change["where"]: change["how"] for change in json.loads(done.stdout)["changes"]}


def config(fleet: Fleet, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "calculet"), "config", verb, "--config", str(fleet.config), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def running(fleet: Fleet) -> dict[str, Any]:
    return call(load_fleet(fleet.config).control_socket, "config")


def settled(fleet: Fleet, version: int) -> bool:
    try:
        found = running(fleet)
    except ControlError:
        return False
    return bool(found["version"] == version and not found["left"])


@contextmanager
def load(fleet: Fleet, users: int = 6) -> Iterator[list[tuple[int, str]]]:
    """Requests one after another by each of the users, half of them streamed; (status, text) of each."""
    stop, answers = threading.Event(), []
    body = {"prompt": "abc", "max_tokens": 60}

    def user(number: int) -> None:
        while not stop.is_set():
            if number % 2:
                answer = fleet.completion(body["prompt"], max_tokens=60)
                answers.append((answer.status, answer.text if answer.status == 200 else str(answer.body)))
            else:
                events = [json.loads(event) for event in fleet.stream(body) if event != "[DONE]"]
                errors = [event["error"]["code"] for event in events if "error" in event]
                answers.append((500 if errors else 200, str(errors) if errors else "".join(event["choices"][0]["text"] for event in events if event.get("choices"))))

    threads = [threading.Thread(target=user, args=(number,)) for number in range(users)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def test_everything_that_can_change_changes_under_load_and_nothing_in_flight_is_lost(fleet: Fleet) -> None:
    expected, before = fleet.completion("abc", max_tokens=60).text, fleet.pids()
    assert plan(fleet) == (0, {})
    with load(fleet) as answers:
        until(lambda: len(answers) > 5, "load")
        # Live: tenants, limits, log level. Nobody is restarted.
        edit(fleet, tenants=[{"name": "default", "max_active": 64}, {"name": "team", "weight": 2}], log={"level": "debug"},
             router={**json.loads(fleet.config.read_text())["router"], "max_inflight_requests": 77})  # fmt: skip
        code, found = plan(fleet)
        assert code == 2 and set(found.values()) == {"live"} and "$.tenants[team]" in found
        done = config(fleet, "apply", "--yes", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert (answer["version"], answer["routers_to_restart"]) == (2, [])
        assert {**fleet.pids(), "supervisor": 0} == {**before, "supervisor": 0}
        assert b'calculet_router_limit{limit="max_inflight_requests"} 77.0' in fleet.get("/metrics").body
        assert b'calculet_worker_tenant_active{board="board0",tenant="team"}' in fleet.get("/metrics").body
        # Boards one after another, and a board that joins.
        scheduler = fleet.folder / "toy.yaml"
        scheduler.write_text(json.dumps({"schema": "calculet-scheduler/v1", "model_alias": "toy", "queues": {"decode_weight": 9}}))
        whole = json.loads(fleet.config.read_text())
        edit(fleet, models=[{**whole["models"][0], "scheduler": "toy.yaml"}], boards=[*whole["boards"], {"name": "board2", "device": "sim"}])
        code, found = plan(fleet)
        assert (code, found["$.boards[board2]"]) == (2, "its worker starts")
        assert found["$.schedulers[toy]"] == "restart of board0, board1"
        done = config(fleet, "apply", "--yes")
        assert done.returncode == 0 and "version 3 is in force" in done.stdout, done.stdout + done.stderr
        assert fleet.ready_boards() == 3 and plan(fleet) == (0, {})
        after = fleet.pids()
        assert after["router"] == before["router"] and after["board0"] != before["board0"] and after["board1"] != before["board1"]
        # A board that leaves.
        whole = json.loads(fleet.config.read_text())
        edit(fleet, boards=whole["boards"][1:])
        done = config(fleet, "apply", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert fleet.pid("worker", "board0") is None and fleet.pid("worker", "board2") is not None
        count = len(answers)
        until(lambda: len(answers) > count + 5, "it serves on")
    assert {status for status, _ in answers} == {200}, [one for one in answers if one[0] != 200][:3]
    assert {text for _, text in answers} == {expected}
    acts = call(load_fleet(fleet.config).control_socket, "audit")["acts"]
    assert [act["detail"].split(",")[0] for act in reversed(acts) if act["verb"] == "configure" and act["board"] is None][1:] == ["4 changes", "3 changes", "1 changes"]
    fleet.boards = ["board1", "board2"]
    assert fleet.stop() == 0
    events = sorted((event for path in (fleet.folder / "log").glob("*.jsonl") for event in read_journal(path)), key=lambda event: event.t)
    assert check(events) == []
    ready = [event for event in events if event.event == "fleet.configured" and event.board != "-"]
    assert [event.board for event in ready] == ["board0", "board1"], "one at a time"


def test_routers_move_under_load_and_nobody_is_refused_nor_a_stream_broken(fleet: Fleet) -> None:
    expected, before = fleet.completion("abc", max_tokens=60).text, fleet.pids()
    whole = json.loads(fleet.config.read_text())
    with load(fleet) as answers:
        until(lambda: len(answers) > 5, "load")
        edit(fleet, usage={"keep_days": 9})
        done = config(fleet, "plan")
        assert done.returncode == 2 and "restart of the routers" in done.stdout and "nobody is refused" in done.stdout
        done = config(fleet, "apply", "--yes", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert (answer["routers_to_restart"], answer["routers_stay"], answer["elsewhere"]) == ([], None, [])
        [router] = until(fleet.status, "status")["routers"]
        assert (router["name"], router["draining"]) == ("router-b", False) and router["pid"] != before["router"]
        assert {**fleet.pids(), "supervisor": 0, "router": 0} == {**before, "supervisor": 0, "router": 0}, "no board moved"
        # By an operator's word, with the supervisor killed meanwhile; and a killed router refuses nobody either.
        fleet.kill("supervisor") if (done := fleet.cli("restart", "router")).returncode == 0 else pytest.fail(done.stderr)
        until(lambda: (status := fleet.status()) and [row["name"] for row in status["routers"]] == ["router"], "back to the first name")
        count = len(answers)
        until(lambda: len(answers) > count + 5, "it serves on")
    assert {status for status, _ in answers} == {200}, [one for one in answers if one[0] != 200][:3]
    assert {text for _, text in answers} == {expected}
    assert plan(fleet) == (0, {})
    # A successor that cannot serve: who serves goes on.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        edit(fleet, router={**whole["router"], "listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        done = config(fleet, "apply", "--yes")
        assert done.returncode == 1 and "stays as it was" in done.stderr and "in use" in done.stderr, done.stdout + done.stderr
        assert "calculet restart router" in done.stderr and fleet.health() == 200
    done = fleet.cli("restart", "router", "--wait")
    assert done.returncode == 0, done.stderr
    assert fleet.health() == 0, "nobody listens there any more"
    fleet.port = int(json.loads(fleet.config.read_text())["router"]["listen"].rpartition(":")[2])
    assert fleet.health() == 200 and plan(fleet) == (0, {})


def test_a_limit_of_a_tenant_holds_from_the_next_request_on(fleet: Fleet) -> None:
    assert fleet.completion().status == 200
    edit(fleet, tenants=[{"name": "default", "requests_per_s": 0.001}])
    assert config(fleet, "apply", "--yes").returncode == 0
    assert [fleet.completion().status for _ in range(2)] == [200, 429]
    edit(fleet, tenants=[{"name": "default"}])
    router = fleet.pid("router")
    assert router is not None
    psutil.Process(router).send_signal(signal.SIGHUP)
    until(lambda: fleet.completion().status == 200, "SIGHUP alone makes a router read its file, too")
    assert fleet.pid("router") == router


def test_what_cannot_be_applied_changes_nothing(fleet: Fleet) -> None:
    good, socket = fleet.config.read_text(), load_fleet(fleet.config).control_socket
    whole = json.loads(good)
    edit(fleet, log_dir="elsewhere", router={**whole["router"], "max_inflight_requests": 7})
    code, found = plan(fleet)
    assert code == 3 and found["$.log_dir"] == "refused"
    done = config(fleet, "apply", "--yes")
    assert done.returncode == 1 and "nothing was changed: $.log_dir" in done.stderr
    edit(fleet, boards=[])
    assert config(fleet, "plan").returncode == config(fleet, "apply", "--yes").returncode == 78
    # Somebody edits the file between the plan and its application.
    fleet.config.write_text(good)
    edit(fleet, router={**whole["router"], "max_inflight_requests": 7})
    with pytest.raises(ControlError, match="it has changed since"):
        call(socket, "config apply", {"digest": "of another file"})
    # Nobody would serve.
    call(socket, "stop", {"board": "board1"})
    until(lambda: fleet.pid("worker", "board1") is None, "board1 is down")
    edit(fleet, recovery={"max_resets_per_10min": 3})
    done = config(fleet, "apply", "--yes")
    assert done.returncode == 1 and "board0 is to be restarted, and no other board of toy serves" in done.stderr
    assert b'calculet_router_limit{limit="max_inflight_requests"} 4096.0' in fleet.get("/metrics").body
    assert running(fleet)["version"] == 1


def test_what_was_committed_comes_about_whatever_is_killed(fleet: Fleet) -> None:
    before = fleet.pids()
    edit(fleet, tenants=[{"name": "default", "max_active": 9}], recovery={"max_resets_per_10min": 3})
    done = config(fleet, "apply", "--yes", "--detach")
    assert done.returncode == 0 and "is committed" in done.stdout, done.stderr
    for victim in ("supervisor", "router"):
        if (pid := fleet.pid(victim)) is not None:
            psutil.Process(pid).kill()
    until(lambda: settled(fleet, 2), "the next supervisor goes on from the commit")
    after = fleet.pids()
    assert after["board0"] not in (before["board0"], None) and after["board1"] not in (before["board1"], None)
    done = config(fleet, "apply", "--yes")
    assert done.returncode == 0 and "version 2 is in force" in done.stdout, "nothing is left to watch"


@pytest.mark.long
def test_a_file_that_was_merely_edited_moves_nobody(fleet: Fleet) -> None:
    edit(fleet, recovery={"max_resets_per_10min": 3})
    before = fleet.pids()
    fleet.kill("worker", "board0")
    until(lambda: fleet.pid("worker", "board0") not in (before["board0"], None), "it reads the new file at its start")
    fleet.wait_ready(2)
    fleet.kill("supervisor")
    until(lambda: fleet.pid("supervisor") not in (before["supervisor"], None) and fleet.status(), "so does the supervisor")
    fleet.wait_ready(2)
    found = running(fleet)
    assert found["version"] == 1 and "the file has changed since" in found["left"][0]
    assert fleet.pid("worker", "board1") == before["board1"]
    assert plan(fleet) == (2, {"$.recovery.max_resets_per_10min": "restart of board0, board1"})
    done = config(fleet, "apply", "--yes")
    assert done.returncode == 0, done.stderr
    assert fleet.pid("worker", "board1") not in (before["board1"], None), "applied, it does"
