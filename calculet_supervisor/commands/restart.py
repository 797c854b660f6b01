"""`calculet restart BOARD [--wait]`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, json_option, open_fleet, say, say_drain
from calculet_supervisor.commands.wait import watch


@click.command()
@board_argument
@config_option
@click.option("--wait", "waits", is_flag=True, help="Show how far it is, and return when the new worker serves.")
@json_option
def restart(board: str, config: Path, waits: bool, as_json: bool) -> None:
    """Replace a board's worker after its drain; also brings back one whose restart budget is spent."""
    fleet = open_fleet(config)
    say_drain(board, fleet.config.supervision.drain_timeout_ms / 1000, "supervision.drain_timeout_ms", "shutting_down")
    rows = ask(fleet, "status")["boards"] if waits else []
    before = next((row["epoch"] for row in rows if row["board"] == board), None)
    answer = ask(fleet, "restart", board=board)
    if waits:
        watch(fleet, board, "ready", min_epoch=(before or 0) + 1)
    words = f"{board} is restarted and ready" if waits else f"{board} restarts once its requests have ended"
    say(answer, as_json, words)
