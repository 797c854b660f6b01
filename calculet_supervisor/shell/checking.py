"""A fleet file checked together with everything it names: scheduler files, keys, packages, profiles, devices.

What can be known to be wrong before anything starts is said here, all of it at once, each with the file and the path in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calculet_core.artifact import Package
from calculet_core.config import ModelConfig, boards_of, check_profiles
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.packages import load_keys, read_package, verify_package


def find_problems(fleet: Fleet) -> list[str]:
    """Everything that is wrong, in words; packages are verified in full."""
    problems: list[str] = []

    def attempt(check: Callable[..., Any], *arguments: Any, prefix: str = "") -> Any:
        try:
            return check(*arguments)
        except (ConfigError, ArtifactError) as error:
            problems.append(f"{prefix}{error}")
            return None

    keys = attempt(load_keys, [fleet.resolve(path) for path in fleet.config.trusted_keys])
    for index, model in enumerate(fleet.config.models):
        scheduler = attempt(fleet.scheduler_of, model.alias)
        root, where = fleet.resolve(model.package), f"{fleet.path}: $.models[{index}].package: "
        package = attempt(read_package, root, prefix=where) if keys is None else attempt(verify_package, root, keys, prefix=where)
        if package is None:
            continue
        problems += _wrong_devices(fleet, model, package)
        if scheduler is not None:
            source = str(fleet.resolve(model.scheduler or ""))
            attempt(check_profiles, scheduler, package.manifest.compiled_batches, package.digest, source)
    return problems


def _wrong_devices(fleet: Fleet, model: ModelConfig, package: Package) -> list[str]:
    backend, problems = package.manifest.backend, []
    for index, board in enumerate(fleet.config.boards):
        if board.name in boards_of(fleet.config, model) and board.device != backend:
            problems.append(
                f"{fleet.path}: $.boards[{index}].device: {board.device!r}, but {model.alias!r} is placed there and its package "
                f"{package.manifest.name} is made for {backend!r}"
            )
    return problems
