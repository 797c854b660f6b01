"""A look at this machine and a fleet's configuration: what would go wrong, or goes wrong, and how to mend it.

Looks only: takes no lock, starts nothing, writes nothing. A check that cannot be made says why instead of passing.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil
from cryptography.x509 import load_pem_x509_certificate

from calculet_core.errors import ConfigError
from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import Fleet, load_fleet
from calculet_core.shell.keys import read_keys
from calculet_core.shell.process import in_words
from calculet_core.shell.standing import held
from calculet_supervisor.shell.checking import find_problems
from calculet_supervisor.units import FILES, UNITS, is_ours, is_untouched

MIN_PYTHON = (3, 11)
SPARE_FILES = 256
"""What a router opens beside its connections."""
MIN_FREE_BYTES = 1 << 30
PROCESS_BYTES = 192 << 20
"""What a process of ours may take before it holds a model."""
DAY_S = 86_400
BORN_S = 1_735_689_600
"""2025-01-01: a clock before it was never set."""
COMMAND_TIMEOUT_S = 10.0
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*\(?(?:>=\s*(?P<bound>[\d.]+))?(?P<rest>.*)")


MENDS = (
    (
        r"cannot read the trusted key",
        "put the public key of whoever signs your packages there, or make a pair: calculet-worker keygen DIR",
    ),
    (r"not a PEM public key|not an Ed25519 public key", "an Ed25519 public key has to be there, as `calculet-worker keygen` makes"),
    (r"is not signed", "calculet package sign FOLDER --key PRIVATE.pem"),
    (r"not trusted", "name the signer's public key in trusted_keys, if you trust it; or sign the package with a key named there"),
    (
        r"manifest\.yaml: No such file|no such package folder",
        "put a signed package there; to try it without a board: calculet package build qwen3-sim --out FOLDER --key PRIVATE.pem",
    ),
    (r"was changed|is missing|is not listed|symbolic link|does not match", "copy the package again from where it was signed"),
    (r"calculet\[otel\]", "pip install 'calculet[otel]', or take tracing.endpoint out"),
    (r"\.device: ", "give the board the device that the package is made for, or place another model there (models[].boards)"),
    (r"profile", "name only profiles that the package has (calculet package show FOLDER) in the scheduler file: batch.profiles"),
)
"""What is wrong with a configuration -> what to do about it; the first that fits."""


class Mark(StrEnum):
    """What came of a check."""

    GOOD = "good"
    FINDING = "finding"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer; `mend` says what to do when it is a finding."""

    check: str
    mark: Mark
    message: str
    mend: str | None = None


def good(check: str, message: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Mark.GOOD, message)


def bad(check: str, message: str, mend: str) -> Finding:
    """Something to mend."""
    return Finding(check, Mark.FINDING, message, mend)


def skipped(check: str, why: str) -> Finding:
    """It could not be checked."""
    return Finding(check, Mark.SKIPPED, why)


def examine(config: Path, root: Path = Path("/")) -> list[Finding]:
    """Everything, in the order in which to mend it. systemd's files are looked for below `root`."""
    found = [*python(), *libraries(), *clock(time.time()), *_as_far("systemd", units(root))]
    try:
        fleet = load_fleet(config)
    except ConfigError as error:
        mend = "correct it" if config.exists() else "name the fleet's file with --config, or write one with `calculet init`"
        before = held(config, str(error))
        goes_on = "; until then what is in force goes on, and no worker starts" if before is not None and is_running(before) else ""
        return [*found, bad("configuration", str(error), f"{mend}{goes_on}")]
    running = is_running(fleet)
    checks = {
        "configuration": configuration(fleet), "trust": trust(fleet), "folders": folders(fleet), "clock": times(fleet, time.time()),
        "descriptors": descriptors(fleet), "memory": memory(fleet, running), "port": port(fleet, running),
        "tls": tls(fleet, time.time()), "boards": locks(fleet, running),
    }  # fmt: skip
    return found + [finding for name, check in checks.items() for finding in _as_far(name, check)]


def _as_far(name: str, check: Iterator[Finding]) -> Iterator[Finding]:
    """A check, as far as this user may look."""
    try:
        yield from check
    except OSError as error:
        yield skipped(name, f"{in_words(error)}: run this as the user that Calculet runs as, or as root")


