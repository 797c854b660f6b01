"""M1 (scheduling §19): one job in flight against the synchronous reference, which submits and waits on one thread.

The same seeded prompts go to both, in rounds that take turns. Tokens must be the same; P50 and P99 of a request's whole time and
of its time per token may be 3 % and 5 % worse at most. Simulated board, B16, 15 ms a step. Shortened: M1 itself is a laboratory's.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from builders_fleet import Fleet, Packages

ROUNDS, CLIENTS, REQUESTS, TOKENS = 4, 8, 64, 32
GATES = {50: 1.03, 99: 1.05}


def a_fleet(folder: Path, package: Path, trust: Path, synchronous: bool) -> Fleet:
    scheduler = folder / "scheduler.yaml"
    folder.mkdir(parents=True)
    scheduler.write_text(json.dumps({"schema": "calculet-scheduler/v1", "model_alias": "toy", "batch": {"profiles": [1, 4, 8, 16]}}))
    fleet = Fleet(folder, package, trust, boards=1, model={"scheduler": str(scheduler)})
    config = json.loads(fleet.config.read_text())
    config["boards"][0]["synchronous"] = synchronous
    fleet.config.write_text(json.dumps(config))
    return fleet.start()


def measure(fleet: Fleet, seed: int) -> tuple[list[str], list[float]]:
    """(answers, milliseconds of each request)."""

    def ask(number: int) -> tuple[str, float]:
        start = time.perf_counter()
        answer = fleet.completion(f"prompt {seed} {number}", max_tokens=TOKENS)
        assert answer.status == 200, answer.body
        return answer.text, (time.perf_counter() - start) * 1e3

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    return [text for text, _ in answers], [ms for _, ms in answers]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="calculet-bench-") as name:
        folder = Path(name)
        packages = Packages(folder)
        package, trust = packages.get("sim-batch", "--step-ms", "15"), packages.key.with_suffix(".pub")
        reference = a_fleet(folder / "sync", package, trust, True)
        candidate = a_fleet(folder / "async", package, trust, False)
        times: dict[str, list[float]] = {"sync": [], "async": []}
        try:
            for index in range(ROUNDS):
                pair = [("sync", reference), ("async", candidate)]
                found = {}
                for label, fleet in pair if index % 2 else reversed(pair):
                    found[label], spent = measure(fleet, index)
                    times[label] += spent
                if found["sync"] != found["async"]:
                    raise SystemExit("tokens differ from the synchronous reference")
        finally:
            reference.stop()
            candidate.stop()
        print(f"{ROUNDS * REQUESTS} requests of {TOKENS} tokens, {CLIENTS} clients: every answer is the reference's")
        for percent, gate in GATES.items():
            before, now = (statistics.quantiles(times[label], n=100)[percent - 1] for label in ("sync", "async"))
            verdict = "within" if now <= before * gate else "OVER"
            print(f"P{percent} of a request: {now:.1f} ms against {before:.1f} ms, {now / before:.3f} ({verdict} {gate})")


if __name__ == "__main__":
    main()
