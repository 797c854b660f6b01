"""`calculet resume BOARD`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, open_fleet


@click.command()
@board_argument
@config_option
def resume(board: str, config: Path) -> None:
    """Let a drained board take requests again."""
    ask(open_fleet(config), "resume", board=board)
    click.echo(f"{board} takes requests again")
