"""`calculet package build|prove|derive-profiles|sign|verify|show`: signed model packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from calculet_supervisor.commands.common import end, json_option, say

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def package() -> None:
    """Work on model packages."""


@package.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe")
@click.option("--out", required=True, type=FOLDER, help="Folder to make.")
@click.option("--key", type=FILE, help="Private Ed25519 key (PEM) to sign with.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def build(recipe: str, out: Path, key: Path | None, options: tuple[str, ...]) -> None:
    """Build a package from a RECIPE by running its device (`calculet-worker build-package`, which explains recipes and OPTIONS)."""
    command = [sys.executable, "-m", "calculet_worker", "build-package", recipe, "--out", str(out)]
    command += [*(["--key", str(key)] if key else []), *options]
    sys.exit(subprocess.run(command, check=False).returncode)


@package.command(context_settings={"ignore_unknown_options": True})
@click.argument("folder", type=FOLDER)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def prove(folder: Path, options: tuple[str, ...]) -> None:
    """Prove on the device whether prompts may be cut, and where (`calculet-worker prove`, which explains OPTIONS).

    Without --key the result is only shown; with it the package takes it up and is signed anew.
    """
    sys.exit(subprocess.run([sys.executable, "-m", "calculet_worker", "prove", str(folder), *options], check=False).returncode)


@package.command("derive-profiles", context_settings={"ignore_unknown_options": True})
@click.argument("folder", type=FOLDER)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def derive_profiles(folder: Path, options: tuple[str, ...]) -> None:
    """Measure on the device from how many sequences on each batch profile pays (`calculet-worker derive-profiles`, which explains
    OPTIONS); prints `batch.profiles` and `batch.thresholds` for a scheduler file."""
    command = [sys.executable, "-m", "calculet_worker", "derive-profiles", str(folder), *options]
    sys.exit(subprocess.run(command, check=False).returncode)


@package.command()
@click.argument("folder", type=FOLDER)
@click.option("--key", required=True, type=FILE, help="Private Ed25519 key (PEM).")
@json_option
def sign(folder: Path, key: Path, as_json: bool) -> None:
    """Sign a package; a signature that is there is replaced."""
    from calculet_core.artifact import MANIFEST_NAME, SIGNATURE_NAME, key_id, sign_manifest
    from calculet_core.errors import ArtifactError, ExitCode
    from calculet_core.shell.files import write_atomic
    from calculet_core.shell.packages import read_package, read_private_key

    try:
        private = read_private_key(key)
        digest = read_package(folder).digest
        write_atomic(folder / SIGNATURE_NAME, sign_manifest((folder / MANIFEST_NAME).read_bytes(), private))
    except OSError as error:
        end(ExitCode.FAILURE, f"{error.filename}: {error.strerror}")
    except ArtifactError as error:
        end(ExitCode.FAILURE, str(error), "`calculet-worker keygen DIR` makes a key" if str(error).startswith(f"{key}:") else None)
    signer = key_id(private.public_key())
    say({"folder": str(folder), "digest": digest, "key": signer}, as_json, f"{folder}: digest {digest[:12]} signed by key {signer}")


@package.command()
@click.argument("folder", type=FOLDER)
@click.option("--trust", "trusted", required=True, multiple=True, type=FILE, help="Trusted public key (PEM); may be repeated.")
@json_option
def verify(folder: Path, trusted: tuple[Path, ...], as_json: bool) -> None:
    """Verify a package: path, signature, every file's hash, manifest."""
    from calculet_core.errors import ArtifactError, ConfigError, ExitCode
    from calculet_core.shell.packages import load_keys, verify_package

    try:
        found = verify_package(folder, load_keys(trusted))
    except (ArtifactError, ConfigError) as error:
        end(ExitCode.FAILURE, str(error))
    manifest = found.manifest
    answer = {
        "folder": str(folder), "name": manifest.name, "version": manifest.version, "digest": found.digest, "key": found.verified_by,
    }  # fmt: skip
    words = f"{folder}: {manifest.name} {manifest.version}, digest {found.digest[:12]}, signed by key {found.verified_by}: good"
    say(answer, as_json, words)


@package.command()
@click.argument("folder", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="The whole manifest as JSON.")
def show(folder: Path, as_json: bool) -> None:
    """Show what a package is and what it has proven. Nothing is verified."""
    import msgspec

    from calculet_core.errors import ArtifactError, ExitCode
    from calculet_core.shell.packages import read_package

    try:
        found = read_package(folder)
    except ArtifactError as error:
        end(ExitCode.FAILURE, str(error))
    manifest, capacity = found.manifest, found.manifest.capacity
    if as_json:
        click.echo(msgspec.json.encode({"digest": found.digest, "manifest": manifest}))
        return
    note = " (inferred)" if capacity.inferred else ""
    lines = [
        ("package", f"{manifest.name} {manifest.version}"),
        ("digest", found.digest),
        ("backend", manifest.backend),
        ("image", f"{manifest.image} (sha256 {manifest.image_sha256[:12]})"),
        ("context", f"{manifest.context} tokens, {manifest.lanes} lanes"),
        ("profiles", ", ".join(f"B{size}" for size in manifest.compiled_batches)),
        ("memory", f"{_gib(capacity.reserved_bytes)} reserved{note}"),
        ("  of it", f"{_gib(capacity.parameters_bytes)} parameters, {_gib(capacity.kv_bytes)} KV"),
        ("golden", f"{len(found.golden)} cases"),
        *((f"proven: {name}", f"{proof.level}, {proof.evidence}") for name, proof in manifest.abilities.items()),
    ]
    for name, value in lines:
        click.echo(f"{name + ':':<12} {value}")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3f} GiB"
