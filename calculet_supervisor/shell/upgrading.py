"""Replacing every process of a host by what is installed now, one at a time, so that nobody who asks notices.

Supervisor first (it is harmless, and the new one knows the old workers), then each router (its connections drain, others wait in
systemd's socket), then each board (its requests drain; the rest of the boards serve). Whatever does not come back ends the upgrade:
what was not touched yet goes on as it was.

When it began is a file in the state folder until it is done. So an upgrade that was interrupted, by Ctrl-C, a lost terminal or a
failure, goes on when it is called again: what began since is new. With another installation, or after a boot, it begins anew.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec

from calculet_core.artifact import sha256_hex
from calculet_core.shell.control_client import SupervisorUnreachable, call
from calculet_core.shell.files import read_bounded, write_atomic
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.process import began_s
from calculet_supervisor.shell.installing import Refusal

SUPERVISOR = "calculet-supervisor.service"
ROUTERS = ("calculet-router.service", "calculet-router@*.service")
SERVES = ("READY", "DRAINING")
COMES = ("ABSENT", "STARTING", "UP", "STOPPING")
"""Process states on the way to a worker that serves."""
RUNS = "--state=active,activating,deactivating,reloading"
"""A service that is just being restarted is one of them."""
GLANCE_S = 0.1
AWAY_S = 60.0
"""How long a supervisor may be away that an interrupted upgrade has told to restart."""
UNIT_S = 300.0
"""What one service may take to drain and to be ready again; systemd has shorter limits of its own."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Begun(msgspec.Struct, frozen=True):
    """An upgrade that is not over; `since_s` is on CLOCK_BOOTTIME, as processes' beginnings are."""

    since_s: float
    wall_s: float
    boot: str
    installed: str


@dataclass(frozen=True, slots=True)
class Steps:
    """What is to be restarted, in this order; boards that do not serve are left alone."""

    begun: Begun
    goes_on: bool
    """Whether an earlier call began it."""
    is_new: tuple[str, ...]
    """What it has restarted already, or somebody else since."""
    units: tuple[str, ...]
    coming: tuple[str, ...]
    """Boards whose new worker is on its way: they are waited for first."""
    boards: tuple[str, ...]
    left_alone: Mapping[str, str]
    """Board -> why."""


# ------------------------------------------------------------------------------------------------ remembering
def begun_before(fleet: Fleet) -> Begun | None:
    """The upgrade to what is installed now that was begun and is not over."""
    try:
        begun = msgspec.json.decode(read_bounded(_path(fleet)), type=Begun)
    except (OSError, msgspec.DecodeError):
        return None
    now = _begun_now()
    return begun if (begun.boot, begun.installed) == (now.boot, now.installed) else None


def remember(fleet: Fleet, begun: Begun) -> None:
    """From now on it goes on where it was.

    Raises:
        Refusal: it cannot be written.
    """
    try:
        write_atomic(_path(fleet), msgspec.json.encode(begun))
    except OSError as error:
        raise Refusal(f"{_path(fleet)}: {error.strerror}", "is the disk full? nothing was restarted") from None


def forget(fleet: Fleet) -> None:
    """It is over."""
    _path(fleet).unlink(missing_ok=True)


def _path(fleet: Fleet) -> Path:
    return fleet.state_dir / "upgrade.json"


def _begun_now() -> Begun:
    record = distribution("calculet").read_text("RECORD") or ""
    boot = BOOT_ID.read_text().strip()
    return Begun(time.clock_gettime(time.CLOCK_BOOTTIME), time.time(), boot, sha256_hex(record.encode()))


# ------------------------------------------------------------------------------------------------ planning
def plan(fleet: Fleet, *, allow_downtime: bool, again: bool = False) -> Steps:
    """What to do on this host. `again`: begin anew, whatever was begun before.

    Raises:
        Refusal: the services do not run, or a model has a single board and no downtime was allowed.
        ControlError: the supervisor does not answer.
    """
    before = None if again else begun_before(fleet)
    begun = before or _begun_now()
    found = {unit: pid for pattern in (SUPERVISOR, *ROUTERS) for unit, pid in _running(pattern).items()}
    if SUPERVISOR not in found:
        hint = "a fleet of `calculet up` is restarted with `calculet restart router`, then `calculet restart BOARD`"
        raise Refusal(f"{SUPERVISOR} does not run under systemd here", hint)
    rows = _until_rows(fleet, time.monotonic() + (AWAY_S if before else 0))
    serving = [row for row in rows if row["up"] and row["state"] in SERVES]
    coming = [row for row in rows if row not in serving and before is not None and _is_coming(row, begun)]
    left_alone = {
        row["board"]: row["why"] or row["state"] or row["process"] for row in rows if row not in serving and row not in coming
    }
    old = sorted((row for row in serving if not _is_new(row["pid"], begun)), key=lambda row: not row["worker_draining"])
    for row in old:
        alone = sum(other["alias"] == row["alias"] for other in (*serving, *coming)) == 1
        if alone and not allow_downtime and not row["worker_draining"]:
            message = f"{row['board']} is the only board that serves {row['alias']}: its restart is an outage of some seconds"
            raise Refusal(message, "--allow-downtime does it nevertheless")
    units = [unit for unit, pid in found.items() if not _is_new(pid, begun)]
    is_new = [unit for unit in found if unit not in units] + [row["board"] for row in serving if row not in old]
    comes, stays = (tuple(row["board"] for row in some) for some in (coming, old))
    return Steps(begun, before is not None, tuple(is_new), tuple(units), comes, stays, left_alone)


