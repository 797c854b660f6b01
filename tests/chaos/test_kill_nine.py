"""kill -9 of each process in turn, under load, through real HTTP: nothing is lost, and the fleet is whole again in seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from builders_fleet import Fleet, Packages, until

from calculet_core.history import check
from calculet_core.shell.files import FileLock
from calculet_core.shell.journal import read_journal

WHOLE_AGAIN_S = 10.0


@pytest.fixture
def fleet(tmp_path: Path, packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "5")
    with Fleet(tmp_path / "fleet", package, packages.key.with_suffix(".pub")) as fleet:
        yield fleet


def test_a_killed_worker_loses_no_request_that_had_not_begun_to_answer(fleet: Fleet) -> None:
    expected = {f"prompt {index}": fleet.completion(f"prompt {index}", max_tokens=300).text for index in range(4)}
    with ThreadPoolExecutor(24) as pool:
        answers = [(prompt, pool.submit(fleet.completion, prompt, max_tokens=300)) for prompt in list(expected) * 6]
        until(lambda: any(fleet.active()), "load on the boards")
        dead = fleet.kill("worker", "board0")
        for prompt, answer in answers:
            assert answer.result().status == 200, answer.result().body
            assert answer.result().text == expected[prompt]
            assert answer.result().json()["usage"]["completion_tokens"] == 300
    fleet.wait_ready(2, WHOLE_AGAIN_S)
    assert fleet.pid("worker", "board0") not in (dead, None)


def test_streams_of_a_killed_worker_end_with_an_error_or_whole_never_silently(fleet: Fleet) -> None:
    whole = "".join(json.loads(event)["choices"][0]["text"] for event in fleet.stream({"prompt": "abc", "max_tokens": 400}) if event != "[DONE]")

    def read() -> tuple[str, list[str]]:
        events = list(fleet.stream({"prompt": "abc", "max_tokens": 400}))
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        errors = [event["error"]["code"] for event in parsed if "error" in event]
        assert errors or events[-1] == "[DONE]"
        assert not errors or "[DONE]" not in events
        return "".join(event["choices"][0]["text"] for event in parsed if event.get("choices")), errors

    with ThreadPoolExecutor(16) as pool:
        readers = [pool.submit(read) for _ in range(16)]
        until(lambda: all(fleet.active()), "both boards busy")
        fleet.kill("worker", "board1")
        results = [reader.result() for reader in readers]
    assert any(errors for _, errors in results), "no stream was cut: the test killed too late"
    assert any(not errors for _, errors in results)
    for text, errors in results:
        assert text == whole if not errors else whole.startswith(text)
        assert not errors or errors == ["worker_lost"]


def test_serving_goes_on_while_the_supervisor_is_dead_and_it_adopts_what_lives(fleet: Fleet) -> None:
    before = fleet.pids()
    fleet.kill("supervisor")
    assert fleet.completion().status == 200
    until(lambda: fleet.pid("supervisor") not in (before["supervisor"], None), "the keeper starts the supervisor again")
    fleet.wait_ready(2, WHOLE_AGAIN_S)
    after = fleet.pids()
    assert {name: after[name] for name in ("router", "board0", "board1")} == {name: before[name] for name in ("router", "board0", "board1")}
    fleet.kill("worker", "board0")
    until(lambda: fleet.pid("worker", "board0") not in (before["board0"], None), "an adopted worker is replaced")
    fleet.wait_ready(2, WHOLE_AGAIN_S)


def test_a_worker_that_dies_while_the_supervisor_is_dead_is_replaced_when_it_returns(fleet: Fleet) -> None:
    before = fleet.pids()
    fleet.kill("supervisor")
    fleet.kill("worker", "board1")
    assert fleet.completion().status == 200
    until(lambda: fleet.pid("worker", "board1") not in (before["board1"], None), "the dead worker is replaced")
    fleet.wait_ready(2, WHOLE_AGAIN_S)


def test_a_killed_router_comes_back_to_the_same_workers(fleet: Fleet) -> None:
    before = fleet.pids()
    fleet.kill("router")
    until(lambda: fleet.health() == 200, "the router serves again", WHOLE_AGAIN_S)
    assert fleet.completion().status == 200
    after = fleet.pids()
    assert after["router"] not in (before["router"], None)
    assert (after["board0"], after["board1"]) == (before["board0"], before["board1"])


def test_requests_of_a_killed_router_free_their_lanes(fleet: Fleet) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(fleet.completion, "long", max_tokens=3000) for _ in range(8)]
        until(lambda: sum(fleet.active()) == 8, "eight active requests")
        fleet.kill("router")
        for answer in answers:
            assert answer.exception() is not None
    until(lambda: fleet.health() == 200, "the router serves again", WHOLE_AGAIN_S)
    until(lambda: fleet.active() == [0, 0], "lanes freed", 10)


def test_a_killed_keeper_takes_everything_with_it(fleet: Fleet) -> None:
    family = fleet.family()
    assert len(family) >= 4
    assert fleet.keeper is not None
    fleet.keeper.kill()
    fleet.keeper.wait(10)
    _, alive = psutil.wait_procs(family, timeout=WHOLE_AGAIN_S)
    assert not alive
    assert fleet.leftovers() == []
    for board in fleet.boards:
        FileLock(fleet.folder / "state" / "boards" / f"{board}.lock").release()
    fleet.start()
    assert fleet.completion().status == 200


def test_the_history_of_a_kill_holds_every_promise(fleet: Fleet) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(fleet.completion, f"p{index}", max_tokens=20) for index in range(64)]
        fleet.kill("worker", "board0")
        assert all(answer.result().status == 200 for answer in answers)
    fleet.wait_ready(2, WHOLE_AGAIN_S)
    assert fleet.stop() == 0
    events = sorted((event for path in (fleet.folder / "log").glob("*.jsonl") for event in read_journal(path)), key=lambda event: event.t)
    assert sum(event.event == "request.done" for event in events) >= 64
    assert check(events) == []


def test_sigterm_ends_everything_and_leaves_nothing_behind(fleet: Fleet) -> None:
    family = fleet.family()
    started = time.monotonic()
    assert fleet.stop() == 0
    assert time.monotonic() - started < 10
    assert not [process for process in family if process.is_running()]
    assert fleet.leftovers() == []
    for board in fleet.boards:
        FileLock(fleet.folder / "state" / "boards" / f"{board}.lock").release()


# ---------------------------------------------------------------- the process that workers are forked from
def fork_server(fleet: Fleet) -> psutil.Process | None:
    for process in fleet.family():
        try:
            if "fork-server" in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def test_a_forked_worker_is_the_keepers_own_child_with_its_own_name_and_session(fleet: Fleet) -> None:
    assert fleet.keeper is not None
    worker = psutil.Process(fleet.pid("worker", "board0"))
    assert worker.cmdline()[1:] == ["-m", "calculet_worker", "run", "--config", str(fleet.config), "--board", "board0"]
    assert worker.ppid() == fleet.keeper.pid
    assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
    server = fork_server(fleet)
    assert server is not None
    shared = {os.readlink(f"/proc/{server.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{server.pid}/fd")}
    own = {os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd")}
    assert not {name for name in shared & own if name.startswith(("socket:", "pipe:"))}, "a descriptor of the fork server came along"


def test_a_killed_fork_server_takes_no_worker_with_it_and_is_replaced(fleet: Fleet) -> None:
    server = until(lambda: fork_server(fleet), "the fork server runs")
    before = fleet.pids()
    server.kill()
    until(lambda: (fork_server(fleet) or server).pid != server.pid, "another fork server")
    assert fleet.pids() == before and fleet.completion().status == 200
    fleet.kill("worker", "board0")
    until(lambda: fleet.pid("worker", "board0") not in (before["board0"], None), "the worker is replaced")
    fleet.wait_ready(2, WHOLE_AGAIN_S)


def test_a_fork_server_that_does_not_answer_delays_a_worker_and_no_more(fleet: Fleet) -> None:
    server = until(lambda: fork_server(fleet), "the fork server runs")
    before = fleet.pids()
    server.suspend()
    fleet.kill("worker", "board0")
    until(lambda: fleet.pid("worker", "board0") not in (before["board0"], None), "the worker is started directly")
    fleet.wait_ready(2, 2 * WHOLE_AGAIN_S)
    until(lambda: (fork_server(fleet) or server).pid != server.pid, "it is killed and replaced")
    assert fleet.completion().status == 200
