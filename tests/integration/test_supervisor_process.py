"""Real keeper, supervisor and router processes over workers without a device, which misbehave as a test tells them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml
from builders_fleet import BIN, Fleet, until
from builders_supervisor import a_package
from test_router_tls import write_certificate

from calculet_core import history, wire
from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call, pack
from calculet_core.shell.files import FileLock
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.journal import read_journal
from calculet_supervisor.shell.crashes import bundles

STUBS = Path(__file__).resolve().parents[1] / "stubs"
QUICK = {"heartbeat_ms": 50, "heartbeat_timeout_ms": 1_000, "hang_timeout_ms": 700, "drain_timeout_ms": 2_000}


class StubFleet(Fleet):
    """A fleet whose workers are `tests/stubs/calculet_worker`."""

    def __init__(self, folder: Path, package: tuple[Path, Path], **sections: Any) -> None:
        super().__init__(folder, *package, **{"supervision": QUICK, **sections})
        self.paths = load_fleet(self.config)

    def tell(self, board: str, behaviour: str) -> None:
        """How the board's next worker behaves."""
        self.paths.state_dir.mkdir(parents=True, exist_ok=True)
        (self.paths.state_dir / f"stub-{board}").write_text(behaviour)

    def status(self) -> dict[str, Any] | None:
        try:
            return call(self.paths.control_socket, "status")
        except SupervisorUnreachable:
            return None

    def row(self, board: str) -> dict[str, Any]:
        status = self.status()
        return next(row for row in status["boards"] if row["board"] == board) if status else {}

    def until_row(self, board: str, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            row = self.row(board)
            return row if row and condition(row) else None

        try:
            return until(found, f"{board}: {what}", 20)  # type: ignore[no-any-return]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.row(board)}\n{self.logs()}") from None

    def ready(self, board: str, beyond_epoch: int = 0) -> dict[str, Any]:
        return self.until_row(board, lambda row: row["state"] == "READY" and row["epoch"] > beyond_epoch, "ready")

    def do(self, verb: str, board: str) -> dict[str, Any]:
        return call(self.paths.control_socket, verb, {"board": board})

    def replace(self, board: str, behaviour: str) -> int:
        """Kill the board's worker; the next one behaves so. The dead one's epoch."""
        epoch = self.ready(board)["epoch"]
        self.tell(board, behaviour)
        self.kill("worker", board)
        return int(epoch)

    def view(self) -> wire.FleetView:
        return msgspec.json.decode(self.paths.fleet_view.read_bytes(), type=wire.FleetView)

    def events(self, name: str) -> list[history.Event]:
        return [event for event in read_journal(self.paths.journal("supervisor")) if event.event == name]

    def run_folder(self) -> list[str]:
        return [path.name for path in self.paths.run_dir.iterdir()] if self.paths.run_dir.exists() else []


@pytest.fixture(scope="module", autouse=True)
def stub_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STUBS))
        patch.setenv("PYTHONSAFEPATH", "1")
        yield


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return a_package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def fleet(tmp_path: Path, package: tuple[Path, Path]) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path / "f", package)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, package: tuple[Path, Path]) -> Iterator[StubFleet]:
    with StubFleet(tmp_path_factory.mktemp("shared"), package) as fleet:
        yield fleet


@pytest.fixture
def shared(started: StubFleet) -> StubFleet:
    """One running fleet for all tests that leave it able to serve; what the last one did to it is forgiven."""
    for board in started.boards:
        started.tell(board, "")
        row = started.row(board)
        if row["failures"]:
            started.do("restart", board)
            started.ready(board, row["epoch"] or 0)
        started.ready(board)
    return started


