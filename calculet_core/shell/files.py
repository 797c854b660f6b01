"""Files that survive a crash, and locks that do not."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

MAX_CONFIG_BYTES = 4 << 20


class LockHeld(Exception):
    """Another process holds the lock; the message names it as far as it is known."""


def write_atomic(path: Path, data: bytes, mode: int = 0o640, owner: tuple[int, int] | None = None) -> None:
    """Replace `path` by rename, with file and folder synced: after a power cut it holds the old or the new content.

    `owner` is the user and group id that the new file gets; only root may give a file away.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if owner is not None:
            os.fchown(fd, *owner)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except BaseException as error:
        os.close(fd)
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write that fails does not say of what
        raise
    os.close(fd)
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that a rename in it is durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_bounded(path: Path, limit: int = MAX_CONFIG_BYTES) -> bytes:
    """The whole file.

    Raises:
        OSError: it cannot be read, or is larger than `limit` bytes (EFBIG).
    """
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(27, f"larger than {limit} bytes", str(path))
    return data


class FileLock:
    """An exclusive flock. The file stays; the lock goes with the process, however it ends.

    The descriptor is close-on-exec, and nothing forks after taking it, so no child can keep it.

    Raises:
        LockHeld: somebody else has it; names the pid that the file records.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise LockHeld(f"{path} is held by another process (pid {holder})") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back; twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_holder(path: Path) -> str | None:
    """Who holds a `FileLock`: the pid that the file records, `unknown`, or None when nobody does. A look takes the lock for an
    instant, so only who decides about the next holder may look.

    Raises:
        OSError: the file is there and cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(fd)
    return None


def next_number(path: Path) -> int:
    """A durable counter in a file: the number after the last one handed out, synced before it is returned.

    The caller holds a lock that covers the file.
    """
    try:
        last = int(path.read_text().strip())
    except FileNotFoundError:
        last = 0
    write_atomic(path, f"{last + 1}\n".encode())
    return last + 1
