"""A fleet file checked together with everything it names: scheduler files, keys, packages, profiles, devices.

What can be known to be wrong before anything starts is said here, all of it at once, each with the file and the path in it.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from calculet_core.artifact import Package
from calculet_core.config import ModelConfig, boards_of
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.curve import ROLES, read_curve_keys
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.packages import load_keys, read_package, verify_package
from calculet_core.shell.spans import check_tracing
from calculet_supervisor.rollout import AliasVersion
from calculet_supervisor.shell.artifacts import ArtifactStore, artifacts_of

FIRST_ROUTER = "router"
"""The name of a fleet's only router; others' keys are where they are."""
log = logging.getLogger("calculet.supervisor")


def find_problems(fleet: Fleet) -> list[str]:
    """Everything that is wrong, in words; packages are verified in full."""
    problems: list[str] = []

    def attempt(check: Callable[..., Any], *arguments: Any, prefix: str = "") -> Any:
        try:
            return check(*arguments)
        except (ConfigError, ArtifactError) as error:
            problems.append(f"{prefix}{error}")
            return None

    attempt(check_tracing, fleet.config.tracing, prefix=f"{fleet.path}: ")
    keys = attempt(load_keys, [fleet.resolve(path) for path in fleet.config.trusted_keys])
    if any(board.listen is not None for board in fleet.config.boards):
        for role in ROLES:
            attempt(read_curve_keys, fleet.curve, role, FIRST_ROUTER)
    attempt(_check_tls, fleet)
    for index, model in enumerate(fleet.config.models):
        known = len(problems)
        attempt(fleet.scheduler_of, model.alias)
        wrong_scheduler = len(problems) > known
        root, where = fleet.resolve(model.package), f"{fleet.path}: $.models[{index}].package: "
        package = attempt(read_package, root, prefix=where) if keys is None else attempt(verify_package, root, keys, prefix=where)
        if package is None:
            continue
        problems += _wrong_devices(fleet, model, package)
        for board in () if wrong_scheduler else fleet.config.boards:
            if board.name in boards_of(fleet.config, model):
                attempt(fleet.check_profiles, model.alias, board, package.manifest.compiled_batches, package.digest)
    return list(dict.fromkeys(problems))  # boards share their alias's file, and what is wrong in it


def _check_tls(fleet: Fleet) -> None:
    """Whether a router can serve with its certificate and key. A key that only others may read is theirs to judge.

    Raises:
        ConfigError: it cannot.
    """
    tls, where = fleet.config.router.tls, f"{fleet.path}: $.router.tls"
    if tls.certificate is None or tls.key is None:
        return
    paths = (fleet.resolve(tls.certificate), fleet.resolve(tls.key))
    try:
        for path in paths:
            path.open("rb").close()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*paths, password="")
    except PermissionError:
        return
    except OSError as error:  # an ssl.SSLError is one
        named = error.filename or f"{paths[1]}: cannot be used with {paths[0]}"
        raise ConfigError(f"{where}: {named}: {error.strerror or error}") from None


def _wrong_devices(fleet: Fleet, model: ModelConfig, package: Package) -> list[str]:
    backend, problems = package.manifest.backend, []
    for index, board in enumerate(fleet.config.boards):
        if board.name in boards_of(fleet.config, model) and board.device != backend:
            problems.append(
                f"{fleet.path}: $.boards[{index}].device: {board.device!r}, but {model.alias!r} is placed there and its package "
                f"{package.manifest.name} is made for {backend!r}"
            )
    return problems


def configured_packages(fleet: Fleet, versions: Mapping[str, list[AliasVersion]]) -> dict[str, Package]:
    """Alias -> the package that the configuration names, read and not verified: a worker verifies before it loads.

    A package that was swapped for another one may be gone from where the configuration names it, and nobody shall be woken for
    that: it is read from where it is kept to go back to.

    Raises:
        ConfigError: a package cannot be read, and no operator has moved its alias to another.
    """
    kept, packages = artifacts_of(fleet), {}
    for index, model in enumerate(fleet.config.models):
        try:
            packages[model.alias] = read_package(fleet.resolve(model.package))
        except ArtifactError as error:
            found = kept_of(kept, versions.get(model.alias, []))
            if found is None:
                raise ConfigError(f"{fleet.path}: $.models[{index}].package: {error}") from None
            log.warning("%s: $.models[%d].package: %s; %s is used as it is kept", fleet.path, index, error, found.digest[:12])
            packages[model.alias] = found
    return packages


def kept_of(kept: ArtifactStore, versions: list[AliasVersion]) -> Package | None:
    """What the configuration named when the alias was moved, else what it was moved to."""
    if not versions:
        return None
    digests = [versions[-1].configured, *([versions[-1].artifact.digest] if versions[-1].artifact else [])]
    for digest in digests:
        with suppress(ArtifactError):
            return read_package(kept.path(digest))
    return None
