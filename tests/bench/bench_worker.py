"""What a worker costs: CPU per one-token request, by its own process clock, split into user and kernel time.

A real worker process with a simulated board whose steps take no time, and one router, played by hand, that keeps so many requests
outstanding: 1 (each pays for being woken), 8, and 64 (the board is never idle). Chunks of requests are measured one by one; the
least and the median are told, since other processes only ever add.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from builders_fleet import Packages
from builders_worker import ROUTER, Peer, WorkerProcess, a_fleet, a_submit

from calculet_core import wire
from calculet_core.requests import Prompt

PROMPT = "The quick brown fox jumps over the lazy dog. " * 5
OUTSTANDING = (1, 8, 64)


def ask(router: Peer, report: wire.WorkerReport, numbers: range, outstanding: int) -> None:
    """One request for each number, at most so many unanswered at a time.

    Raises:
        SystemExit: an answer is not one token.
    """
    left, open_requests, acknowledged, prompt = iter(numbers), 0, 0, Prompt(text=PROMPT)
    for number in (next(left) for _ in range(min(outstanding, len(numbers)))):
        router.send(a_submit(report, number, prompt, max_new_tokens=1))
        open_requests += 1
    while open_requests:
        message = router.receive(20.0)
        if message is None:
            raise SystemExit("the worker does not answer")
        router.seen.clear()
        if not isinstance(message, wire.Tick):
            continue
        if message.refused or any(piece.finish != "length" for piece in message.pieces):
            raise SystemExit(f"not an answer: {message}")
        for _ in message.pieces:
            open_requests -= 1
            if (number := next(left, None)) is not None:
                router.send(a_submit(report, number, prompt, max_new_tokens=1))
                open_requests += 1
        if message.seq - acknowledged >= 100:
            acknowledged = message.seq
            router.send(wire.Lease(ROUTER, report.epoch, message.seq))


def bench(chunks: int, size: int, depths: list[int]) -> dict[str, dict[str, float]]:
    """By how many were outstanding: microseconds a request."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        packages = Packages(Path(name))
        package = packages.get("sim-batch", "--step-ms", "0")
        worker = WorkerProcess(a_fleet(Path(name), package, packages.key.with_suffix(".pub")))
        try:
            report = worker.load()
            router, process, first = worker.router(report.endpoint), psutil.Process(worker.process.pid), 1
            ask(router, report, range(first, first := first + 300), 8)
            for outstanding in depths:
                spent, kernel = [], []
                start = time.monotonic()
                for _ in range(chunks):
                    before = process.cpu_times()
                    cpu = time.clock_gettime((~process.pid << 3) | 2)
                    ask(router, report, range(first, first := first + size), outstanding)
                    spent.append((time.clock_gettime((~process.pid << 3) | 2) - cpu) / size * 1e6)
                    kernel.append((process.cpu_times().system - before.system) / size * 1e6)
                seconds = time.monotonic() - start
                found[str(outstanding)] = {
                    "us_median": statistics.median(spent), "us_least": min(spent), "us_kernel": statistics.mean(kernel),
                    "requests_per_s": chunks * size / seconds,
                }  # fmt: skip
        finally:
            worker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--size", type=int, default=500, help="requests a chunk")
    parser.add_argument("--outstanding", type=int, nargs="+", default=OUTSTANDING)
    options = parser.parse_args()
    for outstanding, figures in bench(options.chunks, options.size, options.outstanding).items():
        print(outstanding, "outstanding:", json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
