"""`calculet config check|plan|apply`: what a file says, what it would change in the fleet that runs, and changing it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import UNREACHABLE, ask, config_option, end, json_option, open_file, say

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

    fleet = open_file(config)
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
    fleet = open_file(config)
    found, digest, running = _plan(fleet)
    left = running["left"]
    if as_json:
        from calculet_supervisor.shell.config_verbs import shown

        answer = {
            "schema": PLAN_SCHEMA, "version": running["version"], "digest": digest, "changes": [shown(one) for one in found],
            "notes": _notes(fleet, found, running), "left": left, "routers_to_restart": _behind(running),
            "elsewhere": running["elsewhere"],
        }  # fmt: skip
        say(answer, True, "")
    else:
        _show(fleet, found, running)
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
    """Put the file in force: tenants, limits, deadlines and log levels live; routers, then boards, one after another, after their
    drain.

    It is committed before anything happens, and goes on whatever is killed. Without changes it watches what an earlier one has left
    to do. Progress is on stderr. Exit codes: 0 in force, 1 refused and nothing was changed, or a router could not take it (the last
    line says which of them), 69 the supervisor cannot be reached, 78 the configuration is wrong.
    """
    fleet = open_file(config)
    found, digest, running = _plan(fleet)
    answer: dict[str, Any] = {"version": running["version"], "digest": digest, "changes": []}
    if found:
        if not as_json:
            _show(fleet, found, running)
        if refused := [one for one in found if one.refused]:
            end(1, f"nothing was changed: {refused[0].where}: {refused[0].refused}")
        _confirm(yes)
        answer = ask(fleet, "config apply", digest=digest, allow_downtime=allow_downtime)
    if not detach:
        running = _follow(fleet, answer["version"])
    behind, stays = _behind(running), running["routers_stay"]
    if as_json:
        rest = {"routers_to_restart": behind, "elsewhere": running["elsewhere"], "routers_stay": stays}
        say({**answer, **rest} if not detach else {**answer, "routers_to_restart": behind}, True, "")
    elif detach:
        click.echo(f"version {answer['version']} is committed; `calculet config apply` watches it")
    elif not behind and not running["elsewhere"]:
        click.echo(f"version {answer['version']} is in force")
    if detach:
        return
    if behind:
        hint = "it serves on with what it had; once that is mended `calculet restart router` brings it there"
        end(1, f"version {answer['version']} is in force but for {', '.join(behind)}: {stays or 'not replaced'}", hint)
    if running["elsewhere"]:
        end(1, f"version {answer['version']} is in force, but {'; '.join(running['elsewhere'])}")


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


def _notes(fleet: Fleet, found: list[Change], running: dict[str, Any]) -> list[str]:
    """What a restart of the routers means here, in words."""
    if not any(one.routers for one in found):
        return []
    listen = any(one.where == "$.router.listen" for one in found)
    if running["under_systemd"]:
        limit = f"{fleet.config.router.drain_timeout_s:g} s (router.drain_timeout_s)"
        notes = [f"routers restart in turn; while the only one drains, up to {limit}, connections wait in systemd's socket"]
        if listen:
            words = "systemd holds the listening socket: afterwards, as root, `calculet install`, then"
            notes.append(f"{words} `systemctl restart calculet-router.socket`, which refuses connections for a moment")
        return notes
    notes = ["a second router serves before the first one drains: nobody is refused, no stream is broken"]
    if listen:
        notes.append("whoever connects to the old address is refused once the new one serves")
    return notes


def _show(fleet: Fleet, found: list[Change], running: dict[str, Any]) -> None:
    """A line for each difference."""
    for one in found:
        sign = "+" if one.old is None else "-" if one.new is None else "~"
        text = f"{_value(one.old)} -> {_value(one.new)}" if sign == "~" else _value(one.new if sign == "+" else one.old)
        click.echo(f"{sign} {one.where}: {text}\n    {one.how}" + (f": {one.refused}" if one.refused else ""))
    for note in _notes(fleet, found, running):
        click.echo(note)


def _show_rest(running: dict[str, Any], left: list[str]) -> None:
    for line in left:
        click.echo(f"still to do: {line}")
    for name in _behind(running):
        why = f": {running['routers_stay']}" if running["routers_stay"] else ""
        click.echo(f"{name} has not taken what a router takes only at its start{why}; `calculet restart router` brings it there")
    for line in running["elsewhere"]:
        click.echo(line)


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
