"""`calculet-perf history check`: which promises the journals of a fleet's processes show broken; the rules are those of
`calculet_core.history`, the same that tests use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from calculet_perf.commands.common import json_option

JOURNAL = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group()
def history() -> None:
    """What happened, from journals."""


@history.command()
@click.argument("journals", nargs=-1, required=True, type=JOURNAL)
@click.option("--resets", type=click.IntRange(min=0), help="Most resets of a board in ten minutes; else not checked.")
@click.option("--restarts", type=click.IntRange(min=0), help="Most automatic restarts of a board in a minute; else not checked.")
@click.option("--running", is_flag=True, help="The fleet still runs: requests need not have ended.")
@json_option
def check(journals: tuple[Path, ...], resets: int | None, restarts: int | None, running: bool, as_json: bool) -> None:
    """Check JOURNALS (NAME.jsonl, with their rotated files) together: one terminal per request, no token after it, no leak, ...

    Exit codes: 0 every promise was kept, 1 one was broken, 2 wrong usage.
    """
    from calculet_core.history import Budgets, Checker
    from calculet_core.shell.journal import read_journal

    events = sorted((event for path in journals for event in read_journal(path)), key=lambda event: event.t)
    checker = Checker(Budgets(resets=resets, restarts=restarts), require_done=not running)
    for event in events:
        checker.see(event)
    violations = checker.finish()
    requests = checker.counts["request.accepted"]
    if as_json:
        rows = [{"at_ns": one.at_ns, "rule": one.rule, "message": one.message} for one in violations]
        click.echo(json.dumps({"events": len(events), "requests": requests, "violations": rows}, indent=2))
        sys.exit(1 if violations else 0)
    for violation in violations:
        click.echo(f"{violation.at_ns / 1e9:.6f} {violation.rule}: {violation.message}")
    click.echo(f"{len(events)} events, {requests} requests, {len(violations)} broken promises", err=True)
    sys.exit(1 if violations else 0)
