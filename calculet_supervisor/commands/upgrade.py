"""`calculet upgrade`: after a new version was installed, every process becomes it, one at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from calculet_supervisor.commands.common import UNREACHABLE, config_option, end, json_option, open_fleet, say, say_drain


@click.command()
@config_option
@click.option("--dry-run", is_flag=True, help="Only show the steps.")
@click.option("--allow-downtime", is_flag=True, help="Also where a model has a single board.")
@click.option("--board-timeout-s", type=click.FloatRange(min=1), default=900.0, show_default=True, help="To serve again.")
@json_option
def upgrade(config: Path, dry_run: bool, allow_downtime: bool, board_timeout_s: float, as_json: bool) -> None:
    """Restart supervisor, routers and boards of this host in turn, without a refused connection or a broken stream.

    Streams drain within router.drain_timeout_s and supervision.drain_timeout_ms. The first that does not come back ends it; run it
    again once that is mended.

    Exit codes: 0 done, 1 refused or failed, 69 the supervisor cannot be reached, 78 the configuration is wrong.
    """
    from calculet_core.errors import ExitCode
    from calculet_core.shell.control_client import ControlError, SupervisorUnreachable
    from calculet_supervisor.shell import upgrading
    from calculet_supervisor.shell.checking import find_problems
    from calculet_supervisor.shell.installing import Refusal

    fleet, done = open_fleet(config), []
    if problems := find_problems(fleet):
        end(ExitCode.CONFIG, "\ncalculet: ".join(problems))
    try:
        steps = upgrading.plan(fleet, allow_downtime=allow_downtime)
        if not dry_run and os.geteuid() != 0:
            raise Refusal("only root may restart services", "use sudo, or look with --dry-run")
        if any("router" in unit for unit in steps.units):
            say_drain("each router", fleet.config.router.drain_timeout_s, "router.drain_timeout_s", "shutting_down")
        if steps.boards:
            limit_ms = fleet.config.supervision.drain_timeout_ms
            say_drain("each board", limit_ms / 1000, "supervision.drain_timeout_ms", "shutting_down")
        for board, why in steps.left_alone.items():
            click.echo(f"calculet: {board} is left alone: {why}", err=True)
        for unit in steps.units:
            began_s = time.monotonic()
            if not dry_run:
                upgrading.restart_unit(unit)
            done.append(_say(unit, began_s, dry_run, as_json))
        for board in steps.boards:
            began_s = time.monotonic()
            if not dry_run:
                upgrading.restart_board(fleet, board, board_timeout_s)
            done.append(_say(board, began_s, dry_run, as_json))
    except Refusal as refusal:
        end(ExitCode.FAILURE, refusal.message, refusal.hint)
    except SupervisorUnreachable as error:
        end(UNREACHABLE, error.message, error.hint)
    except ControlError as error:
        end(ExitCode.FAILURE, error.message, error.hint)


    if as_json:
        say({"dry_run": dry_run, "restarted": done, "left_alone": dict(steps.left_alone)}, True, "")


def _say(what: str, began_s: float, dry_run: bool, as_json: bool) -> dict[str, Any]:
    """Progress: for programs on stderr, as the whole comes at the end."""
    took_s = time.monotonic() - began_s
    click.echo(f"would restart {what}" if dry_run else f"{what}: restarted in {took_s:.1f} s", err=as_json)
    return {"what": what, "seconds": None if dry_run else round(took_s, 3)}
