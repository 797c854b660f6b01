"""`calculet stop BOARD [--wait]`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, json_option, open_fleet, say, say_drain
from calculet_supervisor.commands.wait import watch


@click.command()
@board_argument
@config_option
@click.option("--wait", "waits", is_flag=True, help="Show how far it is, and return when the worker has ended.")
@json_option
def stop(board: str, config: Path, waits: bool, as_json: bool) -> None:
    """End a board's worker after its drain, and keep it down until `start`; the board is free then."""
    fleet = open_fleet(config)
    answer = ask(fleet, "stop", board=board)
    if not answer.get("already"):
        say_drain(board, fleet.config.supervision.drain_timeout_ms / 1000, "supervision.drain_timeout_ms", "shutting_down")
    if waits:
        watch(fleet, board, "down")
    words = f"{board} stops once its requests have ended; `calculet start {board}` brings it back"
    if answer.get("already"):
        words = f"{board} is stopped already; `calculet start {board}` brings it back"
    if waits:
        words = f"{board} is down; `calculet start {board}` brings it back"
    say(answer, as_json, words)
