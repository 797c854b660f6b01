"""`calculet generations`: what each board holds, and what each alias has stood for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from calculet_supervisor.commands.common import ask, config_option, open_fleet


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, schema calculet-generations/v1.")
def generations(config: Path, as_json: bool) -> None:
    """Show what each board holds and shall hold, what each alias stands for, and what was set aside."""
    answer = ask(open_fleet(config), "generations")
    del answer["ok"]
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    for row in answer["boards"]:
        held = row["state"] or "no worker"
        if row["generation"]:
            held = f"generation {row['generation']} {held} {_short(row['digest'])}"
        other = f", shall hold {_short(row['wanted_digest'])}" if row["wanted_digest"] != row["digest"] else ""
        click.echo(f"{row['board']:<12} {row['alias']:<16} {held}{other}{', ' + row['out'] if row['out'] else ''}")
    for alias in answer["aliases"]:
        source = "as configured" if alias["configured"] else "by an operator"
        click.echo(f"{alias['alias']}: {_name(alias['artifact'])}, {source}; previous: {_name(alias['previous'])}")
        for version in alias["versions"][-5:]:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version["wall_s"]))
            click.echo(f"  version {version['version']} since {when}: {_name(version['artifact'])}")
    for row in answer["quarantined"]:
        click.echo(f"set aside: {_short(row['digest'])}: {row['reason']}")


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "nothing"


def _name(artifact: dict[str, Any] | None) -> str:
    return f"{artifact['name']} ({artifact['digest'][:12]})" if artifact else "nothing"
