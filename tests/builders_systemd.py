"""A machine under a real systemd for a test: this host's root in namespaces, with a fleet installed by `calculet install`.

`Machine` boots it (`tests/systemd/boot.py`), runs commands in it, and ends it; clients reach it through its own network, which a
thread enters (`in_network`). Only processes of the machine are signalled, by the pid that its systemd names, from within it.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import Fleet, Packages, until

from calculet_core.shell.control_client import ControlError, call
from calculet_supervisor.units import is_hidden

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = ("core", "router", "supervisor", "worker", "perf")
PREFIX, CONFIG, PORT = "/opt/calculet", "/etc/calculet/fleet.yaml", 8080
SUPERVISOR, ROUTER, SECOND, SOCKET = (
    "calculet-supervisor.service", "calculet-router.service", "calculet-router@2.service", "calculet-router.socket",
)  # fmt: skip
TOOLS = {"/lib/systemd/systemd": "systemd", "/usr/bin/dbus-daemon": "dbus", "/usr/bin/pkaction": "polkitd", "/usr/bin/nsenter": "util-linux"}
CLONE_NEWNET = 0x40000000
POWER_OFF = signal.SIGRTMIN + 4
"""What systemd takes for `systemctl poweroff`."""


def worker(board: str) -> str:
    return f"calculet-worker@{board}.service"


def need_a_machine() -> None:
    """Skip, with the reason, where none can be had; as root in CI missing tools are a failure."""
    missing = sorted({package for path, package in TOOLS.items() if not Path(path).exists()})
    reason = "namespaces need root" if os.geteuid() != 0 else f"not installed: {', '.join(missing)}" if missing else ""
    if missing and os.geteuid() == 0 and os.environ.get("CI"):
        pytest.fail(f"{reason} (make installs it as root)")
    if reason:
        pytest.skip(f"real systemd: {reason}")


class Machine:
    """One booted machine with a fleet of simulated boards, installed and not started."""

    def __init__(self, folder: Path, packages: Packages, boards: int = 2, **sections: Any) -> None:
        self.folder, self.boards = folder, [f"board{index}" for index in range(boards)]
        package = packages.get("sim-batch", "--step-ms", "5")
        self.fleet = {
            "schema": "calculet-fleet/v1", "run_dir": "/run/calculet", "state_dir": "/var/lib/calculet", "log_dir": "/var/log/calculet",
            "trusted_keys": [f"{PREFIX}/keys/dev.pub"], "router": {"listen": f"127.0.0.1:{PORT}", **sections.pop("router", {})},
            "boards": [{"name": name, "device": "sim"} for name in self.boards],
            "models": [{"alias": "toy", "package": f"{PREFIX}/package"}],
            "supervision": {"heartbeat_ms": 50, **sections.pop("supervision", {})}, **sections,
        }  # fmt: skip
        python, binds = _python()
        sources = [(str(ROOT / f"calculet_{name}"), f"{PREFIX}/src/calculet_{name}", None) for name in PRODUCTS]
        modules = {"calculet": "calculet_supervisor.cli", **{f"calculet-{name}": f"calculet_{name}" for name in PRODUCTS[1:4]}}
        commands = [(None, f"{PREFIX}/bin/{name}", f"{python} -m {module} \"$@\"\n") for name, module in modules.items()]
        files = [
            *binds, *sources, *commands, (str(ROOT / "systemd"), f"{PREFIX}/src/systemd", None),
            (str(package), f"{PREFIX}/package", None), (str(packages.get("sim-batch", "--step-ms", "6")), f"{PREFIX}/next", None),
            (str(packages.key.parent), f"{PREFIX}/keys", None),
            (None, CONFIG, json.dumps(self.fleet)),
        ]  # fmt: skip
        command = [sys.executable, str(ROOT / "tests/systemd/boot.py"), str(folder), json.dumps(files)]
        self.boot = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.boot.stdout is not None
        said = self.boot.stdout.readline().strip()
        if said != "Built":
            self.boot.wait(10)
            if said.startswith("Refused"):
                pytest.skip(f"real systemd: namespaces are refused here: {said}")
            raise AssertionError(f"no machine: {said} {self.boot.communicate()[1]}")
        self.init = int(until(lambda: Path(f"/proc/{self.boot.pid}/task/{self.boot.pid}/children").read_text().split(), "PID 1")[0])
        try:
            until(lambda: self.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded"), "booted")
        except BaseException:
            self.power_off()
            raise

    def power_off(self) -> int:
        """End it; 0 when it powered itself off in an orderly way."""
        if self.boot.poll() is None:
            os.kill(self.init, POWER_OFF)
            try:
                self.boot.wait(40)
            except subprocess.TimeoutExpired:
                os.kill(self.init, signal.SIGKILL)
        code = self.boot.wait(20)
        _, complaints = self.boot.communicate()
        assert not complaints, complaints
        return code

    # ---------------------------------------------------------------- commands in it
    def run(self, *command: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", "--"]
        who = ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--"] if user else []
        environment = {"PATH": f"{PREFIX}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        return subprocess.run([*enter, *who, *command], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, env=environment)

    def must(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def systemctl(self, *arguments: str) -> str:
        return self.must("systemctl", *arguments)

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def pid(self, unit: str) -> int:
        """Of the unit's main process, as seen in the machine; 0 while there is none."""
        return int(self.show(unit, "MainPID") or 0)

    def kill(self, unit: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(unit)
        assert pid > 1, f"{unit} has no process\n{self.journal()}"
        self.must("kill", f"-{number.value}", str(pid))
        return pid

    def active(self, *units: str) -> bool:
        return all(self.show(unit, "ActiveState") == "active" for unit in units)

    def journal(self, unit: str | None = None) -> str:
        where = ("-u", unit) if unit else ("-n", "80")
        return self.run("journalctl", "--sync").stderr + self.run("journalctl", "-q", "--no-pager", "-o", "short-monotonic", *where).stdout

    def read(self, path: str) -> Path:
        """A path of the machine as this host sees it."""
        return Path(f"/proc/{self.init}/root{path}")

    def configure(self, **sections: Any) -> None:
        self.read(CONFIG).write_text(json.dumps({**self.fleet, **sections}))

    # ---------------------------------------------------------------- the fleet in it
    def status(self) -> dict[str, Any] | None:
        try:
            return call(self.read("/run/calculet/control.sock"), "status", timeout_s=5)
        except ControlError:
            return None

    def active_requests(self) -> list[int]:
        return [board["active"] or 0 for board in (self.status() or {"boards": []})["boards"]]

    def ready_boards(self) -> int:
        return sum(board["state"] == "READY" for board in (self.status() or {"boards": []})["boards"])

    def wait_ready(self, deadline_s: float = 60.0) -> None:
        try:
            until(lambda: self.ready_boards() == len(self.boards) and self.front(lambda f: f.health()) == 200, "all boards ready", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.status()}\n{self.journal()}") from None

    def enter_network(self) -> None:
        """This thread's new sockets are in the machine's network."""
        with open(f"/proc/{self.init}/ns/net", "rb") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def front(self, ask: Callable[[Front], Any]) -> Any:
        """What `ask` returns when it is called in the machine's network."""
        found: list[Any] = []

        def run() -> None:
            self.enter_network()
            try:
                found.append(ask(Front()))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(120)
        if not found or isinstance(found[0], Exception):
            raise found[0] if found else AssertionError("no answer")
        return found[0]


class Front(Fleet):
    """The HTTP calls of `Fleet`, to the machine's router; for a thread that is in the machine's network."""

    def __init__(self) -> None:
        self.port, self.alias = PORT, "toy"


def _python() -> tuple[str, list[tuple[str | None, str, str | None]]]:
    """The beginning of a command's script, and what has to be bound for it: services cannot see an interpreter below /root."""
    binds: list[tuple[str | None, str, str | None]] = [(sysconfig.get_paths()["purelib"], f"{PREFIX}/site", None)]
    home, version = sys.base_prefix, f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if is_hidden(home) is not None:
        binds.append((home, f"{PREFIX}/python", None))
        home = f"{PREFIX}/python"
    script = f"#!/bin/sh\nexport LD_LIBRARY_PATH={home}/lib PYTHONPATH={PREFIX}/src:{PREFIX}/site PYTHONDONTWRITEBYTECODE=1\n"
    return f"{script}exec {home}/bin/{version}", binds



class Load:
    """Clients in the machine's network that ask without a pause: whole answers and streams, on kept-alive connections and fresh ones.

    Every answer is compared with the one that the simulated board always gives. A failure is (kind, words): `refused` when nobody
    listened, `cut` when a connection ended too early, `lost` for a stream that ends with `worker_lost`, `wrong` for any other status, text or end of stream that is not the expected one.
    """

    TOKENS = 60

    def __init__(self, machine: Machine, clients: int) -> None:
        self.answered = 0
        self.failures: list[tuple[str, str]] = []
        self._machine, self._ended, self._lock = machine, threading.Event(), threading.Lock()
        self._expected = machine.front(lambda front: front.completion("load", self.TOKENS).text)
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    def _client(self, number: int) -> None:
        self._machine.enter_network()
        connection: http.client.HTTPConnection | None = None
        turn = 0
        while not self._ended.is_set():
            turn += 1
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
            try:
                kind, words = self._ask(connection, stream=(number + turn) % 2 == 0)
            except ConnectionRefusedError as error:
                self._note("refused", repr(error))
            except (OSError, http.client.HTTPException) as error:
                self._note("cut", repr(error))
            else:
                self._note(kind, words)
                if number % 3 and connection.sock is not None:
                    continue  # kept alive
            connection.close()
            connection = None

    def _ask(self, connection: http.client.HTTPConnection, *, stream: bool) -> tuple[str, str]:
        """What is wrong with the answer; empty when it is as it should be."""
        body = {"model": "toy", "prompt": "load", "max_tokens": self.TOKENS, "temperature": 0, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            return "wrong", f"{response.status} {data[:200]!r}"
        if not stream:
            text = json.loads(data)["choices"][0]["text"]
            return ("", "") if text == self._expected else ("wrong", f"another text: {text[:80]!r}")
        events = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            lost = bool(events) and json.loads(events[-1]).get("error", {}).get("code") == "worker_lost"
            return "lost" if lost else "wrong", f"a stream without its end: {events[-1:]}"
        text = "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])
        return ("", "") if text == self._expected else ("wrong", f"another stream: {text[:80]!r}")

    def _note(self, kind: str, words: str) -> None:
        with self._lock:
            if kind:
                self.failures.append((kind, words))
            else:
                self.answered += 1
