"""A model swap on four simulated boards under load: failed requests, what the swap adds to the boards' own time, and the way back."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from builders_fleet import Fleet, Packages, until
from builders_swap import Load, ask, rollout, until_over

from calculet_core import history
from calculet_core.shell.journal import read_journal

SWAPS = 6
CLIENTS = 16


def spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.0f} {unit} [{min(values):.0f}-{max(values):.0f}], n={len(values)}"


def own_s(fleet: Fleet, since_ns: int) -> float:
    """Seconds that the boards themselves needed: drain and unload, then load, golden cases and warm-up."""
    total = 0.0
    for board in fleet.boards:
        at = {
            event.data["state"]: event.t
            for event in read_journal(fleet.folder / "log" / f"worker-{board}.jsonl")
            if event.event == history.BOARD_GENERATION and event.t >= since_ns
        }
        total += (at["UNLOADED"] - at["DRAINING"] + at["READY"] - at["VALIDATING"]) / 1e9
    return total


def step_s(found: dict[str, Any], words: str) -> float:
    return next(float(step["wall_s"]) for step in found["log"] if words in step["text"])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="calculet-bench-") as name:
        folder = Path(name)
        packages = Packages(folder)
        blue, green = packages.get("sim-batch", "--step-ms", "5"), packages.get("sim-b1", "--step-ms", "2", "--lanes", "16")
        with Fleet(folder / "fleet", blue, packages.key.with_suffix(".pub"), boards=4) as fleet:
            overheads, backs = [], []
            with Load(fleet, CLIENTS) as load:
                load.more(CLIENTS)
                for number in range(SWAPS):
                    since_ns = time.monotonic_ns()
                    package = (green, blue)[number % 2]
                    found = until_over(fleet, ask(fleet, "load", alias="toy", package=str(package))["rollout"])
                    assert found["state"] == "DONE", found["reason"]
                    time.sleep(0.3)
                    overheads.append((found["ended"] - found["begun"] - own_s(fleet, since_ns)) / len(fleet.boards) * 1000)
            print(f"{CLIENTS} clients, {len(load.answers)} answers, {len(load.failed)} failed, never fewer than {load.fewest} of 4 boards")
            with Load(fleet, CLIENTS) as load:
                for _ in range(SWAPS):
                    begun = ask(fleet, "load", alias="toy", package=str(green))["rollout"]
                    until(lambda: rollout(fleet)["state"] == "DRAINING_BLUE", "the alias has moved")
                    ask(fleet, "rollback", alias="toy")
                    found = until_over(fleet, begun)
                    back = [step for step in found["log"] if "every router" in step["text"]][-1]["wall_s"]
                    backs.append((back - step_s(found, "rolls back: ")) * 1000)
            print(f"rolled back in the middle: {len(load.answers)} answers, {len(load.failed)} failed")
            print(f"a swap beyond the boards' own drain, load and golden time: {spread(overheads, 'ms a board')}")
            print(f"rollback while blue boards remain, command to last router's acknowledgement: {spread(backs, 'ms')}")


if __name__ == "__main__":
    main()
