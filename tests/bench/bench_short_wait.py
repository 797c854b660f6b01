"""How long a short request waits for the device beside a stream of long prompts and running streams, on the real engine: at most one
part of a long prompt and one decode step, plus what the host does.

By the step trace: from the moment the router has the request to its prompt's submission. The bound is of the same run, since a part
and a step take what the machine's other processes leave them: the longest of each. How often it was kept, and by how much, is printed.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from builders_fleet import Fleet, Packages

from calculet_core.trace import StepTrace

SHORTS, STREAMS, FLOODS, LONG, SHORT, PART = 60, 2, 2, 1_500, 20, 256
SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "scheduler-smollm2.yaml"


def scheduler() -> dict[str, Any]:
    """The shipped one, for which prompts of the context's length are long ones, and cut."""
    shipped: dict[str, Any] = msgspec.yaml.decode(SHIPPED.read_bytes())
    queues = shipped["queues"] | {"short_prefill_max_tokens": 128, "medium_prefill_max_tokens": PART}
    return shipped | {"model_alias": "toy", "queues": queues, "executor": {"max_prefill_tokens_per_job": PART}}


def ask(fleet: Fleet, tokens: int, answer: int, seed: int) -> None:
    prompt = [100 + (seed * 31 + place) % 900 for place in range(tokens)]
    body = {"model": "toy", "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    assert fleet.post("/v1/completions", body).status == 200


def load(fleet: Fleet) -> None:
    """Streams and long prompts without a pause, and beside them one short request after the other, at odd moments."""
    stop, rng = threading.Event(), random.Random(7)

    def keep(tokens: int, answer: int, number: int) -> None:
        while not stop.is_set():
            ask(fleet, tokens, answer, number)

    with ThreadPoolExecutor(STREAMS + FLOODS) as pool:
        busy = [pool.submit(keep, 30, 100, number) for number in range(STREAMS)]
        busy += [pool.submit(keep, LONG, 1, 50 + number) for number in range(FLOODS)]
        for number in range(SHORTS):
            time.sleep(rng.uniform(0.0, 0.3))
            ask(fleet, SHORT, 2, 1_000 + number)
        stop.set()
        for task in busy:
            task.result()


def measure(path: Path) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds: waits of short requests; how long parts of long prompts, and decode steps, were on the device."""
    waits, parts, ticks = [], {}, {}
    for line in path.read_bytes().splitlines():
        step = msgspec.json.decode(line, type=StepTrace)
        at = step.at_ns
        if at.submit_ok is None or at.wait_done is None:
            continue
        if step.kind == "decode":
            ticks[step.job_id] = (at.wait_done - at.submit_ok) / 1e6
        elif step.kv_before > 0 or step.kv_after >= PART:
            parts[step.job_id] = (at.wait_done - at.submit_ok) / 1e6
        elif step.kv_after == SHORT:
            waits.append((at.submit_ok - at.accepted) / 1e6)
    return waits, list(parts.values()), list(ticks.values())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="calculet-bench-") as name:
        folder = Path(name)
        packages = Packages(folder)
        file = folder / "scheduler.yaml"
        file.write_text(json.dumps(scheduler()))
        package, trust = packages.get("smollm2"), packages.key.with_suffix(".pub")
        model = {"scheduler": str(file)}
        with Fleet(folder / "fleet", package, trust, boards=1, device="llamacpp", model=model, trace={"steps": True}) as fleet:
            load(fleet)
        waits, parts, ticks = measure(folder / "fleet" / "log" / "trace" / "steps-board0.jsonl")
        assert len(waits) == SHORTS, f"{len(waits)} of {SHORTS} short requests are in the trace"
        for label, values in (("part of a long prompt", parts), ("decode step", ticks), ("wait of a short request", waits)):
            quantiles = statistics.quantiles(values, n=100)
            longest = f"longest {max(values):.1f} ms, n={len(values)}"
            print(f"{label}: median {quantiles[49]:.1f} ms, P99 {quantiles[98]:.1f} ms, {longest}")
        bound, p99 = max(parts) + max(ticks), statistics.quantiles(waits, n=100)[98]
        print(f"longest part and longest step: {bound:.1f} ms; P99 of the wait over that: {p99 / bound:.2f} (at most 1)")


if __name__ == "__main__":
    main()
