"""The order of a run (acceptance §8), worked out before anything is sent: which cells in which rounds, with how many samples,
what is cut short against the specification, and how long it will take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from calculet_perf.manifest import Manifest
from calculet_perf.runinfo import NotApplicable, Shortened
from calculet_perf.workloads.cells import Cell, Shape, expand
from calculet_perf.workloads.facts import ServerFacts
from calculet_perf.workloads.matrix import Assume, Matrix

IDLE_S, MIN_SAMPLES, SHORT_SAMPLES, WARMUPS = 300, 30, 100, 10
"""What acceptance §8 asks for: idle seconds, samples of a case, samples of a short case, warm-ups of a model and shape."""
REFUSALS = 3
"""A boundary refusal is a matter of policy and not of time: so many samples show it."""
OVERHEAD_S = 0.01


@dataclass(frozen=True, slots=True)
class Item:
    """One cell in one round."""

    cell: Cell
    round: int
    count: int

    @property
    def name(self) -> str:
        """As `RunInfo.planned` lists it."""
        return f"{self.cell.id}#{self.round}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, in order."""

    items: list[Item]
    not_applicable: list[NotApplicable]
    shortened: list[Shortened]
    warmups: int
    """Per shape, before its first measured cell; a cell with more users gets as many as it has users."""
    idle_s: float
    seconds: float
    """Estimate by the matrix's `assume`."""
    unmeasured: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cut:
    """Wishes of the command line that shorten a run; every one is labelled."""

    idle_s: float | None = None
    max_requests: int | None = None
    warmups: int | None = None
    only: str | None = None
    """Only cells whose name contains this."""


def build_plan(manifest: Manifest, matrix: Matrix, facts: ServerFacts, cut: Cut | None = None) -> Plan:
    """The plan of a manifest on a server.

    Cells are shuffled anew in each round by the manifest's seed, so that drifting temperature meets all of them (acceptance §8.5).
    """
    cut = cut or Cut()
    cells, lost = expand(matrix, facts)
    if cut.only is not None:
        cells = [cell for cell in cells if cut.only in cell.id]
    short: list[Shortened] = []
    idle_s = matrix.idle_s if cut.idle_s is None else cut.idle_s
    warmups = manifest.warmup_requests if cut.warmups is None else cut.warmups
    if idle_s < IDLE_S:
        short.append(Shortened(what="idle sampling", asked=IDLE_S, done=idle_s, unit="s", clause="8.2"))
    if warmups < WARMUPS:
        short.append(Shortened(what="warm-up of each shape", asked=WARMUPS, done=warmups, unit="requests", clause="8.4"))
    counts: dict[str, int] = {}
    for cell in cells:
        wanted, counts[cell.id] = samples(cell, manifest, matrix, cut)
        if counts[cell.id] < wanted:
            what = f"samples of {cell.id}"
            short.append(Shortened(what=what, asked=wanted, done=counts[cell.id], unit="requests", clause="8.6"))
    rng = random.Random(f"{manifest.seed}/order")
    items = []
    for round_ in range(matrix.rounds):
        order = list(cells)
        rng.shuffle(order)
        for cell in order:
            # Whole bursts, and never fewer requests than users: a round must reach the load that the cell is about.
            count = _share(counts[cell.id] // cell.group, matrix.rounds, round_) * cell.group
            if count:
                items.append(Item(cell, round_, max(count, cell.concurrency or 1)))
    return Plan(items, lost, short, warmups, idle_s, estimate(items, matrix, warmups, idle_s))


def samples(cell: Cell, manifest: Manifest, matrix: Matrix, cut: Cut) -> tuple[int, int]:
    """(what the specification asks for, what is planned) of a cell over all rounds."""
    if cell.expect_refusal:
        return 0, min(REFUSALS, cut.max_requests or REFUSALS)
    is_short = all(shape.prompt <= matrix.short.prompt and shape.output <= matrix.short.output for shape in cell.shapes)
    wanted = SHORT_SAMPLES if is_short else MIN_SAMPLES
    planned = cell.asked_requests or (manifest.measured_requests if is_short else matrix.min_requests)
    if cut.max_requests is not None:
        planned = min(planned, cut.max_requests)
    return wanted, -(-planned // cell.group) * cell.group


def warm_shapes(cell: Cell, warmed: set[tuple[int, int]]) -> list[Shape]:
    """The cell's shapes that were not warmed up yet in this session; a refused shape never reaches a device."""
    if cell.expect_refusal:
        return []
    return [shape for shape in dict.fromkeys(cell.shapes) if (shape.prompt, shape.output) not in warmed]


def estimate(items: list[Item], matrix: Matrix, warmups: int, idle_s: float) -> float:
    """Seconds, by assumed speeds: golden, idle, warm-ups, cells and gaps."""
    assume, total, warmed = matrix.assume, idle_s, set[tuple[int, int]]()
    total += 4 * sum(service_s(Shape(prompt, matrix.golden.output), assume) for prompt in matrix.golden.prompts)
    for item in items:
        total += matrix.gap_s
        for shape in warm_shapes(item.cell, warmed):
            warmed.add((shape.prompt, shape.output))
            total += warmups * service_s(shape, assume)
        total += cell_s(item, assume)
    return total


def cell_s(item: Item, assume: Assume) -> float:
    """Seconds of one cell in one round."""
    cell = item.cell
    if cell.expect_refusal:
        return item.count * OVERHEAD_S
    weight = sum(shape.share * shape.count for shape in cell.shapes)
    each = sum(service_s(shape, assume) * shape.share * shape.count / weight for shape in cell.shapes)
    users = cell.concurrency or assume.lanes
    busy = item.count * each / min(users, assume.lanes)
    return max(busy, item.count / cell.qps) if cell.qps else busy


def service_s(shape: Shape, assume: Assume) -> float:
    """Seconds of one request that is alone."""
    return OVERHEAD_S + shape.prompt / assume.prefill_tokens_per_s + shape.output / assume.decode_tokens_per_s


def _share(count: int, rounds: int, round_: int) -> int:
    """A round's part of a count: as equal as whole numbers allow."""
    return count // rounds + (round_ < count % rounds)
