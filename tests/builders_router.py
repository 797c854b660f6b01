"""Builders for the router: calls, views, a dispatcher under a fake clock, a worker that speaks the wire, and a router process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from calculet_core import wire
from calculet_core.clock import MS, FakeClock
from calculet_core.config import AdmissionConfig, RouterConfig, TenantConfig
from calculet_core.shell.link import Frames, bind_router
from calculet_router import actions, events
from calculet_router.aliases import Aliases
from calculet_router.dispatch import Dispatcher
from calculet_router.fleet import Roster
from calculet_router.openai import Call, parse_chat, parse_text
from calculet_router.tenants import Tenants

DIGEST = "d" * 64
DEADLINE_S = 60.0
PASS_ON = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def a_chat(**fields: Any) -> Call:
    return parse_chat(json.dumps({"model": "qwen3", "messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def a_text(**fields: Any) -> Call:
    return parse_text(json.dumps({"model": "qwen3", "prompt": "hi", **fields}).encode())


def a_board(board: str = "board0", epoch: int = 1, **fields: Any) -> wire.BoardView:
    given = {
        "pid": 1, "endpoint": f"ipc:///nowhere/{board}", "state": "READY", "generation": 7, "digest": DIGEST, "alias": "qwen3", **fields,
    }  # fmt: skip
    return wire.BoardView(board=board, epoch=epoch, **given)


def a_view(*boards: wire.BoardView, version: int = 1, digest: str = DIGEST) -> wire.FleetView:
    return wire.FleetView(version, list(boards), [wire.AliasView("qwen3", digest, 40_960, 1_700_000_000, profiles=[1], capability="C0")])


def a_hello(board: str = "board0", epoch: int = 1, **fields: Any) -> wire.WorkerHello:
    given = {"pid": 1, "generation": 7, "digest": DIGEST, "alias": "qwen3", "state": "READY", **fields}
    return wire.WorkerHello(board=board, epoch=epoch, **given)


class Desk:
    """A dispatcher under a fake clock, with what it did so far."""

    def __init__(self, *boards: str, tenant: TenantConfig | None = None, **config: Any) -> None:
        self.clock = FakeClock()
        self.config = RouterConfig(**config)
        tenants = Tenants([tenant or TenantConfig(name="default")])
        self.dispatcher = Dispatcher(5, self.config, Roster(), Aliases({"qwen3": AdmissionConfig()}), tenants)
        self.done: list[actions.Action] = []
        self.seq: dict[tuple[str, int], int] = {}
        self._names = 0
        if boards:
            self.tell(events.ViewPublished(a_view(*(a_board(board) for board in boards))))
            for board in boards:
                self.hello(board)

    def tell(self, event: events.Event) -> list[actions.Action]:
        out = self.dispatcher.handle(event, self.clock.now_ns())
        self.done += out
        return out

    def hello(self, board: str, epoch: int = 1, **fields: Any) -> None:
        self.tell(events.HelloArrived(board, epoch, a_hello(board, epoch, **fields)))

    def ask(self, call: Call | None = None, **fields: Any) -> str:
        self._names += 1
        owner = f"client{self._names}"
        self.tell(events.CallArrived(owner, call or a_chat(stream=True), 1_700_000_000, **fields))
        return owner

    def tick(self, board: str = "board0", epoch: int = 1, seq: int | None = None, **fields: Any) -> list[actions.Action]:
        number = self.seq.get((board, epoch), 0) + 1 if seq is None else seq
        self.seq[board, epoch] = number
        return self.tell(events.TickArrived(board, epoch, wire.Tick(epoch, number, **{"pieces": [], **fields})))

    def accept(self, submit: wire.Submit, board: str = "board0") -> None:
        self.tick(board, submit.epoch, accepted=[wire.Acceptance(submit.request_id, submit.attempt, 3, 10)])

    def refuse(self, submit: wire.Submit, board: str, code: str, retryable: bool = True, retry_after_s: float | None = None) -> None:
        error = wire.ErrorInfo(code, f"{code} on {board}", None, retry_after_s)
        self.tick(board, submit.epoch, refused=[wire.Refusal(submit.request_id, submit.attempt, error, retryable)])

    def token(self, submit: wire.Submit, board: str = "board0", text: str = "x", **fields: Any) -> list[actions.Action]:
        return self.tick(board, submit.epoch, pieces=[wire.Piece(submit.request_id, submit.attempt, 1, text, **fields)])

    def pass_time(self, ms: int) -> list[actions.Action]:
        self.clock.advance(ms * MS)
        return self.tell(events.TimePassed())

    def sent(self, board: str | None = None) -> list[wire.Submit]:
        return [
            action.message
            for action in self.done
            if isinstance(action, actions.Send) and isinstance(action.message, wire.Submit) and board in (None, action.board)
        ]

    def cancels(self, board: str | None = None) -> list[wire.Cancel]:
        return [
            action.message
            for action in self.done
            if isinstance(action, actions.Send) and isinstance(action.message, wire.Cancel) and board in (None, action.board)
        ]

    def all(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.done if type(action) is kind]

    def failures(self) -> list[tuple[str, str]]:
        return [(action.owner, action.error.code) for action in self.all(actions.Fail)]

    def board_of(self, submit: wire.Submit) -> str:
        return next(action.board for action in self.done if isinstance(action, actions.Send) and action.message is submit)


class FakeWorker:
    """A worker's data socket. `on_submit` decides what a submission gets; without it nothing is answered. It talks to the router that
    spoke last."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: Path,
        board: str,
        epoch: int = 1,
        pid: int | None = None,
        on_submit: Callable[[FakeWorker, wire.Submit], None] | None = None,
    ) -> None:
        self.board, self.epoch, self.pid, self.path = board, epoch, pid or os.getpid(), path
        self.on_submit = on_submit
        self.submits: list[wire.Submit] = []
        self.cancels: list[wire.Cancel] = []
        self.leases: list[wire.Lease] = []
        self.state = "READY"
        self._router = b""
        self._seqs: dict[bytes, int] = {}
        self.link = bind_router(context, path, self._on_frames)

    def view(self, **fields: Any) -> wire.BoardView:
        return a_board(self.board, self.epoch, endpoint=f"ipc://{self.path}", pid=self.pid, **fields)

    def hello(self) -> None:
        self.link.send([self._router, *wire.encode(a_hello(self.board, self.epoch, pid=self.pid, state=self.state))])

    @property
    def seq(self) -> int:
        """Of the last tick to that router."""
        return self._seqs.get(self._router, 0)

    def tick(self, **fields: Any) -> None:
        self._seqs[self._router] = self.seq + 1
        self.link.send([self._router, *wire.encode(wire.Tick(self.epoch, self.seq, **{"pieces": [], **fields}))])

    def accept(self, submit: wire.Submit) -> None:
        self.tick(accepted=[wire.Acceptance(submit.request_id, submit.attempt, 3, submit.max_new_tokens or 100)])

    def refuse(self, submit: wire.Submit, code: str, retryable: bool = True, retry_after_s: float | None = None) -> None:
        error = wire.ErrorInfo(code, f"{code}: {self.board} says no", None, retry_after_s)
        self.tick(refused=[wire.Refusal(submit.request_id, submit.attempt, error, retryable)])

    def piece(self, submit: wire.Submit, text: str, tokens: int = 1, **fields: Any) -> None:
        self.tick(pieces=[wire.Piece(submit.request_id, submit.attempt, tokens, text, **fields)])

    def answer(self, submit: wire.Submit, *texts: str, finish: str = "stop") -> None:
        self.accept(submit)
        for text in texts:
            self.piece(submit, text)
        self.piece(submit, "", 0, finish=finish, usage=wire.Usage(3, len(texts)))

    def close(self) -> None:
        self.link.close()
        self.path.unlink(missing_ok=True)

    def _on_frames(self, frames: Frames) -> None:
        identity, kind, body = frames
        message = wire.decode(kind, body)
        if not isinstance(message, wire.Lease):
            self._router = identity
        if isinstance(message, wire.RouterHello):
            self.hello()
        elif isinstance(message, wire.Submit):
            self.submits.append(message)
            if self.on_submit:
                self.on_submit(self, message)
        elif isinstance(message, wire.Cancel):
            self.cancels.append(message)
        elif isinstance(message, wire.Lease):
            self.leases.append(message)


