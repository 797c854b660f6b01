"""`calculet usage`: what tenants used, from the usage records. Needs no process to run."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from calculet_supervisor.commands.common import config_option, end, open_fleet

GROUPS = ("day", "tenant", "key", "model", "outcome")
NUMBERS = ("requests", "completed", "failed", "cancelled", "prompt_tokens", "generated_tokens")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


class Day(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """2026-11-30, UTC."""

    name = "date"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Of click."""
        try:
            if not _DAY.fullmatch(str(value)):
                raise ValueError
            return datetime.fromisoformat(str(value)).date().isoformat()
        except ValueError:
            self.fail(f"{value!r} is no date like 2026-11-30", param, ctx)


@click.command()
@config_option
@click.option("--from", "first", type=Day(), help="First day (UTC), as 2026-11-30; default: the first of this month.")
@click.option("--to", "last", type=Day(), help="Last day, included; default: today.")
@click.option("--tenant", help="Only this tenant's.")
@click.option(
    "--by", "groups", multiple=True, type=click.Choice(GROUPS), default=("tenant", "model"), show_default=True,
    help="What to sum by; may be given several times.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object with `from`, `to` and `rows`.")
@click.option("--records", is_flag=True, help="The records themselves, one JSON object a line.")
def usage(
    config: Path, first: str | None, last: str | None, tenant: str | None, groups: tuple[str, ...], as_json: bool, records: bool
) -> None:
    """Show what tenants used: requests that were let in and have ended, with their tokens.

    A request counts also when its client left or it failed: with the tokens that were generated for it. Requests that were refused
    used nothing and are only in the metrics. The last fraction of a second may be missing while the router runs.
    """
    from calculet_core.shell.usage import read_usage
    from calculet_core.usage import sum_usage

    fleet = open_fleet(config)
    today = datetime.now(UTC).date().isoformat()
    first, last = first or today[:8] + "01", last or today
    if first > last:
        end(2, f"--from {first} is after --to {last}")
    try:
        found = (one for one in read_usage(fleet.usage, first, last) if tenant is None or one.tenant == tenant)
        if records:
            _print_records(found)
            return
        sums = sum_usage(found, groups)
    except OSError as error:
        end(1, f"{error.filename}: {error.strerror}", "run as the user that Calculet runs as")
    if as_json:
        rows = [
            {**dict(zip(groups, one.group, strict=True)), **{name: getattr(one, name) for name in (*NUMBERS, "recovered")}}
            for one in sums
        ]
        click.echo(json.dumps({"from": first, "to": last, "rows": rows}, indent=2))
        return
    if not sums:
        click.echo(f"no request ended from {first} to {last}" + ("" if tenant is None else f" for tenant {tenant!r}"))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", title=f"{first} to {last}", title_justify="left")
    for name in groups:
        table.add_column(name)
    for name in NUMBERS:
        table.add_column(name.replace("_", " "), justify="right")
    for one in sums:
        table.add_row(*one.group, *(f"{getattr(one, name):,}" for name in NUMBERS))
    Console(highlight=False, markup=False).print(table)
    if recovered := sum(one.recovered for one in sums):
        click.echo(f"{recovered} of them had their router killed; their tokens are what the boards' journals know", err=True)


def _print_records(found: Any) -> None:
    import msgspec

    for record in found:
        click.echo(msgspec.json.encode(record))
