"""`calculet config check`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from calculet_supervisor.commands.common import config_option, end, json_option, open_fleet, say


@click.group()
def config() -> None:
    """Work on the configuration."""


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
    if problems:
        for problem in problems[:-1]:
            click.echo(f"calculet: {problem}", err=True)
        end(ExitCode.CONFIG, problems[-1])
    click.echo(f"{fleet.path}: good ({len(fleet.config.boards)} boards, models: {', '.join(m.alias for m in fleet.config.models)})")
    sys.exit(ExitCode.OK)
