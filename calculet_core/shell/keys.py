"""The key file on disk: mode 0600, of the fleet's own user, replaced as a whole, changed by one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from calculet_core.errors import ConfigError
from calculet_core.keys import KeyFile, format_keys, parse_keys
from calculet_core.shell.files import FileLock, read_bounded, write_atomic

MODE = 0o600
MAX_KEY_FILE_BYTES = 64 << 20


def read_keys(path: Path) -> KeyFile | None:
    """The file's keys; None when there is no file.

    Raises:
        ConfigError: others may read it, it cannot be read, or it is no key file.
    """
    try:
        mode = path.stat().st_mode & 0o777
        data = read_bounded(path, MAX_KEY_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{path}: mode {mode:04o} lets others at it; it must be 0600 (chmod 600)")
    return parse_keys(data, str(path))


def change_keys(path: Path, change: Callable[[KeyFile | None], KeyFile]) -> KeyFile:
    """Replace the file by what `change` makes of it, under a lock; what it raises changes nothing.

    The file gets the owner of its folder, so that root may change keys for a fleet that runs as another user.

    Raises:
        ConfigError: the present file is not usable.
        LockHeld: somebody else changes it right now.
        OSError: it cannot be written.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        found = change(read_keys(path))
        folder = path.parent.stat()
        owner = (folder.st_uid, folder.st_gid) if os.geteuid() == 0 else None
        write_atomic(path, format_keys(found), MODE, owner)
        return found
    finally:
        lock.release()