def _is_new(pid: int | None, begun: Begun) -> bool:
    since_s = began_s(pid) if pid else None
    return since_s is not None and since_s >= begun.since_s


def _is_coming(row: Mapping[str, Any], begun: Begun) -> bool:
    """Whether its next worker, or its new one, is about to serve: an interrupted upgrade had begun with it."""
    on_its_way = row["up"] and not row["condemned"] and row["process"] in COMES and row["state"] != "FAILED"
    return bool(on_its_way and (row["pid"] is None or _is_new(row["pid"], begun)))


# ------------------------------------------------------------------------------------------------ doing
def restart_unit(unit: str) -> None:
    """Restart a service; it is ready when this returns.

    Raises:
        Refusal: it did not come back.
    """
    done = subprocess.run(["systemctl", "restart", unit], capture_output=True, text=True, timeout=UNIT_S, check=False)
    if done.returncode != 0:
        raise Refusal(f"{unit} did not come back: {done.stderr.strip()}", f"journalctl -u {unit}; the rest goes on as it was")


def restart_board(fleet: Fleet, board: str, limit_s: float) -> None:
    """Replace a board's worker after its drain; the new one serves when this returns.

    Raises:
        Refusal: it does not serve in time.
        ControlError: the supervisor refuses.
    """
    deadline_s = time.monotonic() + limit_s
    epoch = _until_answered(fleet, board, deadline_s)["epoch"] or 0
    call(fleet.control_socket, "restart", {"board": board})
    while True:
        row = _until_answered(fleet, board, deadline_s)
        if (row["epoch"] or 0) > epoch and row["state"] in SERVES and not row.get("unreached_by"):
            return
        if time.monotonic() > deadline_s:
            message = f"{board} does not serve again within {limit_s:g} s: {row['why'] or row['state'] or row['process']}"
            raise Refusal(message, "the boards after it go on as they were; `calculet status` shows it")
        time.sleep(GLANCE_S)


def await_board(fleet: Fleet, board: str, limit_s: float) -> None:
    """A board whose new worker is on its way serves when this returns.

    Raises:
        Refusal: it does not serve in time.
    """
    deadline_s = time.monotonic() + limit_s
    while (row := _until_answered(fleet, board, deadline_s))["state"] not in SERVES or row.get("unreached_by"):
        if time.monotonic() > deadline_s:
            message = f"{board} does not serve again within {limit_s:g} s: {row['why'] or row['state'] or row['process']}"
            raise Refusal(message, "the boards after it go on as they were; `calculet status` shows it")
        time.sleep(GLANCE_S)


def _until_answered(fleet: Fleet, board: str, deadline_s: float) -> dict[str, Any]:
    """The board's row."""
    return next(row for row in _until_rows(fleet, deadline_s) if row["board"] == board)


def _until_rows(fleet: Fleet, deadline_s: float) -> list[dict[str, Any]]:
    """All boards' rows; the supervisor may be restarting at any moment."""
    while True:
        try:
            rows: list[dict[str, Any]] = call(fleet.control_socket, "status")["boards"]
            return rows
        except SupervisorUnreachable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(GLANCE_S)


def _running(pattern: str) -> dict[str, int]:
    """Units that run, or are just being restarted, with their main process (0: none now)."""
    command = ["systemctl", "list-units", "--no-legend", "--plain", RUNS, pattern]
    done = subprocess.run(command, capture_output=True, text=True, timeout=UNIT_S, check=False)
    found = {}
    for unit in sorted(line.split()[0] for line in done.stdout.splitlines() if line.strip()):
        command = ["systemctl", "show", "-p", "MainPID", "--value", unit]
        pid = subprocess.run(command, capture_output=True, text=True, timeout=UNIT_S, check=False).stdout.strip()
        found[unit] = int(pid) if pid.isdigit() else 0
    return found
