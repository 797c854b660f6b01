"""systemd as launcher, over a `systemctl` that records what it was asked and starts real processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from calculet_supervisor.shell.launchers.systemd import SystemdLauncher
from calculet_supervisor.world import Exit

# Keeps a unit's state in files beside itself, and is the parent of its process as systemd would be.
SYSTEMCTL = r"""#!/bin/bash
here=$(dirname "$0"); echo "$*" >>"$here/asked"; unit=${!#}
case $1 in
start)
    [ -e "$here/refuse" ] && { echo "Access denied" >&2; exit 4; }
    setsid bash -c '
        bash -c "$(cat "$0/program")" & echo $! >"$0/$1.pid"
        wait $!; code=$?
        if [ $code -gt 128 ]; then echo "2 $((code - 128))"; else echo "1 $code"; fi >"$0/$1.how.tmp"; mv "$0/$1.how.tmp" "$0/$1.how"
    ' "$here" "$unit" </dev/null >/dev/null 2>&1 &
    until [ -s "$here/$unit.pid" ]; do sleep 0.01; done ;;
show)
    pid=$(cat "$here/$unit.pid" 2>/dev/null || echo 0); main=$pid how="0 0"
    [ -e "$here/$unit.how" ] && { main=0; how=$(cat "$here/$unit.how"); }
    printf 'MainPID=%s\nExecMainPID=%s\nExecMainCode=%s\nExecMainStatus=%s\n' "$main" "$pid" $how ;;
esac
"""


class Log:
    """What the launcher told, and waiting for it."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.ended: list[tuple[str, Exit]] = []
        self._news = asyncio.Event()

    def started(self, board: str, pid: int) -> None:
        self.running[board] = pid
        self._news.set()

    def exited(self, board: str, how: Exit) -> None:
        self.ended.append((board, how))
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_a_unit_is_started_by_name_and_its_exit_code_is_told(folder: Path) -> None:
    (folder / "program").write_text("exit 75")

    async def run() -> Log:
        log = Log()
        launcher = SystemdLauncher(["board0"], log)
        launcher.start("board0")
        await log.until(lambda: log.ended)
        launcher.close()
        return log

    assert asyncio.run(run()).ended == [("board0", Exit(code=75))]
    assert (folder / "asked").read_text().splitlines()[0] == "start --no-ask-password --job-mode=fail calculet-worker@board0.service"


@pytest.mark.parametrize(("verb", "number"), [("stop", signal.SIGTERM), ("abort", signal.SIGABRT), ("kill", signal.SIGKILL)])
def test_signals_reach_the_process_and_its_end_is_told(folder: Path, verb: str, number: signal.Signals) -> None:
    (folder / "program").write_text("exec sleep 1000")

    async def run() -> Log:
        log = Log()
        launcher = SystemdLauncher(["board0"], log)
        launcher.start("board0")
        await log.until(lambda: log.running)
        getattr(launcher, verb)("board0")
        await log.until(lambda: log.ended)
        launcher.close()
        return log

    assert asyncio.run(run()).ended == [("board0", Exit(signal=number))]


def test_a_new_supervisor_lists_living_units_and_sees_them_end(folder: Path) -> None:
    (folder / "program").write_text("exec sleep 1000")

    async def run() -> tuple[dict[str, int], int, list[tuple[str, Exit]]]:
        first = Log()
        launcher = SystemdLauncher(["board0", "board1"], first)
        launcher.start("board0")
        await first.until(lambda: first.running)
        launcher.close()
        second = Log()
        launcher = SystemdLauncher(["board0", "board1"], second)
        listed = await launcher.list()
        psutil.Process(listed["board0"]).kill()
        await second.until(lambda: second.ended)
        launcher.close()
        return listed, first.running["board0"], second.ended

    listed, pid, ended = asyncio.run(run())
    assert listed == {"board0": pid}
    assert ended == [("board0", Exit(signal=signal.SIGKILL))]


def test_a_start_that_systemd_refuses_is_an_exit_with_its_words(folder: Path) -> None:
    (folder / "refuse").touch()

    async def run() -> Log:
        log = Log()
        SystemdLauncher(["board0"], log).start("board0")
        await log.until(lambda: log.ended)
        return log

    how = asyncio.run(run()).ended[0][1]
    assert how.code is None and how.reason == "systemctl start calculet-worker@board0.service: Access denied"
