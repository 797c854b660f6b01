"""`calculet support-bundle`."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import click

from calculet_supervisor.commands.common import config_option, end, json_option, open_fleet, say


@click.command("support-bundle")
@config_option
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), show_default="calculet-support-HOST-TIME.tar.gz here",
    help="The archive.",
)  # fmt: skip
@click.option("--max-mib", type=click.IntRange(1, 4096), default=64, show_default=True, help="Most that goes in, uncompressed.")
@json_option
def support_bundle(config: Path, output: Path | None, max_mib: int, as_json: bool) -> None:
    """Put what a supporter needs into one archive: status, configuration, stacks, crash bundles, logs, journals, metrics, versions.

    Works with any process down. It holds no prompts, no answers and no keys; values in the configuration whose names sound like
    secrets are left out. Exit codes: 0 written (what is missing is said), 1 it cannot be written, 78 the configuration is wrong.
    """
    from calculet_core.errors import ExitCode
    from calculet_supervisor.shell.bundling import make_bundle

    fleet = open_fleet(config)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = output or Path(f"calculet-support-{socket.gethostname()}-{moment}.tar.gz")
    try:
        missing = make_bundle(fleet, path, max_mib << 20)
    except OSError as error:
        end(ExitCode.FAILURE, f"{path}: {error.strerror or error}", "name another place with --output")
    for name, reason in missing.items():
        click.echo(f"calculet: not in it: {name}: {reason}", err=True)
    size = path.stat().st_size
    say({"path": str(path), "bytes": size, "missing": missing}, as_json, f"{path} ({size / 1024:.0f} KiB)")
