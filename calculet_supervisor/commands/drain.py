"""`calculet drain BOARD [--wait]`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, json_option, open_fleet, say
from calculet_supervisor.commands.wait import watch


@click.command()
@board_argument
@config_option
@click.option("--wait", "waits", is_flag=True, help="Show how far it is, and return when nothing runs on the board any more.")
@json_option
def drain(board: str, config: Path, waits: bool, as_json: bool) -> None:
    """Finish what runs on a board and send it nothing new, until `resume`; survives restarts."""
    fleet = open_fleet(config)
    answer = ask(fleet, "drain", board=board)
    if waits:
        watch(fleet, board, "drained")
    words = f"{board} drains; `calculet resume {board}` lets it take requests again"
    if answer.get("already"):
        words = f"{board} is drained already, or on its way; `calculet resume {board}` lets it take requests again"
    if not answer.get("up", True):
        words = f"{board} is stopped; after `calculet start {board}` it stays drained until `calculet resume {board}`"
    elif waits:
        words = f"{board} is drained; `calculet resume {board}` lets it take requests again"
    say(answer, as_json, words)
