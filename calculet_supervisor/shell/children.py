"""The keeper's children: each in a process group of its own, with its output in a file, and the death pipe to die by.

A child's output never goes through the keeper, so nothing that the keeper does or fails to do can block a child. When a child
ends, what is left of its process group is killed before the child is reaped, while its process id cannot be anybody else's.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calculet_core.shell.death_pipe import STARTED, VARIABLE
from calculet_core.shell.sd_notify import STRIPPED

PR_SET_CHILD_SUBREAPER = 36
LOG_BYTES = 16 << 20
"""A log above it is put aside as NAME.1 at the next start of its process."""
TAIL_BYTES = 4096
LOG_PREFIX = re.compile(r"^(\d\d:\d\d:\d\d\.\d{3} )?[DIWEC] \S+ ")
"""Of `calculet_core.shell.logs`."""


@dataclass(slots=True, eq=False)
class Child:
    """A process that the keeper started."""

    name: str
    """`router`, `supervisor`, or a board's name."""
    pid: int
    log: Path
    log_start: int
    """Size of the log when it started."""
    started_s: float = field(default_factory=time.monotonic)

    def last_words(self) -> str:
        """The last line it wrote, without its time and level, for a one-line message; empty when it wrote nothing."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        except OSError:
            return ""
        return LOG_PREFIX.sub("", next((line for line in reversed(lines) if line), ""))

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal; a child that is not reaped yet keeps its id, so this never hits a stranger."""
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except ProcessLookupError:
            pass


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: one of the two is there."""

    code: int | None
    signal: int | None


class Children:
    """Starts and reaps. There is one in a process."""

    def __init__(self, log_dir: Path, variables: Mapping[str, str] = {}) -> None:
        """`variables` are set in every process that is started here."""
        self._log_dir, self._variables = log_dir, variables
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        self._started = f"{os.getpid()}-{time.monotonic_ns()}"
        self._by_pid: dict[int, Child] = {}
        become_subreaper()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @property
    def death_pipe(self) -> int:
        """The read end, for a child that is not started here."""
        return self._read_end

    def open_log(self, name: str) -> tuple[int, int]:
        """(descriptor, its size now) of a log that is written on; a large one is put aside first.

        Raises:
            OSError: it cannot be opened.
        """
        path = self._path(name)
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.rename(path.with_name(f"{path.name}.1"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return fd, os.fstat(fd).st_size

    def start(
        self, name: str, log_name: str, command: Sequence[str], fds: Sequence[int] = (), variables: Mapping[str, str] = {}
    ) -> Child:
        """Start a process, with `fds` open and `variables` set in it.

        Raises:
            OSError: it cannot be started.
        """
        environment = {key: value for key, value in os.environ.items() if key not in STRIPPED}
        environment |= {VARIABLE: str(self._read_end), "PYTHONFAULTHANDLER": "1", STARTED: self._started}
        environment |= {**self._variables, **variables}
        output, log_start = self.open_log(log_name)
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                pass_fds=(self._read_end, *fds), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(output)
        process.returncode = 0  # reaped here, not by Popen
        return self.adopt(name, log_name, process.pid, log_start)

    def adopt(self, name: str, log_name: str, pid: int, log_start: int) -> Child:
        """A process that is a child of this one already: started here, or forked for it and left to it.

        Raises:
            ChildProcessError: it was one, and has been reaped with the orphans.
        """
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        child = self._by_pid[pid] = Child(name, pid, self._path(log_name), log_start)
        return child

    def _path(self, log_name: str) -> Path:
        return self._log_dir / f"{log_name}.log"

    def reap(self) -> list[tuple[Child, Ended]]:
        """Children that have ended since the last call. Orphans that were handed to this process are reaped too."""
        ended: list[tuple[Child, Ended]] = []
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return ended
            if found is None:
                return ended
            child = self._by_pid.pop(found.si_pid, None)
            if child is not None:
                child.signal(signal.SIGKILL, group=True)
                exited = found.si_code == os.CLD_EXITED
                ended.append((child, Ended(found.si_status, None) if exited else Ended(None, found.si_status)))
            os.waitpid(found.si_pid, 0)

    def close(self) -> None:
        """Let go of the death pipe: whoever still lives ends."""
        os.close(self._write_end)
        os.close(self._read_end)


def become_subreaper() -> None:
    """Orphans of children become this process's, so that it can reap them."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def command_of(module: str, config: Path, *more: str) -> list[str]:
    """How this installation's process of a package is run."""
    return [sys.executable, "-m", module, "run", "--config", str(config), *more]