def up(fleet: StubFleet) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "calculet"), "up", "--config", str(fleet.config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def locks_are_free(fleet: StubFleet) -> None:
    for path in (*(fleet.paths.board_lock(board) for board in fleet.boards), fleet.paths.supervisor_lock, fleet.paths.state_dir / "keeper.lock"):
        FileLock(path).release()


# ---------------------------------------------------------------- kill -9 of each in turn, and the end
def test_every_process_may_be_killed_and_the_end_leaves_nothing(fleet: StubFleet) -> None:
    fleet.start()
    until(lambda: "toy at http://127.0.0.1" in (fleet.folder / "keeper.log").read_text(), "the line that says where")
    first = {board: fleet.ready(board) for board in fleet.boards}

    at_ns, dead = time.monotonic_ns(), fleet.kill("worker", "board0")
    again = fleet.ready("board0", first["board0"]["epoch"])
    assert (again["epoch"], again["pid"] != dead, again["generation"] > first["board1"]["generation"]) == (2, True, True)
    exited = fleet.events(history.FLEET_WORKER_EXITED)[0]
    assert exited.data["signal"] == signal.SIGKILL
    assert exited.t - at_ns < 100_000_000, "the death was not seen at once"
    assert fleet.row("board1")["pid"] == first["board1"]["pid"]

    before = {board: fleet.ready(board) for board in fleet.boards}
    fleet.do("drain", "board1")
    supervisor = fleet.kill("supervisor")
    until(lambda: (fleet.status() or {"supervisor": {"pid": supervisor}})["supervisor"]["pid"] != supervisor, "a new supervisor")
    after = {board: fleet.until_row(board, lambda row: row["state"] == "READY", "adopted") for board in fleet.boards}
    for board in fleet.boards:
        assert [after[board][key] for key in ("pid", "epoch", "generation")] == [before[board][key] for key in ("pid", "epoch", "generation")]
    assert after["board1"]["draining"]
    assert sorted(event.board or "" for event in fleet.events(history.FLEET_WORKER_ADOPTED)) == fleet.boards

    router = fleet.kill("router")
    until(lambda: fleet.pid("router") not in (router, None) and fleet.health() == 200, "a new router")

    family = fleet.family()
    assert fleet.stop() == 0
    assert not [process for process in family if process.is_running()]
    assert fleet.run_folder() == []
    locks_are_free(fleet)


def test_a_killed_keeper_takes_everything_with_it_and_can_be_followed_at_once(fleet: StubFleet) -> None:
    fleet.start()
    family = fleet.family()
    assert len(family) == 4 and fleet.keeper is not None
    fleet.keeper.kill()
    fleet.keeper.wait(10)
    fleet.start()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert {row["epoch"] for row in (fleet.status() or {})["boards"]} == {2}


def test_a_dead_keepers_sockets_are_removed_by_those_who_outlive_it(fleet: StubFleet) -> None:
    fleet.start()
    family = fleet.family()
    assert fleet.keeper is not None
    fleet.keeper.kill()
    fleet.keeper.wait(10)
    psutil.wait_procs(family, timeout=10)
    assert [name for name in fleet.run_folder() if name.endswith(".sock")] == []
    locks_are_free(fleet)


# ---------------------------------------------------------------- workers that misbehave
def test_a_run_folder_that_somebody_deleted_comes_back_and_the_fleet_is_managed_as_before(fleet: StubFleet) -> None:
    fleet.start()
    before = {board: fleet.ready(board) for board in fleet.boards}
    sockets = set(fleet.run_folder())
    shutil.rmtree(fleet.paths.run_dir)
    until(lambda: set(fleet.run_folder()) >= sockets - {f"exit-{board}.json" for board in fleet.boards}, "every socket is back")
    assert [fleet.ready(board)["pid"] for board in fleet.boards] == [before[board]["pid"] for board in fleet.boards]
    assert fleet.paths.control_socket.stat().st_mode & 0o777 == 0o600

    fleet.paths.keeper_socket.unlink()
    supervisor = fleet.kill("supervisor")
    until(lambda: (fleet.status() or {"supervisor": {"pid": supervisor}})["supervisor"]["pid"] != supervisor, "a new supervisor")
    fleet.kill("worker", "board0")
    assert fleet.ready("board0", before["board0"]["epoch"])["pid"] != before["board0"]["pid"]
    assert "exit 70" not in (fleet.folder / "keeper.log").read_text(), "the new supervisor waits for its keeper's socket"
    assert fleet.stop() == 0
    assert fleet.run_folder() == []


def test_a_router_that_was_refused_is_back_once_the_configuration_is_mended(fleet: StubFleet) -> None:
    fleet.start()
    good, said = fleet.config.read_text(), fleet.folder / "keeper.log"
    until(lambda: "Calculet serves" in said.read_text(), "`calculet up` knows that it serves: until then a wrong configuration ends it")
    wrong = yaml.safe_load(good)
    wrong.setdefault("router", {})["tls"] = {"certificate": "missing.crt", "key": "missing.key"}
    fleet.config.write_text(json.dumps(wrong))
    dead = fleet.kill("router")
    until(lambda: "the router cannot start: calculet-router" in said.read_text(), "it is refused: without TLS it would be worse than gone")
    fleet.config.write_text(good)
    until(lambda: fleet.pid("router") not in (dead, None) and fleet.health() == 200, "a new router, sooner than after the long pause", 25)


def test_up_says_where_it_serves_with_tls(tmp_path: Path, package: tuple[Path, Path]) -> None:
    write_certificate(tmp_path)
    files = {"certificate": str(tmp_path / "tls.crt"), "key": str(tmp_path / "tls.key")}
    fleet = StubFleet(tmp_path / "f", package, router={"tls": files})
    said = fleet.folder / "keeper.log"
    with said.open("w") as log:
        command = [str(BIN / "calculet"), "up", "--config", str(fleet.config)]
        fleet.keeper = subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True)
    try:
        until(lambda: f"toy at https://127.0.0.1:{fleet.port}/v1 (2 of 2 boards ready)" in said.read_text(), "it says that it serves")
    finally:
        assert fleet.stop() == 0


