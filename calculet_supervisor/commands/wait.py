"""`calculet wait BOARD`: watch what was begun, whoever began it and however long ago."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import UNREACHABLE, board_argument, config_option, end, json_option, open_fleet

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet

GLANCE_S = 0.2
READY = "READY"
AWAY_S = 120.0
"""How long a supervisor may be away before nobody waits for it any more; what was begun goes on when it is back."""
Row = dict[str, Any]


def is_ready(row: Row) -> bool:
    """It serves, and every router knows."""
    return bool(row["state"] == "READY" and not row["worker_draining"] and not row.get("unreached_by"))


def is_drained(row: Row) -> bool:
    """Nothing runs on it, and it takes nothing; a board without a worker is that, too."""
    return row["state"] is None or bool(row["worker_draining"] and not (row["active"] or row["waiting"]))


def is_down(row: Row) -> bool:
    """It has no worker."""
    return row["pid"] is None


def is_empty(row: Row) -> bool:
    """It holds no model."""
    return row["generation"] is None


GOALS: dict[str, Callable[[Row], bool]] = {"ready": is_ready, "drained": is_drained, "down": is_down, "empty": is_empty}


@click.command()
@board_argument
@config_option
@click.option("--for", "goal", type=click.Choice(list(GOALS)), default="ready", show_default=True, help="Until it is so.")
@click.option("--timeout-s", type=click.FloatRange(min=0), help="Give up after so long.  [default: never]")
@json_option
def wait(board: str, config: Path, goal: str, timeout_s: float | None, as_json: bool) -> None:
    """Watch BOARD, with its progress on stderr, until it is ready, drained, down or empty.

    Ctrl-C leaves what was begun as it is. Exit codes: 0 it is so, 1 not within --timeout-s, or it cannot become ready until
    somebody says so (it is stopped, drained, set aside, or its model is unloaded).
    """
    row = watch(open_fleet(config), board, goal, timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps(row, indent=2))
    else:
        click.echo(f"{board} is {goal}")


def watch(
    fleet: Fleet, board: str, goal: str, timeout_s: float | None = None, again: str | None = None, min_epoch: int = 0,
    without: str | None = None,
) -> Row:  # fmt: skip
    """Follow a board until the goal, telling every change on stderr; its row then. A supervisor that restarts is waited for.

    `again` is the command that watches anew, told after Ctrl-C. `min_epoch`: only this life of the worker, or a later one, counts.
    `without`: a board that does not hold this alias (another has its turn there) is as good as the goal.
    """
    again = again or f"calculet wait {board} --for {goal}"
    begun, told = time.monotonic(), ""
    try:
        while True:
            row = _row(fleet, board, AWAY_S if told else 0)
            if (row["epoch"] or min_epoch) >= min_epoch and (why := hopeless(row, goal)) is not None:
                end(1, *why)
            elsewhere = without is not None and row["alias"] != without
            if elsewhere or (GOALS[goal](row) and (row["epoch"] or 0) >= min_epoch):
                return row
            words = progress(row)
            if words != told:
                told = words
                click.echo(f"{time.monotonic() - begun:8.1f} s  {board}: {words}", err=True)
            if timeout_s is not None and time.monotonic() - begun > timeout_s:
                end(1, f"{board} is not {goal} after {timeout_s:g} s: {words}", f"`{again}` goes on watching")
            time.sleep(GLANCE_S)
    except KeyboardInterrupt:
        click.echo(f"calculet: what was begun goes on; `{again}` watches it again", err=True)
        sys.exit(130)


def hopeless(row: Row, goal: str) -> tuple[str, str] | None:
    """Why the board will not be ready until somebody says something else, and what; None: it may be on its way."""
    board = row["board"]
    if goal != "ready":
        return None
    if row.get("condemned") is not None:
        return f"{board} was set aside: {row['condemned']}", f"`calculet probation {board}` lets it prove itself"
    if not row.get("up", True):
        return f"{board} is stopped", f"`calculet start {board}` lets it run"
    if row.get("draining") and row["state"] == READY:
        return f"{board} is drained: it takes no requests", f"`calculet resume {board}` lets it take them again"
    if row.get("wanted_digest", "") is None and not row.get("time_shared"):
        return f"{board} has no model to serve: it was unloaded", f"`calculet load {row['alias']} DIR` gives it one"
    return None


def progress(row: Row) -> str:
    """How a board is, in words that change when something moves."""
    parts = [row["state"].lower() if row["state"] else f"no worker yet ({row['process'].lower()})"]
    if row["load_step"]:
        parts.append(row["load_step"])
    if row["active"] or row["waiting"]:
        parts.append(f"{row['active']} requests run, {row['waiting']} wait")
    if row["state"] == "READY" and row.get("unreached_by") and not row["worker_draining"]:
        parts.append(f"not reached yet by router {', '.join(row['unreached_by'])}")
    if row["why"]:
        parts.append(row["why"])
    return ", ".join(parts)


def _row(fleet: Fleet, board: str, patience_s: float) -> Row:
    from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call

    deadline = time.monotonic() + patience_s
    while True:
        try:
            rows = {row["board"]: row for row in call(fleet.control_socket, "status")["boards"]}
            if board not in rows:
                end(1, f"there is no board {board!r}", f"boards: {', '.join(rows)}")
            return dict(rows[board])
        except SupervisorUnreachable as error:
            if time.monotonic() > deadline:
                end(UNREACHABLE, error.message, error.hint)
            time.sleep(GLANCE_S)
        except ControlError as error:
            end(1, error.message, error.hint)
