"""`calculet restart BOARD`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, open_fleet, say_drain


@click.command()
@board_argument
@config_option
def restart(board: str, config: Path) -> None:
    """Replace a board's worker after its drain; also brings back one whose restart budget is spent."""
    fleet = open_fleet(config)
    say_drain(board, fleet.config.supervision.drain_timeout_ms / 1000, "supervision.drain_timeout_ms", "shutting_down")
    ask(fleet, "restart", board=board)
    click.echo(f"{board} restarts once its requests have ended")
