"""Writing and removing systemd's files: first everything that could go wrong is asked, then every file is replaced whole.

Nothing is started, enabled or stopped here; `install` ends by saying what to type for that. Below a `root` other than / only files
are written (for images): the image's first boot makes the user and the folders from sysusers.d and tmpfiles.d.
"""

from __future__ import annotations

import difflib
import grp
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from calculet_core.config import FleetConfig, parse_fleet
from calculet_core.shell.files import write_atomic
from calculet_core.shell.fleet import read_config
from calculet_supervisor.units import example_fleet, is_hidden, is_ours, is_untouched

COMMANDS = ("calculet", "calculet-router", "calculet-supervisor", "calculet-worker")
TEMPLATES = (
    Path(__file__).resolve().parents[2] / "systemd",
    Path(sys.prefix) / "share" / "calculet" / "systemd",
)
"""Beside the source, or where a wheel puts them."""
POLKIT = ("usr/lib/polkit-1/polkitd", "usr/libexec/polkitd", "usr/libexec/polkit-1/polkitd", "usr/lib/polkitd")
COMMAND_TIMEOUT_S = 60.0


class Refusal(Exception):
    """It cannot be done; `hint` says what would help."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Step(StrEnum):
    """What is to become of a file."""

    CREATE = "create"
    UPDATE = "update"
    KEEP = "same"
    REMOVE = "remove"
    EDITED = "edited"
    """Somebody has changed it, or it is not ours: it is left alone unless forced."""


@dataclass(frozen=True, slots=True)
class Change:
    """One file's."""

    path: Path
    step: Step
    before: str = ""
    after: str = ""

    def diff(self) -> str:
        """What changes, as a unified diff."""
        return "".join(
            difflib.unified_diff(
                self.before.splitlines(keepends=True), self.after.splitlines(keepends=True), str(self.path), str(self.path)
            )
        )


def read_templates() -> dict[str, str]:
    """Name -> template.

    Raises:
        Refusal: this installation has none.
    """
    for folder in TEMPLATES:
        if (folder / "calculet.target.j2").is_file():
            return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.j2"))}
    raise Refusal(f"the unit templates are not installed (looked in {' and '.join(map(str, TEMPLATES))})")


def read_fleet_config(root: Path, config: str, templates: Mapping[str, str]) -> FleetConfig:
    """The configuration that the units are for; while there is none, the example's.

    Raises:
        ConfigError: it is wrong.
    """
    path = below(root, config)
    data = read_config(path) if path.exists() else example_fleet(templates, config).encode()
    return parse_fleet(data, str(path))


def below(root: Path, path: str) -> Path:
    """Where an absolute path is when `root` is the root."""
    return root / path.lstrip("/")


# ---------------------------------------------------------------- may it be done?
def check_host(uid: int, slash: Path) -> None:
    """That the machine whose root is `slash` can take an installation by the user `uid`.

    Raises:
        Refusal: it cannot; says what to do.
    """
    if uid != 0:
        raise Refusal("units can only be installed by root", "use sudo, stage them with --root DIR, or look with --dry-run")
    if not (slash / "run/systemd/system").is_dir():
        raise Refusal("systemd does not run this machine", "stage the files with --root DIR; for development use `calculet up`")
    if not any((slash / path).exists() for path in POLKIT):
        raise Refusal("polkit is not installed: the supervisor could not start workers", "Debian: apt install polkitd")


