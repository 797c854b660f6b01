"""One client process: takes a job (requests and their arrival), sends what it saw.

The parent plans and writes; here nothing happens but load. Frames on stdin and stdout are four bytes of length and MessagePack.
Schedules are absolute CLOCK_MONOTONIC times, which all processes of a host share, so that several processes keep one schedule.
End of input means that the parent is gone or wants no more: what is in flight ends as `client_interrupted`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
import uvloop

from calculet_perf.client.observation import Asked, Seen
from calculet_perf.shell.http import AskError, HttpClient, Target
from calculet_perf.shell.timer import Timer, sleep_until
from calculet_perf.shell.tls import TlsSettings

LEAD_NS = 20_000_000
BATCH_S, BATCH = 0.5, 64
"""What was seen is handed over this often, or when so many have ended: every handing over wakes this process and its parent."""


class Job(msgspec.Struct, kw_only=True):
    """One cell's share of one process."""

    host: str
    port: int
    root: str
    path: str
    headers: list[tuple[str, str]]
    tls: TlsSettings | None = None
    timeout_s: float
    arrival: Literal["closed", "scheduled", "groups"]
    concurrency: int
    """Closed: how many at a time. Others: connections to open before the start."""
    start_ns: int
    """Scheduled: the absolute time that offsets count from; others begin then."""
    gap_s: float = 0.0
    """Groups: pause between them."""
    asked: list[Asked]


class Report(msgspec.Struct, kw_only=True):
    """Frame from a process: some requests, and with the last one its own cost."""

    seen: list[Seen]
    ended: bool = False
    failure: str | None = None
    """Nothing could be sent at all: a code of `outcomes.ERRORS`."""
    detail: str | None = None
    cpu_ns: int = 0
    connections: int = 0


class Load:
    """Runs one job; `tell` gets each request's outcome."""

    def __init__(self, job: Job, tell: Callable[[Seen], None]) -> None:
        target = Target(job.host, job.port, job.root, tuple(job.headers), job.tls)
        self.client = HttpClient(target, timeout_s=job.timeout_s)
        self._job, self._tell, self._stopped = job, tell, False
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until every request has ended.

        Raises:
            AskError: not even the connections could be opened.
        """
        job = self._job
        await self.client.prepare(min(job.concurrency, len(job.asked)))
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "closed": self._closed, "scheduled": self._scheduled, "groups": self._groups,
        }  # fmt: skip
        try:
            await kinds[job.arrival]()
        finally:
            self.client.close()

    def stop(self) -> None:
        """Send nothing more; what is in flight ends as `client_interrupted`."""
        self._stopped = True
        if not self._stop.done():
            self._stop.set_result(None)
        self.client.interrupt()

    async def _one(self, asked: Asked, scheduled_ns: int | None = None) -> None:
        self._tell(await self.client.ask(asked, self._job.path, scheduled_ns))

    async def _closed(self) -> None:
        await sleep_until(self._job.start_ns)
        todo = iter(self._job.asked)

        async def user() -> None:
            for asked in todo:
                if self._stopped:
                    return
                await self._one(asked)

        await asyncio.gather(*(user() for _ in range(self._job.concurrency)))

    async def _scheduled(self, asked: list[Asked] | None = None, start_ns: int | None = None) -> None:
        """Each request at its own absolute time, whatever became of the others."""
        loop = asyncio.get_running_loop()
        todo = sorted(self._job.asked if asked is None else asked, key=lambda one: one.offset_ns)
        start = self._job.start_ns if start_ns is None else start_ns
        tasks: set[asyncio.Task[None]] = set()
        place, over = 0, loop.create_future()

        def due() -> None:
            nonlocal place
            now = time.monotonic_ns()
            while place < len(todo) and not self._stopped and start + todo[place].offset_ns <= now:
                one = todo[place]
                place += 1
                tasks.add(loop.create_task(self._one(one, start + one.offset_ns)))
            if place < len(todo) and not self._stopped:
                timer.at(start + todo[place].offset_ns)
            elif not over.done():
                over.set_result(None)

        timer = Timer(loop, due)
        try:
            due()
            await asyncio.wait([over, self._stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.close()
        if tasks:
            await asyncio.gather(*tasks)

    async def _groups(self) -> None:
        groups: dict[int, list[Asked]] = {}
        for asked in self._job.asked:
            groups.setdefault(asked.group, []).append(asked)
        start = self._job.start_ns
        for group in groups.values():
            if self._stopped:
                return
            await self._scheduled(group, start)
            start = time.monotonic_ns() + LEAD_NS + int(self._job.gap_s * 1e9)


# ---------------------------------------------------------------- process
async def serve() -> None:
    """Jobs from stdin until its end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    coming = asyncio.ensure_future(read_frame(reader))
    while (frame := await coming) is not None:
        coming = asyncio.ensure_future(read_frame(reader))
        await _run(msgspec.msgpack.decode(frame, type=Job), coming)


async def _run(job: Job, coming: asyncio.Future[bytes | None]) -> None:
    """One job; it is given up when `coming` says that the input has ended."""
    pending: list[Seen] = []

    def told(seen: Seen) -> None:
        pending.append(seen)
        if len(pending) >= BATCH:
            hand_over()

    def hand_over() -> None:
        _send(Report(seen=pending[:]))
        pending.clear()

    load = Load(job, told)
    running = asyncio.ensure_future(load.run())
    collected = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    before = _cpu_ns()
    try:
        while not running.done():
            waited: list[asyncio.Future[Any]] = [running] if coming.done() else [running, coming]
            await asyncio.wait(waited, timeout=BATCH_S, return_when=asyncio.FIRST_COMPLETED)
            if coming.done() and coming.result() is None and not running.done():
                load.stop()
                await asyncio.wait([running], timeout=5)
                break
            if pending:
                hand_over()
    finally:
        if collected:
            gc.enable()
        gc.unfreeze()
    failure = running.exception() if running.done() else None
    last = Report(seen=pending, ended=True, cpu_ns=_cpu_ns() - before, connections=load.client.opened)
    if isinstance(failure, AskError):
        last.failure, last.detail = failure.code, str(failure)
    elif failure is not None:
        raise failure
    _send(last)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None at the end of input."""
    try:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
    except asyncio.IncompleteReadError:
        return None


def frame_of(message: msgspec.Struct) -> bytes:
    """Length and MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def _send(report: Report) -> None:
    view = memoryview(frame_of(report))
    while view:
        view = view[os.write(1, view) :]


def _cpu_ns() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int((usage.ru_utime + usage.ru_stime) * 1e9)


def main() -> None:
    """Ctrl-C is the parent's business: it closes our input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(serve())


if __name__ == "__main__":
    main()