def test_the_keeper_outlives_whoever_reads_what_it_says(fleet: StubFleet) -> None:
    command = [str(BIN / "calculet"), "up", "--config", str(fleet.config)]
    fleet.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert fleet.keeper.stdout is not None
    assert any("boards ready" in line for line in fleet.keeper.stdout)
    fleet.keeper.stdout.close()
    for name in ("router", "supervisor"):
        dead = fleet.kill(name)
        until(lambda name=name, dead=dead: fleet.pid(name) not in (dead, None), f"another {name}")
    fleet.wait_ready(2)
    assert fleet.stop() == 0


def test_a_hanging_worker_is_aborted_with_a_dump_and_replaced(shared: StubFleet) -> None:
    epoch = shared.replace("board1", "hang")
    shared.until_row("board1", lambda row: row["failures"] > 1, "found hanging")
    shared.tell("board1", "")
    shared.ready("board1", epoch + 1)
    killed = [event for event in shared.events(history.FLEET_WORKER_KILLED) if (event.epoch or 0) > epoch and event.board == "board1"]
    assert killed[0].data["signal"] == "SIGABRT"
    assert "no step" in killed[0].data["reason"]
    crash = next(path for path in bundles(shared.paths.crashes) if path.name.endswith(f"-board1-e{killed[0].epoch}"))
    stacks, how = (crash / "stacks.txt").read_text(), json.loads((crash / "exit.json").read_text())
    assert stacks.startswith(f"# board board1 epoch {killed[0].epoch} pid {how['pid']}\n")
    asked, _, died = stacks.partition("Fatal Python error: Aborted")
    assert "in run" in asked and "in run" in died, "first the stacks, then the abort"
    assert (how["class"], how["signal"], how["board_lock"]) == ("killed by signal 6", 6, "free")
    assert how["last_report"]["inflight"] > 0 and how["versions"]["calculet"]
    assert "no step" in (crash / "fleet.jsonl").read_text()
    assert shared.row("board0")["state"] == "READY"


