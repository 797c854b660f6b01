"""A support bundle: what somebody who cannot log in needs to see, in one archive.

Every part is gathered on its own, with any process down: a part that cannot be had is named in MANIFEST.json with the reason. Files
that grow are taken from their end, and the whole is bounded. Keys, their hashes, prompts and answers are in none of it.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import psutil

from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.stacks import DUMP, can_dump
from calculet_supervisor.shell.crashes import bundles
from calculet_supervisor.shell.tails import tail

SCHEMA = "calculet-support/v1"
LOG_BYTES = 1 << 20
JOURNAL_BYTES = 4 << 20
METRICS_BYTES = 8 << 20
STACKS_S = 2.0
"""How long a worker may take to write its stacks."""
COMMAND_S = 20.0
COMMANDS: dict[str, tuple[str, ...]] = {
    "systemd/units.txt": ("systemctl", "show", "--no-pager", "calculet*"),
    "systemd/files.txt": ("systemctl", "cat", "--no-pager", "calculet*"),
    "systemd/journal.txt": ("journalctl", "--no-pager", "-q", "-o", "short-precise", "-n", "5000", "-u", "calculet*"),
    "system/disks.txt": ("df", "-hT"),
    "system/kernel.txt": ("dmesg", "--ctime", "--level=emerg,alert,crit,err,warn"),
}
_SECRET = re.compile(r"(?im)^(\s*(?:-\s*)?[\w-]*(?:secret|password|passwd|private_?key|api_?key|credential)[\w-]*\s*:\s*).+$")
Files = Iterator[tuple[str, bytes]]


class Archive:
    """A bounded tar.gz that notes what it holds and what it lacks."""

    def __init__(self, file: io.BufferedWriter, name: str, max_bytes: int) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w:gz")  # noqa: SIM115
        self._name, self._left = name, max_bytes
        self.files: dict[str, int] = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, data: bytes) -> None:
        """Add a file unless the archive is full."""
        if len(data) > self._left:
            self.missing[name] = f"{len(data)} bytes: the bundle would be larger than its limit"
            return
        self._left -= len(data)
        self.files[name] = len(data)
        self._put(name, data)

    def close(self, about: dict[str, Any]) -> None:
        """Write the manifest, and the end."""
        manifest = {"schema": SCHEMA, **about, "files": self.files, "missing": self.missing}
        self._put("MANIFEST.json", json.dumps(manifest, indent=2).encode() + b"\n")
        self._tar.close()

    def _put(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(f"{self._name}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), 0o640, int(time.time())
        self._tar.addfile(entry, io.BytesIO(data))


def make_bundle(fleet: Fleet, output: Path, max_bytes: int) -> dict[str, str]:
    """Write the bundle to `output`, mode 0600; what is missing, with the reasons.

    Raises:
        OSError: it cannot be written; then there is none.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            archive = Archive(file, output.name.removesuffix(".tar.gz"), max_bytes)
            for part in PARTS:
                try:
                    for name, data in part(fleet):
                        archive.add(name, data)
                except Exception as error:  # whatever is broken: the rest is all the more needed
                    archive.missing[part.__name__.strip("_")] = f"{type(error).__name__}: {error}"
            for name, command in COMMANDS.items():
                _add_command(archive, name, command)
            archive.close(_about(fleet))
        temporary.rename(output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return archive.missing


def redact(text: str) -> str:
    """A configuration without what looks like a secret."""
    return _SECRET.sub(r"\1'*** (left out)'", text)


# ---------------------------------------------------------------- parts, the most telling first: a full bundle lacks the last
def _status(fleet: Fleet) -> Files:
    try:
        yield "status.json", _json(call(fleet.control_socket, "status", timeout_s=5))
        yield "audit.json", _json(call(fleet.control_socket, "audit", timeout_s=5))
    except ControlError as error:
        raise OSError(error.message) from None


def _configuration(fleet: Fleet) -> Files:
    paths = [fleet.path, *(fleet.resolve(model.scheduler) for model in fleet.config.models if model.scheduler)]
    for path in dict.fromkeys(paths):
        yield f"config/{path.name}", redact(path.read_text()).encode()


def _stacks(fleet: Fleet) -> Files:
    """Where workers and the supervisor are right now, as far as they can be asked; else where they, and routers, last were."""
    locks = {fleet.stacks(f"worker-{board.name}"): fleet.board_lock(board.name) for board in fleet.config.boards}
    locks[fleet.stacks("supervisor")] = fleet.supervisor_lock
    for path, lock in locks.items():
        _ask_for_stacks(lock, path)
    for path in sorted({*locks, *fleet.log_dir.glob("router*.stacks")}):
        if data := tail(path, LOG_BYTES):
            yield f"stacks/{path.name}", data


def _crashes(fleet: Fleet) -> Files:
    for bundle in reversed(bundles(fleet.crashes)):
        for path in sorted(bundle.iterdir()):
            yield f"crashes/{bundle.name}/{path.name}", path.read_bytes()


def _view(fleet: Fleet) -> Files:
    if fleet.fleet_view.exists():
        yield "fleet-view.json", fleet.fleet_view.read_bytes()


def _logs(fleet: Fleet) -> Files:
    for path in sorted((*fleet.log_dir.glob("*.log"), *fleet.log_dir.glob("*.log.1"))):
        yield f"logs/{path.name}", tail(path, LOG_BYTES)


def _journals(fleet: Fleet) -> Files:
    for path in sorted(fleet.log_dir.glob("*.jsonl")):
        yield f"journals/{path.name}", tail(path, JOURNAL_BYTES)


def _metrics(fleet: Fleet) -> Files:
    for path in sorted(fleet.run_dir.glob("m-*.sock")):
        yield f"metrics/{path.stem.removeprefix('m-')}.prom", _scrape(path)


def _processes(fleet: Fleet) -> Files:
    wanted = ("pid", "ppid", "username", "status", "create_time", "cpu_times", "memory_info", "num_threads", "num_fds", "cmdline")
    found = []
    for process in psutil.process_iter(list(wanted)):
        if any("calculet" in part for part in process.info["cmdline"] or ()):
            found.append({key: _plain(value) for key, value in process.info.items()})
    yield "system/processes.json", _json(found)


def _host(fleet: Fleet) -> Files:
    for name in ("meminfo", "loadavg", "cpuinfo", "pressure/cpu", "pressure/memory", "pressure/io"):
        path = Path("/proc", name)
        if path.exists():
            yield f"system/{name.replace('/', '-')}.txt", path.read_bytes()
    packages = sorted(f"{one.metadata['Name']}=={one.version}" for one in distributions())
    yield "system/packages.txt", "\n".join(packages).encode() + b"\n"


PARTS: tuple[Callable[[Fleet], Files], ...] = (
    _status, _configuration, _stacks, _crashes, _view, _processes, _host, _metrics, _logs, _journals,
)  # fmt: skip


def _ask_for_stacks(lock: Path, path: Path) -> None:
    """The process that the lock file names writes its stacks now. The lock itself is not touched: a look would hold it for
    an instant, in which another may start."""
    try:
        holder = int(lock.read_text())
        if b"calculet" not in Path(f"/proc/{holder}/cmdline").read_bytes() or not can_dump(holder):
            return
        before = path.stat().st_size
        os.kill(holder, DUMP)
    except (OSError, ValueError):
        return
    deadline_s = time.monotonic() + STACKS_S
    while path.stat().st_size == before and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _scrape(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(STACKS_S)
        try:
            sock.connect(str(path))
            chunks, size = [], 0
            while (chunk := sock.recv(65_536)) and size < METRICS_BYTES:
                chunks.append(chunk)
                size += len(chunk)
        except OSError as error:
            return f"# no answer: {error}\n".encode()
    return b"".join(chunks)


def _add_command(archive: Archive, name: str, command: tuple[str, ...]) -> None:
    if command[0] in ("systemctl", "journalctl") and not Path("/run/systemd/system").is_dir():
        archive.missing[name] = "systemd does not run this machine"
        return
    if shutil.which(command[0]) is None:
        archive.missing[name] = f"{command[0]} is not installed"
        return
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        archive.missing[name] = f"{' '.join(command)}: no answer within {COMMAND_S:g} s"
        return
    if done.returncode != 0 and not done.stdout:
        archive.missing[name] = done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"
    else:
        archive.add(name, done.stdout[-JOURNAL_BYTES:])


def _about(fleet: Fleet) -> dict[str, Any]:
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": socket.gethostname(), "config": str(fleet.path),
        "calculet": version("calculet"), "python": platform.python_version(), "kernel": platform.platform(),
    }  # fmt: skip


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def _plain(value: Any) -> Any:
    return value._asdict() if hasattr(value, "_asdict") else value
