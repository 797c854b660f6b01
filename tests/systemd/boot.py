"""Becomes systemd, as PID 1 of a throw-away machine: `boot.py SCRATCH BINDS`, as root; SCRATCH is an empty folder.

The machine is made of fresh namespaces over an overlay of this host's root whose upper half is memory, so that nothing that happens
in it reaches the host, and everything of it (processes, mounts, networks) vanishes with PID 1. PID 1 dies with this process, and
this process with whoever started it. BINDS is a JSON list of [source, target, content]: a bind mount (read-only), or, where source is
null, a file with that content (executable when it begins with #!).

Only the standard library and util-linux' pivot_root are needed; `Refused` is said on stdout when the kernel does not let us.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

BIND, REC, PRIVATE, REMOUNT, READ_ONLY = 0x1000, 0x4000, 1 << 18, 0x20, 0x1
NOSUID, NODEV, NOEXEC = 0x2, 0x4, 0x8
DETACH = 2
NEW_NS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_PID, NEW_NET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
DROPPED_CAPABILITIES = (16, 17, 22, 25, 34, 35)
"""Modules, raw io, boot, clock, syslog, wake alarm: what a machine could hurt the host by."""
SYSTEMD = "/lib/systemd/systemd"
UNITS = "etc/systemd/system"
WANTS = "usr/lib/systemd/system/{}.target.wants"
EMPTIED = ("sysinit", "local-fs", "timers", "multi-user", "sockets", "basic", "graphical")
"""Targets of which the host's own services are taken away; what is needed is named below."""
NEEDED = "dbus.socket systemd-journald.service systemd-journald.socket"
libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel does not let us."""


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*(value.encode() if isinstance(value, str) else value for value in arguments)) != 0:
        raise Refused(f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: Path, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    call("mount", source, str(target), kind, ctypes.c_ulong(flags), data)


def bind(source: str, target: Path, *, read_only: bool) -> None:
    mount(source, target, None, BIND)
    if read_only:
        mount("none", target, None, BIND | REMOUNT | READ_ONLY)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755 if text.startswith("#!") else 0o644)


def new_cgroup(scratch: Path) -> Path:
    """A new child of the host's unified hierarchy; left-overs of killed runs are removed."""
    found = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if line.split()[2] == "cgroup2"]
    if found:
        top = Path(found[0])
    else:
        top = scratch / "cgroup"
        top.mkdir()
        mount("cgroup2", top, "cgroup2")
    for old in top.glob("calculet-test-*"):
        if not Path("/proc", old.name.rpartition("-")[2]).exists():
            remove_cgroup(old)
    own = top / f"calculet-test-{os.getpid()}"
    own.mkdir()
    return own


def remove_cgroup(path: Path) -> None:
    for folder, _, _ in os.walk(path, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            pass


def build_root(scratch: Path, binds: list[tuple[str | None, str, str | None]]) -> Path:
    memory = scratch / "memory"
    memory.mkdir()
    mount("tmpfs", memory, "tmpfs", 0, "mode=755,size=1g")
    for name in ("upper", "work", "root"):
        (memory / name).mkdir()
    root = memory / "root"
    mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={memory / 'upper'},workdir={memory / 'work'}")
    mount("proc", root / "proc", "proc", NOSUID | NODEV | NOEXEC)
    for name in ("sys", "sysrq-trigger", "irq", "bus"):
        if (root / "proc" / name).exists():
            bind(str(root / "proc" / name), root / "proc" / name, read_only=True)
    mount("sysfs", root / "sys", "sysfs", READ_ONLY | NOSUID | NODEV | NOEXEC)
    mount("cgroup2", root / "sys/fs/cgroup", "cgroup2", NOSUID | NODEV | NOEXEC)
    for name, mode in (("run", "755"), ("tmp", "1777"), ("dev", "755")):
        mount("tmpfs", root / name, "tmpfs", NOSUID, f"mode={mode}")
    devices(root / "dev")
    for name in EMPTIED:
        if (root / WANTS.format(name)).is_dir():
            mount("tmpfs", root / WANTS.format(name), "tmpfs")
    for name in (UNITS, "usr/lib/systemd/system-generators"):
        mount("tmpfs", root / name, "tmpfs", 0, "mode=755")
    write(root / UNITS / "machine.target", f"[Unit]\nRequires={NEEDED}\nAfter={NEEDED}\nAllowIsolate=yes\n")
    write(root / "etc/systemd/journald.conf.d/test.conf", "[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=no\nForwardToSyslog=no\nRateLimitBurst=0\n")
    write(root / "etc/systemd/system.conf.d/test.conf", "[Manager]\nDefaultTimeoutStopSec=20s\nShowStatus=no\n")
    (root / "etc/machine-id").unlink(missing_ok=True)
    write(root / "etc/machine-id", f"{uuid.uuid4().hex}\n")
    for source, target, content in binds:
        place = root / target.lstrip("/")
        if source is None:
            write(place, content or "")
        else:
            place.mkdir(parents=True, exist_ok=True)
            bind(source, place, read_only=True)
    return root


def devices(folder: Path) -> None:
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        (folder / name).touch()
        bind(f"/dev/{name}", folder / name, read_only=False)
    for name in ("pts", "shm"):
        (folder / name).mkdir()
    mount("devpts", folder / "pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
    mount("tmpfs", folder / "shm", "tmpfs", NOSUID | NODEV, "mode=1777")
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (folder / name).symlink_to(target)


def become_systemd(root: Path) -> None:
    old = root / "run/old"
    old.mkdir()
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "run/old"], check=True)
    os.chroot(".")
    call("umount2", "/run/old", DETACH)
    os.rmdir("/run/old")
    for capability in DROPPED_CAPABILITIES:
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    environment = {"container": "calculet-test", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    os.execve(SYSTEMD, [SYSTEMD, "--system", "--unit=machine.target", "--log-target=journal-or-kmsg"], environment)


def main(scratch: Path, binds: list[tuple[str | None, str, str | None]]) -> int:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        call("unshare", NEW_NS)
        mount("none", Path("/"), None, REC | PRIVATE)
        cgroup = new_cgroup(scratch)
        home = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        call("unshare", NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET)
    except (Refused, OSError) as error:
        print(f"Refused {error}", flush=True)
        return 3
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            call("unshare", NEW_NS)
            call("sethostname", "calculet-test", 13)
            root = build_root(scratch, binds)
            print("Built", flush=True)
            become_systemd(root)
        except (Refused, OSError, subprocess.CalledProcessError) as error:
            print(f"Refused {error}", flush=True)
        os._exit(3)
    try:
        (cgroup.parent / home.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:  # it came from outside of what it can see: its group stays until the next boot
        pass
    _, status = os.waitpid(child, 0)
    remove_cgroup(cgroup)
    return 0 if os.waitstatus_to_exitcode(status) in (0, -signal.SIGINT) else 1  # how a power-off looks from outside


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