class RouterProcess:
    """A real router for a fleet under `folder`; `log` collects its stderr."""

    def __init__(
        self,
        folder: Path,
        boards: tuple[str, ...] = ("board0",),
        listen: str = "127.0.0.1:0",
        sections: dict[str, Any] | None = None,
        **router: Any,
    ) -> None:
        self.folder = folder
        settings = json.dumps({"listen": listen, "worker_silence_ms": 60_000, **router})
        listed = ", ".join(f"{{name: {board}, device: sim}}" for board in boards)
        self.config = folder / "fleet.yaml"
        self.config.write_text(
            f"schema: calculet-fleet/v1\nrun_dir: run\nstate_dir: state\nlog_dir: log\nrouter: {settings}\n"
            f"boards: [{listed}]\nmodels: [{{alias: qwen3, package: p}}]\n"
            + "".join(f"{name}: {json.dumps(value)}\n" for name, value in (sections or {}).items())
        )
        for name in ("run", "state", "log"):
            (folder / name).mkdir(exist_ok=True)
        self.log: list[str] = []
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    def publish(self, view: wire.FleetView) -> None:
        (self.folder / "state" / "fleet-view.json").write_bytes(msgspec.json.encode(view))

    def start(self, *options: str, listening: socket.socket | None = None) -> None:
        """With `listening` that socket is passed on as systemd would."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("LISTEN_", "NOTIFY_"))}
        command = [sys.executable, "-m", "calculet_router", "run", "--config", str(self.config), *options]
        descriptors: tuple[int, ...] = ()
        if listening is not None:
            descriptors = (listening.fileno(),)
            command = [sys.executable, "-c", PASS_ON, str(listening.fileno()), *command]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, pass_fds=descriptors)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening at=https?://.*:(\d+)", line):
                self.port = int(found.group(1))

    async def listening(self) -> None:
        await until(lambda: self.port or self.process.poll() is not None)
        assert self.port, "".join(self.log)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.001)


@contextmanager
def a_sleeping_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose death can be commanded: it stands for a worker's."""
    process = subprocess.Popen(["sleep", "300"])
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


class HttpClient:
    """Raw HTTP/1.1 over asyncio: what goes over the wire is what the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> HttpClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=16 << 20))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: bytes | dict[str, Any], *headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = "".join(f"{header}\r\n" for header in headers)
        self.send(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{lines}\r\n".encode() + data)

    def get(self, path: str, method: str = "GET") -> None:
        self.send(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        async with asyncio.timeout(DEADLINE_S):
            if headers.get("transfer-encoding") == "chunked":
                return status, headers, b"".join([chunk async for chunk in self.chunks()])
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))

    async def chunks(self) -> Any:
        while size := await self.chunk():
            yield size

    async def chunk(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            size = int(await self.reader.readline(), 16)
            data = await self.reader.readexactly(size)
            await self.reader.readline()
        return data

    async def closed(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    def close(self) -> None:
        self.writer.close()


def events_of(body: bytes) -> list[Any]:
    """The data of a stream's events; `[DONE]` stays text."""
    found: list[Any] = []
    for block in body.split(b"\n\n"):
        if block.startswith(b"data: "):
            data = block.removeprefix(b"data: ")
            found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found
