"""`calculet-perf schema`: the JSON Schema files of what a run writes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec

from calculet_perf.records import json_schema

SCHEMAS: dict[str, str] = {
    "run-manifest": "calculet_perf.manifest:Manifest", "matrix": "calculet_perf.workloads.matrix:Matrix",
    "claim": "calculet_perf.rules:Claim", "rules": "calculet_perf.rules:Rules",
    "requests": "calculet_perf.records:RequestRecord", "steps": "calculet_perf.records:StepRecord",
    "device": "calculet_perf.records:DeviceRecord", "processes": "calculet_perf.records:ProcessRecord",
    "cases": "calculet_perf.runinfo:CaseRecord",
    "run": "calculet_perf.runinfo:RunInfo", "faults": "calculet_perf.faults:Outcome", "stage": "calculet_perf.stability:StageRun",
    "swaps": "calculet_perf.swapping:SwapCycle",
    "capacity": "calculet_perf.shell.capacity:Result", "report": "calculet_perf.report.model:Report",
}  # fmt: skip
"""Name -> where the struct is; one is imported when its schema is asked for."""


def schema_bytes(name: str) -> bytes:
    """The content of `schemas/NAME.schema.json`."""
    module, _, name_of_class = SCHEMAS[name].partition(":")
    cls: type[Any] = getattr(import_module(module), name_of_class)
    return msgspec.json.format(msgspec.json.encode(json_schema(cls, name)), indent=2) + b"\n"


@click.command()
@click.argument("name", type=click.Choice(list(SCHEMAS)), required=False)
@click.option("--write", "folder", type=click.Path(path_type=Path, file_okay=False), help="Write all of them there.")
def schema(name: str | None, folder: Path | None) -> None:
    """Print the JSON Schema of a file that a run reads or writes, or of a report; without NAME list them."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for each in SCHEMAS:
            (folder / f"{each}.schema.json").write_bytes(schema_bytes(each))
    if name is not None:
        click.echo(schema_bytes(name).decode(), nl=False)
    elif folder is None:
        click.echo("\n".join(SCHEMAS))
