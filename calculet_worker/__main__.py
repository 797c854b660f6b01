"""`calculet-worker`: serves one board, and builds packages by running a device."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from pathlib import Path

import click

COMMANDS = "calculet_worker.commands"


class _Group(click.Group):
    """Finds the commands on packages in a module of their own, so that `run` does not load what it never needs."""

    lazy = {
        "build-package": ("build_package", "build_package_command"),
        "fork-server": ("fork_server", "fork_server_command"),
        "keygen": ("build_package", "keygen_command"),
        "derive-profiles": ("derive_profiles", "derive_command"),
        "prove": ("prove", "prove_command"),
    }

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *self.lazy})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in self.lazy:
            module, attribute = self.lazy[name]
            command: click.Command = getattr(importlib.import_module(f"{COMMANDS}.{module}"), attribute)
            return command
        return super().get_command(context, name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="calculet", prog_name="calculet-worker")
def cli() -> None:
    """One board's worker."""


@cli.command()
@click.option("--config", required=True, type=click.Path(path_type=Path), help="The fleet's configuration (calculet-fleet/v1).")
@click.option("--board", "board_name", required=True, help="Which of its boards to serve.")
def run(config: Path, board_name: str) -> None:
    """Serve a board until the supervisor or a signal ends it.

    Exit codes: 0 commanded, 70 a bug, 75 the board is unavailable, 78 the configuration is wrong.
    """
    from calculet_core.shell.fleet import load_fleet, make_folders
    from calculet_core.shell.logs import keep_copy, set_level, set_up_logs
    from calculet_core.shell.process import in_words
    from calculet_core.shell.stacks import ignore_dumps
    from calculet_worker.shell.app import exit_code_of, serve
    from calculet_worker.shell.loading import check_configuration

    ignore_dumps()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # "read your file again" is for others; by default it would end a worker
    set_up_logs(f"worker-{board_name}")
    try:
        fleet = load_fleet(config)
        board = fleet.board(board_name)
        check_configuration(fleet, board)
        make_folders(fleet)
        set_level(fleet.config.log.level)
        keep_copy(f"worker-{board_name}", fleet.log(f"worker-{board_name}"))
        code, reason = serve(fleet, board)
        logging.info("ends with code %d: %s", code, reason)
    except Exception as error:
        code = exit_code_of(error)
        words = in_words(error) if isinstance(error, OSError) else str(error)
        logging.critical("%s", words, exc_info=None if code != 70 else error)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # a device or a hashing thread that is stuck must not keep the process


def main() -> None:
    """The console script."""
    cli(prog_name="calculet-worker")


if __name__ == "__main__":
    main()
