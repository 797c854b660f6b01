"""What a process knows about itself."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

NO_PLACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR})


def rss_bytes() -> int:
    """Resident memory. Cheap, and it needs no new descriptor after the first time: it is told when there is none left, too."""
    return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * PAGE_BYTES


def is_shortage(error: BaseException | None) -> bool:
    """Whether the machine or a limit has run out of something for the moment: no bug of ours, and no reason to end."""
    return isinstance(error, OSError) and error.errno in SHORTAGES


def is_machines(error: BaseException | None) -> bool:
    """Whether the machine stands in the way: a shortage, a disk that is full, read-only or failing, a folder of somebody else."""
    return is_shortage(error) or (isinstance(error, OSError) and error.errno in NO_PLACE)


def in_words(error: OSError) -> str:
    """`PATH: No space left on device`, without the number; what a person needs of it."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, of whatever user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def began_s(pid: int) -> float | None:
    """When a process began, seconds on CLOCK_BOOTTIME (which no setting of the clock moves); None: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


@cache
def _statm(pid: int) -> int:
    """One that was opened before a fork tells of the parent."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
