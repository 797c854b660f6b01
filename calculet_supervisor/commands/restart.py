"""`calculet restart BOARD`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, open_fleet


@click.command()
@board_argument
@config_option
def restart(board: str, config: Path) -> None:
    """Replace a board's worker after its drain; also brings back one whose restart budget is spent."""
    ask(open_fleet(config), "restart", board=board)
    click.echo(f"{board} restarts once its requests have ended")
