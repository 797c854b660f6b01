"""A worker without a device, for tests of those who start and watch workers: it speaks the wire, and misbehaves when it is told to.

`stub-BOARD` in the state folder names how: `exit CODE` at start, `silent` (never reports), `hang` (reports a job that makes no step),
`mute` (stops reporting once ready), `reset` (wants one reset), `child` (leaves a child in its group). Nothing: it is well.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from calculet_core import wire
from calculet_core.shell.death_pipe import watch_death_pipe
from calculet_core.shell.files import FileLock, LockHeld, next_number, write_atomic
from calculet_core.shell.fleet import Fleet, load_fleet
from calculet_core.shell.link import Frames, bind_router, connect_dealer
from calculet_core.shell.stacks import keep_stacks

HEARTBEAT_S = 0.05


@dataclass
class Stub:
    fleet: Fleet
    board: str
    epoch: int
    behaviour: str
    state: dict[str, Any] = field(default_factory=lambda: {"state": "UNLOADED", "command_seq": 0})

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end)
        watch_death_pipe(self.end)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        path = self.fleet.worker_socket(self.board, self.epoch)
        data = bind_router(context, path, self.from_router)
        self.data = data
        self.supervisor = connect_dealer(context, str(self.fleet.supervisor_socket), self.command)
        if self.behaviour == "child":
            subprocess.Popen(["sleep", "1000"])
        while not self.ended.done():
            self.report()
            await asyncio.wait([self.ended], timeout=HEARTBEAT_S)
        data.close()
        self.supervisor.close()
        context.destroy(linger=0)
        path.unlink(missing_ok=True)

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def report(self) -> None:
        silent = self.behaviour == "silent" or (self.behaviour == "mute" and self.state["state"] == "READY")
        if not silent:
            fields = {"inflight": 1, "steps": 3} if self.behaviour == "hang" else {}
            endpoint = f"ipc://{self.fleet.worker_socket(self.board, self.epoch)}"
            report = wire.WorkerReport(
                self.board, self.epoch, os.getpid(), wire.PROTOCOL, endpoint, lanes={"FREE": 4}, **{**self.state, **fields}
            )
            self.supervisor.send(wire.encode(report))

    def command(self, frames: Frames) -> None:
        message: Any = wire.decode(*frames)
        if message.seq <= self.state["command_seq"]:
            return
        self.state["command_seq"] = message.seq
        if isinstance(message, wire.LoadModel):
            ready = {"state": "READY", "generation": message.generation, "digest": message.digest, "alias": message.alias}
            self.state |= ready if self.behaviour != "reset" else {**ready, "state": "RECOVERING", "wants_reset": True, "fault": "wait_timeout"}
        elif isinstance(message, wire.GrantReset):
            self.state |= {"state": "READY", "generation": message.generation, "wants_reset": False, "fault": None}
        elif isinstance(message, wire.DenyReset):
            self.state |= {"state": "FAILED", "wants_reset": False, "condemned": message.reason}
        elif isinstance(message, wire.DrainBoard | wire.ResumeBoard):
            self.state["draining"] = isinstance(message, wire.DrainBoard)
        elif isinstance(message, wire.StopWorker):
            self.end()
        self.report()

    def from_router(self, frames: Frames) -> None:
        identity, kind, body = frames
        message = wire.decode(kind, body)
        if isinstance(message, wire.RouterHello | wire.Lease):
            known = {name: self.state.get(name, default) for name, default in (("generation", 0), ("digest", ""), ("alias", ""), ("state", ""))}
            self.data.send([identity, *wire.encode(wire.WorkerHello(self.board, self.epoch, os.getpid(), **known))])


def main() -> int:
    fleet, board = load_fleet(Path(sys.argv[sys.argv.index("--config") + 1])), sys.argv[sys.argv.index("--board") + 1]
    told = fleet.state_dir / f"stub-{board}"
    behaviour = told.read_text().strip() if told.exists() else ""
    try:
        lock = FileLock(fleet.board_lock(board))
    except LockHeld as error:
        print(error, file=sys.stderr)
        return 75
    epoch = next_number(fleet.board_epoch(board))
    keep_stacks(fleet.stacks(f"worker-{board}"), f"board {board} epoch {epoch} pid {os.getpid()}")
    code = int(behaviour.split()[1]) if behaviour.startswith("exit") else 0
    print(f"stub of {board}: epoch {epoch}, told {behaviour!r}", file=sys.stderr)
    if not code:
        asyncio.run(Stub(fleet, board, epoch, behaviour).run())
    write_atomic(fleet.board_exit(board), json.dumps({"code": code, "reason": f"told {behaviour!r}", "epoch": epoch}).encode())
    lock.release()
    return code


if __name__ == "__main__":
    sys.exit(main())
