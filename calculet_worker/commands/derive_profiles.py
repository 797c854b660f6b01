"""`calculet package derive-profiles`: from how many ready sequences on does each batch profile pay? (scheduling §8)

Steps of every profile with 1, 2, ... active lanes are timed on the device itself, taking turns round by round, so that a warm or
busy moment befalls all alike; `scheduling/thresholds` makes thresholds of their lower quartiles. What was measured is written down.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import numpy as np
import yaml

from calculet_core.artifact import Package
from calculet_core.batches import BatchProfile
from calculet_core.config import BoardConfig
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.jobs import Job, JobKind, ReturnCode
from calculet_core.shell.files import write_atomic
from calculet_core.shell.packages import read_package
from calculet_worker.commands.device_runs import Runs
from calculet_worker.device import BACKENDS
from calculet_worker.device.base import BoardUnavailable, Device
from calculet_worker.scheduling.decode import NO_TOKEN
from calculet_worker.scheduling.profiles import rows_of
from calculet_worker.scheduling.thresholds import Derived, derive

DEFAULT_ROUNDS, DEFAULT_PROMPT_TOKENS = 15, 64


class StepRow(msgspec.Struct, frozen=True):
    """One profile with so many active lanes; nanoseconds of device time."""

    profile: int
    active: int
    typical_ns: float
    """The lower quartile: what else the machine does only ever adds."""
    lowest_ns: float
    highest_ns: float


class Batch(msgspec.Struct, frozen=True):
    """The section of a scheduler file."""

    profiles: tuple[int, ...]
    thresholds: dict[int, int]


class Thresholds(msgspec.Struct, frozen=True):
    """`calculet-thresholds/v1`: what was measured, and what follows."""

    schema: Literal["calculet-thresholds/v1"]
    artifact: str
    digest: str
    device: str
    runtime: str | None
    rounds: int
    prompt_tokens: int
    steps: list[StepRow]
    best: tuple[int, ...]
    """The best profile for 1, 2, ... ready sequences."""
    batch: Batch


class Lanes:
    """All lanes of a configured device, each with a sequence; steps of the first so many."""

    def __init__(self, device: Device, package: Package, prompt_tokens: int) -> None:
        self._device, self._runs, self._prompt_tokens = device, Runs(device, package), prompt_tokens
        manifest = package.manifest
        self._context = manifest.context
        self._lanes = min(manifest.lanes, manifest.compiled_batches[-1])
        self._lengths = [0] * self._lanes

    def step_ns(self, profile: BatchProfile, active: int) -> int:
        """Device time of one step of the first `active` lanes; each holds at least the prompt."""
        for lane in range(active):
            if not 0 < self._lengths[lane] < self._context:
                self._begin(lane)
        rows = rows_of(profile, active)
        lanes, tokens, positions = (np.full(rows, NO_TOKEN, np.int32) for _ in range(3))
        valid = np.zeros(rows, np.uint8)
        lanes[:active], positions[:active], valid[:active] = range(active), self._lengths[:active], 1
        tokens[:active] = [self._token(lane, self._lengths[lane]) for lane in range(active)]
        took_ns = self._runs.timed(Job(1, 1, JobKind.DECODE, profile, lanes, tokens, positions, valid))
        for lane in range(active):
            self._lengths[lane] += 1
        return took_ns

    def _begin(self, lane: int) -> None:
        if self._lengths[lane]:
            self._device.release(lane)
        size = self._prompt_tokens
        ids = np.array([self._token(lane, place) for place in range(size)], np.int32)
        positions = np.arange(size, dtype=np.int32)
        self._runs.timed(Job(1, 1, JobKind.PREFILL, self._runs.profile, np.array([lane], np.int32), ids, positions, None, True))
        self._lengths[lane] = size

    def _token(self, lane: int, place: int) -> int:
        return (7 + 131 * place + 17 * lane) % min(self._runs.vocab_size, 30_000)


def measure(device: Device, package: Package, rounds: int, prompt_tokens: int) -> tuple[list[StepRow], Derived]:
    """Time every profile with every number of lanes on a configured device whose lanes are empty.

    Raises:
        ArtifactError: the device does not run a step, or the context has no room for one.
    """
    manifest = package.manifest
    if prompt_tokens >= manifest.context:
        raise ArtifactError(
            f"a prompt of {prompt_tokens} tokens leaves no room for a step in a context of {manifest.context} (--prompt-tokens)"
        )
    lanes = Lanes(device, package, prompt_tokens)
    profiles = [profile for profile in manifest.profiles if profile.compiled_batch <= manifest.lanes]
    kinds = [(profile, active) for profile in profiles for active in range(1, profile.compiled_batch + 1)]
    taken: dict[tuple[int, int], list[int]] = {(profile.compiled_batch, active): [] for profile, active in kinds}
    for profile, active in kinds:  # a kind's first step may be slow once
        lanes.step_ns(profile, active)
    for number in range(rounds):
        for profile, active in kinds if number % 2 else reversed(kinds):
            taken[profile.compiled_batch, active].append(lanes.step_ns(profile, active))
    rows = [StepRow(size, active, lower_quartile(found), min(found), max(found)) for (size, active), found in taken.items()]
    times: dict[int, dict[int, float]] = {}
    for row in rows:
        times.setdefault(row.profile, {})[row.active] = row.typical_ns
    return rows, derive(times)


def lower_quartile(values: list[int]) -> float:
    """Of at least one value."""
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else float(values[0])


def derive_thresholds(folder: Path, rounds: int, prompt_tokens: int, options: dict[str, Any]) -> Thresholds:
    """Measure on a device of the package's backend.

    Raises:
        ArtifactError: the package is broken, or its device does not take it or a step of it.
        BoardUnavailable: the device is not here.
        ConfigError: the device's options are wrong.
    """
    package = read_package(folder)
    manifest = package.manifest
    device = BACKENDS[manifest.backend](BoardConfig("derive", manifest.backend, 1024.0, options))
    try:
        if (rc := device.configure(package, 1)) != ReturnCode.OK:
            raise ArtifactError(f"{folder}: the device does not take the package (code {int(rc)})")
        rows, found = measure(device, package, rounds, prompt_tokens)
        versions = device.versions()
    finally:
        device.close()
    return Thresholds(
        "calculet-thresholds/v1", f"{manifest.name} {manifest.version}", package.digest, versions.device, versions.runtime, rounds,
        prompt_tokens, rows, found.best, Batch(found.profiles, found.thresholds),
    )  # fmt: skip


@click.command("derive-profiles")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--rounds", default=DEFAULT_ROUNDS, show_default=True, type=click.IntRange(min=1), help="Steps of each kind.")
@click.option(
    "--prompt-tokens", default=DEFAULT_PROMPT_TOKENS, show_default=True, type=click.IntRange(min=1), help="In each lane at least."
)
@click.option("--option", "given", multiple=True, metavar="NAME=VALUE", help="Of the board, as in boards[].options.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="A JSON file for all that was measured.")
def derive_command(folder: Path, rounds: int, prompt_tokens: int, given: tuple[str, ...], record: Path | None) -> None:
    """Measure on the device from how many ready sequences on each batch profile pays.

    Prints `batch.profiles` and `batch.thresholds` for a scheduler file. A profile that is never best is left out.
    """
    try:
        options = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in given)}
        found = derive_thresholds(folder, rounds, prompt_tokens, options)
        if record is not None:
            write_atomic(record, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    except (ArtifactError, BoardUnavailable, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{record or folder}: {error.strerror}") from None
    for row in found.steps:
        typical, lowest, highest = row.typical_ns / 1e6, row.lowest_ns / 1e6, row.highest_ns / 1e6
        rate = row.active / row.typical_ns * 1e9
        click.echo(f"# B{row.profile} with {row.active}: {typical:.3f} ms [{lowest:.3f}-{highest:.3f}], {rate:.0f} tokens/s")
    best = ", ".join(map(str, found.best))
    click.echo(f"# {found.artifact} on {found.device}, {rounds} rounds; best for 1, 2, ... ready: {best}")
    click.echo(yaml.safe_dump({"batch": {"profiles": list(found.batch.profiles), "thresholds": found.batch.thresholds}}), nl=False)
