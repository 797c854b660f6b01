"""`calculet config check|plan|apply`: what a file says, what it would change in the fleet that runs, and changing it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import UNREACHABLE, ask, config_option, end, json_option, open_fleet, say

if TYPE_CHECKING:
    from calculet_core.applying import Change
    from calculet_core.shell.fleet import Fleet

PLAN_SCHEMA = "calculet-config-plan/v1"
CHANGES, REFUSED = 2, 3
"""Exit codes of `plan`."""
GLANCE_S, AWAY_S = 0.2, 120.0
WIDEST = 60


@click.group()
def config() -> None:
    """Check the configuration, see what it would change in the fleet that runs, and apply it."""


@config.command()
@config_option
@json_option
def check(config: Path, as_json: bool) -> None:
    """Check the fleet's file with everything it names: scheduler files, keys, packages, profiles. Exit code 78 when it is wrong."""
    from calculet_core.errors import ExitCode
    from calculet_supervisor.shell.checking import find_problems

    fleet = open_fleet(config)
    problems = find_problems(fleet)
    if as_json:
        say({"path": str(fleet.path), "problems": problems}, True, "")
        sys.exit(ExitCode.CONFIG if problems else ExitCode.OK)
    _end_if_wrong(problems)
    click.echo(f"{fleet.path}: good ({len(fleet.config.boards)} boards, models: {', '.join(m.alias for m in fleet.config.models)})")
    sys.exit(ExitCode.OK)


@config.command()
@config_option
@json_option
def plan(config: Path, as_json: bool) -> None:
    """Show what the file would change in the fleet that runs, key by key: live, by a restart of boards, of routers, or refused.

    Exit codes: 0 nothing to do, 2 there are changes, 3 some of them are refused, 69 the supervisor cannot be reached, 78 the
    configuration is wrong.
    """
    fleet = open_fleet(config)
    found, digest, running = _plan(fleet)
    left = running["left"]
    if as_json:
        from calculet_supervisor.shell.config_verbs import shown

        answer = {
            "schema": PLAN_SCHEMA, "version": running["version"], "digest": digest, "changes": [shown(one) for one in found],
            "left": left, "routers_to_restart": _behind(running),
        }  # fmt: skip
        say(answer, True, "")
    else:
        _show(found)
        _show_rest(running, left if not found else [])
        if not found:
            click.echo(f"nothing to change: version {running['version']} is in force")
    sys.exit(REFUSED if any(one.refused for one in found) else CHANGES if found else 0)


@config.command()
@config_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--allow-downtime", is_flag=True, help="Also where a model has a single board that must be restarted.")
@click.option("--detach", is_flag=True, help="Return once it is committed and cannot be lost.")
@json_option
def apply(config: Path, yes: bool, allow_downtime: bool, detach: bool, as_json: bool) -> None:
    """Put the file in force: tenants, limits, deadlines and log levels live; boards one after another, after their drain.

    It is committed before anything happens, and goes on whatever is killed. Without changes it watches what an earlier one has left
    to do. Progress is on stderr. Exit codes: 0 in force, 1 refused and nothing was changed, 69 the supervisor cannot be reached,
    78 the configuration is wrong.
    """
    fleet = open_fleet(config)
    found, digest, running = _plan(fleet)
    answer: dict[str, Any] = {"version": running["version"], "digest": digest, "changes": []}
    if found:
        if not as_json:
            _show(found)
        if refused := [one for one in found if one.refused]:
            end(1, f"nothing was changed: {refused[0].where}: {refused[0].refused}")
        _confirm(yes)
        answer = ask(fleet, "config apply", digest=digest, allow_downtime=allow_downtime)
    if not detach:
        running = _follow(fleet, answer["version"])
    behind = _behind(running)
    if as_json:
        say({**answer, "routers_to_restart": behind}, True, "")
        return
    words = "is committed; `calculet config apply` watches it" if detach else "is in force"
    click.echo(f"version {answer['version']} {words}")
    _show_rest(running, [])


# ------------------------------------------------------------------------------------------------ the plan
def _plan(fleet: Fleet) -> tuple[list[Change], str, dict[str, Any]]:
    """(changes, the file's digest, what the supervisor says of what runs)."""
    from calculet_core.errors import ConfigError, ExitCode
    from calculet_supervisor.shell.checking import find_problems
    from calculet_supervisor.shell.config_verbs import plan as compare

    _end_if_wrong(find_problems(fleet))
    running = ask(fleet, "config")
    try:
        found, digest = compare(running["content"], fleet, running["serving"])
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error))
    return found, digest, running


def _end_if_wrong(problems: list[str]) -> None:
    from calculet_core.errors import ExitCode

    if problems:
        for problem in problems[:-1]:
            click.echo(f"calculet: {problem}", err=True)
        end(ExitCode.CONFIG, problems[-1])


def _show(found: list[Change]) -> None:
    """A line for each difference."""
    for one in found:
        sign = "+" if one.old is None else "-" if one.new is None else "~"
        text = f"{_value(one.old)} -> {_value(one.new)}" if sign == "~" else _value(one.new if sign == "+" else one.old)
        click.echo(f"{sign} {one.where}: {text}\n    {one.how}" + (f": {one.refused}" if one.refused else ""))


def _show_rest(running: dict[str, Any], left: list[str]) -> None:
    for line in left:
        click.echo(f"still to do: {line}")
    for name in _behind(running):
        click.echo(f"{name} must be restarted for what it takes only at its start")


def _value(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, sort_keys=True)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."


def _behind(running: dict[str, Any]) -> list[str]:
    return [one["process"] for one in running["processes"] if one["process"].startswith("router") and one["start"] is False]


def _confirm(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        end(2, "nobody is there to ask", "say --yes")
    click.confirm("Apply it?", abort=True, err=True)


# ------------------------------------------------------------------------------------------------ following
def _follow(fleet: Fleet, version: int) -> dict[str, Any]:
    """Until nothing is left to do; what the supervisor says then. It is born again meanwhile, and waited for."""
    from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call

    told: list[str] = []
    begun = heard = time.monotonic()
    try:
        while True:
            try:
                running = call(fleet.control_socket, "config")
            except SupervisorUnreachable as error:
                if time.monotonic() - heard > AWAY_S:
                    end(UNREACHABLE, error.message, f"version {version} is committed; it goes on when the supervisor is back")
                time.sleep(GLANCE_S)
                continue
            except ControlError as error:
                end(1, error.message, error.hint)
            heard = time.monotonic()
            if (running["version"] or 0) > version:
                end(1, f"version {running['version']} has been applied meanwhile", "`calculet config apply` watches that one")
            if not running["left"]:
                return running
            if running["left"] != told:
                told = running["left"]
                click.echo(f"{time.monotonic() - begun:8.1f} s  {'; '.join(told)}", err=True)
            time.sleep(GLANCE_S)
    except KeyboardInterrupt:
        click.echo("calculet: it goes on; `calculet config apply` watches it again", err=True)
        sys.exit(130)
