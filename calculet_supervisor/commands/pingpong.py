"""`calculet pingpong BOARD allow|forbid`."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, json_option, open_fleet, say


@click.command()
@board_argument
@click.argument("word", type=click.Choice(["allow", "forbid"]))
@config_option
@json_option
def pingpong(board: str, word: str, config: Path, as_json: bool) -> None:
    """Let a board have two jobs in flight again after it went back to one by itself, or forbid it.

    It touches new jobs only, and holds for the life of the worker; `executor.max_inflight: 1` forbids it for good.
    """
    answer = ask(open_fleet(config), "pingpong", board=board, allowed=word == "allow")
    off = f" ({answer['pingpong_off']})" if answer["pingpong_off"] else ""
    say(answer, as_json, f"{board}: {answer['max_inflight']} in flight at most{off}")
