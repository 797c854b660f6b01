"""One verb per file; `COMMANDS` is all of them, in the order of the help text."""

from __future__ import annotations

import click

from calculet_perf.commands.capacity import capacity
from calculet_perf.commands.chaos import chaos
from calculet_perf.commands.compare import compare
from calculet_perf.commands.faults import faults
from calculet_perf.commands.golden import golden
from calculet_perf.commands.history import history
from calculet_perf.commands.maintenance import maintenance
from calculet_perf.commands.manifest import manifest
from calculet_perf.commands.report import report
from calculet_perf.commands.run import run
from calculet_perf.commands.schema import schema
from calculet_perf.commands.selftest import selftest
from calculet_perf.commands.soak import soak
from calculet_perf.commands.verify import verify

COMMANDS: tuple[click.Command, ...] = (
    manifest,
    run,
    golden,
    capacity,
    faults,
    chaos,
    maintenance,
    soak,
    selftest,
    report,
    compare,
    verify,
    history,
    schema,
)
