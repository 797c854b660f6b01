"""A whole fleet for a test: keeper, supervisor, router and workers as real processes, found by their command lines.

Every process that is signalled here is the keeper that this module started, or a child of it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import load_fleet

BIN = Path(sys.executable).parent
DEADLINE_S = 60.0


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The condition's first true value.

    Raises:
        AssertionError: it did not come true in time.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Packages:
    """Simulated packages, built and signed once per test session."""

    folder: Path
    built: dict[tuple[str, ...], Path] = field(default_factory=dict)

    @property
    def key(self) -> Path:
        if not (self.folder / "keys" / "dev.pem").exists():
            command = [str(BIN / "calculet-worker"), "keygen", str(self.folder / "keys"), "--name", "dev"]
            subprocess.run(command, check=True, capture_output=True)
        return self.folder / "keys" / "dev.pem"

    def get(self, recipe: str, *options: str) -> Path:
        wanted = (recipe, *options)
        if wanted not in self.built:
            out = self.folder / f"{recipe}-{len(self.built)}"
            command = [str(BIN / "calculet-worker"), "build-package", recipe, "--out", str(out), "--key", str(self.key), *options]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            self.built[wanted] = out
        return self.built[wanted]


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The first choice's text, chat or completion."""
        choice = self.json()["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])


class Fleet:
    """`calculet up` over a configuration in `folder`; stop it with `stop`, or kill parts of it."""

    tls: ssl.SSLContext | None = None
    """Of clients, where the fleet speaks HTTPS; its certificate is for localhost."""

    def __init__(self, folder: Path, package: Path, trust: Path, *, boards: int = 2, device: str = "sim", **sections: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self.boards = folder, free_port(), [f"board{index}" for index in range(boards)]
        self.alias = "toy"
        options = sections.pop("options", {})
        router = {"listen": f"127.0.0.1:{self.port}", **sections.pop("router", {})}
        config = {
            "schema": "calculet-fleet/v1", "run_dir": "run", "state_dir": "state", "log_dir": "log", "trusted_keys": [str(trust)],
            "router": router, "boards": [{"name": name, "device": device, "options": options} for name in self.boards],
            "models": [{"alias": self.alias, "package": str(package), **sections.pop("model", {})}],
            "supervision": {"heartbeat_ms": 50, **sections.pop("supervision", {})}, **sections,
        }  # fmt: skip
        self.config = folder / "fleet.yaml"
        self.config.write_text(json.dumps(config))
        self.keeper: subprocess.Popen[str] | None = None

    # ---------------------------------------------------------------- life
    def start(self, ready: int | None = None) -> Fleet:
        command = [str(BIN / "calculet"), "up", "--config", str(self.config)]
        with (self.folder / "keeper.log").open("w") as log:
            self.keeper = subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True)
        self.wait_ready(len(self.boards) if ready is None else ready)
        return self

    def wait_ready(self, boards: int, deadline_s: float = DEADLINE_S) -> None:
        try:
            until(lambda: self.ready_boards() >= boards, f"{boards} boards ready", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def ready_boards(self) -> int:
        assert self.keeper is not None
        assert self.keeper.poll() is None, f"calculet up ended with {self.keeper.returncode}\n{self.logs()}"
        status = self.status()
        return sum(board["state"] == "READY" for board in status["boards"]) if status and self.health() == 200 else 0

    def status(self) -> dict[str, Any] | None:
        """What `calculet status --json` shows; None while no supervisor answers."""
        try:
            return call(load_fleet(self.config).control_socket, "status", timeout_s=5)
        except ControlError:
            return None

    def active(self) -> list[int]:
        """Requests admitted on each board, as of its last heartbeat."""
        return [board["active"] or 0 for board in (self.status() or {"boards": []})["boards"]]

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "calculet"), arguments[0], "--config", str(self.config), *arguments[1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def stop(self) -> int:
        """SIGTERM to the keeper; its exit code. Whatever it left is killed and is a failure of the caller's assertions."""
        if self.keeper is None:
            return 0
        family = self.family()
        if self.keeper.poll() is None:
            self.keeper.send_signal(signal.SIGTERM)
        try:
            code = self.keeper.wait(60)
        except subprocess.TimeoutExpired:
            self.keeper.kill()
            code = self.keeper.wait(10)
        for process in family:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        self.keeper = None
        return code

    def __enter__(self) -> Fleet:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---------------------------------------------------------------- processes
    def family(self) -> list[psutil.Process]:
        assert self.keeper is not None
        try:
            return psutil.Process(self.keeper.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def pid(self, role: str, board: str | None = None) -> int | None:
        """Pid of `router`, `supervisor` or a board's `worker`; None while there is none."""
        for process in self.family():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if any(f"calculet_{role}" in part or f"calculet-{role}" in part for part in line) and (board is None or board in line):
                return process.pid
        return None

    def kill(self, role: str, board: str | None = None) -> int:
        """kill -9; the dead pid."""
        pid = self.pid(role, board)
        assert pid is not None, f"no {role} {board or ''} to kill\n{self.logs()}"
        os.kill(pid, signal.SIGKILL)
        return pid

    def pids(self) -> dict[str, int | None]:
        return {"router": self.pid("router"), "supervisor": self.pid("supervisor"), **{b: self.pid("worker", b) for b in self.boards}}

    def leftovers(self) -> list[str]:
        """Socket files that are still there."""
        folder = load_fleet(self.config).run_dir
        return [path.name for path in folder.iterdir() if path.is_socket()] if folder.exists() else []

    def logs(self) -> str:
        paths = [self.folder / "keeper.log", *sorted((self.folder / "log").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in paths if path.exists())

    # ---------------------------------------------------------------- HTTP
    def health(self) -> int:
        try:
            return self.get("/health").status
        except (OSError, http.client.HTTPException):
            return 0

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, headers)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        if self.tls is not None:
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=60, context=self.tls)
        try:
            connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        finally:
            connection.close()

    def completion(self, prompt: str = "Hello", max_tokens: int = 8, **more: Any) -> Answer:
        body = {"model": self.alias, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        return self.post("/v1/completions", body)

    def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> Iterator[str]:
        """The `data:` payloads of a streamed answer; the status must be 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = json.dumps({"model": self.alias, "temperature": 0, **body, "stream": True})
            connection.request("POST", path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().rstrip("\n")
        finally:
            connection.close()