# ---------------------------------------------------------------- the machine
def python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    """Its version."""
    shown = ".".join(map(str, version))
    if version < MIN_PYTHON:
        yield bad("python", f"{shown} is too old", "install Python 3.11 or newer and make the virtual environment anew with it")
    else:
        yield good("python", shown)


def libraries() -> Iterator[Finding]:
    """What the package asks for, against what is installed."""
    try:
        wanted, ours = metadata.requires("calculet") or [], metadata.version("calculet")
    except metadata.PackageNotFoundError:
        yield bad("libraries", "calculet itself is not installed", "pip install calculet (from a checkout: make setup)")
        return
    wrong = []
    for requirement in wanted:
        match = _REQUIREMENT.match(requirement)
        if match is None or "extra ==" in match["rest"]:
            continue
        name, bound = match["name"], match["bound"]
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if bound and _numbers(there) < _numbers(bound):
            wrong.append(f"{name} {there} is older than {bound}")
    if wrong:
        yield bad("libraries", "; ".join(wrong), "pip install --upgrade calculet (from a checkout: make setup)")
    else:
        yield good("libraries", f"calculet {ours} and all that it asks for")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def clock(now_s: float) -> Iterator[Finding]:
    """Usage records, certificates and journals need the time of day."""
    if now_s < BORN_S:
        yield bad("clock", f"it says {time.strftime('%F', time.gmtime(now_s))}", "set it: timedatectl set-ntp true")
        return
    answer = _run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if answer is None:
        yield skipped("clock", "whether it is synchronised cannot be asked (no timedatectl)")
    elif answer.strip() == "no":
        yield bad("clock", "it is not synchronised", "timedatectl set-ntp true, or whatever keeps time in this container's host")
    else:
        yield good("clock", "synchronised")


def units(root: Path) -> Iterator[Finding]:
    """systemd's files, when `calculet install` put them here."""
    places = [root / place.lstrip("/") for place in FILES.values()]
    texts = {path: path.read_text(errors="replace") for path in places if path.is_file()}
    if not any(path.parent == root / UNITS.lstrip("/") for path in texts):
        yield skipped("systemd", "the units are not installed")
        return
    right = len(texts)
    for path, text in texts.items():
        if not is_ours(text) or not is_untouched(text):
            yield bad("systemd", f"{path} was edited or is not ours", "use a drop-in for changes, then: calculet install --force")
            right -= 1
        for command in re.findall(r"^ExecStart=[-+!]*(/\S+)", text, re.M):
            if not os.access(root / command.lstrip("/"), os.X_OK):
                mend = "run `calculet install` with the right --prefix"
                yield bad("systemd", f"{path} starts {command}, which is not there", mend)
                right -= 1
    if missing := [path for path in places if path not in texts and not path.name.endswith(".example")]:
        yield bad("systemd", f"{missing[0]} is missing", "run `calculet install` again")
    elif right == len(texts):
        yield good("systemd", f"{len(texts)} files as `calculet install` wrote them")
    failed = _run("systemctl", "list-units", "calculet*", "--state=failed", "--plain", "--no-legend") if root == Path("/") else None
    for line in (failed or "").splitlines():
        unit = line.split()[0]
        yield bad("systemd", f"{unit} has failed", f"journalctl -u {unit} -n 50, then: systemctl reset-failed {unit}")


# ---------------------------------------------------------------- the configuration
def configuration(fleet: Fleet) -> Iterator[Finding]:
    """The file with everything it names; packages are verified in full."""
    problems = find_problems(fleet)
    for problem in problems:
        mend = next((mend for pattern, mend in MENDS if re.search(pattern, problem)), "correct it")
        yield bad("configuration", problem, f"{mend}; `calculet config check` looks again")
    if not problems:
        yield good("configuration", f"{fleet.path} and its packages")


