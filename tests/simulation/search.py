"""Many seeds at once, and a failing run made small: fewer faults, fewer acts, fewer requests, less time.

Shrinking keeps what still breaks the same rule. As every fault and every client has its own source of randomness, what is left
still does what it did.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from calculet_core.clock import S
from calculet_core.history import Violation
from simulation.scenario import Scenario, Settings, Traffic
from simulation.timeline import START_NS, Livelock
from simulation.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    scenario: Scenario
    violations: tuple[Violation, ...]
    fired: Counter[str]
    sometimes: Counter[str]
    trace_hash: str
    requests: int
    completed: int
    cpu_s: float
    virtual_s: float

    def worst(self) -> str | None:
        """The first violation, in words."""
        if not self.violations:
            return None
        first = self.violations[0]
        return f"{first.rule} at {(first.at_ns - START_NS) / S:.3f} s: {first.message}"


def judge(scenario: Scenario) -> Outcome:
    """Run it to its end."""
    began = time.process_time()
    world = World(scenario)
    violations: list[Violation] = world.checker.violations
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)  # a day's clients live on; looking at all of them often costs a tenth of the run
    try:
        world.run()
    except Livelock as error:
        violations.append(Violation("no_livelock", str(error), world.timeline.now))
    except Exception as error:
        violations.append(Violation("no_crash", f"{type(error).__name__}: {error}", world.timeline.now))
    finally:
        gc.set_threshold(*thresholds)
    accepted = world.checker.core.counts
    return Outcome(
        scenario, tuple(violations), world.faults_fired, world.sometimes, world.trace_hash, accepted["request.accepted"],
        accepted["done.completed"], time.process_time() - began, (world.timeline.now - START_NS) / S,
    )  # fmt: skip


def search(scenarios: Iterable[Scenario], processes: int) -> Iterator[Outcome]:
    """All of them, in any order."""
    if processes <= 1:
        yield from map(judge, scenarios)
        return
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(judge, scenarios, chunksize=1)


def shrink(scenario: Scenario, rule: str, tries: int = 120, say: Callable[[str], None] = lambda line: None) -> Scenario:
    """A smaller scenario that still breaks `rule`; the same one when nothing can be left out."""
    left = [tries]

    def breaks(candidate: Scenario) -> bool:
        if left[0] <= 0:
            return False
        left[0] -= 1
        found = any(violation.rule == rule for violation in judge(candidate).violations)
        say(f"{'still broken' if found else 'not broken  '}  {candidate.words()}")
        return found

    scenario = _shorter(scenario, rule, breaks)
    scenario = replace(scenario, faults=_fewer(scenario.faults, lambda kept: breaks(replace(scenario, faults=tuple(kept)))))
    scenario = replace(scenario, acts=_fewer(scenario.acts, lambda kept: breaks(replace(scenario, acts=tuple(kept)))))
    for what in ({"routers": 1}, {"boards": 1}):
        smaller = replace(scenario, **what)  # type: ignore[arg-type]
        if smaller != scenario and breaks(smaller):
            scenario = smaller
    world = World(scenario)
    world.run()
    everybody = tuple(range(world.clients.arrived))
    kept = _fewer(everybody, lambda some: breaks(replace(scenario, requests=frozenset(some))))
    if kept != everybody:
        scenario = replace(scenario, requests=frozenset(kept))
    return _shorter(scenario, rule, breaks)


def _shorter(scenario: Scenario, rule: str, breaks: Callable[[Scenario], bool]) -> Scenario:
    """Not longer than until the rule was broken, if that is enough."""
    first = next((one for one in judge(scenario).violations if one.rule == rule), None)
    if first is None:
        return scenario
    seconds = round((first.at_ns - START_NS) / S + 0.05, 2)
    if seconds >= scenario.seconds:
        return scenario
    end_ns = int(seconds * S)
    shorter = replace(
        scenario, seconds=seconds, faults=tuple(fault for fault in scenario.faults if fault.at_ns < end_ns),
        acts=tuple(act for act in scenario.acts if act.at_ns < end_ns),
    )  # fmt: skip
    return shorter if breaks(shorter) else scenario


def _fewer(items: tuple[T, ...], still: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Delta debugging: leave out halves, quarters, ... as long as that is enough."""
    if items and still(()):
        return ()
    size = max(1, len(items) // 2)
    while items:
        start = 0
        while start < len(items):
            without = items[:start] + items[start + size :]
            if without and len(without) < len(items) and still(without):
                items = without
            else:
                start += size
        if size == 1:
            return items
        size //= 2
    return items


def as_code(scenario: Scenario) -> str:
    """The scenario as it can be put into a test."""
    parts = [f"{scenario.seed}, {scenario.seconds}, {scenario.boards}, {scenario.routers}"]
    if scenario.traffic != Traffic():
        changed = (one for one in fields(Traffic) if getattr(scenario.traffic, one.name) != one.default)
        parts.append(f"Traffic({', '.join(f'{one.name}={getattr(scenario.traffic, one.name)!r}' for one in changed)})")
    if scenario.settings != Settings():
        parts.append("settings=...")
    parts += [f"{name}=({''.join(f'{one!r}, ' for one in found)})" for name, found in (("faults", scenario.faults), ("acts", scenario.acts)) if found]
    if scenario.requests is not None:
        parts.append(f"requests=frozenset({sorted(scenario.requests)})")
    return f"Scenario({', '.join(parts)})"
