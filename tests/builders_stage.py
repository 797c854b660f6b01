"""A router process and workers that speak the wire from the test, on one stage."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import zmq
from builders_router import FakeWorker, HttpClient, RouterProcess, a_view

from calculet_core import wire
from calculet_core.config import run_dir_for
from calculet_core.history import Checker
from calculet_core.shell.journal import read_journal

CHAT: dict[str, Any] = {"model": "qwen3", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
PATH = "/v1/chat/completions"


class Stage:
    """A router and its fake workers in one folder; `play` runs a scene against them and checks the router's history."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.routers = folder, list[RouterProcess]()
        self.run_dir = Path(run_dir_for(str(folder / "run"), os.getuid()))
        self.run_dir.mkdir(exist_ok=True)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.workers: list[FakeWorker] = []

    def worker(self, board: str = "board0", **fields: Any) -> FakeWorker:
        epoch = fields.get("epoch", 1)
        worker = FakeWorker(self.context, self.run_dir / f"w-{board}-{epoch}.sock", board, **fields)
        self.workers.append(worker)
        return worker

    def router(self, boards: tuple[str, ...] = ("board0",), **settings: Any) -> RouterProcess:
        router = RouterProcess(self.folder, boards, **settings)
        self.routers.append(router)
        return router

    async def serve(self, *workers: FakeWorker, **settings: Any) -> RouterProcess:
        router = self.router(tuple(worker.board for worker in workers) or ("board0",), **settings)
        router.publish(a_view(*(worker.view() for worker in workers)))
        router.start()
        await router.listening()
        return router

    def play(self, scene: Callable[[Stage], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await scene(self)
            finally:
                for worker in self.workers:
                    worker.close()

        asyncio.run(run())

    def close(self) -> None:
        for router in self.routers:
            router.kill()
        self.context.destroy(linger=0)
        shutil.rmtree(self.run_dir)
        checker = Checker(require_done=False)
        for event in read_journal(self.folder / "log" / "router.jsonl"):
            checker.see(event)
        assert checker.finish() == []


def says(*texts: str, finish: str = "stop") -> Callable[[FakeWorker, wire.Submit], None]:
    return lambda worker, submit: worker.answer(submit, *texts, finish=finish)


def accepts(worker: FakeWorker, submit: wire.Submit) -> None:
    worker.accept(submit)


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def metrics_of(router: RouterProcess) -> str:
    """The router's exposition."""
    client = await HttpClient.connect(router.port)
    client.get("/metrics")
    text = (await client.response())[2].decode()
    client.close()
    return text


async def value_of(router: RouterProcess, sample: str) -> float:
    """One sample of the router's exposition, named as it stands there; 0 when it is not there."""
    for line in (await metrics_of(router)).splitlines():
        if line.startswith(sample + " "):
            return float(line.rpartition(" ")[2])
    return 0.0
