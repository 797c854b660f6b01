"""`calculet init`: the configuration of a new fleet."""

from __future__ import annotations

import os
from pathlib import Path

import click

from calculet_supervisor.commands.common import end


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option("--boards", type=click.IntRange(1, 64), default=2, show_default=True, help="How many boards.")
@click.option("--device", type=click.Choice(["sim", "llamacpp"]), help="Their backend; default: the package's, else sim.")
@click.option("--package", default="packages/model", show_default=True, help="Folder of a signed package.")
@click.option("--alias", default="model", show_default=True, help="What clients send as `model`.")
@click.option("--trusted-key", default="keys/release.pub", show_default=True, help="Public key that the package is signed with.")
def init(folder: Path, boards: int, device: str | None, package: str, alias: str, trusted_key: str) -> None:
    """Write the configuration of a new fleet into DIR (default: here): a commented fleet.yaml and its scheduler file.

    Overwrites nothing. Exit codes: 0 written, 1 refused, 78 the values make no configuration.
    """
    from calculet_core.artifact import MANIFEST_NAME
    from calculet_core.errors import ArtifactError, ConfigError, ExitCode
    from calculet_core.shell.packages import read_package
    from calculet_supervisor.beginning import FLEET_FILE, new_fleet

    proven: tuple[int, ...] | None = None
    if (Path(package) / MANIFEST_NAME).exists():
        try:
            manifest = read_package(Path(package)).manifest
        except ArtifactError as error:
            end(ExitCode.FAILURE, str(error), "name another folder with --package; nothing was written")
        if device is not None and device != manifest.backend:
            message = f"{package} is made for {manifest.backend!r}, not for {device!r}"
            end(ExitCode.FAILURE, message, f"leave out --device, or say --device {manifest.backend}")
        device, proven = manifest.backend, manifest.compiled_batches
    try:
        files = new_fleet(boards, device or "sim", _seen_from(folder, package), alias, _seen_from(folder, trusted_key), proven)
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error), "nothing was written")
    there = [folder / name for name in files if os.path.lexists(folder / name)]
    if there:
        end(ExitCode.FAILURE, f"{there[0]} is there already; nothing was written", "name another folder, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x") as file:
                file.write(text)
            click.echo(folder / name)
    except OSError as error:
        end(ExitCode.FAILURE, f"{error.filename or folder}: {error.strerror}")
    config = folder / FLEET_FILE
    if proven is None:
        click.echo(f"next: put a signed package at {package} and its public key at {trusted_key}", err=True)
        key = Path(trusted_key)
        if key.suffix == ".pub":
            click.echo("or, to try it without a board, make both:", err=True)
            click.echo(f"  calculet-worker keygen {key.parent} --name {key.stem}", err=True)
            click.echo(f"  calculet package build qwen3-sim --out {package} --key {key.with_suffix('.pem')}", err=True)
    click.echo(f"next: calculet doctor --config {config} && calculet up --config {config}", err=True)


def _seen_from(folder: Path, path: str) -> str:
    """A path that was given from here, as the file in `folder` has to say it."""
    return path if Path(path).is_absolute() else os.path.relpath(Path.cwd() / path, folder.resolve())
