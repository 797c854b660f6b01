"""Where a process is stuck, in a file of its own: on SIGUSR2 it writes the stacks of all threads and goes on; on a fatal signal
(the supervisor's SIGABRT among them) it writes them and dies.

The handlers are C and need neither the interpreter's lock nor a running event loop: they work on a process that hangs in a driver.
The file holds the last life only; it is opened once and written unbuffered.
"""

from __future__ import annotations

import faulthandler
import signal
from contextlib import suppress
from pathlib import Path
from typing import IO

DUMP = signal.SIGUSR2
_kept: list[IO[bytes]] = []
"""Open for the life of the process, as faulthandler wants it."""


def ignore_dumps() -> None:
    """Until `keep_stacks`: by default the signal would end the process."""
    signal.signal(DUMP, signal.SIG_IGN)


def keep_stacks(path: Path, title: str) -> None:
    """Write stacks to `path` from now on, below a line with `title`."""
    file = path.open("wb", buffering=0)
    file.write(f"# {title}\n".encode())
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(DUMP, file, all_threads=True, chain=False)
    _kept[:] = [file]


def keep_stacks_if_possible(path: Path, title: str) -> None:
    """`keep_stacks`, for a process that must start on a full disk, too; there the signal is ignored."""
    ignore_dumps()
    with suppress(OSError):
        keep_stacks(path, title)


def can_dump(pid: int) -> bool:
    """Whether the process has a handler for `DUMP`; to one that has none (it starts, or is of another version) none is sent."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (DUMP - 1) & 1)
