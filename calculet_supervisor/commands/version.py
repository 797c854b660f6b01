"""`calculet version`."""

from __future__ import annotations

import click

from calculet_supervisor.commands.common import json_option, say


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the version; with --json also commit and image, where they are known."""
    from calculet_core.shell.build import build

    say(dict(build()), as_json, f"calculet {build()['version']}")
