"""A fleet of simulated boards as a whole: start, device busy share, death and return of a worker, resident memory."""

from __future__ import annotations

import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
from builders_fleet import Fleet, Packages, until

from calculet_core import history
from calculet_core.shell.journal import read_journal

SATURATED_S = 60.0
KILLS = 7
WORKER_BYTES = 70 << 20


def spread(values: list[float], unit: str, digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} {unit} [{min(values):.{digits}f}-{max(values):.{digits}f}], n={len(values)}"


def busy_seconds(fleet: Fleet, board: str) -> tuple[float, float]:
    """(monotonic now, seconds the board has been busy)."""
    text = fleet.get("/metrics").body.decode()
    found = re.search(rf'calculet_worker_device_busy_seconds_total{{board="{board}"}} (\S+)', text)
    assert found, "the metric is missing"
    return time.monotonic(), float(found[1])


def busy_share(folder: Path, packages: Packages) -> None:
    """B1 at 15 ms a step, three clients for one board."""
    package = packages.get("sim-b1", "--step-ms", "15", "--lanes", "4")
    with Fleet(folder / "busy", package, packages.key.with_suffix(".pub"), boards=1) as fleet, ThreadPoolExecutor(3) as pool:
        stop = time.monotonic() + SATURATED_S + 2

        def client(number: int) -> None:
            while time.monotonic() < stop:
                assert fleet.completion(f"client {number}", max_tokens=100).status == 200

        clients = [pool.submit(client, number) for number in range(3)]
        until(lambda: busy_seconds(fleet, "board0")[1] > 0.5, "the board is busy")
        start, busy = busy_seconds(fleet, "board0")
        time.sleep(SATURATED_S)
        end, more = busy_seconds(fleet, "board0")
        for one in clients:
            one.result()
    print(f"device busy, B1 at 15 ms a step, {SATURATED_S:g} s saturated: {(more - busy) / (end - start) * 100:.2f} %")


def after(fleet: Fleet, name: str, since_ns: int, **data: object) -> int | None:
    """Nanoseconds from `since_ns` to the first such event of board0 in any journal."""
    events = [event for path in (fleet.folder / "log").glob("*.jsonl") for event in read_journal(path)]
    wanted = data.items()
    times = [e.t for e in events if e.event == name and e.board == "board0" and e.t > since_ns and wanted <= e.data.items()]
    return min(times, default=since_ns) - since_ns or None


def floor_ms() -> list[float]:
    """How long the kernel takes from SIGKILL to a plain process of a worker's size being gone: nobody can see its death sooner."""
    found = []
    for _ in range(KILLS):
        code = f"import time; data = bytearray({WORKER_BYTES}); data[::4096] = b'x' * len(data[::4096]); print(flush=True); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            fd, at = os.pidfd_open(process.pid), time.monotonic_ns()
            process.kill()
            select.select([fd], [], [])
            found.append((time.monotonic_ns() - at) / 1e6)
            os.close(fd)
    return found


def kills(fleet: Fleet) -> None:
    gone, seen, back = [], [], []
    for _ in range(KILLS):
        pid = fleet.pid("worker", "board0")  # finding it takes milliseconds, which are nobody's but ours
        assert pid is not None
        fd, at = os.pidfd_open(pid), time.monotonic_ns()
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        select.select([fd], [], [])
        gone.append(time.monotonic_ns() - at)
        os.close(fd)
        back.append(until(partial(after, fleet, history.BOARD_GENERATION, at, state="READY"), "Ready again"))
        seen.append(until(partial(after, fleet, history.FLEET_WORKER_EXITED, at), "exit journalled"))
        fleet.wait_ready(2)
    print(f"kill -9 of a plain process of that size to its end (the floor): {spread(floor_ms(), 'ms')}")
    print(f"kill -9 of a worker to its end, which the kernel takes: {spread([ns / 1e6 for ns in gone], 'ms')}")
    print(f"kill -9 of a worker to seen by the supervisor: {spread([ns / 1e6 for ns in seen], 'ms')}")
    print(f"from its end to seen: {spread([(s - g) / 1e6 for s, g in zip(seen, gone, strict=True)], 'ms')}")
    print(f"kill -9 of a worker to Ready again: {spread([ns / 1e9 for ns in back], 's', 2)}")


def memory(fleet: Fleet) -> None:
    for name, pid in fleet.pids().items():
        assert pid
        print(f"resident memory, idle, {name}: {psutil.Process(pid).memory_info().rss / 1e6:.0f} MB")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="calculet-bench-") as name:
        folder = Path(name)
        packages = Packages(folder)
        generous = {"restart": {"max_restarts": 100}}
        package = packages.get("sim-batch", "--step-ms", "5")
        fleet = Fleet(folder / "fleet", package, packages.key.with_suffix(".pub"), supervision=generous)
        starts = []
        for _ in range(5):
            start = time.monotonic()
            fleet.start()
            starts.append(time.monotonic() - start)
            fleet.stop()
        print(f"start of a two-board fleet to both Ready: {spread(starts, 's', 2)}")
        with fleet:
            memory(fleet)
            kills(fleet)
        busy_share(folder, packages)


if __name__ == "__main__":
    main()
