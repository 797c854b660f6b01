"""Two models take turns on one board under load: each request is answered by its own model, none is lost, and everything is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders_fleet import Fleet, Packages, until
from builders_swap import ask, until_over

from calculet_core.history import check
from calculet_core.shell.journal import read_journal
from calculet_core.shell.packages import read_package

COMMON, RARE = "toy", "rare"
ROLES = (("supervisor", None), ("router", None), ("worker", "board0"))


@pytest.fixture(scope="module")
def artifacts(packages: Packages) -> dict[str, Path]:
    return {COMMON: packages.get("sim-batch", "--step-ms", "2"), RARE: packages.get("sim-b1", "--step-ms", "1", "--lanes", "16")}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages, artifacts: dict[str, Path]) -> Iterator[Fleet]:
    """One board, shared by two models."""
    fleet = Fleet(tmp_path_factory.mktemp("turns") / "fleet", artifacts[COMMON], packages.key.with_suffix(".pub"), boards=1)
    config = json.loads(fleet.config.read_text())
    config["boards"][0]["time_shared"] = {"min_residence_s": 0.3, "max_wait_s": 0.5, "max_waiting_requests": 8}
    config["models"].append({"alias": RARE, "package": str(artifacts[RARE])})
    fleet.config.write_text(json.dumps(config))
    with fleet:
        yield fleet


def shared(fleet: Fleet) -> dict[str, Any]:
    status = until(fleet.status, "the supervisor")
    found: dict[str, Any] = status["boards"][0]["time_shared"]
    return found


class Clients:
    """They go on asking for both models."""

    def __init__(self, fleet: Fleet, **counts: int) -> None:
        self.fleet, self.answers, self.failed = fleet, list[tuple[str, str]](), list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(alias,)) for alias, count in counts.items() for _ in range(count)]

    def _ask(self, alias: str) -> None:
        while not self._stop.is_set():
            answer = self.fleet.completion(f"hello {alias}", max_tokens=20, model=alias)
            if answer.status == 200:
                self.answers.append((alias, answer.json()["system_fingerprint"]))
            else:
                self.failed.append(f"{alias}: {answer.status} {answer.body!r}")

    def more(self, alias: str, count: int) -> None:
        goal = sum(found == alias for found, _ in self.answers) + count
        until(lambda: sum(found == alias for found, _ in self.answers) >= goal or self.failed, f"{count} more answers of {alias}")

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def test_both_models_are_listed_and_the_one_that_waits_says_so(fleet: Fleet) -> None:
    models = {model["id"]: model["calculet"]["state"] for model in fleet.get("/v1/models").json()["data"]}
    assert models == {COMMON: "ready", RARE: "waits"}
    assert fleet.get(f"/v1/models/{RARE}").status == 200
    assert shared(fleet)["resident"] == COMMON


def test_under_load_no_request_is_lost_while_models_take_turns_and_processes_die(fleet: Fleet, artifacts: dict[str, Path]) -> None:
    digests = {alias: read_package(path).digest for alias, path in artifacts.items()}
    with Clients(fleet, toy=4, rare=3) as clients:
        for _ in range(2):
            clients.more(RARE, 4)
            clients.more(COMMON, 4)
        dead = fleet.kill("supervisor")
        until(lambda: fleet.pid("supervisor") not in (dead, None), "the keeper starts it again")
        clients.more(RARE, 4)
        clients.more(COMMON, 4)
        resident = shared(fleet)["resident"]
        fleet.kill("worker", "board0")  # who ran there is sent again, who waits has nothing there
        for alias in (RARE, COMMON) if resident == COMMON else (COMMON, RARE):
            clients.more(alias, 4)
    assert clients.failed == []
    assert {alias: {mark for found, mark in clients.answers if found == alias} for alias in digests} == {
        alias: {digest} for alias, digest in digests.items()
    }
    assert shared(fleet)["waiting"] == {} or until(lambda: shared(fleet)["waiting"] == {}, "nobody waits any more") is not None
    switches = [act for act in ask(fleet, "audit")["acts"] if act["verb"] == "switch"]
    assert len(switches) >= 4 and all(act["board"] == "board0" and act["uid"] is None for act in switches)


def test_turns_are_events_metrics_and_part_of_a_requests_story(fleet: Fleet) -> None:
    told = fleet.cli("events").stdout
    assert f"turn of {RARE} after {COMMON}" in told and "time_shared.max_wait_s is over" in told
    text = fleet.get("/metrics").body.decode()
    assert f'calculet_supervisor_resident{{board="board0",model="{shared(fleet)["resident"]}"}} 1.0' in text
    assert 'calculet_router_model_wait_seconds_count{model="rare"}' in text and "calculet_router_waiting_model" in text
    assert 'calculet_supervisor_limit{limit="board0.time_shared.max_waiting_requests"} 8.0' in text
    events = read_journal(fleet.folder / "log" / "router.jsonl")
    waited = next(event.request for event in events if event.event == "request.waiting_model")
    story = fleet.cli("explain", f"{waited:016x}").stdout
    assert "waits for its turn" in story and "turn of" in story and "completed" in story.splitlines()[0]
    shown = fleet.cli("status").stdout
    assert "turn of " in shown and "waiting: none" in shown


def test_more_than_may_wait_is_429_and_as_many_as_may_are_answered(fleet: Fleet) -> None:
    other = RARE if shared(fleet)["resident"] == COMMON else COMMON
    refused = fleet.completion("x", model=other, n=9)
    assert refused.status == 429 and "time_shared.max_waiting_requests" in refused.json()["error"]["message"]
    answered = fleet.completion("x", model=other, n=8)
    assert answered.status == 200 and len(answered.json()["choices"]) == 8


def test_a_swap_of_a_waiting_model_takes_its_turn_and_both_go_on(fleet: Fleet, packages: Packages) -> None:
    other = RARE if shared(fleet)["resident"] == COMMON else COMMON
    green = packages.get("sim-b1", "--step-ms", "1", "--lanes", "8")
    number = ask(fleet, "load", alias=other, package=str(green))["rollout"]
    assert until_over(fleet, number)["state"] == "DONE"
    assert shared(fleet)["resident"] == other
    assert fleet.completion(model=other).json()["system_fingerprint"] == read_package(green).digest
    assert fleet.completion(model=RARE if other == COMMON else COMMON).status == 200


def test_an_unloaded_model_is_503_and_the_other_one_has_the_board(fleet: Fleet) -> None:
    assert fleet.cli("unload", RARE, "--yes").returncode == 0
    until(lambda: shared(fleet)["resident"] == COMMON, "the other one's turn")
    until(lambda: fleet.completion(model=RARE).status == 503, "an unloaded model")
    assert fleet.completion(model=COMMON).status == 200
    assert until_over(fleet, ask(fleet, "rollback", alias=RARE)["rollout"])["state"] == "DONE"
    assert fleet.completion(model=RARE).status == 200


@pytest.mark.parametrize("turns", [4, pytest.param(100, marks=pytest.mark.long)])
def test_turns_leave_memory_descriptors_and_threads_where_they_were(fleet: Fleet, turns: int) -> None:
    def take(count: int) -> None:
        goal = int(shared(fleet)["switches"]) + count
        with Clients(fleet, toy=2, rare=2) as clients:
            until(lambda: int(shared(fleet)["switches"]) >= goal or clients.failed, f"{count} turns", 60 + 5 * count)
        assert clients.failed == []

    def measure() -> dict[str, tuple[float, int, int]]:
        processes = {role: psutil.Process(fleet.pid(role, board)) for role, board in ROLES}
        return {role: (one.memory_info().rss / 2**20, one.num_fds(), one.num_threads()) for role, one in processes.items()}

    take(2)  # what is made once is made
    before = measure()
    take(turns)
    after = measure()
    for role in before:
        (rss, fds, threads), (rss_before, fds_before, threads_before) = after[role], before[role]
        assert fds <= fds_before + 4, f"{role}: {fds_before} -> {fds} descriptors"
        assert threads <= threads_before + 1, f"{role}: {threads_before} -> {threads} threads"
        assert rss <= rss_before + 12, f"{role}: {rss_before:.1f} -> {rss:.1f} MiB after {turns} turns"
    until(lambda: shared(fleet)["waiting"] == {}, "nobody waits")
    row = (fleet.status() or {})["boards"][0]
    assert (row["faults"], row["resets"]) == (0, 0)


def test_a_stopped_board_is_503_at_once_and_not_a_wait(fleet: Fleet) -> None:
    assert fleet.cli("stop", "board0").returncode == 0
    until(lambda: fleet.get("/v1/models").json()["data"] == [], "nobody is offered")
    began_s = time.monotonic()
    assert fleet.completion(model=RARE).status == 503
    assert time.monotonic() - began_s < 5
    assert fleet.cli("start", "board0").returncode == 0
    fleet.wait_ready(1)


def test_the_journals_of_all_this_hold_every_promise(fleet: Fleet) -> None:
    assert fleet.stop() == 0
    events = sorted((event for path in (fleet.folder / "log").glob("*.jsonl") for event in read_journal(path)), key=lambda event: event.t)
    assert check(events) == []
