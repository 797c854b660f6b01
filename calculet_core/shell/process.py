"""What a process knows about itself."""

from __future__ import annotations

import errno
import os
from functools import cache

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def rss_bytes() -> int:
    """Resident memory. Cheap, and it needs no new descriptor after the first time: it is told when there is none left, too."""
    return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * PAGE_BYTES


def is_shortage(error: BaseException | None) -> bool:
    """Whether the machine or a limit has run out of something for the moment: no bug of ours, and no reason to end."""
    return isinstance(error, OSError) and error.errno in SHORTAGES


def is_alive(pid: int) -> bool:
    """Whether there is such a process, of whatever user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def _statm(pid: int) -> int:
    """One that was opened before a fork tells of the parent."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
