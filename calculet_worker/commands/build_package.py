"""Building a package: the recipe's files, golden cases recorded by running the device, hashes, manifest, signature.

Nothing is left behind when it fails: all happens in a temporary folder that takes the target's place at the end. The same recipe
on the same machine gives the same digest.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from calculet_core.artifact import (
    LOGIT_DTYPES,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    GoldenCase,
    Package,
    parse_manifest,
    sha256_hex,
    sign_manifest,
)
from calculet_core.config import BoardConfig
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.jobs import ReturnCode
from calculet_core.shell.packages import hash_file, read_private_key
from calculet_worker.commands.device_runs import Runs
from calculet_worker.commands.prove import ABILITY, ability_of, prove_cuts, write_proof
from calculet_worker.commands.recipes import RECIPES, Options, Recipe
from calculet_worker.device import BACKENDS
from calculet_worker.device.base import BoardUnavailable

GOLDEN = "golden.jsonl"


def build_package(
    name: str, out: Path, key: Ed25519PrivateKey | None = None, options: Options = Options(), force: bool = False
) -> Package:
    """Build recipe `name` into the folder `out`.

    Raises:
        ArtifactError: unknown recipe, `out` is there already, or the device's answers are no use as golden cases.
        BoardUnavailable: the recipe's device is not installed here.
    """
    if name not in RECIPES:
        raise ArtifactError(f"no recipe {name!r} (recipes: {', '.join(RECIPES)})")
    if out.exists() and not force:
        raise ArtifactError(f"{out} is there already (--force replaces it)")
    if out.exists() and not (out / MANIFEST_NAME).exists():
        raise ArtifactError(f"{out} is there already and is no package: it is not replaced")
    recipe = RECIPES[name]()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / "package"
        folder.mkdir(mode=0o755)
        package = _build(folder, recipe, options)
        if key is not None:
            (folder / SIGNATURE_NAME).write_bytes(sign_manifest((folder / MANIFEST_NAME).read_bytes(), key))
        if out.exists():
            out.rename(Path(temporary) / "replaced")
        folder.rename(out)
    return package


def _build(folder: Path, recipe: Recipe, options: Options) -> Package:
    mapping = recipe.build(folder, options)
    (folder / GOLDEN).write_bytes(b"")
    draft = _with_hashes(folder, mapping)
    device = BACKENDS[draft.manifest.backend](BoardConfig("build", draft.manifest.backend, 1024.0))
    try:
        if (rc := device.configure(draft, 1)) != ReturnCode.OK:
            raise ArtifactError(f"the device does not take the package (code {int(rc)})")
        cases = [
            record_golden(Runs(device, draft), case, prompt, recipe.golden_tokens, recipe.min_margin)
            for case, prompt in recipe.golden_prompts(folder).items()
        ]
        if recipe.cuts:
            proof = prove_cuts(device, replace(draft, golden=tuple(cases)), recipe.cuts, timed=False)
            write_proof(folder, proof)
            if (ability := ability_of(proof)) is not None:
                mapping["abilities"] = {**mapping["abilities"], ABILITY: ability}
    finally:
        device.close()
    (folder / GOLDEN).write_bytes(b"".join(msgspec.json.encode(case) + b"\n" for case in cases))
    return _with_hashes(folder, mapping)


def seal(folder: Path, mapping: dict[str, Any], key: Ed25519PrivateKey) -> Package:
    """Hash what is in the folder, write the manifest and sign it."""
    package = _with_hashes(folder, mapping)
    (folder / SIGNATURE_NAME).write_bytes(sign_manifest((folder / MANIFEST_NAME).read_bytes(), key))
    return package


def _with_hashes(folder: Path, mapping: dict[str, Any]) -> Package:
    """Hash what is there and write the manifest."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: hash_file(folder / name) for name in names if name not in (MANIFEST_NAME, SIGNATURE_NAME)}
    whole = {**mapping, "golden": mapping.get("golden", GOLDEN), "image_sha256": files[mapping["image"]], "files": files}
    data = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=120).encode()
    (folder / MANIFEST_NAME).write_bytes(data)
    return Package(folder, parse_manifest(data, str(folder / MANIFEST_NAME)), sha256_hex(data), ())


def record_golden(runs: Runs, name: str, prompt: list[int], count: int, min_margin: float) -> GoldenCase:
    """Greedy tokens of a prompt, with the margin between the best and the second-best logit at each."""
    tokens: list[int] = []
    margins: list[float] = []
    for logits in runs.answer(prompt, (), count - 1):
        second, best = np.partition(logits, -2)[-2:]
        tokens.append(int(logits.argmax()))
        margins.append(round(float(best - second), 4))
    case = GoldenCase(name, prompt, tokens, margins, min_margin)
    if not case.gated():
        raise ArtifactError(f"golden case {name!r}: the first margin {margins[0]} is below {min_margin}: it would prove nothing")
    return case


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a fresh pair NAME.pem (mode 0600) and NAME.pub; existing ones are never replaced.

    Raises:
        ArtifactError: one of the files is there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    if existing := [path for path in (private, public) if path.exists()]:
        raise ArtifactError(f"{existing[0]} is there already; keys are never replaced")
    key = Ed25519PrivateKey.generate()
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    fd = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return private, public


@click.command("build-package")
@click.argument("recipe", type=click.Choice(list(RECIPES)))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The package's folder.")
@click.option("--key", type=click.Path(path_type=Path), help="Private key (PEM) to sign with.")
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@click.option("--step-ms", type=click.FloatRange(min=0), help="Simulated recipes: a decode step; 0: as fast as it can.")
@click.option("--context", type=click.IntRange(min=64), help="Simulated recipes: positions per sequence.")
@click.option("--lanes", type=click.IntRange(min=1, max=256), help="Simulated recipes: hardware lanes.")
@click.option("--logits", type=click.Choice(LOGIT_DTYPES), help="Simulated recipes: how logits leave the device.")
def build_package_command(
    recipe: str, out: Path, key: Path | None, force: bool, step_ms: float | None, context: int | None, lanes: int | None,
    logits: str | None,
) -> None:
    """Build a package that ships with Calculet, recording its golden cases on the device."""
    try:
        signer = None if key is None else read_private_key(key)
        package = build_package(recipe, out, signer, Options(step_ms, context, lanes, logits), force)
    except (ArtifactError, BoardUnavailable, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or out}: {error.strerror}") from None
    manifest = package.manifest
    click.echo(f"{out}: {manifest.name} {manifest.version}, digest {package.digest[:12]}, {'signed' if signer else 'not signed'}")


@click.command("keygen")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--name", default="calculet", show_default=True, help="The files are NAME.pem (private) and NAME.pub.")
def keygen_command(folder: Path, name: str) -> None:
    """Make a key pair for signing packages."""
    try:
        private, public = make_keys(folder, name)
    except ArtifactError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"private key {private}; put {public} into trusted_keys")


