"""Loads of the stability stages (acceptance §13), as segments: what runs next, for about how long.

A stage is one long load. It is cut into segments so that records reach the disk, so that bursts come periodically, and so that
there are short moments in which nothing runs and counted resources must be back at their baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from calculet_perf.workloads.cells import Cell, Shape

Form = Literal["closed", "poisson", "mixed"]
MIXED = (Shape(128, 32, "short", 0.7), Shape(2048, 128, "medium", 0.2), Shape(16384, 256, "long", 0.1))
"""Acceptance §6.3; what does not fit the served context is left out, and the shares of the rest grow."""
SHORT = Shape(128, 32)
BURST_SIZES = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage's load. `share` is of the target rate; `burst_every`: each so-manieth segment is a burst, 0: never."""

    form: Form
    share: float | None
    burst_every: int = 0


LOADS: dict[str, StageLoad] = {
    "smoke": StageLoad("closed", None),
    "dev": StageLoad("poisson", 0.7),
    "candidate": StageLoad("mixed", 1.0, burst_every=4),
    "release": StageLoad("poisson", 1.0, burst_every=12),
    "endurance": StageLoad("mixed", 0.7, burst_every=12),
}
"""By the stage's name in the rules. `smoke` is one user; the others need a target rate."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What runs next."""

    cell: Cell
    count: int


def segment(
    load: StageLoad, stage: str, number: int, target_qps: float | None, seconds: float, context: int | None, per_s: float
) -> Segment:
    """Segment `number` of a stage, for about so many seconds.

    Args:
        per_s: requests per second of the closed loop so far; the first segments guess.
    """
    name = f"soak/{stage}"
    if load.burst_every and number % load.burst_every == load.burst_every - 1:
        size = BURST_SIZES[(number // load.burst_every) % len(BURST_SIZES)]
        shape = fitting((SHORT,), context)[0]
        burst = Shape(shape.prompt, shape.output, count=size)
        cell = Cell(
            id=f"{name}/burst/b{size}", kind="soak", arrival="burst", shapes=(burst,), stream=True, sampling="greedy",
            asked_requests=None, concurrency=size,
        )  # fmt: skip
        return Segment(cell, size * 4)
    if load.form == "closed":
        cell = Cell(
            id=f"{name}/c1", kind="soak", arrival="closed", shapes=fitting((SHORT,), context), stream=True, sampling="greedy",
            asked_requests=None, concurrency=1,
        )  # fmt: skip
        return Segment(cell, max(2, round(per_s * seconds)))
    assert target_qps is not None and load.share is not None
    qps = target_qps * load.share
    cell = Cell(
        id=f"{name}/q{qps:g}", kind="soak", arrival="poisson", shapes=fitting(MIXED if load.form == "mixed" else (SHORT,), context),
        stream=True, sampling="greedy", asked_requests=None, qps=qps,
    )  # fmt: skip
    return Segment(cell, max(2, round(qps * seconds)))


def fitting(shapes: tuple[Shape, ...], context: int | None) -> tuple[Shape, ...]:
    """The shapes that the context holds; when it holds none, the smallest, cut to fit."""
    fits = tuple(shape for shape in shapes if context is None or shape.prompt + shape.output <= context)
    if fits:
        return fits
    assert context is not None
    return (Shape(max(1, context // 2), max(1, min(shapes[0].output, context // 4))),)
