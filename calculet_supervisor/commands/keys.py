"""`calculet keys`: who may use the fleet. Works on the key file itself, so it needs no supervisor; routers follow the file."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import completed_by, config_option, end, json_option, open_fleet, say

if TYPE_CHECKING:
    from calculet_core.keys import KeyFile, KeyRecord
    from calculet_core.shell.fleet import Fleet

IN_FORCE_S = 5.0
"""How long a router may take to follow the file before that is said; it looks several times a second."""
DAY_S = 86_400
COLUMNS = ("key", "tenant", "state", "created", "expires", "note")


@click.group()
def keys() -> None:
    """Make, list, rotate and revoke API keys.

    Keys take effect in a running router within a second. While no key was ever made, nobody needs one.
    """


@keys.command()
@config_option
@click.argument("tenant", shell_complete=completed_by("tenants"))
@click.option("--note", default="", help="For the list: who has it, what for.")
@click.option("--expires-days", type=click.FloatRange(min=0, min_open=True), help="When it ends by itself; default: never.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: id, key, tenant, expires_s.")
def create(config: Path, tenant: str, note: str, expires_days: float | None, as_json: bool) -> None:
    """Make a key for TENANT and print it. It is shown this once: only its hash is kept."""
    fleet = open_fleet(config)
    known = [one.name for one in fleet.config.tenants]
    if tenant not in known:
        message = f"no tenant {tenant!r} in {fleet.path} (tenants: {', '.join(known)})"
        end(1, message, "add it under `tenants`, then `calculet config apply`")
    expires_s = None if expires_days is None else int(time.time() + expires_days * DAY_S)
    record, key = _new(tenant, note, expires_s)
    first = not fleet.keys.exists()
    changed = _change(fleet, lambda found: _with(found, (*(found.keys if found else ()), record)))
    _show(record, key, as_json)
    if first:
        click.echo("this is the first key: from now on every request needs one", err=True)
    _say_in_force(fleet, changed.version)


@keys.command("list")
@config_option
@click.option("--all", "everything", is_flag=True, help="Also those that are revoked or expired.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with `version` and `keys`.")
def list_keys(config: Path, everything: bool, as_json: bool) -> None:
    """List keys: never the keys themselves, only their ids."""
    fleet, now_s = open_fleet(config), time.time()
    found = _read(fleet)
    records = [one for one in (found.keys if found else ()) if everything or one.state(now_s) in ("active", "expiring")]
    if as_json:
        rows = [
            {
                "id": one.id, "tenant": one.tenant, "state": one.state(now_s), "created_s": one.created_s,
                "created_by": one.created_by, "expires_s": one.expires_s, "revoked_s": one.revoked_s, "revoked_by": one.revoked_by,
                "replaced_by": one.replaced_by, "note": one.note,
            }
            for one in records
        ]  # fmt: skip
        click.echo(json.dumps({"version": found.version if found else 0, "keys": rows}, indent=2))
        return
    if found is None:
        required = fleet.config.router.require_keys
        consequence = "every request is refused (router.require_keys)" if required else "nobody needs one"
        click.echo(f"no key was made: {consequence}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for column in COLUMNS:
        table.add_column(column, no_wrap=column != "note")
    for one in records:
        ends = one.revoked_s if one.revoked_s is not None else one.expires_s
        table.add_row(one.id, one.tenant, one.state(now_s), _day(one.created_s), _day(ends) if ends else "-", one.note)
    console = Console(highlight=False, markup=False)
    console.print(table if records else "no key is valid: every request is refused")


@keys.command()
@config_option
@click.argument("key_id", shell_complete=completed_by("key_ids"))
@click.option(
    "--grace-hours", type=click.FloatRange(min=0), default=24.0, show_default=True,
    help="How long the old key still works; 0: it ends now.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object: id, key, tenant, expires_s.")
def rotate(config: Path, key_id: str, grace_hours: float, as_json: bool) -> None:
    """Make a new key in place of KEY_ID, for the same tenant, and print it. Both work until the grace period is over."""
    from msgspec.structs import replace

    fleet, now_s = open_fleet(config), int(time.time())
    made: list[tuple[KeyRecord, str]] = []

    def change(found: KeyFile | None) -> KeyFile:
        old = _find(found, key_id)
        record, key = _new(old.tenant, old.note, None)
        made.append((record, key))
        until_s = int(now_s + grace_hours * 3600)
        ends_s = until_s if old.expires_s is None else min(old.expires_s, until_s)
        retired = replace(old, expires_s=ends_s, replaced_by=record.id)
        assert found is not None
        return _with(found, (*(retired if one.id == old.id else one for one in found.keys), record))

    changed = _change(fleet, change)
    record, key = made[0]
    _show(record, key, as_json)
    click.echo(f"{key_id} works for {grace_hours:g} h more" if grace_hours else f"{key_id} has ended", err=True)
    _say_in_force(fleet, changed.version)


@keys.command()
@config_option
@click.argument("key_id", shell_complete=completed_by("key_ids"))
@json_option
def revoke(config: Path, key_id: str, as_json: bool) -> None:
    """End KEY_ID now. Requests that are being answered are finished; new ones get 401."""
    from msgspec.structs import replace

    fleet, now_s = open_fleet(config), int(time.time())

    def change(found: KeyFile | None) -> KeyFile:
        old = _find(found, key_id)
        revoked = replace(old, revoked_s=now_s, revoked_by=os.getuid())
        assert found is not None
        return _with(found, tuple(revoked if one.id == old.id else one for one in found.keys))

    changed = _change(fleet, change)
    say({"id": key_id, "revoked_s": now_s, "version": changed.version}, as_json, f"{key_id} is revoked")
    _say_in_force(fleet, changed.version)


@keys.command()
@config_option
@click.option("--force", is_flag=True, help="Replace the keys that are there; then restart workers and routers.")
@click.option("--router", "router", metavar="NAME", help="Only a pair for this router alone, beside the keys that are there.")
def curve(config: Path, force: bool, router: str | None) -> None:
    """Make the keys with which routers and workers speak over TCP (boards that have `listen`).

    Unix sockets need none. A router on another host gets router.secret, router.public and worker.public, over a safe way; or, with
    a pair of its own, routers/NAME.secret, routers/NAME.public and worker.public. Workers let in whose public key they have, from
    the moment that they have it; delete it to shut that router out.
    """
    from calculet_core.errors import ConfigError, ExitCode
    from calculet_core.shell.curve import ROUTERS, make_curve_keys, make_router_keys
    from calculet_core.shell.fleet import make_folders

    fleet = open_fleet(config)
    place = fleet.curve if router is None else fleet.curve / ROUTERS / f"{router}.secret"
    if place.exists() and not force:
        end(1, f"{place} is there already", "--force replaces its keys")
    try:
        make_folders(fleet)
        written = make_curve_keys(fleet.curve) if router is None else make_router_keys(fleet.curve, router)
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error))
    except OSError as error:
        end(ExitCode.FAILURE, f"{fleet.curve}: {error.strerror}", "run as the user that Calculet runs as, or as root")
    for path in written:
        click.echo(path)


# ---------------------------------------------------------------- the file
def _new(tenant: str, note: str, expires_s: int | None) -> tuple[KeyRecord, str]:
    from calculet_core.keys import KEY_ID_BYTES, SECRET_BYTES, KeyRecord, hash_key, make_key

    key_id, key = make_key(os.urandom(KEY_ID_BYTES + SECRET_BYTES))
    digest = hash_key(key.encode()).hex()
    return KeyRecord(key_id, tenant, digest, int(time.time()), os.getuid(), note[:200], expires_s), key


def _with(found: KeyFile | None, records: tuple[KeyRecord, ...]) -> KeyFile:
    from calculet_core.keys import KeyFile

    return KeyFile(found.version + 1 if found else 1, records)


def _find(found: KeyFile | None, key_id: str) -> KeyRecord:
    record = found.find(key_id) if found else None
    if record is None:
        end(1, f"no key {key_id!r}", "`calculet keys list --all` shows the ids")
    if record.revoked_s is not None:
        end(1, f"{key_id} was revoked on {_day(record.revoked_s)}")
    return record


def _read(fleet: Fleet) -> KeyFile | None:
    from calculet_core.errors import ConfigError, ExitCode
    from calculet_core.shell.keys import read_keys

    try:
        return read_keys(fleet.keys)
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error))


def _change(fleet: Fleet, change: Callable[[KeyFile | None], KeyFile]) -> KeyFile:
    from calculet_core.errors import ConfigError, ExitCode
    from calculet_core.shell.files import LockHeld
    from calculet_core.shell.keys import change_keys

    try:
        return change_keys(fleet.keys, change)
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error))
    except LockHeld as error:
        end(ExitCode.FAILURE, str(error), "try again")
    except OSError as error:
        end(ExitCode.FAILURE, f"{fleet.keys}: {error.strerror}", "run as the user that Calculet runs as, or as root")


# ---------------------------------------------------------------- what is said
def _show(record: KeyRecord, key: str, as_json: bool) -> None:
    """The key alone on stdout, so that a script can take it."""
    if as_json:
        click.echo(json.dumps({"id": record.id, "key": key, "tenant": record.tenant, "expires_s": record.expires_s}))
        return
    click.echo(key)
    click.echo(f"key {record.id} of tenant {record.tenant}; it is not shown again", err=True)


def _say_in_force(fleet: Fleet, version: int) -> None:
    """Whether the running router has it; a router that does not follow is a failure that nobody should find out by themselves."""
    import asyncio

    from calculet_core.shell.telemetry import fetch_metrics

    deadline_s, running = time.monotonic() + IN_FORCE_S, [path for path in _router_sockets(fleet) if _listens(path)]
    if not running:
        click.echo("no router runs here: it is in force when one starts", err=True)
        return
    while behind := [path for path in running if _listens(path) and _version_in(asyncio.run(fetch_metrics(path))) < version]:
        if time.monotonic() > deadline_s:
            names = ", ".join(path.stem.removeprefix("m-") for path in behind)
            end(1, f"still not taken after {IN_FORCE_S:g} s by {names}", "see its log")
        time.sleep(0.05)
    click.echo("in force", err=True)


def _router_sockets(fleet: Fleet) -> list[Path]:
    return sorted(fleet.run_dir.glob("m-router*.sock"))


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


def _version_in(exposition: bytes) -> int:
    for line in exposition.splitlines():
        if line.startswith(b"calculet_router_keys_version "):
            return int(float(line.rpartition(b" ")[2]))
    return 0


def _day(at_s: Any) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
