"""`calculet reset`, `condemn`, `probation`, `breaker`, `release`: what to do about boards and artifacts that failed."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, completed_by, config_option, json_option, open_fleet, say
from calculet_supervisor.commands.wait import watch


@click.command()
@board_argument
@config_option
@click.option("--wait", "waits", is_flag=True, help="Show how far it is, and return when the board serves.")
@json_option
def reset(board: str, config: Path, waits: bool, as_json: bool) -> None:
    """Reset a board that is FAILED or RECOVERING now, whatever the reset budget says; it counts in the budget."""
    fleet = open_fleet(config)
    answer = ask(fleet, "reset", board=board)
    words = f"{board} is reset (generation {answer['generation']}; the budget had {answer['resets_left']} left)"
    if waits:
        watch(fleet, board, "ready")
        words = f"{board} was reset and is ready"
    say(answer, as_json, words)


@click.command()
@board_argument
@config_option
@click.option("--reason", help="For those who ask why.")
@json_option
def condemn(board: str, config: Path, reason: str | None, as_json: bool) -> None:
    """Set a board aside: its requests finish, its worker ends, and only `probation` brings it back."""
    answer = ask(open_fleet(config), "condemn", board=board, reason=reason)
    say(answer, as_json, f"{board} is set aside; `calculet probation {board}` lets it prove itself")


@click.command()
@board_argument
@config_option
@click.option("--wait", "waits", is_flag=True, help="Show how far it is, and return when the board serves.")
@json_option
def probation(board: str, config: Path, waits: bool, as_json: bool) -> None:
    """Let a board that was set aside come back: reset, golden cases, then a small share of work until it has proved itself."""
    fleet = open_fleet(config)
    answer = ask(fleet, "probation", board=board)
    if waits:
        watch(fleet, board, "ready")
    say(answer, as_json, f"{board} comes back on probation for {answer['probation_s']:g} s (it was set aside: {answer['was']})")


@click.command()
@config_option
@click.option("--close", is_flag=True, help="Let automatic action go on.")
@json_option
def breaker(config: Path, close: bool, as_json: bool) -> None:
    """Show whether automatic action is stopped because too many boards went bad at once, and why."""
    answer = ask(open_fleet(config), "breaker", close=close)
    if close:
        words = f"automatic action goes on (it was stopped: {answer['was']})" if answer["was"] else "it was not stopped"
    else:
        words = f"automatic action is stopped: {answer['reason']}" if answer["reason"] else "automatic action goes on"
    say(answer, as_json, words)


@click.command()
@click.argument("digest", shell_complete=completed_by("digests"))
@config_option
@json_option
def release(digest: str, config: Path, as_json: bool) -> None:
    """Take back that the artifact with DIGEST (or its beginning) was set aside."""
    answer = ask(open_fleet(config), "release", digest=digest)
    say(answer, as_json, f"{answer['digest'][:12]} may be loaded again (it was set aside: {answer['was']})")
