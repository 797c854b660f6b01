"""`calculet doctor`: is this machine fit for its fleet?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from calculet_supervisor.commands.common import config_option

SCHEMA = "calculet-doctor/v1"
SIGNS = {"good": "ok", "finding": "!!", "skipped": "--"}


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help=f"One JSON object, schema {SCHEMA}.")
def doctor(config: Path, as_json: bool) -> None:
    """Look at this machine and the fleet's configuration; say what is wrong and how to mend it.

    Changes nothing, and may run beside a fleet. Exit codes: 0 good, 1 there are findings.
    """
    from calculet_core.errors import ExitCode
    from calculet_supervisor.shell.doctoring import Mark, examine

    answers = examine(config)
    findings = sum(answer.mark is Mark.FINDING for answer in answers)
    if as_json:
        rows = [{"check": one.check, "mark": one.mark, "message": one.message, "mend": one.mend} for one in answers]
        click.echo(json.dumps({"schema": SCHEMA, "findings": findings, "checks": rows}))
    else:
        for one in answers:
            click.echo(f"{SIGNS[one.mark]}  {one.check}: {one.message}")
            if one.mend is not None:
                click.echo(f"      {one.mend}")
        click.echo(f"{findings} finding{'' if findings == 1 else 's'}" if findings else "good")
    sys.exit(ExitCode.FAILURE if findings else ExitCode.OK)
