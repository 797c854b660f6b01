"""The static half of a load: everything that can be refused before any board is touched (scheduling §11 steps 1-4).

Runs on a thread, outside of everything that serves. Each refusal names its step, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calculet_core.artifact import Package, incompatible
from calculet_core.capacity import GIB, DramPlan
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.packages import load_keys, read_package
from calculet_core.wire import WorkerReport
from calculet_supervisor.rollout import Artifact, Rollout
from calculet_supervisor.shell.artifacts import ArtifactStore, check_trusted


class Unfit(Exception):
    """Refused; the message names the step and what is wrong."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the examination needs to know of the fleet."""

    fleet: Fleet
    artifacts: ArtifactStore
    reports: Mapping[str, WorkerReport | None]
    quarantined: Mapping[str, str]


def examine(rollout: Rollout, context: Context) -> tuple[Package, dict[str, Any]]:
    """The verified package and the fields that a rollout gets from it.

    Raises:
        Unfit: what is wrong, and at which step.
    """
    fleet, artifacts = context.fleet, context.artifacts
    with _step("trusted keys"):
        keys = load_keys([fleet.resolve(path) for path in fleet.config.trusted_keys])
    if rollout.verb == "load":
        with _step("step 1, trusted path"):
            source = check_trusted(Path(rollout.package))
        with _step("step 2, signature and hashes"):
            package = artifacts.take(source, keys)
    else:
        assert rollout.green is not None
        with _step("step 2, signature and hashes"):
            package = artifacts.verify(rollout.green.digest, keys)
    green = artifact_of(package)
    if rollout.blue is not None and rollout.blue.digest == green.digest:
        raise Unfit(f"{rollout.alias} already serves {green}")
    if (reason := context.quarantined.get(green.digest)) is not None and not rollout.override:
        raise Unfit(f"{green} was set aside: {reason} (--override loads it all the same)")
    with _step("step 3, compatibility"):
        _check_compatible(rollout, package, context)
    with _step("step 4, capacity"):
        for name in rollout.boards:
            plan = DramPlan(int(fleet.board(name).dram_gib * GIB), 0, package.manifest.capacity.reserved_bytes)
            if not plan.fits:
                raise ArtifactError(f"{green} does not fit {name}: {plan.arithmetic()}")
    return package, {"green": green, "blue": _retain(rollout.blue, artifacts, keys)}


def artifact_of(package: Package) -> Artifact:
    """How rollouts name it."""
    return Artifact(package.digest, str(package.root), f"{package.manifest.name} {package.manifest.version}")


def no_room(fleet: Fleet, alias: str, package: Path, resident: Mapping[str, Package]) -> str:
    """Why an alias without a board of its own cannot be loaded, with the arithmetic."""
    known = ", ".join(model.alias for model in fleet.config.models)
    try:
        wanted = read_package(package).manifest.capacity.reserved_bytes
    except ArtifactError as error:
        return f"no model is named {alias!r} (models: {known}); and {error}"
    words = []
    for board in fleet.config.boards:
        held = resident.get(board.name)
        if held is not None:
            plan = DramPlan(int(board.dram_gib * GIB), held.manifest.capacity.reserved_bytes, wanted)
            words.append(f"{board.name} holds {held.manifest.name}: {plan.arithmetic()}")
    return (
        f"no board is placed for {alias!r} (models: {known}), and a second model on a board is C3, unproven: one runtime "
        f"configures the whole device. {'; '.join(words)}"
    )


def _check_compatible(rollout: Rollout, package: Package, context: Context) -> None:
    fleet, manifest = context.fleet, package.manifest
    for name in rollout.boards:
        board, report = fleet.board(name), context.reports.get(name)
        if board.device != manifest.backend:
            raise ArtifactError(f"{manifest.name} is made for {manifest.backend!r}; {name} is {board.device!r}")
        if report is not None:
            wrong = incompatible(
                manifest.compatibility, report.runtime, report.driver, report.firmware, len(report.chips) or None
            )
            if wrong:
                raise ArtifactError(f"{name} has {'; '.join(wrong)}")
        fleet.check_profiles(rollout.alias, board, manifest.compiled_batches, package.digest)


def _retain(blue: Artifact | None, artifacts: ArtifactStore, keys: Any) -> Artifact | None:
    """What serves must be there to go back to, under a path that nobody changes."""
    if blue is None:
        return None
    with _step("step 11, keep what serves"):
        if not artifacts.holds(blue.digest):
            found = artifacts.take(Path(blue.package), keys)
            if found.digest != blue.digest:
                raise ArtifactError(
                    f"{blue.package} holds {found.digest[:12]} now, not {blue.digest[:12]} that serves: nothing could be rolled "
                    "back to. Put the signed package that serves back there"
                )
        return artifact_of(artifacts.verify(blue.digest, keys))


@contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except (ArtifactError, ConfigError) as error:
        raise Unfit(f"{name}: {error}") from None
    except OSError as error:
        raise Unfit(f"{name}: {error.filename or ''}: {error.strerror or error}") from None
