"""Verifying a package for the engine (scheduling §11 steps 1-3), on a thread: hashing a model takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec.structs import replace

from calculet_core.artifact import Package, incompatible
from calculet_core.config import BoardConfig, SchedulerConfig
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.jobs import DeviceVersions
from calculet_core.shell.curve import read_curve_keys
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.packages import read_package, verify_package
from calculet_worker.actions import VerifyPackage
from calculet_worker.events import PackageVerified
from calculet_worker.generation import default_scheduler
from calculet_worker.shell.tokenizing import PromptTokenizer

log = logging.getLogger("calculet.loading")


def verify(
    fleet: Fleet, board: BoardConfig, keys: Sequence[Ed25519PublicKey], versions: DeviceVersions, action: VerifyPackage
) -> tuple[PackageVerified, PromptTokenizer | None]:
    """The engine's answer, and the package's tokenizer when it is good."""
    try:
        package = verify_package(Path(action.path), keys)
        if action.digest and package.digest != action.digest:
            raise ArtifactError(f"{action.path}: its digest is {package.digest[:12]}, but {action.digest[:12]} was asked for")
        if package.manifest.backend != board.device:
            raise ArtifactError(f"{action.path}: made for {package.manifest.backend!r}; board {board.name} is {board.device!r}")
        wanted = package.manifest.compatibility
        if wrong := incompatible(wanted, versions.runtime, versions.driver, versions.firmware, versions.chips):
            raise ArtifactError(f"{action.path}: board {board.name} has {'; '.join(wrong)}")
        scheduler = scheduler_for(fleet, board, action.alias, package)
        tokenizer = PromptTokenizer(package)
    except (ArtifactError, ConfigError, OSError) as error:
        return PackageVerified(action.generation, error=str(error)), None
    except Exception as error:
        log.exception("package %s could not be verified", action.path)
        return PackageVerified(action.generation, error=f"{action.path}: {type(error).__name__}: {error}"), None
    return PackageVerified(action.generation, package, tokenizer.vocabulary, scheduler), tokenizer


def scheduler_for(fleet: Fleet, board: BoardConfig, alias: str, package: Package) -> SchedulerConfig | None:
    """The alias's scheduler file, its profiles checked against the manifest; None when there is no file: the engine has defaults.

    A board's own profiles go before the file's.

    Raises:
        ConfigError: the file is wrong, or it or the board names a profile that the manifest does not have.
    """
    fleet.check_profiles(alias, board, package.manifest.compiled_batches, package.digest)
    config = fleet.scheduler_of(alias)
    if board.profiles is None:
        return config
    base = config or default_scheduler(alias, package.manifest)
    return replace(base, batch=replace(base.batch, profiles=board.profiles))


def check_configuration(fleet: Fleet, board: BoardConfig) -> None:
    """What can be known to be wrong before anything starts. A package that cannot be read yet is the load's business.

    Raises:
        ConfigError: the scheduler file is wrong, or names a profile that the configured package does not have; or the board listens
            on TCP and has no CURVE keys.
    """
    if board.listen is not None:
        read_curve_keys(fleet.curve, "worker")
    for model in fleet.models_of(board.name):
        fleet.scheduler_of(model.alias)
        try:
            package = read_package(fleet.resolve(model.package))
        except ArtifactError:
            continue
        scheduler_for(fleet, board, model.alias, package)
