"""`calculet load`, `rollback`, `promote`, `unload`, `rollouts`: a model swap across the boards, begun, watched, turned round."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import (
    alias_argument,
    ask,
    completed_by,
    config_option,
    end,
    json_option,
    open_fleet,
    say,
    say_drain,
)
from calculet_supervisor.commands.wait import watch

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet

GLANCE_S = 0.1
AWAY_S = 120.0
"""How long a supervisor may be away before nobody waits for it any more; the rollout goes on when it is back."""
OVER = ("DONE", "ROLLED_BACK", "REFUSED")


class Percent(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """`10%` or `0.1`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """A share between 0 and 1."""
        try:
            share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a share like 10% or 0.1", param, ctx)
        if not 0 <= share < 1:
            self.fail(f"{value} is not between 0% and 100%", param, ctx)
        return float(share)


def follow_options(command: Any) -> Any:
    """`--detach`, `--json`."""
    command = click.option("--detach", is_flag=True, help="Return once it is begun and cannot be lost.")(command)
    return click.option("--json", "as_json", is_flag=True, help="The rollout as one JSON object at the end.")(command)


def capacity_options(command: Any) -> Any:
    """`--floor`, `--max-unavailable`, `--allow-downtime`, `--yes`."""
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--allow-downtime", is_flag=True, help="A fleet with one board: accept 503 while it loads."),
        click.option("--max-unavailable", type=click.IntRange(1), default=1, help="Boards that do not serve.  [default: 1]"),
        click.option("--floor", type=click.IntRange(0), help="Boards that serve at any time.  [default: half of them]"),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@alias_argument
@click.argument("package", type=click.Path(path_type=Path, file_okay=False))
@config_option
@click.option("--canary", type=Percent(), default="0", help="Share of new requests that the new artifact gets first, e.g. 10%.")
@capacity_options
@click.option("--override", is_flag=True, help="Load an artifact that was set aside.")
@follow_options
def load(alias: str, package: Path, config: Path, **options: Any) -> None:
    """Move ALIAS to the signed PACKAGE, board by board, and back when it fails.

    Exit code 0: every board serves it. 1: refused, or rolled back; what served goes on serving.
    """
    fleet = open_fleet(config)
    where = package.resolve()
    _say_drain(fleet, "each board that moves")
    _confirm(options.pop("yes"), f"Move {alias} to {where}?")
    _run(fleet, "load", options, alias=alias, package=str(where))


@click.command()
@alias_argument
@config_option
@capacity_options
@follow_options
def rollback(alias: str, config: Path, **options: Any) -> None:
    """Move ALIAS back to the artifact before; a rollout that is under way is turned round."""
    fleet = open_fleet(config)
    _say_drain(fleet, "each board that moves")
    _confirm(options.pop("yes"), f"Move {alias} back?")
    _run(fleet, "rollback", options, alias=alias)


@click.command()
@alias_argument
@config_option
@json_option
def promote(alias: str, config: Path, as_json: bool) -> None:
    """Let the canary of ALIAS go on at once."""
    answer = ask(open_fleet(config), "promote", alias=alias)
    say(answer, as_json, f"the canary of {alias} goes on (rollout {answer['rollout']})")


@click.command()
@alias_argument
@config_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--detach", is_flag=True, help="Return once it is decided and cannot be lost.")
@json_option
def unload(alias: str, config: Path, yes: bool, detach: bool, as_json: bool) -> None:
    """Drain and empty the boards of ALIAS: it answers 503 until it is loaded again.

    Progress is on stderr; after --detach or Ctrl-C, `calculet wait BOARD --for empty` watches a board again.
    """
    fleet = open_fleet(config)
    _say_drain(fleet, "each board")
    _confirm(yes, f"{alias} will answer 503 until it is loaded again. Unload it?")
    answer = ask(fleet, "unload", alias=alias)
    for board in () if detach else answer["boards"]:
        watch(fleet, board, "empty", without=alias)
    say(answer, as_json, f"{alias} is unloaded" if not detach else f"{alias} is being unloaded")


