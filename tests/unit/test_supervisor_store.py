"""The supervisor's memory survives it, and is refused when it cannot be trusted."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calculet_core import wire
from calculet_core.clock import S
from calculet_core.errors import ConfigError
from calculet_supervisor.attribution import Failure
from calculet_supervisor.rollout import AliasVersion, Artifact, Rollout, refuse
from calculet_supervisor.shell.store import _TABLES, SCHEMA, Act, Memory, Store, Wanted, backup_of, open_store


def with_store(path: Path, work: Callable[[Store], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        store = await open_store(path)
        try:
            return await work(store)
        finally:
            store.close()

    return asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "supervisor.sqlite"


def test_generations_are_never_handed_out_twice_and_start_above_what_was_seen_in_use(path: Path) -> None:
    async def mint(store: Store) -> list[int]:
        return [await store.mint_generation() for _ in range(3)]

    assert with_store(path, mint) == [1, 2, 3]
    assert with_store(path, mint) == [4, 5, 6]
    assert with_store(path, lambda store: store.mint_generation(at_least=40)) == 40
    assert with_store(path, mint) == [41, 42, 43]


def test_a_view_is_committed_with_a_growing_version_before_its_file_is_written(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet-view.json"
    for version in (1, 2):
        view = with_store(path, lambda store: store.publish(wire.FleetView(0), 1, file))
        assert view.version == version
        assert msgspec.json.decode(file.read_bytes(), type=wire.FleetView) == view
        assert with_store(path, lambda store: store.recall()).view == view
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError):
        with_store(path, lambda store: store.publish(wire.FleetView(0), 1, file))
    assert with_store(path, lambda store: store.recall()).view.version == 3


def test_what_an_operator_wants_is_remembered_with_who_said_so(path: Path) -> None:
    wanted = Wanted(up=False, draining=True, min_epoch=7)
    with_store(path, lambda store: store.want("board0", wanted, Act("stop", "board0", 1000, 42)))
    assert with_store(path, lambda store: store.recall()).boards == {"board0": wanted}
    act = with_store(path, lambda store: store.audit())[0]
    assert (act["verb"], act["board"], act["uid"], act["pid"]) == ("stop", "board0", 1000, 42)
    assert abs(act["wall_s"] - time.time()) < 60


def test_spends_come_back_as_times_of_this_boots_clock_and_can_be_forgiven(path: Path) -> None:
    with_store(path, lambda store: store.spend("reset", "board0"))
    with_store(path, lambda store: store.spend("restart", "board0"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE spend SET wall_ns = wall_ns - ? WHERE kind = 'reset'", (100 * S,))
    spends = with_store(path, lambda store: store.recall()).spends
    assert 99 * S < time.monotonic_ns() - spends["reset", "board0"][0] < 160 * S
    with_store(path, lambda store: store.forgive("restart", "board0"))
    assert set(with_store(path, lambda store: store.recall()).spends) == {("reset", "board0")}


def test_a_spend_from_the_future_counts_as_now(path: Path) -> None:
    with_store(path, lambda store: store.spend("reset", "board0"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE spend SET wall_ns = wall_ns + ?", (10_000 * S,))
    assert with_store(path, lambda store: store.recall()).spends["reset", "board0"][0] <= time.monotonic_ns()


def test_a_store_of_a_newer_version_is_left_alone(path: Path) -> None:
    with_store(path, lambda store: store.mint_generation())
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    with pytest.raises(ConfigError, match="newer Calculet"):
        with_store(path, lambda store: store.recall())


@pytest.mark.parametrize("damage", ["garbage", "page"])
def test_a_damaged_store_is_refused_with_the_way_to_mend_it(path: Path, damage: str) -> None:
    with_store(path, lambda store: store.want("board0", Wanted(), Act("drain", "board0", 0, 0)))
    data = bytearray(path.read_bytes())
    path.write_bytes(b"no database" * 999 if damage == "garbage" else data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(ConfigError, match=r"supervisor\.sqlite.*Restore it from a backup; or move it away"):
        with_store(path, lambda store: store.recall())


# ------------------------------------------------------------------------------------------------ rollouts, versions, marks
BLUE, GREEN = Artifact("b" * 64, "/blue", "toy 1"), Artifact("9" * 64, "/green", "toy 2")
BEGUN = Rollout(0, "toy", "load", ("board0",), green=GREEN, blue=BLUE, state="STAGING")


def test_a_rollout_and_what_its_alias_stands_for_are_one_commit(path: Path) -> None:
    rollout = with_store(path, lambda store: store.open_rollout(BEGUN, Act("load", None, 1000, 42, "toy")))
    assert rollout.id == 1
    moved = msgspec.structs.replace(rollout, on_green=True, state="SHIFTING")
    version = AliasVersion("toy", GREEN, BLUE, BLUE.digest, 5.0, rollout.id)
    with_store(path, lambda store: store.save_rollout(moved, version))
    memory = with_store(path, lambda store: store.recall())
    assert memory.rollouts == {"toy": moved}
    assert memory.versions["toy"] == [msgspec.structs.replace(version, version=1)]
    assert with_store(path, lambda store: store.audit())[0]["detail"] == "toy"


def test_two_rollouts_of_an_alias_cannot_be_under_way(path: Path) -> None:
    first = with_store(path, lambda store: store.open_rollout(BEGUN, Act("load")))
    with pytest.raises(sqlite3.IntegrityError):
        with_store(path, lambda store: store.open_rollout(BEGUN, Act("load")))
    assert len(with_store(path, lambda store: store.audit())) == 1, "the act that was refused left nothing behind"
    over = refuse(msgspec.structs.replace(first, state="VERIFYING"), 1.0, "the hash is wrong")
    with_store(path, lambda store: store.save_rollout(over))
    assert with_store(path, lambda store: store.recall()).rollouts == {}
    assert with_store(path, lambda store: store.open_rollout(BEGUN, Act("load"))).id == 2
    assert [rollout.id for rollout in with_store(path, lambda store: store.rollouts())] == [2, 1]


def test_what_was_set_aside_is_remembered_with_the_reason(path: Path) -> None:
    with_store(path, lambda store: store.want("board0", Wanted(condemned="it burns"), Act("condemn", "board0")))
    with_store(path, lambda store: store.quarantine("d" * 64, "golden on two boards", Act("quarantine")))
    with_store(path, lambda store: store.failed(Failure("board0", "d" * 64, "golden", time.time())))
    with_store(path, lambda store: store.failed(Failure("board0", "d" * 64, "long ago", time.time() - 90_000)))
    with_store(path, lambda store: store.flag("breaker", "board0 and board1", Act("breaker")))
    memory = with_store(path, lambda store: store.recall())
    assert memory.boards["board0"].condemned == "it burns"
    assert memory.quarantined == {"d" * 64: "golden on two boards"}
    assert [failure.what for failure in memory.failures] == ["golden"]
    assert memory.flags == {"breaker": "board0 and board1"}
    with_store(path, lambda store: store.quarantine("d" * 64, None, Act("release")))
    with_store(path, lambda store: store.flag("breaker", None, Act("close")))
    memory = with_store(path, lambda store: store.recall())
    assert memory.quarantined == {} and memory.flags == {}


def test_a_store_of_the_first_schema_is_brought_up_to_date(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = 1; COMMIT;")
        db.execute("INSERT INTO board VALUES ('board0', 0, 1, 7)")
    assert with_store(path, lambda store: store.recall()).boards == {"board0": Wanted(False, True, 7)}
    assert with_store(path, lambda store: store.open_rollout(BEGUN, Act("load"))).id == 1


def test_the_copy_beside_it_mends_a_damaged_store(path: Path) -> None:
    with_store(path, lambda store: store.want("board0", Wanted(draining=True), Act("drain", "board0")))
    with_store(path, lambda store: store.recall())
    path.write_bytes(b"no database" * 999)
    with pytest.raises(ConfigError, match=r"cp \S+supervisor\.sqlite\.backup"):
        with_store(path, lambda store: store.recall())
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    backup_of(path).rename(path)
    assert with_store(path, lambda store: store.recall()).boards == {"board0": Wanted(draining=True)}


def test_a_log_that_a_power_cut_ends_anywhere_gives_a_beginning_of_what_was_committed(path: Path, tmp_path: Path) -> None:
    async def acts(store: Store) -> bytes:
        await store.recall()
        for number in range(1, 5):
            await store.want("board0", Wanted(min_epoch=number), Act("restart", "board0"))
            await store.mint_generation()
        copy(tmp_path / "cut", path)
        return b""

    with_store(path, acts)
    whole = (tmp_path / "cut" / "supervisor.sqlite-wal").read_bytes()
    page = int.from_bytes(whole[8:12], "big")
    frame = 24 + page
    frames = (len(whole) - 32) // frame
    assert frames > 4
    seen = []
    for cut in [32 + number * frame + extra for number in range(frames + 1) for extra in (0, 17)]:
        folder = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "cut", folder)
        (folder / "supervisor.sqlite-wal").write_bytes(whole[:cut])
        memory, generation = with_store(folder / "supervisor.sqlite", read)
        epoch = memory.boards["board0"].min_epoch if memory.boards else 0
        assert generation - 1 in (epoch, epoch - 1)
        seen.append(epoch)
    assert seen == sorted(seen) and seen[-1] == 4


@pytest.mark.parametrize("whole_folder", [False, True], ids=["file", "folder"])
def test_a_database_that_was_deleted_is_written_again_before_anything_is_acknowledged(tmp_path: Path, whole_folder: bool) -> None:
    path = tmp_path / "state" / "supervisor.sqlite"
    path.parent.mkdir()

    async def work(store: Store) -> None:
        await store.want("board0", Wanted(draining=True), Act("drain", "board0"))
        if whole_folder:
            shutil.rmtree(path.parent)
        else:
            path.unlink()
        assert store.is_astray
        await store.want("board1", Wanted(draining=True), Act("drain", "board1"))
        assert not store.is_astray
        await store.want("board2", Wanted(draining=True), Act("drain", "board2"))
        copy(tmp_path / "crash", path)  # what a kill -9 would leave

    with_store(path, work)
    for left in (path, tmp_path / "crash" / path.name):
        memory = with_store(left, lambda store: store.recall())
        assert sorted(memory.boards) == ["board0", "board1", "board2"]


def test_a_database_that_was_replaced_takes_no_more_acts_and_is_not_touched(path: Path, tmp_path: Path) -> None:
    with_store(tmp_path / "other", lambda store: store.mint_generation())

    async def work(store: Store) -> None:
        await store.mint_generation()
        (tmp_path / "other").rename(path)
        before = path.read_bytes()
        with pytest.raises(sqlite3.OperationalError, match="was replaced while it is in use; a new supervisor"):
            await store.want("board0", Wanted(draining=True), Act("drain", "board0"))
        assert path.read_bytes() == before

    with_store(path, work)


def test_a_deleted_database_that_cannot_be_written_again_refuses_and_does_so_later(path: Path) -> None:
    async def work(store: Store) -> None:
        path.unlink()
        (path.with_name(f".{path.name}.tmp")).mkdir()
        with pytest.raises(sqlite3.OperationalError, match="was deleted and cannot be written again"):
            await store.stand_by()
        (path.with_name(f".{path.name}.tmp")).rmdir()
        await store.stand_by()
        assert not store.is_astray

    with_store(path, work)


def test_a_database_that_the_machine_keeps_from_opening_is_not_called_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_store(path, lambda store: store.mint_generation())
    for code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):

        def fails(path: Path, code: int = code) -> sqlite3.Connection:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = code
            raise error

        monkeypatch.setattr("calculet_supervisor.shell.store._open", fails)
        with pytest.raises(OSError, match="It is not damaged"):
            with_store(path, lambda store: store.recall())


async def read(store: Store) -> tuple[Memory, int]:
    return await store.recall(), await store.mint_generation()


def copy(folder: Path, path: Path) -> None:
    folder.mkdir()
    for name in ("", "-wal"):
        shutil.copy(path.with_name(path.name + name), folder)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_nothing_is_acknowledged_before_it_is_synced(path: Path, tmp_path: Path) -> None:
    script = f"""
import asyncio, os
from pathlib import Path
from calculet_supervisor.shell.store import Act, Wanted, open_store
async def run():
    store = await open_store(Path({str(path)!r}))
    for number in range(5):
        await store.want("board0", Wanted(min_epoch=number), Act("restart", "board0"))
        os.write(2, b"acknowledged\\n")
    store.close()
asyncio.run(run())
"""
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-e", "trace=fsync,fdatasync,write", "-s", "16", "-o", str(trace), sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("this machine forbids strace")
    assert done.stderr.count("acknowledged") == 5, done.stderr
    synced = acknowledged = 0
    for line in trace.read_text().splitlines():
        if "fsync(" in line or "fdatasync(" in line:
            synced += 1
        elif '"acknowledged' in line:
            assert synced, "an act was acknowledged before anything was synced"
            acknowledged, synced = acknowledged + 1, 0
    assert acknowledged == 5