def trust(fleet: Fleet) -> Iterator[Finding]:
    """Who may change what is trusted: a key or package that others can write proves nothing."""
    if not fleet.config.trusted_keys:
        mend = "name the signer's public key under trusted_keys"
        yield bad("trust", f"{fleet.path}: $.trusted_keys is empty: no package can be verified", mend)
        return
    places = [fleet.path, *map(fleet.resolve, fleet.config.trusted_keys), *(fleet.resolve(m.package) for m in fleet.config.models)]
    open_ones = [path for path in places if path.exists() and path.stat().st_mode & stat.S_IWOTH]
    for path in open_ones:
        yield bad("trust", f"everybody may write {path}", f"chmod o-w {path}")
    if fleet.keys.exists() and fleet.keys.stat().st_mode & (stat.S_IRWXO | stat.S_IRWXG):
        yield bad("trust", f"others may read {fleet.keys}", f"chmod 600 {fleet.keys}")
    elif (why := _unusable(fleet.keys)) is not None:
        mend = "no router starts with it: put a good copy there; without the file nobody needs a key"
        yield bad("trust", why, mend)
    elif not open_ones:
        yield good("trust", "only their owner may change configuration, keys and packages")


def _unusable(keys: Path) -> str | None:
    if keys.exists() and not os.access(keys, os.R_OK):
        return None
    try:
        read_keys(keys)
    except ConfigError as error:
        return str(error)
    return None


def folders(fleet: Fleet) -> Iterator[Finding]:
    """Run, state and log folder: ours, closed, with room."""
    for name, folder in (("run_dir", fleet.run_dir), ("state_dir", fleet.state_dir), ("log_dir", fleet.log_dir)):
        there = next(path for path in (folder, *folder.parents) if path.exists())  # the folder, or where it would be made
        mine = f"chown {_user()} {there}, or run this as the fleet's user"
        if not there.is_dir():
            yield bad(name, f"{there} is no folder", "move it away")
        elif os.statvfs(there).f_flag & os.ST_RDONLY:
            yield bad(name, f"{there} is mounted read-only", "after an error of its disk? see dmesg, mount it anew; or move it")
        elif not os.access(there, os.W_OK | os.X_OK):
            yield bad(name, f"{there} cannot be written" + ("" if there == folder else f" (to make {folder})"), mine)
        elif (free := shutil.disk_usage(there).free) < MIN_FREE_BYTES:
            mend = "make room: journals, usage records and packages live there"
            yield bad(name, f"only {free >> 20} MiB are free at {there}", mend)
        elif there == folder and folder.stat().st_uid != os.getuid() and os.getuid() != 0:
            yield bad(name, f"{folder} belongs to another user", mine)
        elif there == folder and folder.stat().st_mode & stat.S_IWOTH:
            yield bad(name, f"everybody may write {folder}", f"chmod 750 {folder}")
        else:
            yield good(name, f"{folder}, {free >> 30} GiB free")


def times(fleet: Fleet, now_s: float) -> Iterator[Finding]:
    """Files from the future: the clock went back."""
    paths = [path for path in (fleet.fleet_view, fleet.store, fleet.keys) if path.exists()]
    ahead = max((path.stat().st_mtime - now_s for path in paths), default=0.0)
    if ahead > 60:
        yield bad("clock", f"files in {fleet.state_dir} are {ahead:.0f} s from the future", "set it before you start anything")


# ---------------------------------------------------------------- limits
def descriptors(fleet: Fleet, hard: int | None = None) -> Iterator[Finding]:
    """A connection is a descriptor; a router raises its soft limit up to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard
    wanted = fleet.config.router.max_connections + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        mend = "raise it (ulimit -Hn, LimitNOFILE=) or lower router.max_connections"
        yield bad("descriptors", f"at most {hard} files may be open; router.max_connections needs {wanted}", mend)
    else:
        yield good("descriptors", "no limit" if hard == resource.RLIM_INFINITY else f"{hard} of {wanted}")


def memory(fleet: Fleet, running: bool, available: int | None = None) -> Iterator[Finding]:
    """Room for the processes, and for models that live in this machine's memory."""
    available = _available() if available is None else available
    if running:
        yield skipped("memory", "the fleet is running")
        return
    wanted = PROCESS_BYTES * (len(fleet.config.boards) + 2)
    for board in fleet.config.boards:
        if board.device == "llamacpp":
            packages = [fleet.resolve(model.package) for model in fleet.models_of(board.name)]
            wanted += max(sum(path.stat().st_size for path in package.glob("*.gguf")) for package in packages)
    if available < wanted:
        mend = "fewer boards, smaller models, or more memory (in a container: its limit)"
        yield bad("memory", f"{available >> 20} MiB are available; about {wanted >> 20} MiB are needed", mend)
    else:
        yield good("memory", f"{available >> 20} MiB available, about {wanted >> 20} MiB needed")


