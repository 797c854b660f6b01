"""The ends of files that grow: what is read at night."""

from __future__ import annotations

import os
from pathlib import Path


def tail(path: Path, max_bytes: int) -> bytes:
    """The last whole lines of a file, at most `max_bytes` of them; empty when there is none.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except FileNotFoundError:
        return b""
    return data if size <= max_bytes else data.partition(b"\n")[2]
