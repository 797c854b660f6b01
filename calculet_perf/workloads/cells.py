"""From the matrix to its cells. A cell that the served artifact cannot have is listed as not applicable, never dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from calculet_perf.runinfo import NotApplicable
from calculet_perf.workloads.facts import ServerFacts
from calculet_perf.workloads.matrix import (
    Boundary,
    Burst,
    CellSpec,
    Closed,
    DecodeHeavy,
    Interference,
    Lanes,
    Matrix,
    Mixed,
    Poisson,
    PrefillHeavy,
    Single,
)


class Shape(msgspec.Struct, frozen=True):
    """One class of a cell's requests. Groups: `count` of them `after_ms` after the group's begin; else drawn by `share`."""

    prompt: int
    output: int
    name: str | None = None
    share: float = 1.0
    count: int = 1
    after_ms: float = 0.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One case of the matrix."""

    id: str
    kind: str
    arrival: Literal["single", "closed", "poisson", "burst"]
    shapes: tuple[Shape, ...]
    stream: bool
    sampling: Literal["greedy", "sampled"]
    asked_requests: int | None
    """The matrix's own number; None: by the rule of acceptance §8.6."""
    concurrency: int | None = None
    qps: float | None = None
    expect_refusal: bool = False
    active_lanes: int | None = None
    profile: int | None = None

    @property
    def group(self) -> int:
        """Requests of one burst; 1 elsewhere."""
        return sum(shape.count for shape in self.shapes) if self.arrival == "burst" else 1

    @property
    def longest(self) -> Shape:
        """The shape that needs the most context."""
        return max(self.shapes, key=lambda shape: shape.prompt + shape.output)


def expand(matrix: Matrix, facts: ServerFacts) -> tuple[list[Cell], list[NotApplicable]]:
    """All cells in the matrix's order, and those that the server cannot have, with the reason. Equal cells come once."""
    cells: dict[str, Cell] = {}
    lost: dict[str, str] = {}
    for spec in matrix.cells:
        for cell in _EXPAND[type(spec)](spec, facts):
            reason = cell if isinstance(cell, NotApplicable) else _unfit(cell, facts)
            if isinstance(cell, Cell) and reason is None:
                cells.setdefault(cell.id, cell)
            elif isinstance(reason, NotApplicable):
                lost.setdefault(reason.case, reason.reason)
    return list(cells.values()), [NotApplicable(case=case, reason=reason) for case, reason in lost.items()]


def _unfit(cell: Cell, facts: ServerFacts) -> NotApplicable | None:
    shape = cell.longest
    needed = shape.prompt + shape.output
    if facts.context is None or needed <= facts.context or cell.expect_refusal:
        return None
    return NotApplicable(
        case=cell.id, reason=f"needs {shape.prompt} + {shape.output} tokens, the served artifact's context has {facts.context}"
    )


