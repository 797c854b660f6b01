"""`calculet upgrade`: after a new version was installed, every process becomes it, one at a time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import UNREACHABLE, config_option, end, json_option, open_file, say, say_drain

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet
    from calculet_supervisor.shell.upgrading import Steps

INTERRUPTED = 130


@click.command()
@config_option
@click.option("--dry-run", is_flag=True, help="Only show the steps.")
@click.option("--again", is_flag=True, help="Begin anew: also restart what an interrupted upgrade has restarted already.")
@click.option("--allow-downtime", is_flag=True, help="Also where a model has a single board.")
@click.option("--board-timeout-s", type=click.FloatRange(min=1), default=900.0, show_default=True, help="To serve again.")
@json_option
def upgrade(config: Path, dry_run: bool, again: bool, allow_downtime: bool, board_timeout_s: float, as_json: bool) -> None:
    """Restart supervisor, routers and boards of this host in turn, without a refused connection or a broken stream.

    Streams drain within router.drain_timeout_s and supervision.drain_timeout_ms. The first that does not come back ends it. Ctrl-C
    or a lost terminal does no harm: what was begun comes about, and `calculet upgrade` goes on where it was.

    Exit codes: 0 done, 1 refused or failed, 69 the supervisor cannot be reached, 78 the configuration is wrong, 130 interrupted.
    """
    from calculet_core.errors import ExitCode
    from calculet_core.shell.control_client import ControlError, SupervisorUnreachable
    from calculet_core.shell.files import FileLock, LockHeld
    from calculet_supervisor.shell import upgrading
    from calculet_supervisor.shell.checking import find_problems
    from calculet_supervisor.shell.installing import Refusal

    fleet = open_file(config)
    if problems := find_problems(fleet):
        end(ExitCode.CONFIG, "\ncalculet: ".join(problems))
    try:
        if dry_run:
            _tell(fleet, steps := upgrading.plan(fleet, allow_downtime=allow_downtime, again=again))
            _answer(steps, [_say(what, None, as_json) for what in (*steps.units, *steps.boards)], True, as_json)
            return
        if os.geteuid() != 0:
            raise Refusal("only root may restart services", "use sudo, or look with --dry-run")
        lock = FileLock(fleet.state_dir / "upgrade.lock")
        with _interruptible():
            steps = upgrading.plan(fleet, allow_downtime=allow_downtime, again=again)
            _tell(fleet, steps)
            upgrading.remember(fleet, steps.begun)
            done = list(_run(fleet, steps, board_timeout_s, as_json))
            upgrading.forget(fleet)
        lock.release()
    except LockHeld as error:
        end(ExitCode.FAILURE, f"another `calculet upgrade` is at work: {error}", "`calculet status --watch` shows what it does")
    except Refusal as refusal:
        end(ExitCode.FAILURE, refusal.message, refusal.hint)
    except SupervisorUnreachable as error:
        end(UNREACHABLE, error.message, error.hint)
    except ControlError as error:
        end(ExitCode.FAILURE, error.message, error.hint)
    _answer(steps, done, False, as_json)


def _run(fleet: Fleet, steps: Steps, board_timeout_s: float, as_json: bool) -> Iterator[dict[str, Any]]:
    from calculet_supervisor.shell import upgrading

    for board in steps.coming:
        upgrading.await_board(fleet, board, board_timeout_s)
        click.echo(f"{board}: serves again", err=as_json)
    for unit in steps.units:
        began_s = time.monotonic()
        upgrading.restart_unit(unit)
        yield _say(unit, time.monotonic() - began_s, as_json)
    for board in steps.boards:
        began_s = time.monotonic()
        upgrading.restart_board(fleet, board, board_timeout_s)
        yield _say(board, time.monotonic() - began_s, as_json)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and the end of the terminal end the command alone, with a word about what goes on."""

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: nothing is to be heard
            signal.signal(number, interrupted)
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):  # nobody may be there to read it
            click.echo("calculet: what was begun comes about; `calculet upgrade` goes on where it was", err=True)
        sys.exit(INTERRUPTED)


def _tell(fleet: Fleet, steps: Steps) -> None:
    """Before anything happens, on stderr."""
    if steps.goes_on:
        began = time.strftime("%F %T", time.localtime(steps.begun.wall_s))
        new = ", ".join(steps.is_new) or "nothing"
        click.echo(f"calculet: goes on with the upgrade of {began}; new already: {new} (--again begins anew)", err=True)
    for board in steps.coming:
        click.echo(f"calculet: {board} was begun: it is waited for", err=True)
    if any("router" in unit for unit in steps.units):
        say_drain("each router", fleet.config.router.drain_timeout_s, "router.drain_timeout_s", "shutting_down")
    if steps.boards:
        limit_ms = fleet.config.supervision.drain_timeout_ms
        say_drain("each board", limit_ms / 1000, "supervision.drain_timeout_ms", "shutting_down")
    for board, why in steps.left_alone.items():
        click.echo(f"calculet: {board} is left alone: {why}", err=True)


def _answer(steps: Steps, restarted: list[dict[str, Any]], dry_run: bool, as_json: bool) -> None:
    if not as_json:
        return
    answer = {
        "dry_run": dry_run, "goes_on": steps.goes_on, "is_new": list(steps.is_new), "restarted": restarted,
        "left_alone": dict(steps.left_alone),
    }  # fmt: skip
    say(answer, True, "")


def _say(what: str, took_s: float | None, as_json: bool) -> dict[str, Any]:
    """Progress: for programs on stderr, as the whole comes at the end. `took_s` None: it is only shown."""
    click.echo(f"would restart {what}" if took_s is None else f"{what}: restarted in {took_s:.1f} s", err=as_json)
    return {"what": what, "seconds": None if took_s is None else round(took_s, 3)}