def test_a_worker_that_falls_silent_is_replaced(shared: StubFleet) -> None:
    epoch = shared.replace("board0", "mute")
    shared.until_row("board0", lambda row: row["failures"] > 1, "found silent")
    shared.tell("board0", "")
    shared.ready("board0", epoch + 1)
    reasons = [event.data["reason"] for event in shared.events(history.FLEET_WORKER_KILLED) if event.board == "board0"]
    assert "no heartbeat" in reasons[0]


def test_a_worker_that_does_not_even_die_of_the_abort_is_killed_and_its_board_is_free(shared: StubFleet) -> None:
    row = shared.ready("board0")
    os.kill(row["pid"], signal.SIGSTOP)  # neither dump nor abort reach it
    shared.ready("board0", row["epoch"])
    killed = [event.data["signal"] for event in shared.events(history.FLEET_WORKER_KILLED) if event.board == "board0" and event.epoch == row["epoch"]]
    assert killed == ["SIGABRT", "SIGKILL"]
    crash = next(path for path in bundles(shared.paths.crashes) if path.name.endswith(f"-board0-e{row['epoch']}"))
    how = json.loads((crash / "exit.json").read_text())
    assert (how["signal"], how["pid"], how["board_lock"]) == (9, row["pid"], "free")


def test_a_router_or_supervisor_that_hangs_is_ended_and_replaced(tmp_path: Path, package: tuple[Path, Path]) -> None:
    with StubFleet(tmp_path / "f", package, supervision={**QUICK, "service_timeout_ms": 4_000}) as fleet:
        workers = {board: fleet.ready(board)["pid"] for board in fleet.boards}
        stuck = {}
        for name in ("router", "supervisor"):
            stuck[name] = fleet.pid(name) or 0
            os.kill(stuck[name], signal.SIGSTOP)
        for name in stuck:
            until(lambda name=name: fleet.pid(name) not in (stuck[name], None), f"another {name}")
        fleet.wait_ready(2)
        said = (fleet.folder / "keeper.log").read_text()
        for name, pid in stuck.items():
            assert f"the {name} (pid {pid}) hangs: it said nothing for 4 s" in said
        assert {board: fleet.ready(board)["pid"] for board in fleet.boards} == workers


def test_router_and_supervisor_write_their_stacks_when_asked_and_go_on(shared: StubFleet) -> None:
    for name in ("router", "supervisor"):
        pid, path = shared.pid(name) or 0, shared.paths.stacks(name)
        os.kill(pid, signal.SIGUSR2)
        until(lambda path=path: "Current thread" in path.read_text() or "Thread 0x" in path.read_text(), f"stacks of the {name}")
        assert f"pid {pid}" in path.read_text().splitlines()[0]
        assert shared.pid(name) == pid


def test_a_crash_loop_is_quarantined_shown_and_brought_back_by_an_operator(shared: StubFleet) -> None:
    epoch = shared.replace("board1", "exit 70")
    row = shared.until_row("board1", lambda row: row["process"] == "QUARANTINED", "quarantined")
    assert row["restarts_left"] == 0 and "exit 70" in row["why"] and row["retry_in_s"] > 200
    assert shared.row("board0")["state"] == "READY"
    assert "board1 does not serve: exit 70" in (shared.folder / "keeper.log").read_text()
    dead, epochs = shared.kill("supervisor"), shared.paths.board_epoch("board1").read_text()
    until(lambda: shared.pid("supervisor") not in (dead, None), "the keeper starts it again")
    shared.ready("board0")
    row = shared.until_row("board1", lambda row: row["process"] == "QUARANTINED", "still in quarantine")
    assert "exit 70" in row["why"] and row["retry_in_s"] > 200
    assert shared.paths.board_epoch("board1").read_text() == epochs, "nobody has started it"
    shared.tell("board1", "")
    shared.do("restart", "board1")
    shared.ready("board1", epoch)
    act = call(shared.paths.control_socket, "audit")["acts"][0]
    assert (act["verb"], act["board"], act["uid"]) == ("restart", "board1", os.getuid())


