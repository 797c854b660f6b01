"""A report of 10,000 requests in 40 cells with 110,000 steps: judging, statistics, HTML, PDF and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from builders_perf import a_run_folder, a_step, some_requests

CELLS, COUNT = 40, 250


def main() -> None:
    requests = [
        record for cell in range(CELLS) for record in some_requests(COUNT, seed=cell, ttft_ms=80, case=f"single/p{16 + cell}/o11")
    ]
    steps = [a_step(record.request_id, number * 11 + step, step) for number, record in enumerate(requests) for step in range(11)]
    with tempfile.TemporaryDirectory() as path:
        folder = a_run_folder(Path(path) / "run", requests, steps=steps)
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "calculet_perf.cli", "report", str(folder), "--pdf"], capture_output=True, text=True
        )
        wall = time.monotonic() - start
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((folder / "report.json").read_bytes())
        sizes = ", ".join(f"{name.suffix[1:]} {name.stat().st_size / 1e6:.2f} MB" for name in sorted(folder.glob("report.*")))
    assert report["run"]["counted"] == CELLS * COUNT
    print(f"report of {CELLS * COUNT:,} requests: {wall:.1f} s ({sizes})")


if __name__ == "__main__":
    main()
