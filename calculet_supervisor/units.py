"""systemd's files for one installation, rendered from the templates of `systemd/`; pure: a dry run and a test see the same.

Each rendered file says in its first line who wrote it, with a digest of the rest: so a file that somebody has edited is known, and
is neither overwritten nor removed by accident. Changes of one's own belong into drop-ins, of which there are examples.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from posixpath import dirname, join, normpath

import jinja2

from calculet_core.config import FleetConfig
from calculet_core.errors import ConfigError

UNITS = "/etc/systemd/system"
EXAMPLES = ".example"
"""systemd reads no drop-in that ends like this."""
FILES: Mapping[str, str] = {
    "calculet.target.j2": f"{UNITS}/calculet.target",
    "calculet.slice.j2": f"{UNITS}/calculet.slice",
    "calculet-workers.slice.j2": f"{UNITS}/calculet-workers.slice",
    "calculet-supervisor.service.j2": f"{UNITS}/calculet-supervisor.service",
    "calculet-router.socket.j2": f"{UNITS}/calculet-router.socket",
    "calculet-router.service.j2": f"{UNITS}/calculet-router.service",
    "calculet-router@.service.j2": f"{UNITS}/calculet-router@.service",
    "calculet-worker@.service.j2": f"{UNITS}/calculet-worker@.service",
    "polkit.rules.j2": "/etc/polkit-1/rules.d/50-calculet.rules",
    "sysusers.conf.j2": "/etc/sysusers.d/calculet.conf",
    "tmpfiles.conf.j2": "/etc/tmpfiles.d/calculet.conf",
    "examples/worker-device.conf.j2": f"{UNITS}/calculet-worker@.service.d/10-device.conf{EXAMPLES}",
    "examples/worker-placement.conf.j2": f"{UNITS}/calculet-worker@.service.d/20-placement.conf{EXAMPLES}",
    "examples/socket-public.conf.j2": f"{UNITS}/calculet-router.socket.d/10-listen.conf{EXAMPLES}",
}
"""Template -> where its file goes."""
EXAMPLE_FLEET = "examples/fleet.yaml.j2"
"""Rendered beside the configuration, as NAME.example."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What ProtectHome and PrivateTmp hide from the services."""
STOP_GRACE_S = 15
"""What systemd grants a process beyond its own drain deadline, before SIGKILL."""
SPARE_FILES = 1024
"""Descriptors of a router beside those of connections."""
_SAFE = re.compile(r"[A-Za-z0-9._/+-]+")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_HEADER = re.compile(r"\A(?:#|//) Written by `calculet install` \(digest ([0-9a-f]{16})\); .*\n")


@dataclass(frozen=True, slots=True)
class Installation:
    """What the templates are filled with. Folders are names below /run, /var/lib and /var/log."""

    bin: str
    config: str
    user: str
    group: str
    listen: str
    run: str
    state: str
    logs: str
    router_drain_s: float
    worker_drain_s: float
    max_connections: int
    worker_families: str = "AF_UNIX"
    """Sockets that workers may have: TCP only where a board listens on it."""


def plan_installation(prefix: str, config_path: str, config: FleetConfig, user: str, group: str) -> Installation:
    """The installation of a fleet's configuration under a prefix whose `bin` has the commands.

    Raises:
        ConfigError: names what the units could not run with: a path that the services cannot see or write, or a wrong name.
    """
    _check_path("the prefix", prefix)
    _check_path("the configuration", config_path)
    for what, name in (("user", user), ("group", group)):
        if not _USER.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be the name of a {what}: small letters, digits, - and _")
    if user == "root":
        raise ConfigError("the services run unprivileged: name another user than root")
    base = dirname(config_path)
    for where, path in _named_files(config):
        _check_path(f"{config_path}: {where}", normpath(join(base, path)))
    folders = {
        key: _below(f"{config_path}: $.{key}", normpath(join(base, getattr(config, key))), parent)
        for key, parent in (("run_dir", "/run"), ("state_dir", "/var/lib"), ("log_dir", "/var/log"))
    }
    return Installation(
        join(prefix, "bin"), config_path, user, group, config.router.listen,
        folders["run_dir"], folders["state_dir"], folders["log_dir"],
        config.router.drain_timeout_s, config.supervision.drain_timeout_ms / 1000, config.router.max_connections,
        "AF_UNIX AF_INET AF_INET6" if any(board.listen for board in config.boards) else "AF_UNIX",
    )  # fmt: skip


def render(templates: Mapping[str, str], installation: Installation) -> dict[str, str]:
    """Path -> content of every file, headers included."""
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(dict(templates)), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    places = {**FILES, EXAMPLE_FLEET: f"{installation.config}{EXAMPLES}"}
    values = {field: getattr(installation, field) for field in installation.__dataclass_fields__} | {
        "router_stop_s": math.ceil(installation.router_drain_s) + STOP_GRACE_S,
        "worker_stop_s": math.ceil(installation.worker_drain_s) + STOP_GRACE_S,
        "router_files": installation.max_connections + SPARE_FILES,
    }
    return {place: stamp(place, _tidy(environment.get_template(name).render(values))) for name, place in places.items()}


def example_fleet(templates: Mapping[str, str], config_path: str) -> str:
    """The example configuration alone: what is installed for while there is no configuration yet."""
    text: str = jinja2.Template(templates[EXAMPLE_FLEET]).render(config=config_path)
    return text


def stamp(path: str, text: str) -> str:
    """`text` with the header that tells whether it was edited since."""
    mark = "//" if path.endswith(".rules") else "#"
    return f"{mark} Written by `calculet install` (digest {_digest(text)}); what is changed here is lost: use a drop-in.\n{text}"


def is_ours(text: str) -> bool:
    """Whether `calculet install` wrote this file, whatever became of it."""
    return _HEADER.match(text) is not None


def is_untouched(text: str) -> bool:
    """Whether it is as `calculet install` wrote it."""
    header = _HEADER.match(text)
    return header is not None and header[1] == _digest(text[header.end() :])


def is_hidden(path: str) -> str | None:
    """The folder that hides a path from the services; None when they can see it."""
    return next((folder for folder in HIDDEN if path == folder or path.startswith(f"{folder}/")), None)


def _named_files(config: FleetConfig) -> list[tuple[str, str]]:
    found = [(f"$.trusted_keys[{index}]", path) for index, path in enumerate(config.trusted_keys)]
    for index, model in enumerate(config.models):
        found.append((f"$.models[{index}].package", model.package))
        if model.scheduler is not None:
            found.append((f"$.models[{index}].scheduler", model.scheduler))
    return found


def _check_path(what: str, path: str) -> None:
    if not path.startswith("/") or not _SAFE.fullmatch(path):
        raise ConfigError(f"{what}: {path!r} cannot stand in a unit: absolute paths of letters, digits and . _ / + - only")
    if (folder := is_hidden(path)) is not None:
        raise ConfigError(f"{what}: {path} is below {folder}, which the services cannot see (ProtectHome, PrivateTmp)")


def _below(what: str, path: str, parent: str) -> str:
    name = path.removeprefix(f"{parent}/")
    if name == path or not _SAFE.fullmatch(name):
        raise ConfigError(f"{what}: {path}, but the services may write only below {parent}; {parent}/calculet would do")
    return name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tidy(text: str) -> str:
    """Blank lines single, none at the ends: macros leave some."""
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"
