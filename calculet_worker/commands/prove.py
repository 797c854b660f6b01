"""`calculet package prove`: may this artifact's prompts be cut, and where? (scheduling §6)

The five conditions, tried on the device itself: it continues a prompt at all; what it then computes has the bits of one job, for
the prompt's last logits and for the decode steps after it; a part at a wrong position never passes for the right one; cuts and
lengths around 15, 16, 17 and around the granularity; and the golden cases come out the same, at a cost that is recorded.
Whatever was tried is written down, exact or not. Only a granularity whose every cut was exact is proven, and only its multiples
are used.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import numpy as np
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from calculet_core.artifact import GoldenCase, Package
from calculet_core.config import BoardConfig
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.jobs import ReturnCode
from calculet_core.shell.packages import read_package, read_private_key
from calculet_worker.commands.device_runs import Refused, Runs
from calculet_worker.device import BACKENDS
from calculet_worker.device.base import BoardUnavailable, Device

PROOF_FILE = "proofs/incremental_prefill.json"
ABILITY = "incremental_prefill"
DEFAULT_CANDIDATES = (16, 32, 64, 128, 256, 512)
BOUNDARIES = (15, 16, 17)
STEPS = 4
"""Decode steps after each prompt: they read the KV that the prompt left."""
TIMED_PARTS = 6


class Trial(msgspec.Struct, frozen=True):
    """One prompt, once as one job and once cut after `cuts` tokens."""

    length: int
    cuts: list[int]
    exact: bool
    """The same bits: the prompt's logits, and those of each step after it."""
    greatest_difference: float | None
    """Of any logit, those of steps that follow another token included; null: the device refused a part."""


class Candidate(msgspec.Struct, frozen=True):
    """What was found for one granularity."""

    granularity: int
    exact: bool
    golden: bool
    """Every golden case, cut so, gave its tokens."""
    cost_ratio: float | None
    """Device time of a prompt cut so over that of one job; null where nothing was timed."""


class CutProof(msgspec.Struct, frozen=True):
    """`calculet-proof/v1`: what is written beside the manifest."""

    schema: Literal["calculet-proof/v1"]
    ability: str
    artifact: str
    device: str
    runtime: str | None
    continues: bool
    """The device takes a part that continues a prompt."""
    misplaced_part_shows: bool
    """A part at a wrong position is refused, or changes the result."""
    candidates: list[Candidate]
    trials: list[Trial]
    granularity: int | None
    """The smallest proven one; null: none, and prompts are never cut."""
    conclusion: str


def prove_cuts(
    device: Device, package: Package, candidates: Iterable[int] = DEFAULT_CANDIDATES, timed: bool = True
) -> CutProof:
    """Try every condition on a configured device whose lanes are empty.

    Without `timed` no cost is recorded, and the same device gives the same proof, byte for byte.

    Raises:
        ArtifactError: the device does not run a whole prompt.
    """
    runs, context = Runs(device, package), package.manifest.context
    sizes = sorted({size for size in candidates if size >= 2 and 4 * size + STEPS <= context})
    trials: dict[tuple[int, tuple[int, ...]], Trial] = {}

    def tried(length: int, cuts: Sequence[int]) -> Trial:
        key = (length, tuple(cuts))
        if key not in trials:
            trials[key] = _try(runs, length, cuts)
        return trials[key]

    continues = tried(32, [16]).greatest_difference is not None if context >= 32 + STEPS else False
    for odd in BOUNDARIES:  # recorded whatever they give: they are cuts that no granularity vouches for
        if continues and context >= 2 * odd + STEPS:
            tried(2 * odd, [odd])
    shows = continues and _misplaced_part_shows(runs, sizes[0] if sizes else BOUNDARIES[0])
    found = []
    for size in sizes if continues else ():
        outcomes = [tried(length, list(range(size, length, size))) for length in _lengths(size)]
        exact = all(trial.exact for trial in outcomes)
        for cut in (size - 1, size + 1):
            tried(2 * size, [cut])
        golden = exact and all(_golden(runs, case, size) for case in package.golden)
        found.append(Candidate(size, exact, golden, _cost_ratio(runs, size, context) if exact and timed else None))
    proven = [candidate.granularity for candidate in found if candidate.exact and candidate.golden] if shows else []
    versions = device.versions()
    return CutProof(
        "calculet-proof/v1", ABILITY, f"{package.manifest.name} {package.manifest.version}", versions.device, versions.runtime,
        continues, shows, found, list(trials.values()), min(proven, default=None), _conclusion(continues, shows, sizes, proven),
    )  # fmt: skip


def _lengths(size: int) -> list[int]:
    """Prompts around one, two and three parts, and around 15, 16 and 17 beyond a cut."""
    around = {parts * size + offset for parts in (1, 2, 3) for offset in (-1, 0, 1)} | {size + odd for odd in BOUNDARIES}
    return sorted(length for length in around if length > size)


def _try(runs: Runs, length: int, cuts: Sequence[int]) -> Trial:
    prompt = _prompt(runs, length)
    whole = runs.answer(prompt, (), STEPS)
    try:
        parts = runs.answer(prompt, cuts, STEPS)
    except Refused:
        return Trial(length, list(cuts), False, None)
    exact = all(np.array_equal(one, other) for one, other in zip(whole, parts, strict=True))
    greatest = max(float(np.abs(one - other).max()) for one, other in zip(whole, parts, strict=True))
    return Trial(length, list(cuts), exact, greatest)


