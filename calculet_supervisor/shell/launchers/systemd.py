"""systemd as launcher: template units `calculet-worker@BOARD.service` with `Restart=no`.

`systemctl start` and `show` are all that is asked of the manager (a polkit rule allows just those units). Workers run as the
supervisor's own user, so signals go through a pidfd, which also tells their end at once; `KillMode=mixed` takes what a worker
leaves behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Coroutine, Sequence
from typing import Any

from calculet_core.shell.stacks import DUMP
from calculet_supervisor.shell.launchers import Events
from calculet_supervisor.world import Exit

SYSTEMCTL = "systemctl"
COMMAND_TIMEOUT_S = 60.0
START_OPTIONS = ("--no-ask-password", "--job-mode=fail")
"""Where everything is being stopped, a start must not take the place of the stop."""
SETTLE_S = 0.02
SETTLE_TRIES = 50
"""How long systemd may take to notice an exit that the kernel has told us."""
CLD_EXITED = "1"
log = logging.getLogger("calculet.systemd")


def unit_of(board: str) -> str:
    """The board's unit."""
    return f"calculet-worker@{board}.service"


class SystemdLauncher:
    """Starts and watches the units of `boards`."""

    def __init__(self, boards: Sequence[str], events: Events) -> None:
        self._boards, self._events = boards, events
        self._pidfds: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def list(self) -> dict[str, int]:
        shown = await asyncio.gather(*(self._show(board, "MainPID") for board in self._boards))
        found = {board: int(values.get("MainPID") or 0) for board, values in zip(self._boards, shown, strict=True)}
        return {board: pid for board, pid in found.items() if pid and self._watch(board, pid)}

    def start(self, board: str) -> None:
        self._spawn(self._start(board))

    def stop(self, board: str) -> None:
        self._signal(board, signal.SIGTERM)

    def dump(self, board: str) -> None:
        self._signal(board, DUMP)

    def abort(self, board: str) -> None:
        self._signal(board, signal.SIGABRT)

    def kill(self, board: str) -> None:
        self._signal(board, signal.SIGKILL)

    def tell(self, boards: dict[str, Any]) -> None:
        """Nobody watches: the journal and `calculet status` tell it."""

    def replace_router(self, pid: int) -> bool:
        return False

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for board in list(self._pidfds):
            self._forget(board)

    async def _start(self, board: str) -> None:
        code, _, errors = await self._run("start", *START_OPTIONS, unit_of(board))
        if code != 0:
            self._events.exited(board, Exit(reason=f"systemctl start {unit_of(board)}: {errors or f'exit {code}'}"))
            return
        pid = int((await self._show(board, "MainPID")).get("MainPID") or 0)
        if pid and self._watch(board, pid):
            self._events.started(board, pid)
        else:
            self._events.exited(board, await self._how(board, pid))

    def _watch(self, board: str, pid: int) -> bool:
        """Follow the process by a pidfd; False when it is gone already."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self._pidfds[board] = fd
        asyncio.get_running_loop().add_reader(fd, self._gone, board, pid)
        return True

    def _gone(self, board: str, pid: int) -> None:
        self._forget(board)
        self._spawn(self._report_exit(board, pid))

    async def _report_exit(self, board: str, pid: int) -> None:
        self._events.exited(board, await self._how(board, pid))

    async def _how(self, board: str, pid: int) -> Exit:
        """How the unit's last process ended; waits until systemd has noticed."""
        values: dict[str, str] = {}
        for _ in range(SETTLE_TRIES):
            values = await self._show(board, "MainPID,ExecMainPID,ExecMainCode,ExecMainStatus")
            if values.get("MainPID") in (None, "0"):
                break
            await asyncio.sleep(SETTLE_S)
        if not values.get("ExecMainStatus", "").isdigit() or (pid and values.get("ExecMainPID") != str(pid)):
            return Exit()
        status = int(values["ExecMainStatus"])
        return Exit(code=status) if values.get("ExecMainCode") == CLD_EXITED else Exit(signal=status)

    def _forget(self, board: str) -> None:
        fd = self._pidfds.pop(board, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _signal(self, board: str, number: signal.Signals) -> None:
        fd = self._pidfds.get(board)
        if fd is None:
            return
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            pass
        except OSError as error:
            log.error("board %s: %s could not be sent: %s", board, number.name, error)

    async def _show(self, board: str, properties: str) -> dict[str, str]:
        _, out, _ = await self._run("show", "-p", properties, unit_of(board))
        return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)

    async def _run(self, *arguments: str) -> tuple[int, str, str]:
        try:
            process = await asyncio.create_subprocess_exec(SYSTEMCTL, *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                out, errors = await process.communicate()
        except (OSError, TimeoutError) as error:
            return 1, "", str(error) or f"no answer within {COMMAND_TIMEOUT_S:g} s"
        return process.returncode or 0, out.decode(errors="replace"), errors.decode(errors="replace").strip()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