def check_commands(root: Path, prefix: str) -> list[str]:
    """That the services can run the prefix's commands; what is only suspicious is returned, in words.

    Raises:
        Refusal: a command is missing, or its interpreter is where services cannot see it.
    """
    folder = below(root, prefix) / "bin"
    missing = [name for name in COMMANDS if not os.access(folder / name, os.X_OK)]
    if missing and root != Path("/"):
        return [f"{folder} has no {', '.join(missing)} yet"]
    if missing:
        hint = "--prefix names the folder of a virtual environment that Calculet is installed in"
        raise Refusal(f"{folder} has no {', '.join(missing)}", hint)
    for name in COMMANDS:
        with (folder / name).open("rb") as file:
            line = file.readline(512).decode(errors="replace").strip()
        if line.startswith("#!") and root == Path("/"):
            named = line[2:].split()[0]
            real = os.path.realpath(named)
            if (hidden := is_hidden(named) or is_hidden(real)) is not None:
                message = f"{folder / name} runs {real}, below {hidden}: services cannot see it (ProtectHome, PrivateTmp)"
                raise Refusal(message, "make the environment with the system's python3")
    way = [step for step in (folder, *folder.parents) if step != root and step.is_relative_to(root)]
    closed = [step for step in way if not step.stat().st_mode & 0o001]
    return [f"{path} is closed to others: the service user may not reach the commands" for path in closed[:1]]


def group_of(user: str) -> str:
    """The user's primary group; one of its own name while there is no such user."""
    try:
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    except KeyError:
        return user


def active_units() -> list[str]:
    """Calculet's units that run now."""
    states = "--state=active,activating,deactivating,reloading"
    done = _run("systemctl", "list-units", "--no-legend", "--plain", states, "calculet*")
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    return [name for name in names if not name.endswith(".slice")]


# ---------------------------------------------------------------- what changes
def plan_install(root: Path, files: Mapping[str, str], *, force: bool) -> list[Change]:
    """What is to be done for `files`; files of an older version that are no more wanted go."""
    changes = []
    for place, text in files.items():
        path = below(root, place)
        before = _read(path)
        if before is None:
            step = Step.CREATE
        elif before == text:
            step = Step.KEEP
        else:
            step = Step.UPDATE if force or is_untouched(before) else Step.EDITED
        changes.append(Change(path, step, before or "", text))
    wanted = {change.path for change in changes}
    return changes + [change for change in plan_uninstall(root, files, force=force) if change.path not in wanted]


def plan_uninstall(root: Path, files: Mapping[str, str], *, force: bool) -> list[Change]:
    """The removal of every file that `calculet install` wrote, of this version or another."""
    folders = {below(root, place).parent for place in files}
    found = sorted(path for folder in folders if folder.is_dir() for path in folder.glob("*calculet*") if path.is_file())
    found += sorted(path for folder in folders if folder.is_dir() for path in folder.glob("*.example") if path.is_file())
    changes = []
    for path in found:
        text = _read(path)
        if text is not None and is_ours(text):
            changes.append(Change(path, Step.REMOVE if force or is_untouched(text) else Step.EDITED, text))
    return changes


def apply(changes: list[Change]) -> None:
    """Do it.

    Raises:
        Refusal: a file cannot be written; those before it are.
    """
    for change in changes:
        try:
            if change.step in (Step.CREATE, Step.UPDATE):
                change.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
                write_atomic(change.path, change.after.encode(), 0o644)
                change.path.chmod(0o644)
            elif change.step is Step.REMOVE:
                change.path.unlink(missing_ok=True)
                if change.path.parent.name.endswith(".d") and not any(change.path.parent.iterdir()) and _is_drop_in(change.path):
                    change.path.parent.rmdir()
        except OSError as error:
            raise Refusal(f"{change.path}: {error.strerror}") from None


SETTLE_INSTALLED = (
    ("systemd-sysusers", "calculet.conf"), ("systemd-tmpfiles", "--create", "calculet.conf"), ("systemctl", "daemon-reload"),
)  # fmt: skip
"""Make the user and the folders; let systemd take notice."""
BEFORE_REMOVAL = (("systemctl", "disable", "calculet.target", "calculet-router@.service"),)
AFTER_REMOVAL = (("systemctl", "daemon-reload"),)


def run_all(commands: tuple[tuple[str, ...], ...]) -> list[str]:
    """Run each; what went wrong, in words."""
    problems = []
    for command in commands:
        done = _run(*command)
        if done.returncode != 0:
            problems.append(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return problems


def _is_drop_in(path: Path) -> bool:
    return path.parent.parent.name == "system"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {COMMAND_TIMEOUT_S:g} s")