def _prompt(runs: Runs, length: int) -> list[int]:
    """Tokens that differ from place to place; the same on every machine."""
    size = min(runs.vocab_size, 30_000)
    return [(7 + 131 * place + 17 * (place // 7) * place) % size for place in range(length)]


def _misplaced_part_shows(runs: Runs, cut: int) -> bool:
    prompt = _prompt(runs, 2 * cut)
    right = runs.answer(prompt, (cut,), 0)[0]
    try:
        wrong = runs.answer(prompt, (cut,), 0, shift=1)[0]
    except Refused:
        return True
    return not np.array_equal(right, wrong)


def _golden(runs: Runs, case: GoldenCase, size: int) -> bool:
    expected = case.gated()
    logits = runs.answer(case.prompt_token_ids, range(size, len(case.prompt_token_ids), size), len(expected) - 1)
    return [int(row.argmax()) for row in logits] == expected


def _cost_ratio(runs: Runs, size: int, context: int) -> float | None:
    length = min(TIMED_PARTS * size, (context - STEPS) // size * size)
    prompt = _prompt(runs, length)
    times = []
    for cuts in ((), range(size, length, size)):
        start = time.perf_counter_ns()
        runs.answer(prompt, cuts, 0)
        times.append(time.perf_counter_ns() - start)
    return round(times[1] / times[0], 3) if times[0] else None


def _conclusion(continues: bool, shows: bool, sizes: Sequence[int], proven: Sequence[int]) -> str:
    if not continues:
        return "the device does not continue a prompt: it is never cut"
    if not shows:
        return "a part at a wrong position passes for the right one: positions are not understood, prompts are never cut"
    if not proven:
        return f"no granularity of {list(sizes)} gave the bits of one job at every cut: prompts are never cut"
    return f"cuts at multiples of {min(proven)} give the bits of one job"


def ability_of(proof: CutProof) -> dict[str, Any] | None:
    """What the manifest says; None where nothing is proven."""
    if proof.granularity is None:
        return None
    exact = sum(trial.exact for trial in proof.trials)
    words = f"{PROOF_FILE}: {proof.conclusion} on {proof.device} ({exact} of {len(proof.trials)} cuts tried were exact)"
    return {"level": "C0", "granularity": proof.granularity, "evidence": words}


def write_proof(folder: Path, proof: CutProof) -> None:
    """Beside the manifest."""
    path = folder / PROOF_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(proof), indent=1) + b"\n")


def prove_package(folder: Path, candidates: Sequence[int], options: dict[str, Any], key: Ed25519PrivateKey | None) -> CutProof:
    """Prove on a device of the package's backend. With a key the package takes the result up, and is signed anew.

    Raises:
        ArtifactError: the package is broken, or its device does not take it.
        BoardUnavailable: the device is not here.
        ConfigError: the device's options are wrong.
    """
    from calculet_worker.commands.build_package import seal

    package = read_package(folder)
    device = BACKENDS[package.manifest.backend](BoardConfig("prove", package.manifest.backend, 1024.0, options))
    try:
        if (rc := device.configure(package, 1)) != ReturnCode.OK:
            raise ArtifactError(f"{folder}: the device does not take the package (code {int(rc)})")
        proof = prove_cuts(device, package, candidates)
    finally:
        device.close()
    if key is not None:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            copy = Path(temporary) / "package"
            shutil.copytree(folder, copy)
            mapping = yaml.safe_load((folder / "manifest.yaml").read_bytes())
            write_proof(copy, proof)
            abilities = mapping.setdefault("abilities", {})
            abilities.pop(ABILITY, None)
            if (ability := ability_of(proof)) is not None:
                abilities[ABILITY] = ability
            seal(copy, mapping, key)
            folder.rename(Path(temporary) / "replaced")
            copy.rename(folder)
    return proof


@click.command("prove")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--granularity", "candidates", multiple=True, type=click.IntRange(min=2), help="To try; may be repeated.")
@click.option("--key", type=click.Path(path_type=Path), help="Private key (PEM): the package takes the result up, signed anew.")
@click.option("--option", "given", multiple=True, metavar="NAME=VALUE", help="Of the board, as in boards[].options.")
@click.option("--json", "as_json", is_flag=True, help="The whole proof.")
def prove_command(folder: Path, candidates: tuple[int, ...], key: Path | None, given: tuple[str, ...], as_json: bool) -> None:
    """Prove on the device whether prompts may be cut, and where. Exit code 1 when nothing is proven."""
    try:
        options = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in given)}
        signer = None if key is None else read_private_key(key)
        proof = prove_package(folder, candidates or DEFAULT_CANDIDATES, options, signer)
    except (ArtifactError, BoardUnavailable, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or folder}: {error.strerror}") from None
    if as_json:
        click.echo(msgspec.json.encode(proof))
    else:
        for trial in proof.trials:
            difference = "refused" if trial.greatest_difference is None else f"greatest difference {trial.greatest_difference:.3g}"
            verdict = "exact" if trial.exact else f"not exact, {difference}"
            click.echo(f"  {trial.length} tokens cut after {', '.join(map(str, trial.cuts))}: {verdict}")
        for candidate in proof.candidates:
            cost = "" if candidate.cost_ratio is None else f", {candidate.cost_ratio:.2f} times the device time of one job"
            click.echo(f"granularity {candidate.granularity}: {'exact' if candidate.exact else 'not exact'}{cost}")
        click.echo(f"{folder}: {proof.conclusion}")
    if proof.granularity is None:
        raise SystemExit(1)
