"""What is put aside of a crash, how much of it, and for how long; and starting only where the board's lock is free."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from calculet_core import history, wire
from calculet_core.shell.files import FileLock, lock_holder
from calculet_core.shell.fleet import Fleet, load_fleet, make_folders
from calculet_supervisor.shell.crashes import CrashBundles, bundles
from calculet_supervisor.shell.launchers import checked
from calculet_supervisor.shell.tails import tail
from calculet_supervisor.world import Exit, Note


def a_fleet(folder: Path, keep: int = 3, max_bytes: int = 4096) -> Fleet:
    (folder / "fleet.yaml").write_text(
        "{schema: calculet-fleet/v1, run_dir: r, state_dir: s, log_dir: l, models: [{alias: a, package: p}], boards: [{name: b, device: sim}],"
        f" crashes: {{keep: {keep}, max_bytes: {max_bytes}}}}}"
    )
    fleet = load_fleet(folder / "fleet.yaml")
    make_folders(fleet)
    return fleet


def an_exit(epoch: int = 1, **data: Any) -> Note:
    return Note(history.FLEET_WORKER_EXITED, "b", epoch, data={"code": None, "signal": 9, "reason": None, "commanded": False, **data})


def crash(crashes: CrashBundles, note: Note) -> None:
    asyncio.run(crashes.keep(note, crashes.gather(note)))


def test_a_bundle_holds_the_ends_of_everything_and_is_bounded(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path)
    fleet.log("worker-b").write_text("".join(f"line {number}\n" for number in range(1000)))
    fleet.journal("worker-b").write_text('{"event":"board.fault"}\n')
    fleet.journal("supervisor").write_text('{"event":"x","board":"other"}\n{"event":"fleet.reset_granted","board":"b"}\n')
    fleet.stacks("worker-b").write_text("# board b\nThread 0x1\n")
    crashes = CrashBundles(fleet)
    crashes.about_to_forget("b", 4711, wire.WorkerReport("b", 1, 4711, 1, "ipc://x", "READY", steps=77, driver="1.2"))
    crash(crashes, an_exit(reason="told"))
    (bundle,) = bundles(fleet.crashes)
    how = json.loads((bundle / "exit.json").read_text())
    assert (how["board"], how["epoch"], how["pid"], how["class"], how["reason"]) == ("b", 1, 4711, "killed by signal 9", "told")
    assert (how["last_report"]["steps"], how["versions"]["driver"], how["board_lock"]) == (77, "1.2", "free")
    log = (bundle / "log.txt").read_text().splitlines()
    assert log[-1] == "line 999" and log[0].startswith("line ") and sum(map(len, log)) < 1024
    assert "Thread 0x1" in (bundle / "stacks.txt").read_text() and "board.fault" in (bundle / "journal.jsonl").read_text()
    assert (bundle / "fleet.jsonl").read_text() == '{"event":"fleet.reset_granted","board":"b"}\n'
    assert (crashes.written, crashes.failed) == (1, 0)


@pytest.mark.parametrize(("code", "signal", "kind"), [(70, None, "bug"), (75, None, "board unavailable"), (78, None, "configuration"), (99, None, "unknown"), (None, None, "gone"), (None, 11, "killed by signal 11")])  # fmt: skip
def test_the_exit_class_is_in_words(tmp_path: Path, code: int | None, signal: int | None, kind: str) -> None:
    fleet = a_fleet(tmp_path)
    crash(CrashBundles(fleet), an_exit(code=code, signal=signal))
    assert json.loads((bundles(fleet.crashes)[0] / "exit.json").read_text())["class"] == kind


def test_a_held_lock_is_named(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path)
    lock = FileLock(fleet.board_lock("b"))
    crash(CrashBundles(fleet), an_exit())
    assert json.loads((bundles(fleet.crashes)[0] / "exit.json").read_text())["board_lock"] == f"held by process {os.getpid()}"
    lock.release()


def test_the_oldest_bundles_go_and_none_is_written_over(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path, keep=3)
    crashes = CrashBundles(fleet)
    for epoch in (1, 2, 3, 3, 4):
        crash(crashes, an_exit(epoch))
    assert len(bundles(fleet.crashes)) == 3 and crashes.written == 5
    assert [json.loads((path / "exit.json").read_text())["epoch"] for path in bundles(fleet.crashes)] == [3, 3, 4]


def test_keep_0_makes_none(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path, keep=0)
    crash(CrashBundles(fleet), an_exit())
    assert not fleet.crashes.exists()


def test_a_bundle_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path)
    fleet.crashes.write_text("a file where the folder should be")
    crashes = CrashBundles(fleet)
    crash(crashes, an_exit())
    fleet.stacks("worker-b").mkdir()
    crash(crashes, an_exit())
    assert (crashes.written, crashes.failed) == (0, 2)


def test_a_tail_begins_at_a_line(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"first\nsecond\nthird\n")
    assert (tail(tmp_path / "f", 100), tail(tmp_path / "f", 10), tail(tmp_path / "none", 10)) == (b"first\nsecond\nthird\n", b"third\n", b"")


# ---------------------------------------------------------------- locks
class Inner:
    """A launcher that remembers what it was asked; also who hears of exits."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[tuple[str, Exit]] = []

    def start(self, board: str) -> None:
        self.begun.append(board)

    def started(self, board: str, pid: int) -> None:
        raise AssertionError("not by the check")

    def exited(self, board: str, how: Exit) -> None:
        self.ended.append((board, how))

    def close(self) -> None:
        pass


def test_a_free_board_is_started_at_once_and_a_held_one_when_it_is_free(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path)

    async def run() -> None:
        inner = Inner()
        launcher = checked.LockChecked(inner, fleet, inner)  # type: ignore[arg-type]
        launcher.start("b")
        assert inner.begun == ["b"]
        lock = FileLock(fleet.board_lock("b"))
        launcher.start("b")
        launcher.start("b")
        assert inner.begun == ["b"]
        lock.release()
        async with asyncio.timeout(20):
            while len(inner.begun) < 2:
                await asyncio.sleep(0.01)
        assert lock_holder(fleet.board_lock("b")) is None and inner.begun == ["b", "b"] and not inner.ended

    asyncio.run(run())


def test_a_board_that_stays_held_is_told_with_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = a_fleet(tmp_path)
    monkeypatch.setattr(checked, "WAIT_S", 0.2)
    lock = FileLock(fleet.board_lock("b"))

    async def run() -> Inner:
        inner = Inner()
        launcher = checked.LockChecked(inner, fleet, inner)  # type: ignore[arg-type]
        launcher.start("b")
        async with asyncio.timeout(20):
            while not inner.ended:
                await asyncio.sleep(0.01)
        launcher.close()
        return inner

    inner = asyncio.run(run())
    lock.release()
    ((board, how),) = inner.ended
    assert (board, how.code, inner.begun) == ("b", 75, [])
    assert f"held by another process (pid {os.getpid()})" in (how.reason or "")
