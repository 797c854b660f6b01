"""`calculet stop BOARD`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, open_fleet, say_drain


@click.command()
@board_argument
@config_option
def stop(board: str, config: Path) -> None:
    """End a board's worker after its drain, and keep it down until `start`; the board is free then."""
    fleet = open_fleet(config)
    say_drain(board, fleet.config.supervision.drain_timeout_ms / 1000, "supervision.drain_timeout_ms", "shutting_down")
    ask(fleet, "stop", board=board)
    click.echo(f"{board} stops once its requests have ended; `calculet start {board}` brings it back")
