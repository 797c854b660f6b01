"""Loads, ways back and unloads that a stage drives itself (scheduling §19 M4): what comes next, what is written of each, and what
all of them show.

A cycle takes every board of the model from one artifact to another. Most swap under load, where the fleet has boards enough; some
go back by the one command that operators have for it; some empty the boards first, in a pause between two segments, because a model
that is unloaded answers nobody. Memory of an empty board is what must come back: compared from the first such cycle to the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from calculet_perf.manifest import SwapsPart
from calculet_perf.records import Natural, Record

Kind = Literal["swap", "rollback", "unload_load", "home"]
CYCLES_ASKED = 100
"""Scheduling §19 M4; what the manifest asks for below that is labelled as shortened."""
GIVE_UP_AFTER = 3
"""Cycles that fail one after the other; then nothing more is driven."""


class SwapBoard(Record, kw_only=True):
    """One board before and after a cycle; null: not told."""

    board: str
    generation_before: int | None = None
    generation_after: int | None = None
    digest_after: str | None = None
    state_after: str | None = None
    device_bytes_before: float | None = None
    device_bytes_empty: float | None = None
    """While nothing was loaded; null in cycles that do not empty the boards."""
    device_bytes_after: float | None = None
    rss_bytes_after: float | None = None


class SwapCycle(Record, kw_only=True):
    """`swaps.jsonl`, `calculet-perf-swap/v1`: one cycle."""

    schema: Literal["calculet-perf-swap/v1"] = "calculet-perf-swap/v1"
    run_id: str
    number: Natural
    kind: Kind
    """`home`: the last one, that leaves the fleet as it was found."""
    under_load: bool
    """Requests went on meanwhile; false: in a pause of the load."""
    from_digest: str | None
    from_package: str | None
    """Its folder on the fleet's host."""
    to_digest: str
    rollout: int | None = None
    """The supervisor's number of it; null: none was begun."""
    utc: str
    start_ns: int
    end_ns: int
    unload_s: float | None = None
    """Until every board was empty; null: they were not emptied first."""
    state: str | None = None
    """The rollout's last state; null: nobody could tell it."""
    ok: bool
    interrupted: bool = False
    """This program was stopped: the cycle shows nothing, good or bad."""
    why: str | None = None
    """What was wrong; null when it was as asked."""
    boards: list[SwapBoard] = []

    @property
    def seconds(self) -> float:
        """From the order to its end."""
        return (self.end_ns - self.start_ns) / 1e9


class Residue(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of one board's empty moments."""

    board: str
    first_bytes: float
    last_bytes: float
    moments: int


class Driven(msgspec.Struct, frozen=True, kw_only=True):
    """What the driven cycles of a stage show."""

    loads: int
    """Cycles after which every board served what was asked for, but for rollbacks."""
    rollbacks: int
    unloads: int
    """Of those loads: cycles that emptied every board first."""
    under_load: int
    interrupted: int
    failed: list[str]
    mixed: list[str]
    """Boards that were not on a newer generation with the cycle's artifact."""
    residue: list[Residue]
    median_s: float | None
    slowest_s: float | None


def kind_of(number: int, part: SwapsPart, *, to_home: bool) -> Kind:
    """What cycle `number` (from 0) is. The way back is tried first, so that a stage which ends early has shown it."""
    if part.unload_every and (number + 1) % part.unload_every == 0:
        return "unload_load"
    if to_home and part.rollback_every and (number // 2) % part.rollback_every == 0:
        return "rollback"
    return "swap"


def due_s(number: int, cycles: int, seconds: float) -> float:
    """When a cycle is due, in seconds of the stage: evenly spread, none at its very begin or end."""
    return seconds * (number + 0.5) / cycles


def wrong_boards(boards: Iterable[SwapBoard], digest: str) -> list[str]:
    """Boards that do not serve `digest` in a newer generation than before, in words."""
    found = []
    for one in boards:
        if one.state_after != "READY" or one.digest_after != digest:
            found.append(f"{one.board} is {one.state_after or 'without a worker'} with {(one.digest_after or 'nothing')[:12]}")
        elif one.generation_before is not None and (one.generation_after or 0) <= one.generation_before:
            found.append(f"{one.board} serves generation {one.generation_after} after {one.generation_before}: not a newer one")
    return found


def driven(cycles: Iterable[SwapCycle]) -> Driven | None:
    """Sum up; None: nothing was driven."""
    all_cycles = list(cycles)
    if not all_cycles:
        return None
    counted = [cycle for cycle in all_cycles if not cycle.interrupted]
    good = [cycle for cycle in counted if cycle.ok]
    empty: dict[str, list[float]] = {}
    for cycle in counted:
        for board in cycle.boards:
            if board.device_bytes_empty is not None:
                empty.setdefault(board.board, []).append(board.device_bytes_empty)
    times = sorted(cycle.seconds for cycle in good)
    return Driven(
        loads=sum(cycle.kind != "rollback" for cycle in good),
        rollbacks=sum(cycle.kind == "rollback" for cycle in good),
        unloads=sum(cycle.unload_s is not None for cycle in good),
        under_load=sum(cycle.under_load for cycle in good),
        interrupted=len(all_cycles) - len(counted),
        failed=[f"cycle {cycle.number} ({cycle.kind}): {cycle.why}" for cycle in counted if not cycle.ok],
        mixed=[f"cycle {cycle.number}: {text}" for cycle in good for text in wrong_boards(cycle.boards, cycle.to_digest)],
        residue=[
            Residue(board=board, first_bytes=values[0], last_bytes=values[-1], moments=len(values))
            for board, values in sorted(empty.items())
        ],
        median_s=times[len(times) // 2] if times else None,
        slowest_s=times[-1] if times else None,
    )