def _variants(spec: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every way of sampling and streaming, with the end of the cell's name."""
    for sampling in spec.sampling:
        for stream in spec.stream:
            fields = {"kind": spec.__struct_config__.tag, "sampling": sampling, "stream": stream, "asked_requests": spec.requests}
            yield fields, f"{sampling}/{'stream' if stream else 'whole'}"


def _single(spec: Single, _: ServerFacts) -> Iterator[Cell]:
    for fields, end in _variants(spec):
        for prompt in spec.prompts:
            for output in spec.outputs:
                shape = Shape(prompt, output)
                yield Cell(id=f"single/p{prompt}/o{output}/{end}", arrival="single", shapes=(shape,), concurrency=1, **fields)


def _closed(spec: Closed, _: ServerFacts) -> Iterator[Cell]:
    for fields, end in _variants(spec):
        for users in spec.concurrency:
            name = f"{fields['kind']}/c{users}/p{spec.prompt}/o{spec.output}/{end}"
            yield Cell(id=name, arrival="closed", shapes=(Shape(spec.prompt, spec.output),), concurrency=users, **fields)


def _poisson(spec: Poisson, _: ServerFacts) -> Iterator[Cell]:
    for fields, end in _variants(spec):
        for qps in spec.qps:
            name = f"poisson/q{qps:g}/p{spec.prompt}/o{spec.output}/{end}"
            yield Cell(id=name, arrival="poisson", shapes=(Shape(spec.prompt, spec.output),), qps=qps, **fields)


def _burst(spec: Burst, _: ServerFacts) -> Iterator[Cell]:
    for fields, end in _variants(spec):
        for size in spec.sizes:
            name = f"burst/b{size}/p{spec.prompt}/o{spec.output}/{end}"
            shape = Shape(spec.prompt, spec.output, count=size)
            yield Cell(id=name, arrival="burst", shapes=(shape,), concurrency=size, **fields)


def _mixed(spec: Mixed, _: ServerFacts) -> Iterator[Cell]:
    shapes = tuple(Shape(one.prompt, one.output, one.name, one.share) for one in spec.classes)
    for fields, end in _variants(spec):
        for qps in spec.qps:
            yield Cell(id=f"mixed/q{qps:g}/{end}", arrival="poisson", shapes=shapes, qps=qps, **fields)
        for users in spec.concurrency:
            yield Cell(id=f"mixed/c{users}/{end}", arrival="closed", shapes=shapes, concurrency=users, **fields)


def _interference(spec: Interference, _: ServerFacts) -> Iterator[Cell]:
    victims = Shape(spec.short_prompt, spec.short_output, "short", count=spec.short)
    long = Shape(spec.long_prompt, spec.long_output, "long", count=spec.long, after_ms=spec.after_ms)
    for fields, end in _variants(spec):
        name = f"interference/s{spec.short}xp{spec.short_prompt}o{spec.short_output}"
        if spec.baseline:
            yield Cell(id=f"{name}/alone/{end}", arrival="burst", shapes=(victims,), concurrency=spec.short, **fields)
        both = f"{name}/l{spec.long}xp{spec.long_prompt}o{spec.long_output}/{end}"
        yield Cell(id=both, arrival="burst", shapes=(victims, long), concurrency=spec.short + spec.long, **fields)


def _boundary(spec: Boundary, facts: ServerFacts) -> Iterator[Cell | NotApplicable]:
    prompt = spec.prompt
    if prompt == "context":
        if facts.context is None:
            yield NotApplicable(case="boundary/context", reason="the server does not tell its context")
            return
        prompt = facts.context - 1
    for fields, end in _variants(spec):
        yield Cell(id=f"boundary/p{prompt}/o1/{end}", arrival="single", shapes=(Shape(prompt, 1),), concurrency=1, **fields)
        for output in spec.refused_outputs:
            name = f"boundary/p{prompt}/o{output}/refused/{end}"
            if facts.context is None:
                yield NotApplicable(case=name, reason="the server does not tell its context, so that a refusal proves nothing")
            elif prompt + output <= facts.context:
                reason = f"{prompt} + {output} tokens fit the served artifact's context of {facts.context}"
                yield NotApplicable(case=name, reason=reason)
            else:
                shape = Shape(prompt, output)
                yield Cell(id=name, arrival="single", shapes=(shape,), concurrency=1, expect_refusal=True, **fields)


def _lanes(spec: Lanes, facts: ServerFacts) -> Iterator[Cell | NotApplicable]:
    for fields, end in _variants(spec):
        for profile in spec.profiles:
            for active in spec.active or range(1, profile + 1):
                if active > profile:
                    continue
                name = f"lanes/B{profile}/a{active}/p{spec.prompt}/o{spec.output}/{end}"
                if facts.profiles is None:
                    yield NotApplicable(case=name, reason="the server does not tell its batch profiles")
                elif profile not in facts.profiles:
                    proven = ", ".join(f"B{size}" for size in facts.profiles)
                    yield NotApplicable(case=name, reason=f"the served artifact has no B{profile} (it has {proven})")
                else:
                    users = active * (facts.boards or 1)
                    shape = Shape(spec.prompt, spec.output)
                    yield Cell(
                        id=name, arrival="closed", shapes=(shape,), concurrency=users, active_lanes=active, profile=profile,
                        **fields,
                    )  # fmt: skip


_EXPAND: dict[type[Any], Callable[[Any, ServerFacts], Iterable[Cell | NotApplicable]]] = {
    Single: _single, Closed: _closed, DecodeHeavy: _closed, PrefillHeavy: _closed, Poisson: _poisson, Burst: _burst, Mixed: _mixed,
    Interference: _interference, Boundary: _boundary, Lanes: _lanes,
}  # fmt: skip
assert set(_EXPAND) == set(CellSpec.__args__)
