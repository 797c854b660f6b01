"""`calculet chaos run|list`: runs `calculet-perf chaos`, which disturbs the fleet from outside and judges it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from calculet_supervisor.commands.common import completed_by, config_option, open_file

PASSED_ON = {"ignore_unknown_options": True}


@click.group()
def chaos() -> None:
    """Break the running fleet on purpose; only where its configuration says `chaos: {enabled: true}`."""


@chaos.command(context_settings=PASSED_ON)
@click.argument("scenario", shell_complete=completed_by("scenarios"))
@config_option
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the faults' times and boards, and the load.")
@click.option("--json", "as_json", is_flag=True, help="The outcome as JSON, schema calculet-perf-chaos/v1.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run(scenario: str, config: Path, seed: int, as_json: bool, options: tuple[str, ...]) -> None:
    """Run SCENARIO under load (`calculet-perf chaos run --help` explains further OPTIONS) and judge what came of it.

    Exit codes: 0 every promise was kept, 1 one was broken, 2 wrong usage or a fleet that does not allow chaos, 3 invalid: the
    fleet is not there, or a planned fault did not fire; 78 the configuration is wrong.
    """
    fleet = open_file(config)
    json = ("--json",) if as_json else ()
    sys.exit(_perf("run", scenario, "--config", str(fleet.path), "--seed", str(seed), *json, *options))


@chaos.command(name="list", context_settings=PASSED_ON)
@click.option("--json", "as_json", is_flag=True, help="The scenarios as JSON.")
def list_command(as_json: bool) -> None:
    """List the scenarios and what is expected of them."""
    sys.exit(_perf("list", *(("--json",) if as_json else ())))


def _perf(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "calculet_perf.cli", "chaos", *arguments], check=False).returncode
