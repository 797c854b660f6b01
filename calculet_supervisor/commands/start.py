"""`calculet start BOARD`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, open_fleet


@click.command()
@board_argument
@config_option
def start(board: str, config: Path) -> None:
    """Let a stopped board's worker run again."""
    ask(open_fleet(config), "start", board=board)
    click.echo(f"{board} is started")
