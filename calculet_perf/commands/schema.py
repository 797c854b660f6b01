"""`calculet-perf schema`: the JSON Schema files of what a run writes."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from calculet_perf.manifest import Manifest
from calculet_perf.records import RECORDS, json_schema
from calculet_perf.runinfo import CaseRecord, RunInfo

SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "run-manifest": Manifest, "requests": RECORDS["requests"], "steps": RECORDS["steps"], "device": RECORDS["device"],
    "cases": CaseRecord, "run": RunInfo,
}  # fmt: skip


def schema_bytes(name: str) -> bytes:
    """The content of `schemas/NAME.schema.json`."""
    cls = SCHEMAS[name]
    return msgspec.json.format(msgspec.json.encode(json_schema(cls, name)), indent=2) + b"\n"


@click.command()
@click.argument("name", type=click.Choice(list(SCHEMAS)), required=False)
@click.option("--write", "folder", type=click.Path(path_type=Path, file_okay=False), help="Write all of them there.")
def schema(name: str | None, folder: Path | None) -> None:
    """Print the JSON Schema of a file of a run; without NAME list them."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for each in SCHEMAS:
            (folder / f"{each}.schema.json").write_bytes(schema_bytes(each))
    if name is not None:
        click.echo(schema_bytes(name).decode(), nl=False)
    elif folder is None:
        click.echo("\n".join(SCHEMAS))
