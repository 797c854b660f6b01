"""`calculet drain BOARD [--wait]`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, open_fleet

GLANCE_S = 0.2


@click.command()
@board_argument
@config_option
@click.option("--wait", is_flag=True, help="Return when nothing runs on the board any more.")
def drain(board: str, config: Path, wait: bool) -> None:
    """Finish what runs on a board and send it nothing new, until `resume`; survives restarts."""
    fleet = open_fleet(config)
    ask(fleet, "drain", board=board)
    while wait:
        row = next(row for row in ask(fleet, "status")["boards"] if row["board"] == board)
        wait = row["state"] is not None and (not row["worker_draining"] or bool(row["active"] or row["waiting"]))
        if wait:
            time.sleep(GLANCE_S)
    click.echo(f"{board} drains; `calculet resume {board}` lets it take requests again")
