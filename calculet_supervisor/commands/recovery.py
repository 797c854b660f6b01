"""`calculet reset`, `condemn`, `probation`, `breaker`, `release`: what to do about boards and artifacts that failed."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_supervisor.commands.common import ask, board_argument, config_option, open_fleet


@click.command()
@board_argument
@config_option
def reset(board: str, config: Path) -> None:
    """Reset a board that is FAILED or RECOVERING now, whatever the reset budget says; it counts in the budget."""
    answer = ask(open_fleet(config), "reset", board=board)
    click.echo(f"{board} is reset (generation {answer['generation']}; the budget had {answer['resets_left']} left)")


@click.command()
@board_argument
@config_option
@click.option("--reason", help="For those who ask why.")
def condemn(board: str, config: Path, reason: str | None) -> None:
    """Set a board aside: its requests finish, its worker ends, and only `probation` brings it back."""
    ask(open_fleet(config), "condemn", board=board, reason=reason)
    click.echo(f"{board} is set aside; `calculet probation {board}` lets it prove itself")


@click.command()
@board_argument
@config_option
def probation(board: str, config: Path) -> None:
    """Let a board that was set aside come back: reset, golden cases, then a small share of work until it has proved itself."""
    answer = ask(open_fleet(config), "probation", board=board)
    click.echo(f"{board} comes back on probation for {answer['probation_s']:g} s (it was set aside: {answer['was']})")


@click.command()
@config_option
@click.option("--close", is_flag=True, help="Let automatic action go on.")
def breaker(config: Path, close: bool) -> None:
    """Show whether automatic action is stopped because too many boards went bad at once, and why."""
    answer = ask(open_fleet(config), "breaker", close=close)
    if close:
        click.echo(f"automatic action goes on (it was stopped: {answer['was']})" if answer["was"] else "it was not stopped")
    else:
        click.echo(f"automatic action is stopped: {answer['reason']}" if answer["reason"] else "automatic action goes on")


@click.command()
@click.argument("digest")
@config_option
def release(digest: str, config: Path) -> None:
    """Take back that the artifact with DIGEST (or its beginning) was set aside."""
    answer = ask(open_fleet(config), "release", digest=digest)
    click.echo(f"{answer['digest'][:12]} may be loaded again (it was set aside: {answer['was']})")
