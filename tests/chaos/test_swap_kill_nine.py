"""kill -9 in the middle of a swap: of everything, of the supervisor, of a worker. It goes on or back, and nobody's answer is lost to it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders_fleet import Fleet, Packages, until
from builders_packages import with_wrong_golden
from builders_swap import Load, ask, held, rollout, until_over

from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.packages import read_package
from calculet_core.states.rollout import RolloutState

STATES = ("VERIFYING", "STAGING", "SHIFTING", "DRAINING_BLUE")


@pytest.fixture(scope="module")
def blue(packages: Packages) -> Path:
    return packages.get("sim-batch", "--step-ms", "2")


@pytest.fixture(scope="module")
def green(packages: Packages) -> Path:
    return packages.get("sim-b1", "--step-ms", "1", "--lanes", "16")


@pytest.fixture
def fleet(tmp_path: Path, packages: Packages, blue: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path / "fleet", blue, packages.key.with_suffix(".pub"), boards=3) as fleet:
        yield fleet


def state_of(fleet: Fleet) -> str:
    """Read from the store itself, which answers while nobody lives."""
    with sqlite3.connect(f"file:{load_fleet(fleet.config).store}?mode=ro", uri=True) as db:
        (body,) = db.execute("SELECT body FROM rollout ORDER BY id DESC LIMIT 1").fetchone()
    return str(json.loads(body)["state"])


def reached(fleet: Fleet, name: str) -> Any:
    """At that step, or past it: steps may be shorter than a look."""
    return until(lambda: RolloutState[state_of(fleet)] >= RolloutState[name], f"the rollout at {name}")


def kill_everything(fleet: Fleet) -> None:
    family = fleet.family()
    assert fleet.keeper is not None
    for process in [psutil.Process(fleet.keeper.pid), *family]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    fleet.keeper.wait(10)
    psutil.wait_procs(family, timeout=10)


def converged(fleet: Fleet, blue: Path, green: Path) -> str:
    """Over, every board alike, and answers are of what the alias stands for."""
    state = until(lambda: state_of(fleet) in ("DONE", "ROLLED_BACK", "REFUSED") and state_of(fleet), "the end of the rollout")
    digest = read_package(green if state == "DONE" else blue).digest
    until(lambda: set(held(fleet).values()) == {digest}, f"every board with {digest[:12]}: {held(fleet)}")
    until(lambda: fleet.health() == 200, "the router serves")
    assert fleet.completion().json()["system_fingerprint"] == digest
    return str(state)


@pytest.mark.parametrize("name", ["STAGING", pytest.param("VERIFYING", marks=pytest.mark.long), pytest.param("SHIFTING", marks=pytest.mark.long), "DRAINING_BLUE"])
def test_kill_nine_of_everything_at_a_step_of_a_swap_converges(fleet: Fleet, blue: Path, green: Path, name: str) -> None:
    ask(fleet, "load", alias="toy", package=str(green))
    reached(fleet, name)
    kill_everything(fleet)
    fleet.start(ready=0)
    assert converged(fleet, blue, green) == "DONE"
    generations = [row["generation"] for row in ask(fleet, "generations")["boards"]]
    assert len(set(generations)) == 3


def test_kill_nine_of_everything_while_it_goes_back_converges_to_blue(fleet: Fleet, packages: Packages, blue: Path, green: Path, tmp_path: Path) -> None:
    bad = with_wrong_golden(green, tmp_path / "bad", packages.key)
    ask(fleet, "load", alias="toy", package=str(bad))
    reached(fleet, "ROLLING_BACK")
    kill_everything(fleet)
    fleet.start(ready=0)
    assert converged(fleet, blue, green) == "ROLLED_BACK"


def test_a_supervisor_that_is_killed_again_and_again_during_a_swap_loses_no_request(fleet: Fleet, blue: Path, green: Path) -> None:
    with Load(fleet, 6) as load:
        load.more(6)
        number = ask(fleet, "load", alias="toy", package=str(green))["rollout"]
        for name in ("STAGING", "SHIFTING", "DRAINING_BLUE"):
            reached(fleet, name)
            dead = fleet.kill("supervisor")
            until(lambda dead=dead: fleet.pid("supervisor") not in (dead, None), "the keeper starts it again")
            until(lambda: fleet.status() is not None, "it answers")
        assert until_over(fleet, number)["state"] == "DONE"
        load.more(6)
    assert load.failed == []
    assert set(held(fleet).values()) == {read_package(green).digest}


def test_a_worker_that_is_killed_while_it_loads_green_loads_it_again(fleet: Fleet, blue: Path, green: Path) -> None:
    number = ask(fleet, "load", alias="toy", package=str(green))["rollout"]
    board = until(lambda: (rollout(fleet, number)["assigned"] or [None])[0], "a board that moves")
    fleet.kill("worker", board)
    assert until_over(fleet, number)["state"] == "DONE"
    assert converged(fleet, blue, green) == "DONE"


@pytest.mark.parametrize("mend", [False, pytest.param(True, marks=pytest.mark.long)])  # the keeper tries again after 30 s
def test_a_damaged_store_is_refused_while_serving_goes_on_and_a_copy_mends_it(fleet: Fleet, mend: bool) -> None:
    assert fleet.cli("drain", "board2").returncode == 0
    first = fleet.kill("supervisor")  # its successor keeps a copy of what it finds
    until(lambda: fleet.pid("supervisor") not in (first, None) and fleet.status(), "the keeper starts it again")
    store = load_fleet(fleet.config).store
    copy = store.with_name(f"{store.name}.backup")
    assert copy.exists()
    for name in ("-wal", "-shm"):
        store.with_name(store.name + name).unlink(missing_ok=True)
    store.write_bytes(b"no database" * 4096)
    fleet.kill("supervisor")
    until(lambda: "not a usable database" in (fleet.folder / "keeper.log").read_text(), "it says what is wrong")
    assert f"cp {copy} {store}" in (fleet.folder / "keeper.log").read_text()
    assert all(fleet.completion().status == 200 for _ in range(10))
    if not mend:
        return
    store.write_bytes(copy.read_bytes())
    until(lambda: fleet.status() is not None, "it is back")
    until(lambda: fleet.status()["boards"][2]["draining"], "what an operator wanted is known again")  # type: ignore[index]


@pytest.mark.parametrize("cycles", [10, pytest.param(100, marks=pytest.mark.long)])
def test_loads_and_unloads_leave_memory_descriptors_and_the_board_at_their_baseline(tmp_path: Path, packages: Packages, blue: Path, green: Path, cycles: int) -> None:
    with Fleet(tmp_path / "one", blue, packages.key.with_suffix(".pub"), boards=1) as fleet:

        def cycle(package: Path) -> None:
            until_over(fleet, ask(fleet, "load", alias="toy", package=str(package), allow_downtime=True)["rollout"])
            assert fleet.completion().json()["system_fingerprint"] == read_package(package).digest
            ask(fleet, "unload", alias="toy")
            until(lambda: fleet.status()["boards"][0]["state"] == "UNLOADED", "an empty board")  # type: ignore[index]

        def measure() -> dict[str, tuple[float, int, int]]:
            found = {}
            for role, board in (("supervisor", None), ("router", None), ("worker", "board0")):
                process = psutil.Process(fleet.pid(role, board))
                found[role] = (process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
            return found

        def device_bytes() -> int | None:
            chips = fleet.status()["boards"][0]["chips"]  # type: ignore[index]
            return sum(chip["memory_used_bytes"] or 0 for chip in chips)

        ask(fleet, "unload", alias="toy")
        until(lambda: fleet.status()["boards"][0]["state"] == "UNLOADED", "an empty board")  # type: ignore[index]
        empty = device_bytes()
        for package in (green, blue, green, blue):  # what is made once is made
            cycle(package)
        before = measure()
        for number in range(cycles):
            cycle((green, blue)[number % 2])
        after = measure()
        for role in before:
            (rss, fds, threads), (rss_before, fds_before, threads_before) = after[role], before[role]
            assert fds <= fds_before + 2, f"{role}: {fds_before} -> {fds} descriptors"
            assert threads <= threads_before + 1, f"{role}: {threads_before} -> {threads} threads"
            assert rss <= rss_before + 8, f"{role}: {rss_before:.1f} -> {rss:.1f} MiB after {cycles} cycles"
        assert device_bytes() == empty
        folder = load_fleet(fleet.config).state_dir / "artifacts"
        kept = {path.name for path in folder.iterdir()}
        assert read_package(blue).digest in kept and kept <= {read_package(blue).digest, read_package(green).digest}
