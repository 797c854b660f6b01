"""One verb per file; `COMMANDS` is all of them, in the order of the help text."""

from __future__ import annotations

import click

from calculet_perf.commands.history import history
from calculet_perf.commands.schema import schema

COMMANDS: tuple[click.Command, ...] = (
    history,
    schema,
)
