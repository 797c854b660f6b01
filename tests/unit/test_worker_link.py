"""A router's link to one worker: what it must hear is asked for again and again, not waited for once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from calculet_core import wire
from calculet_core.shell.link import Frames, bind_router
from calculet_router import events
from calculet_router.shell.worker_link import WorkerLink


async def until(condition: Callable[[], Any], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_hello_that_got_lost_is_asked_for_again_while_ticks_keep_coming(tmp_path: Path) -> None:
    """A worker says once that it is Ready; when the connection broke just then, nobody must wait for it for ever."""

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        state, fed = ["WARMING"], list[events.Event]()
        peers: set[bytes] = set()

        def worker(frames: Frames) -> None:
            identity, kind, body = frames
            peers.add(identity)
            if isinstance(wire.decode(kind, body), wire.RouterHello):
                server.send([identity, *wire.encode(wire.WorkerHello("board0", 1, os.getpid(), 1, "d", "toy", state[0]))])

        server = bind_router(context, tmp_path / "w.sock", worker)
        view = wire.BoardView("board0", 1, os.getpid(), f"ipc://{tmp_path / 'w.sock'}", "READY", 1, "d", "toy")
        link = WorkerLink(context, view, 7, 0.05, fed.append, lambda reason: None)

        def heard() -> list[str]:
            return [event.hello.state for event in fed if isinstance(event, events.HelloArrived)]

        await until(lambda: heard() == ["WARMING"])
        state[0] = "READY"  # what it said about that did not arrive
        seq = 0

        def ready_while_it_ticks() -> bool:
            nonlocal seq
            for identity in peers:
                seq += 1
                server.send([identity, *wire.encode(wire.Tick(1, seq, []))])
            return "READY" in heard()

        await until(ready_while_it_ticks)
        link.close()
        server.close()
        context.term()

    asyncio.run(run())


def test_all_that_a_dead_worker_has_said_is_read_before_it_is_declared_dead(tmp_path: Path) -> None:
    """As after a standstill: thousands of messages wait, and the process that sent them is gone."""
    ticks = 5_000

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        fed, peers = list[events.Event](), set[bytes]()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

        def worker(frames: Frames) -> None:
            identity, kind, body = frames
            peers.add(identity)
            if isinstance(wire.decode(kind, body), wire.RouterHello):
                server.send([identity, *wire.encode(wire.WorkerHello("board0", 1, child.pid, 1, "d", "toy", "READY"))])

        server = bind_router(context, tmp_path / "w.sock", worker)
        view = wire.BoardView("board0", 1, child.pid, f"ipc://{tmp_path / 'w.sock'}", "READY", 1, "d", "toy")
        link = WorkerLink(context, view, 7, 60.0, fed.append, lambda reason: None)
        await until(lambda: any(isinstance(event, events.HelloArrived) for event in fed))
        (identity,) = peers
        for seq in range(1, ticks + 1):
            assert server.send([identity, *wire.encode(wire.Tick(1, seq, []))])
        child.kill()
        child.wait()
        await until(lambda: any(isinstance(event, events.WorkerEnded) for event in fed))
        assert isinstance(fed[-1], events.WorkerEnded)
        assert [event.tick.seq for event in fed if isinstance(event, events.TickArrived)] == list(range(1, ticks + 1))
        link.close()
        server.close()
        context.term()

    asyncio.run(run())
