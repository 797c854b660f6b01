"""Replacing every process of a host by what is installed now, one at a time, so that nobody who asks notices.

Supervisor first (it is harmless, and the new one knows the old workers), then each router (its connections drain, others wait in
systemd's socket), then each board (its requests drain; the rest of the boards serve). Whatever does not come back ends the upgrade:
what was not touched yet goes on as it was.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calculet_core.shell.control_client import SupervisorUnreachable, call
from calculet_core.shell.fleet import Fleet
from calculet_supervisor.shell.installing import Refusal

SUPERVISOR = "calculet-supervisor.service"
ROUTERS = ("calculet-router.service", "calculet-router@*.service")
SERVES = ("READY", "DRAINING")
GLANCE_S = 0.1
UNIT_S = 300.0
"""What one service may take to drain and to be ready again; systemd has shorter limits of its own."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What is to be restarted, in this order; boards that do not serve are left alone."""

    units: tuple[str, ...]
    boards: tuple[str, ...]
    left_alone: Mapping[str, str]
    """Board -> why."""


def plan(fleet: Fleet, *, allow_downtime: bool) -> Steps:
    """What to do on this host.

    Raises:
        Refusal: the services do not run, or a model has a single board and no downtime was allowed.
        ControlError: the supervisor does not answer.
    """
    units = [unit for pattern in (SUPERVISOR, *ROUTERS) for unit in _active(pattern)]
    if SUPERVISOR not in units:
        raise Refusal(f"{SUPERVISOR} does not run under systemd here", "a fleet of `calculet up` is restarted by hand")
    rows = call(fleet.control_socket, "status")["boards"]
    serving = [row for row in rows if row["up"] and row["state"] in SERVES]
    left_alone = {row["board"]: row["why"] or row["state"] or row["process"] for row in rows if row not in serving}
    for row in serving:
        if not allow_downtime and sum(other["alias"] == row["alias"] for other in serving) == 1:
            message = f"{row['board']} is the only board that serves {row['alias']}: its restart is an outage of some seconds"
            raise Refusal(message, "--allow-downtime does it nevertheless")
    return Steps(tuple(units), tuple(row["board"] for row in serving), left_alone)


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


def _until_answered(fleet: Fleet, board: str, deadline_s: float) -> dict[str, Any]:
    """The board's row; the supervisor may be restarting at any moment."""
    while True:
        try:
            rows = call(fleet.control_socket, "status")["boards"]
            return next(row for row in rows if row["board"] == board)
        except SupervisorUnreachable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(GLANCE_S)


def _active(pattern: str) -> list[str]:
    command = ["systemctl", "list-units", "--no-legend", "--plain", "--state=active", pattern]
    done = subprocess.run(command, capture_output=True, text=True, timeout=UNIT_S, check=False)
    return sorted(line.split()[0] for line in done.stdout.splitlines() if line.strip())
