"""`calculet install` and `calculet uninstall`: systemd's files for this host or for an image."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calculet_supervisor.commands.common import end, json_option, say

if TYPE_CHECKING:
    from calculet_supervisor.shell.installing import Change

DEFAULT_CONFIG = "/etc/calculet/fleet.yaml"
_prefix = click.option(
    "--prefix", default=lambda: sys.prefix, show_default="where this command runs from",
    help="Folder whose bin/ has calculet-router and the others: a virtual environment.",
)  # fmt: skip
_root = click.option(
    "--root", type=click.Path(path_type=Path, file_okay=False), default=Path("/"), show_default=True,
    help="Write below this folder (an image) and run nothing.",
)  # fmt: skip
_config = click.option("--config", "-c", default=DEFAULT_CONFIG, show_default=True, help="The fleet's configuration.")
_user = click.option("--user", default="calculet", show_default=True, help="Unprivileged user of all services.")
_dry_run = click.option("--dry-run", is_flag=True, help="Only show what would change, as a diff.")
_force = click.option("--force", is_flag=True, help="Also files that somebody has edited.")


@click.command()
@_prefix
@_root
@_config
@_user
@_dry_run
@_force
@json_option
def install(prefix: str, root: Path, config: str, user: str, dry_run: bool, force: bool, as_json: bool) -> None:
    """Install the systemd units, the polkit rule, the service user and the folders. Starts nothing.

    Run it again after an upgrade, or after a change of router.listen or of a drain time: what is right already is left alone.
    Exit codes: 0 done (with --dry-run: shown), 1 refused, 78 the configuration cannot run under these units.
    """
    from calculet_core.errors import ConfigError, ExitCode
    from calculet_supervisor.shell import installing
    from calculet_supervisor.units import plan_installation, render

    root, at_host = root.resolve(), root.resolve() == Path("/")
    try:
        if at_host and not dry_run:
            installing.check_host(os.geteuid(), root)
        templates = installing.read_templates()
        fleet = installing.read_fleet_config(root, config, templates)
        installation = plan_installation(prefix, config, fleet, user, installing.group_of(user) if at_host else user)
        warnings = installing.check_commands(root, prefix)
        changes = installing.plan_install(root, render(templates, installation), force=force)
        _refuse_edited(changes, "--force overwrites it")
        _show(changes, dry_run, as_json)
        if not dry_run:
            installing.apply(changes)
            if at_host:
                warnings += installing.run_all(installing.SETTLE_INSTALLED)
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error))
    except installing.Refusal as refusal:
        end(ExitCode.FAILURE, refusal.message, refusal.hint)
    for warning in warnings:
        click.echo(f"calculet: {warning}", err=True)
    if at_host and not dry_run and not as_json:
        _say_what_is_next(config, changes)


@click.command()
@_root
@_config
@_dry_run
@_force
@json_option
def uninstall(root: Path, config: str, dry_run: bool, force: bool, as_json: bool) -> None:
    """Remove what `calculet install` wrote. Configuration, state, logs and the service user stay.

    Exit codes: 0 done (with --dry-run: shown), 1 refused.
    """
    from calculet_core.errors import ExitCode
    from calculet_supervisor.shell import installing
    from calculet_supervisor.units import EXAMPLES, FILES

    root, at_host = root.resolve(), root.resolve() == Path("/")
    places = dict.fromkeys([*FILES.values(), f"{config}{EXAMPLES}"], "")
    try:
        if at_host and not dry_run:
            installing.check_host(os.geteuid(), root)
            if active := installing.active_units():
                hint = "first: systemctl stop calculet.target 'calculet-*'"
                raise installing.Refusal(f"{', '.join(active)} {'runs' if len(active) == 1 else 'run'}", hint)
        changes = installing.plan_uninstall(root, places, force=force)
        _refuse_edited(changes, "--force removes it")
        _show(changes, dry_run, as_json)
        warnings: list[str] = []
        if not dry_run:
            warnings += installing.run_all(installing.BEFORE_REMOVAL) if at_host and changes else []
            installing.apply(changes)
            warnings += installing.run_all(installing.AFTER_REMOVAL) if at_host and changes else []
    except installing.Refusal as refusal:
        end(ExitCode.FAILURE, refusal.message, refusal.hint)
    for warning in warnings:
        click.echo(f"calculet: {warning}", err=True)


def _refuse_edited(changes: list[Change], hint: str) -> None:
    from calculet_supervisor.shell.installing import Refusal, Step

    if edited := [change for change in changes if change.step is Step.EDITED]:
        for change in edited[1:]:
            click.echo(f"calculet: {change.path} was edited, or is not Calculet's", err=True)
        message = f"{edited[0].path} was edited, or is not Calculet's; nothing was changed"
        raise Refusal(message, f"move the change into a drop-in, or {hint}")


def _show(changes: list[Change], dry_run: bool, as_json: bool) -> None:
    from calculet_supervisor.shell.installing import Step

    if as_json:
        rows = [{"path": str(change.path), "step": str(change.step)} for change in changes]
        say({"dry_run": dry_run, "changes": rows}, True, "")
        return
    for change in changes:
        if change.step is not Step.KEEP:
            click.echo(f"{change.step} {change.path}")
        if dry_run and change.step is Step.UPDATE:
            click.echo(change.diff(), nl=False)
    same = sum(change.step is Step.KEEP for change in changes)
    if same == len(changes):
        click.echo(f"nothing to do: {same} files are as they should be")


def _say_what_is_next(config: str, changes: list[Change]) -> None:
    from calculet_supervisor.shell.installing import Step

    if not Path(config).exists():
        click.echo(f"next: write {config} (an example is {config}.example), then: systemctl enable --now calculet.target")
    elif any(change.step is Step.UPDATE and change.path.suffix == ".socket" for change in changes):
        click.echo("next: the address changes with `systemctl restart calculet-router.socket` (this cuts what is connected)")
    elif any(change.step is Step.UPDATE for change in changes):
        click.echo("next: restart one service after another; what runs goes on as it was until then")
    elif any(change.step is Step.CREATE for change in changes):
        click.echo(f"next: calculet config check --config {config} && systemctl enable --now calculet.target")
