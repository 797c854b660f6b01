"""The configuration that was in force last, for services that start while the file is broken.

A supervisor that has begun to supervise leaves its configuration in the run folder, which goes with the boot and with
`calculet up`; without anybody who lives it counts no more. A supervisor or router that is started again in between, and finds a
file that cannot be used, goes on with that. A worker never does: the file says whom to trust.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from calculet_core.applying import Standing, decode
from calculet_core.config import run_dir_for
from calculet_core.errors import ConfigError
from calculet_core.shell.files import read_bounded, write_atomic
from calculet_core.shell.fleet import STANDING, Fleet, load_fleet, standing_of

VARIABLE = "CALCULET_RUN_DIR"
VARIABLES = (VARIABLE, "RUNTIME_DIRECTORY")
"""Where the run folder is: from `calculet up`, or from systemd."""
LISTENS_S = 0.5
DEFAULT_RUN_DIRS = ("../.calculet/run", "run", "/run/calculet")
_RUN_DIR = re.compile(r"""\brun_dir["']?[ \t]*:[ \t]*["']?([^"'#,}\s]+)""")


def leave_standing(fleet: Fleet, standing: Standing) -> None:
    """Keep what is in force now.

    Raises:
        OSError: the disk.
    """
    body = {"path": str(fleet.path), "standing": json.loads(standing.encode())}
    write_atomic(fleet.standing, json.dumps(body, sort_keys=True).encode())


def is_left(fleet: Fleet) -> bool:
    """Whether it lies there; somebody may have deleted the run folder."""
    return fleet.standing.exists()


def goes_on(fleet: Fleet) -> bool:
    """Whether a service that starts now only follows another one of a fleet that serves: what was in force counts then. Under
    `calculet up` the run folder is swept at every end; under systemd it lasts until the boot, so somebody must live."""
    if not is_left(fleet):
        return False
    return VARIABLE in os.environ or any(_listens(path) for path in fleet.run_dir.glob(fleet.metrics_socket("*").name))


def _listens(path: Path) -> bool:
    """Whether the process of a metrics socket lives; nobody is in the way of its successor for that, as with a look at a lock."""
    with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
        sock.settimeout(LISTENS_S)
        sock.connect(str(path))
        return True
    return False


def load_or_held(path: Path, run_dir: Path | None = None) -> Fleet:
    """What the file says; while it or a scheduler file cannot be used, what was in force last, with the reason in `held`.
    `run_dir` is where the run folder of a fleet that serves is known to be.

    Raises:
        ConfigError: the file cannot be used, and nothing was in force since the boot, or since `calculet up`.
    """
    try:
        fleet = load_fleet(path)
        standing_of(fleet)
    except ConfigError as error:
        found = held(path, str(error), run_dir)
        if found is None:
            raise
        return found
    return fleet


def held(path: Path, reason: str, run_dir: Path | None = None) -> Fleet | None:
    """What was in force last of the fleet whose file is `path`, which cannot be used for `reason`; None: nothing was."""
    path = path.resolve()
    for folder in (*([run_dir] if run_dir is not None else []), *_run_dirs(path)):
        with suppress(OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
            kept = json.loads(read_bounded(folder / STANDING))
            if kept["path"] == str(path):
                standing = decode(json.dumps(kept["standing"]).encode())
                found = _fleet_of(path, standing, reason)
                if run_dir is not None or goes_on(found):
                    return found
    return None


def _fleet_of(path: Path, standing: Standing, reason: str) -> Fleet:
    config, base = standing.fleet, path.parent
    run_dir = run_dir_for(str((base / config.run_dir).resolve()), os.getuid())
    fleet = Fleet(config, path, Path(run_dir), (base / config.state_dir).resolve(), (base / config.log_dir).resolve())
    return replace(fleet, held=reason, schedulers=dict(standing.schedulers))


def _run_dirs(path: Path) -> Iterator[Path]:
    """Where the run folder may be, of a file that nobody can parse."""
    yield from (Path(os.environ[name]) for name in VARIABLES if os.environ.get(name))
    text = ""
    with suppress(OSError):
        text = read_bounded(path).decode(errors="replace")
    for name in (*_RUN_DIR.findall(text), *DEFAULT_RUN_DIRS):
        yield Path(run_dir_for(str((path.parent / name).resolve()), os.getuid()))
