"""`calculet-perf maintenance`: resets of real hardware, with somebody's authority, guided and logged (acceptance §12.4)."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from calculet_perf.commands.common import Exit, end
from calculet_perf.maintenance import BEGIN, Action, Health, Line, Touched, broken

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet
    from calculet_perf.shell.http import Target

FILE = click.Path(path_type=Path, dir_okay=False)
LOG = Path("maintenance.jsonl")


@click.group()
def maintenance() -> None:
    """Maintenance windows (acceptance §12.4)."""


@maintenance.command("run")
@click.option("--config", type=FILE, required=True, help="The fleet's configuration.")
@click.option("--board", required=True, help="The board that is worked on.")
@click.option("--action", type=click.Choice(get_args(Action)), required=True, help="What is tried.")
@click.option("--operator", required=True, help="Who does it: a name that others know.")
@click.option("--authority", required=True, help="By whose word: a ticket, a contract, the owner's name.")
@click.option("--run", "command", help="A command to run while the board is set aside, as the vendor's tool; no shell.")
@click.option("--log", type=FILE, default=LOG, show_default=True, help="The log; windows are only ever appended to it.")
@click.option("--url", help="Where a router listens.  [default: router.listen of the configuration]")
@click.option("--api-key-env", help="Environment variable with an API key, where the fleet asks for one.")
@click.option("--ca-file", type=FILE, help="Authorities of an https:// url, PEM.")
@click.option("--command-s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="How long the command may take.")
@click.option("--recover-s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Draining, and coming back.")
@click.option("--allow-downtime", is_flag=True, help="Also when no other board serves.")
@click.option("--dry-run", is_flag=True, help="Look, say what would be done, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def run_window(
    config: Path, board: str, action: Action, operator: str, authority: str, command: str | None, log: Path, url: str | None,
    api_key_env: str | None, ca_file: Path | None, command_s: float, recover_s: float, allow_downtime: bool, dry_run: bool,
    yes: bool,
) -> None:  # fmt: skip
    """Open a window on one board of a fleet that serves: look, set the board aside, act, bring it back, look again.

    device_reset needs no command: a board that is brought back is reset. Everything else needs --run. What runs on the board is
    finished before anything is done to it, and it is brought back whatever came of the command.

    Exit codes: 0 it serves again and golden agrees, 1 it does not, 2 the window was not opened (usage, authority, no other
    board), 3 the fleet cannot be asked.
    """
    import uvloop

    from calculet_core.errors import ConfigError
    from calculet_core.shell.fleet import load_fleet

    arguments = shlex.split(command) if command else None
    if action != "device_reset" and arguments is None:
        end(Exit.INVALID, f"{action} needs --run: this program has no such reset of its own")
    for name, text in (("--operator", operator), ("--authority", authority)):
        if not text.strip():
            end(Exit.INVALID, f"{name} is empty: a window has somebody who does it, and somebody's word for it")
    try:
        fleet = load_fleet(config)
    except ConfigError as error:
        end(Exit.INVALID, str(error))
    now = datetime.now(UTC)
    line = Line(
        previous=BEGIN, number=0, utc="", monotonic_ns=0, window=f"{now:%Y%m%dT%H%M%SZ}-{board}", step="opened", operator=operator,
        uid=os.getuid(), authority=authority, board=board, action=action, command=arguments,
    )  # fmt: skip
    target = _target(fleet, url, api_key_env, ca_file)
    raise SystemExit(uvloop.run(_main(fleet, target, line, log, command_s, recover_s, allow_downtime, dry_run, yes)))


@maintenance.command()
@click.argument("log", type=FILE, default=LOG)
def check(log: Path) -> None:
    """Check that LOG is what was written: no line changed, taken out or put in, every window closed.

    Exit codes: 0 it is, 1 it is not (named), 2 it cannot be read.
    """
    from calculet_core.shell.files import read_bounded

    try:
        lines = read_bounded(log, 256 << 20).splitlines(keepends=True)
    except OSError as error:
        end(Exit.INVALID, f"{log}: {error.strerror}")
    found = broken(lines, log.name)
    for problem in found:
        click.echo(problem)
    if found:
        raise SystemExit(Exit.CORRECTNESS)
    click.echo(f"{log}: {len(lines)} lines, whole")


def _target(fleet: Fleet, url: str | None, api_key_env: str | None, ca_file: Path | None) -> Target:
    from calculet_perf.shell.probe import target_of
    from calculet_perf.shell.tls import TlsSettings

    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        end(Exit.INVALID, f"the environment has no {api_key_env}")
    return target_of(url or f"http://{fleet.config.router.listen}", key, TlsSettings(ca_file=str(ca_file)) if ca_file else None)


async def _main(
    fleet: Fleet, target: Target, line: Line, path: Path, command_s: float, recover_s: float, allow_downtime: bool, dry_run: bool,
    yes: bool,
) -> int:  # fmt: skip
    from calculet_core.shell.control_client import ControlError
    from calculet_perf.shell.http import HttpClient
    from calculet_perf.shell.maintenance_run import Log, Window, WindowError

    client = HttpClient(target)
    try:
        log = Log(path, line)
    except WindowError as error:
        end(error.code, str(error), error.hint)
    try:
        window = Window(fleet.control_socket, client, line.board, log, lambda text: click.echo(text, err=True))
        before, touched = await window.look()
        others = await window.others()
        click.echo("\n".join(_plan(line, before, touched, others)), err=True)
        if before.golden is None:
            raise WindowError(Exit.CORRECTNESS, "golden fails before anything was done: there is nothing to compare with")
        if not others and not allow_downtime:
            message = f"no board but {line.board} serves: nobody would be answered"
            raise WindowError(Exit.INVALID, message, "--allow-downtime accepts that")
        if before.resets_left == 0:
            message = f"{line.board} has no reset left in its budget: once set aside it could not be brought back"
            raise WindowError(Exit.INVALID, message, "wait until one is allowed again: `calculet status` tells how many are left")
        if dry_run:
            return Exit.PASS
        if not yes and not click.confirm("Open the window?", err=True):
            raise WindowError(Exit.INVALID, "not opened")
        log.write("opened", before, touched, other_boards=others)
        reason = f"maintenance {line.window} by {line.operator} ({line.authority})"
        findings = await window.run(before, reason, line.command, command_s, recover_s)
    except WindowError as error:
        end(error.code, str(error), error.hint)
    except ControlError as error:
        end(Exit.CORRECTNESS, f"the supervisor refused: {error.message}", error.hint)
    finally:
        client.close()
        log.close()
    for name, (was, is_now) in findings.changed.items():
        click.echo(f"{name}: {was} before, {is_now} after")
    for reason in findings.reasons:
        click.echo(f"FAILED: {reason}")
    if findings.reasons:
        return Exit.CORRECTNESS
    click.echo(f"{line.board} serves again after {(findings.recovery_ms or 0) / 1e3:.1f} s, golden agrees; {path}")
    return Exit.PASS


def _plan(line: Line, before: Health, touched: Touched, others: int) -> list[str]:
    def known(value: Any) -> str:
        return "not told" if value is None else str(value)

    tenants = ", ".join(f"{name} ({count})" for name, count in touched.tenants.items()) or "nobody"
    act = shlex.join(line.command) if line.command else "nothing besides"
    return [
        f"{line.board}: {known(before.state)}, generation {known(before.generation)}, fault {known(before.fault)}",
        f"  runtime {known(before.runtime)}, driver {known(before.driver)}, firmware {known(before.firmware)}",
        f"  {known(touched.running)} requests run on it, {known(touched.waiting)} wait, {known(before.in_flight)} jobs in flight",
        f"  requests are open for: {tenants}; {others} other boards serve",
        f"{line.action} by {line.operator}, on the word of {line.authority}:",
        "  1. set the board aside: what runs is finished, its worker ends",
        f"  2. run: {act}",
        "  3. bring it back: reset, golden cases, a small share of work",
        "  4. look again: versions, health, golden, whose requests failed",
    ]
