"""`calculet restart BOARD|router [--wait]`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calculet_supervisor.commands.common import (
    UNREACHABLE,
    ask,
    board_argument,
    config_option,
    end,
    json_option,
    open_fleet,
    say,
    say_drain,
)
from calculet_supervisor.commands.wait import watch

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet

ROUTER = "router"
GLANCE_S, AWAY_S = 0.2, 120.0


@click.command()
@board_argument
@config_option
@click.option("--wait", "waits", is_flag=True, help="Show how far it is, and return when the new process serves.")
@json_option
def restart(board: str, config: Path, waits: bool, as_json: bool) -> None:
    """Replace the worker of BOARD after its drain; also brings back one whose restart budget is spent.

    `calculet restart router` replaces the routers, one at a time: where `calculet up` keeps them, each by another that serves
    before it drains; under systemd connections wait in the socket while the only one drains.
    """
    fleet = open_fleet(config)
    if board == ROUTER and all(one.name != ROUTER for one in fleet.config.boards):
        _restart_routers(fleet, waits, as_json)
        return
    rows = ask(fleet, "status")["boards"] if waits else []
    before = next((row["epoch"] for row in rows if row["board"] == board), None)
    answer = ask(fleet, "restart", board=board)
    say_drain(board, fleet.config.supervision.drain_timeout_ms / 1000, "supervision.drain_timeout_ms", "shutting_down")
    if waits:
        watch(fleet, board, "ready", min_epoch=(before or 0) + 1)
    words = f"{board} is restarted and ready" if waits else f"{board} restarts once its requests have ended"
    say(answer, as_json, words)


def _restart_routers(fleet: Fleet, waits: bool, as_json: bool) -> None:
    answer = ask(fleet, "restart routers")
    say_drain("each router", fleet.config.router.drain_timeout_s, "router.drain_timeout_s", "shutting_down")
    if waits:
        _follow(fleet)
    what = f"{len(answer['routers'])} router{'s' if len(answer['routers']) > 1 else ''}"
    words = f"{what} replaced, and the old ones have ended" if waits else f"{what} to be replaced, one at a time; --wait shows it"
    say(answer, as_json, words)


def _follow(fleet: Fleet) -> None:
    """Until no router is left that is to be replaced."""
    from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call

    told, heard, begun = "", time.monotonic(), time.monotonic()
    try:
        while True:
            try:
                running = call(fleet.control_socket, "config")
            except SupervisorUnreachable as error:
                if time.monotonic() - heard > AWAY_S:
                    end(UNREACHABLE, error.message, "it is committed; it goes on when the supervisor is back")
                time.sleep(GLANCE_S)
                continue
            except ControlError as error:
                end(1, error.message, error.hint)
            heard = time.monotonic()
            if running["routers_stay"]:
                end(1, running["routers_stay"], "once that is mended, `calculet restart router` again")
            if not running["routers_left"]:
                return
            if (words := "; ".join(running["routers_left"])) != told:
                told = words
                click.echo(f"{time.monotonic() - begun:8.1f} s  {told}", err=True)
            time.sleep(GLANCE_S)
    except KeyboardInterrupt:
        click.echo("calculet: it goes on; `calculet status` shows the routers", err=True)
        sys.exit(130)
