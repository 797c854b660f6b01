"""Joining 1,000,000 step records to their requests, from lines on disk; and the memory that it takes.

Steps are those of 8,000 requests of 125 tokens at B8, written as a worker writes them: all lanes of a job after one another.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from builders_perf import a_request, a_step

from calculet_perf.joins import StepJoin
from calculet_perf.records import Batch, StepRecord, to_line
from calculet_perf.shell.run_dir import read_lines

LANES, TOKENS, GROUPS = 8, 125, 1_000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        with path.open("wb") as file:
            for group in range(GROUPS):
                for step in range(TOKENS):
                    for lane in range(LANES):
                        batch = Batch(compiled=LANES, active=LANES)
                        file.write(to_line(a_step(f"request-{group * LANES + lane}", group * TOKENS + step, step, batch=batch)))
        before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        start, cpu = time.monotonic(), time.process_time()
        join = StepJoin()
        for record in read_lines(path, StepRecord):
            join.add(record)
        complete = 0
        for number in range(GROUPS * LANES):
            complete += join.apply(a_request(f"request-{number}", ttft_ms=60, tokens=TOKENS)).quality.server_trace_joined
        wall, used = time.monotonic() - start, time.process_time() - cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert join.steps == GROUPS * LANES * TOKENS and complete == GROUPS * LANES and join.unmatched() == 0
    print(f"join of {join.steps:,} steps: {wall:.1f} s ({used:.1f} s CPU), peak {peak_mb:.0f} MB ({before_mb:.0f} MB before)")


if __name__ == "__main__":
    main()
