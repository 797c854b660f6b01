"""`calculet resume BOARD`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, json_option, open_fleet, say


@click.command()
@board_argument
@config_option
@json_option
def resume(board: str, config: Path, as_json: bool) -> None:
    """Let a drained board take requests again."""
    answer = ask(open_fleet(config), "resume", board=board)
    words = f"{board} takes requests already" if answer.get("already") else f"{board} takes requests again"
    if not answer.get("up", True):
        words = f"{board} is not drained any more, but stopped; `calculet start {board}` lets it run"
    say(answer, as_json, words)
