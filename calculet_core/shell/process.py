"""What this process itself uses, as the operating system tells."""

from __future__ import annotations

import os
import resource

PAGE_BYTES = resource.getpagesize()


def rss_bytes() -> int:
    """Resident memory of this process; asked for by whoever it is now, since a worker may have been forked.

    Raises:
        OSError: /proc is not there.
    """
    fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, 256).split()[1]) * PAGE_BYTES
    finally:
        os.close(fd)