def test_what_a_dead_worker_leaves_in_its_group_is_killed_with_it(shared: StubFleet) -> None:
    epoch = shared.replace("board0", "child")
    pid = shared.ready("board0", epoch)["pid"]
    child = until(lambda: psutil.Process(pid).children(), "the worker's child")[0]
    shared.kill("worker", "board0")
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
    shared.ready("board0", epoch + 1)


def test_up_ends_with_78_when_every_worker_says_that_the_configuration_is_wrong(fleet: StubFleet) -> None:
    for board in fleet.boards:
        fleet.tell(board, "exit 78")
    done = up(fleet)
    assert done.returncode == 78
    assert "board0 does not serve: exit 78" in done.stderr
    assert fleet.run_folder() == []


def test_a_board_that_somebody_else_holds_does_not_keep_the_others_from_serving(fleet: StubFleet) -> None:
    lock = FileLock(fleet.paths.board_lock("board1"))
    fleet.start(ready=1)
    line = until(lambda: [line for line in (fleet.folder / "keeper.log").read_text().splitlines() if "board1" in line], "the reason")[0]
    assert "held by another process" in line and str(os.getpid()) in line and "worker-board1.log" in line
    lock.release()
    fleet.do("restart", "board1")
    fleet.ready("board1")


# ---------------------------------------------------------------- resets
def test_a_reset_is_granted_with_a_new_generation_and_the_next_is_denied(tmp_path: Path, package: tuple[Path, Path]) -> None:
    fleet = StubFleet(tmp_path / "f", package, boards=1, recovery={"max_resets_per_10min": 1})
    fleet.tell("board0", "reset")
    try:
        fleet.start()
        row = fleet.ready("board0")
        assert (row["generation"], row["faults"], row["resets_left"]) == (2, 1, 0)
        fleet.kill("supervisor")
        fleet.kill("worker", "board0")
        row = fleet.until_row("board0", lambda row: row["state"] == "FAILED", "the budget survived the supervisor")
        assert "1 resets in ten minutes are spent" in row["why"]
        assert [event.event for event in fleet.events(history.FLEET_RESET_DENIED)] == [history.FLEET_RESET_DENIED]
    finally:
        fleet.stop()


# ---------------------------------------------------------------- operators
def test_operators_drain_stop_start_and_restart(shared: StubFleet) -> None:
    assert shared.cli("drain", "board0", "--wait").stdout.startswith("board0 is drained")
    assert shared.row("board0")["worker_draining"] is True
    until(lambda: [board.draining for board in shared.view().boards if board.board == "board0"] == [True], "routers are told")
    assert shared.cli("resume", "board0").returncode == 0
    shared.until_row("board0", lambda row: row["worker_draining"] is False, "resumed")

    epoch = shared.row("board0")["epoch"]
    assert shared.cli("restart", "board0").returncode == 0
    assert shared.ready("board0", epoch)["failures"] == 0

    assert shared.cli("stop", "board1").returncode == 0
    shared.until_row("board1", lambda row: row["pid"] is None, "stopped")
    FileLock(shared.paths.board_lock("board1")).release()
    shared.kill("supervisor")
    shared.until_row("board1", lambda row: row["up"] is False and row["pid"] is None, "still stopped for the next supervisor")
    assert "stopped by an operator" in shared.cli("status").stdout
    assert shared.cli("restart", "board1").returncode == 1
    assert shared.cli("start", "board1").returncode == 0
    shared.ready("board1")

    refused = shared.cli("drain", "board7")
    assert (refused.returncode, "boards: board0, board1" in refused.stderr, refused.stdout) == (1, True, "")


