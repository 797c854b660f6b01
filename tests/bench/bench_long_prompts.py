"""What long prompts do to running streams: time per output token with and without a stream of 1,500-token prompts, real engine.

Rounds with and without take turns. Cuts of the prompts are the artifact's proven ones; decode keeps its turns between them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from builders_fleet import Fleet, Packages

ROUNDS, STREAMS, REQUESTS, TOKENS, LONG = 3, 4, 12, 48, 1_500


def tpot_ms(fleet: Fleet, number: int) -> float:
    """Mean time per token after the first, by the arrival of a stream's events."""
    body = {"model": "toy", "prompt": f"Request {number}:", "max_tokens": TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    times = [time.perf_counter() for event in fleet.stream(body) if event != "[DONE]"]
    return (times[-1] - times[0]) / (TOKENS - 1) * 1e3


def streams(fleet: Fleet) -> list[float]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: tpot_ms(fleet, number), range(REQUESTS)))


def flood(fleet: Fleet, stop: threading.Event, done: list[int]) -> None:
    while not stop.is_set():
        body = {"model": "toy", "prompt": [100 + (len(done) * 31 + place) % 900 for place in range(LONG)], "max_tokens": 1}
        assert fleet.post("/v1/completions", body).status == 200
        done.append(1)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="calculet-bench-") as name:
        folder = Path(name)
        packages = Packages(folder)
        scheduler = folder / "scheduler.yaml"
        batch = {"profiles": [1, 4, 8, 16]}
        text = {"schema": "calculet-scheduler/v1", "model_alias": "toy", "batch": batch, "executor": {"max_prefill_tokens_per_job": 64}}
        scheduler.write_text(json.dumps(text))
        package, trust = packages.get("smollm2"), packages.key.with_suffix(".pub")
        without: list[float] = []
        beside: list[float] = []
        done: list[int] = []
        model = {"scheduler": str(scheduler)}
        with Fleet(folder / "fleet", package, trust, boards=1, device="llamacpp", model=model) as fleet:
            streams(fleet)
            for _ in range(ROUNDS):
                without += streams(fleet)
                stop = threading.Event()
                thread = threading.Thread(target=flood, args=(fleet, stop, done))
                thread.start()
                beside += streams(fleet)
                stop.set()
                thread.join()
        before, now = (statistics.quantiles(values, n=100) for values in (without, beside))
        print(f"{STREAMS} streams, time per output token: P50 {before[49]:.1f} ms, P99 {before[98]:.1f} ms")
        print(f"beside {len(done)} prompts of {LONG} tokens: P50 {now[49]:.1f} ms, P99 {now[98]:.1f} ms")
        print(f"P99 with / without: {now[98] / before[98]:.2f}")


if __name__ == "__main__":
    main()