def _available() -> int:
    """What processes may still take: the machine's, or less in a control group."""
    available = psutil.virtual_memory().available
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return available if limit == "max" else min(available, int(limit) - int(used))
    except (OSError, ValueError):
        return available


# ---------------------------------------------------------------- what is in the way
def is_running(fleet: Fleet) -> bool:
    """Whether a supervisor of this fleet answers."""
    try:
        call(fleet.control_socket, "status", timeout_s=2)
    except ControlError:
        return False
    return True


def port(fleet: Fleet, running: bool) -> Iterator[Finding]:
    """Whether the router can listen, for clients and for the dashboard."""
    for key in ("listen", "admin_listen"):
        listen = getattr(fleet.config.router, key)
        if listen is not None and running:
            yield good("port", f"{listen}: the fleet is running")
        elif listen is not None:
            yield _free(listen, key)


def _free(listen: str, key: str) -> Finding:
    host, _, number = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(number), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        mend = f"ss -ltnp 'sport = :{number}' says who has it; or choose another router.{key}"
        return bad("port", f"{listen}: {error.strerror or error}", mend)
    return good("port", f"{listen} is free")


def tls(fleet: Fleet, now_s: float) -> Iterator[Finding]:
    """The certificate, when there is one."""
    config = fleet.config.router.tls
    if config.certificate is None or config.key is None:
        return
    certificate, key = fleet.resolve(config.certificate), fleet.resolve(config.key)
    try:
        ends_s = load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()
        mode = key.stat().st_mode
    except (OSError, ValueError) as error:
        yield bad("tls", str(error), "put certificate and key (PEM) where router.tls says")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        yield bad("tls", f"{key} cannot be used with {certificate}: {error}", "put the key (PEM) of that certificate there")
        return
    if mode & stat.S_IRWXO:
        yield bad("tls", f"everybody may read {key}", f"chmod 640 {key}")
    elif ends_s - now_s < 14 * DAY_S:
        mend = "renew it; the router takes the new one by itself"
        days = (ends_s - now_s) / DAY_S
        yield bad("tls", f"{certificate} " + (f"ends in {days:.0f} days" if days > 0 else f"ended {-days:.0f} days ago"), mend)
    else:
        yield good("tls", f"{certificate} is good for {(ends_s - now_s) / DAY_S:.0f} days")


def locks(fleet: Fleet, running: bool) -> Iterator[Finding]:
    """Boards that somebody else holds. Read from the kernel's list: taking a lock to look could fail a start that happens now."""
    if running:
        yield good("boards", f"{len(fleet.config.boards)}, the fleet is running")
        return
    held = {board.name: pid for board in fleet.config.boards if (pid := lock_owner(fleet.board_lock(board.name))) is not None}
    for board, pid in held.items():
        mend = f"ps -fp {pid}; end it if it is a leftover"
        yield bad("boards", f"process {pid} holds the lock of {board} while no supervisor answers", mend)
    if not held:
        yield good("boards", f"{len(fleet.config.boards)}, none is held")


def lock_owner(path: Path, kernel: Callable[[], Iterable[str]] | None = None) -> int | None:
    """The live process that a lock file names, when the kernel has a lock on the file; None: it is free."""
    try:
        inode, pid = path.stat().st_ino, int(path.read_text().strip() or 0)
    except (OSError, ValueError):
        return None
    lines = kernel() if kernel is not None else Path("/proc/locks").read_text().splitlines()
    is_held = any(" FLOCK " in line and line.split()[5].endswith(f":{inode}") for line in lines if len(line.split()) > 5)
    return pid if is_held and psutil.pid_exists(pid) else None


def _user() -> str:
    return os.environ.get("USER") or str(os.getuid())


def _run(*command: str) -> str | None:
    """What a command says; None when it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