@click.command()
@click.argument("number", required=False, type=int, shell_complete=completed_by("rollouts"))
@config_option
@click.option("--follow", "-f", is_flag=True, help="Watch it until its end.")
@click.option("--json", "as_json", is_flag=True, help="JSON.")
def rollouts(number: int | None, config: Path, follow: bool, as_json: bool) -> None:
    """Show model swaps, newest first; or rollout NUMBER with every step it took."""
    fleet = open_fleet(config)
    if follow:
        found = ask(fleet, "rollouts")["rollouts"]
        if number is None and not found:
            end(1, "there was no rollout yet")
        _follow(fleet, found[0]["id"] if number is None else number, as_json)
    answer = ask(fleet, "rollouts", **({} if number is None else {"rollout": number}))
    if as_json:
        click.echo(json.dumps(answer["rollouts"], indent=2))
    elif number is not None:
        _print_steps(answer["rollouts"][0], 0)
        _print_boards(answer["rollouts"][0])
    else:
        _print_table(answer["rollouts"])


# ------------------------------------------------------------------------------------------------ following
def _confirm(yes: bool, question: str) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        end(2, "nobody is there to ask", "say --yes")
    click.confirm(question, abort=True, err=True)


def _say_drain(fleet: Fleet, what: str) -> None:
    say_drain(what, fleet.config.rollout.drain_timeout_ms / 1000, "rollout.drain_timeout_ms", "model_draining")


def _run(fleet: Fleet, verb: str, options: dict[str, Any], **arguments: Any) -> None:
    detach, as_json = options.pop("detach"), options.pop("as_json")
    answer = ask(fleet, verb, **arguments, **options)
    number = answer["rollout"]
    if detach:
        words = f"rollout {number} is begun; `calculet rollouts {number} --follow` watches it"
        click.echo(json.dumps(answer) if as_json else words)
        return
    _follow(fleet, number, as_json)


def _follow(fleet: Fleet, number: int, as_json: bool) -> None:
    """Until its end; the exit code says how it went. A supervisor that restarts meanwhile is waited for."""
    try:
        _follow_to_its_end(fleet, number, as_json)
    except KeyboardInterrupt:
        click.echo(f"calculet: it goes on; `calculet rollouts {number} --follow` watches it again", err=True)
        sys.exit(130)


def _follow_to_its_end(fleet: Fleet, number: int, as_json: bool) -> None:
    from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call

    shown, away_since = 0, None
    while True:
        try:
            rollout = call(fleet.control_socket, "rollouts", {"rollout": number})["rollouts"][0]
            away_since = None
        except SupervisorUnreachable as error:
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > AWAY_S:
                end(69, error.message, f"rollout {number} goes on when the supervisor is back")
            time.sleep(GLANCE_S)
            continue
        except ControlError as error:
            end(1, error.message, error.hint)
        if not as_json:
            shown = _print_steps(rollout, shown)
        if rollout["state"] in OVER:
            if as_json:
                click.echo(json.dumps(rollout, indent=2))
            if rollout["state"] == "DONE":
                sys.exit(0)
            end(1, f"rollout {number} of {rollout['alias']}: {rollout['state']}: {rollout['reason']}")
        time.sleep(GLANCE_S)


def _print_steps(rollout: dict[str, Any], shown: int) -> int:
    for step in rollout["log"][shown:]:
        click.echo(f"{step['wall_s'] - rollout['begun']:8.3f} s  {step['text']}")
    return len(rollout["log"])


def _print_boards(rollout: dict[str, Any]) -> None:
    click.echo(f"{rollout['state']}: " + ", ".join(f"{board} {state}" for board, state in rollout["boards_seen"].items()))
    if rollout["canary_words"]:
        click.echo(f"canary: {rollout['canary_words']}")


def _print_table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["begun"]))
        to = (row["green"] or {}).get("name") or row["package"]
        tail = f": {row['reason']}" if row["reason"] else ""
        click.echo(f"{row['id']:>4}  {begun}  {row['verb']:<8} {row['alias']} -> {to}  {row['state']}{tail}")
    if not rows:
        click.echo("no rollout yet")
