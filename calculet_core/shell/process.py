"""What this process itself uses, as the operating system tells."""

from __future__ import annotations

import psutil

_ME = psutil.Process()


def rss_bytes() -> int:
    """Resident memory of this process."""
    size: int = _ME.memory_info().rss
    return size
