"""`calculet-supervisor run --config FLEET.yaml`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import click

from calculet_core.errors import ConfigError, ExitCode
from calculet_core.shell.files import LockHeld
from calculet_core.shell.fleet import make_folders
from calculet_core.shell.logs import keep_copy, set_level, set_up_logs
from calculet_core.shell.process import in_words, is_machines
from calculet_core.shell.stacks import answer_dumps, ignore_dumps
from calculet_core.shell.standing import load_or_held
from calculet_supervisor.shell.reloading import BornAgain, become_new
from calculet_supervisor.shell.starting import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="calculet", prog_name="calculet-supervisor")
def main() -> None:
    """Keeps a fleet's boards alive."""


@main.command()
@click.option("--config", required=True, type=click.Path(path_type=Path), help="A calculet-fleet/v1 file.")
def run(config: Path) -> None:
    """Supervise until SIGTERM; workers live on. SIGHUP reads the configuration again.

    Exit codes: 0 commanded, 1 another one runs, 70 bug, 75 the machine stands in the way (a full disk, say), 78 configuration.
    """
    ignore_dumps()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can be served: by default it would end the process
    set_up_logs("supervisor")
    try:
        fleet = load_or_held(config)
        make_folders(fleet)
        set_level(fleet.config.log.level)
        keep_copy("supervisor", fleet.log("supervisor"))
        answer_dumps(fleet.stacks("supervisor"), f"supervisor pid {os.getpid()}")
        code = asyncio.run(serve(fleet))
    except ConfigError as error:
        click.echo(f"calculet-supervisor: {error}", err=True)
        sys.exit(ExitCode.CONFIG)
    except LockHeld as error:
        click.echo(f"calculet-supervisor: this fleet has a supervisor already: {error}", err=True)
        sys.exit(ExitCode.FAILURE)
    except BornAgain:
        become_new()
    except Exception as error:
        if isinstance(error, OSError) and is_machines(error):
            click.echo(f"calculet-supervisor: {in_words(error)}", err=True)
            sys.exit(ExitCode.UNAVAILABLE)
        logging.getLogger("calculet.supervisor").exception("the supervisor failed")
        sys.exit(ExitCode.BUG)
    sys.exit(code)


if __name__ == "__main__":
    main()
