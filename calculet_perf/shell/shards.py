"""The client processes of a run, as their parent sees them: a job is dealt out to them, what they saw comes back."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from calculet_perf.client.observation import Asked, Seen
from calculet_perf.shell.http import Target
from calculet_perf.shell.shard import Job, Report, frame_of, read_frame

START_IN_NS = 150_000_000
"""From dealing a job out to its start: processes decode it and open connections meanwhile."""
PER_REQUEST_NS = 20_000
"""Added for every request, which has to be decoded."""


class ShardError(Exception):
    """The load could not be applied; `code` is one of `outcomes.ERRORS`, or `crash` for a process of ours that died."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Applied:
    """What became of a job."""

    seen: list[Seen]
    start_ns: int
    end_ns: int
    cpu_ns: int = 0
    connections: int = 0


@dataclass(slots=True)
class _Process:
    process: asyncio.subprocess.Process
    stderr: asyncio.Task[bytes]
    jobs: int = 0
    reports: list[Report] = field(default_factory=list)


class Shards:
    """Client processes, one or more. Use as an asynchronous context; leaving it ends them."""

    def __init__(self, target: Target, path: str, timeout_s: float, processes: int = 1) -> None:
        self.target, self.path, self.timeout_s, self.processes = target, path, timeout_s, processes
        self._running: list[_Process] = []

    async def __aenter__(self) -> Shards:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        command = [sys.executable, "-m", "calculet_perf.shell.shard"]
        pipe = asyncio.subprocess.PIPE
        for _ in range(self.processes - len(self._running)):
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 26)
            assert process.stderr is not None
            self._running.append(_Process(process, asyncio.ensure_future(process.stderr.read())))

    async def stop(self) -> None:
        """Close their input, which ends them; whoever does not end in time is killed."""
        running, self._running = self._running, []
        for one in running:
            if one.process.stdin is not None:
                one.process.stdin.close()
        for one in running:
            try:
                await asyncio.wait_for(one.process.wait(), 10)
            except TimeoutError:
                one.process.kill()
                await one.process.wait()
            await one.stderr

    async def apply(
        self, arrival: str, asked: Sequence[Asked], *, concurrency: int = 1, gap_s: float = 0.0,
        progress: Callable[[int], None] | None = None,
    ) -> Applied:  # fmt: skip
        """Send the requests and wait for all of them.

        Args:
            arrival: `closed`, `scheduled` or `groups` (see `shard.Job`). Groups all go through one process, which is what keeps a
                burst together.
            progress: told how many requests ended, as they do.

        Raises:
            ShardError: no connection could be opened, or a process of ours died.
        """
        if not self._running:
            await self._start()
        users = min(concurrency, len(asked)) or 1
        wanted = 1 if arrival == "groups" else min(self.processes, users if arrival == "closed" else len(asked)) or 1
        start_ns = time.monotonic_ns() + START_IN_NS + PER_REQUEST_NS * len(asked)
        jobs = []
        for number in range(wanted):
            share = users // wanted + (number < users % wanted)
            jobs.append(self._job(arrival, list(asked[number::wanted]), max(1, share), gap_s, start_ns))
        applied = Applied([], start_ns, start_ns)
        await asyncio.gather(*(self._one(shard, job, applied, progress) for shard, job in zip(self._running, jobs, strict=False)))
        applied.end_ns = time.monotonic_ns()
        applied.seen.sort(key=lambda seen: seen.index)
        return applied

    def _job(self, arrival: str, asked: list[Asked], concurrency: int, gap_s: float, start_ns: int) -> Job:
        target = self.target
        return Job(
            host=target.host, port=target.port, root=target.root, path=self.path, headers=list(target.headers),
            tls=target.tls, timeout_s=self.timeout_s, arrival=cast(Any, arrival), concurrency=concurrency, start_ns=start_ns,
            gap_s=gap_s, asked=asked,
        )  # fmt: skip

    async def _one(self, shard: _Process, job: Job, applied: Applied, progress: Callable[[int], None] | None) -> None:
        stdin, stdout = shard.process.stdin, shard.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(frame_of(job))
            await stdin.drain()
        except ConnectionError:
            raise await self._crashed(shard) from None
        while True:
            frame = await read_frame(stdout)
            if frame is None:
                raise await self._crashed(shard)
            report = msgspec.msgpack.decode(frame, type=Report)
            applied.seen += report.seen
            if progress is not None and report.seen:
                progress(len(report.seen))
            if report.ended:
                applied.cpu_ns += report.cpu_ns
                applied.connections += report.connections
                if report.failure is not None:
                    raise ShardError(report.failure, report.detail or report.failure)
                return

    async def _crashed(self, shard: _Process) -> ShardError:
        code = await shard.process.wait()
        words = (await shard.stderr).decode(errors="replace").strip().splitlines()
        return ShardError("crash", f"a client process ended with {code}: {words[-1] if words else 'no message'}")