def test_a_stranger_on_the_control_socket_loses_only_its_own_connection(shared: StubFleet) -> None:
    assert shared.paths.control_socket.stat().st_mode & 0o777 == 0o600
    for garbage in (b"\xc1" * 8, b"GET / HTTP/1.1\r\n\r\n", pack({"verb": 5}), b"\xdd\xff\xff\xff\xff", os.urandom(4096)):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(shared.paths.control_socket))
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(4096) == b""
    with pytest.raises(ControlError, match="unknown verb"):
        call(shared.paths.control_socket, "format-disk")
    assert shared.ready_boards() == 2


def test_a_second_keeper_is_refused_and_harms_nothing(shared: StubFleet) -> None:
    done = up(shared)
    assert done.returncode == 1
    assert "runs already" in done.stderr and str(shared.keeper.pid if shared.keeper else "") in done.stderr
    assert shared.ready_boards() == 2


def test_a_folder_where_a_file_should_be_is_named_without_a_stack(fleet: StubFleet) -> None:
    (fleet.folder / "state" / "keeper.lock").mkdir(parents=True)
    done = up(fleet)
    assert done.returncode == 1
    assert "state/keeper.lock: Is a directory" in done.stderr and "doctor" in done.stderr and "Traceback" not in done.stderr


# ---------------------------------------------------------------- the store
def test_a_database_that_cannot_be_opened_now_is_not_called_damaged_and_is_tried_again(fleet: StubFleet) -> None:
    fleet.paths.store.mkdir(parents=True)  # for SQLite as good as a file that may not be opened
    said = fleet.folder / "keeper.log"
    command = [str(BIN / "calculet"), "up", "--config", str(fleet.config)]
    with said.open("w") as log:
        fleet.keeper = subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True)
    until(lambda: "It is not damaged" in said.read_text(), "it says what is wrong")
    assert "exit 75" in said.read_text() and "Restore it" not in said.read_text()
    fleet.paths.store.rmdir()
    fleet.wait_ready(2)


def test_a_damaged_store_is_refused_with_the_way_to_mend_it(fleet: StubFleet) -> None:
    fleet.paths.state_dir.mkdir(parents=True)
    fleet.paths.store.write_bytes(b"this is no database" * 100)
    done = up(fleet)
    assert done.returncode == 78
    assert "supervisor.sqlite" in done.stderr and "move it away" in done.stderr and "Traceback" not in done.stderr


def test_a_store_that_was_moved_away_hands_out_nothing_twice(fleet: StubFleet) -> None:
    fleet.start()
    for board in fleet.boards:
        fleet.ready(board)
    until(lambda: [board.state for board in fleet.view().boards] == ["READY", "READY"], "published")
    before = fleet.view()
    fleet.kill("supervisor")
    for path in fleet.paths.state_dir.glob("supervisor.sqlite*"):
        path.unlink()
    fleet.ready("board0")
    fleet.kill("worker", "board0")
    fleet.ready("board0", 1)
    until(lambda: [board.state for board in fleet.view().boards if board.epoch == 2] == ["READY"], "published")
    after = fleet.view()
    assert after.version > before.version
    assert max(board.generation for board in after.boards) > max(board.generation for board in before.boards)


def test_a_store_that_is_deleted_under_the_supervisor_comes_back_with_every_act(fleet: StubFleet) -> None:
    fleet.start()
    fleet.ready("board0")
    fleet.do("drain", "board0")
    for path in fleet.paths.state_dir.glob("supervisor.sqlite*"):
        path.unlink()
    until(fleet.paths.store.exists, "the database is there again")
    dead = fleet.kill("supervisor")
    until(lambda: (fleet.status() or {"supervisor": {"pid": dead}})["supervisor"]["pid"] != dead, "a new supervisor")
    assert fleet.until_row("board0", lambda row: row["state"], "seen")["draining"]


def test_the_store_keeps_its_promises_about_durability(shared: StubFleet) -> None:
    with sqlite3.connect(shared.paths.store) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("SELECT value FROM counter WHERE name = 'generation'").fetchone()[0] >= 2
    assert shared.paths.store.stat().st_mode & 0o077 == 0
