"""`calculet-router run --config FLEET.yaml`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import click
import uvloop

from calculet_core.errors import ConfigError, ExitCode
from calculet_core.shell.logs import set_up_logs
from calculet_core.shell.process import in_words, is_machines
from calculet_core.shell.stacks import ignore_dumps
from calculet_router.shell.app import serve
from calculet_router.shell.telemetry import FIRST


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="calculet", prog_name="calculet-router")
def main() -> None:
    """The OpenAI-compatible front door of a fleet."""


@main.command()
@click.option("--config", required=True, type=click.Path(path_type=Path), help="A calculet-fleet/v1 file.")
@click.option("--name", default=FIRST, show_default=True, help="Of its journal and metrics, when several routers share the fleet.")
def run(config: Path, name: str) -> None:
    """Serve HTTP until SIGTERM. Exit codes: 0 commanded, 78 configuration, 75 the machine stands in the way, 70 bug."""
    ignore_dumps()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can be served: by default it would end the process
    set_up_logs(name)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(serve(config, name))
    except ConfigError as error:
        click.echo(f"calculet-router: {error}", err=True)
        sys.exit(ExitCode.CONFIG)
    except Exception as error:
        if isinstance(error, OSError) and is_machines(error):
            click.echo(f"calculet-router: {in_words(error)}; it is tried again", err=True)
            sys.exit(ExitCode.UNAVAILABLE)
        logging.getLogger("calculet.router").exception("the router failed")
        sys.exit(ExitCode.BUG)
    sys.exit(code)


if __name__ == "__main__":
    main()
