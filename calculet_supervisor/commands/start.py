"""`calculet start BOARD [--wait]`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, json_option, open_fleet, say
from calculet_supervisor.commands.wait import watch


@click.command()
@board_argument
@config_option
@click.option("--wait", "waits", is_flag=True, help="Show how far it is, and return when it serves.")
@json_option
def start(board: str, config: Path, waits: bool, as_json: bool) -> None:
    """Let a stopped board's worker run again."""
    fleet = open_fleet(config)
    answer = ask(fleet, "start", board=board)
    if waits:
        watch(fleet, board, "ready")
    words = f"{board} is ready" if waits else f"{board} was not stopped" if answer.get("already") else f"{board} is started"
    if answer.get("draining"):
        words += f"; it is drained, and takes requests after `calculet resume {board}`"
    say(answer, as_json, words)
