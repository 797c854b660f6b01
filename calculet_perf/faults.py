"""Fault scenarios as data (acceptance §11, §12), and the judgement of what came of one.

A scenario starts a fleet of its own with an injector around one board, waits until it serves, arms the injector for a limited
time, sends a load, and looks at five things: what the clients got, whether every planned fault fired (else the scenario proves
nothing and is invalid), what the supervisor and the boards went through, whether the history keeps its promises, and whether
golden passes after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from calculet_perf.manifest import ManifestError, convert, load_yaml

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Kind = Literal["requests", "lengths", "leave_waiting", "leave_running", "shutdown", "swap"]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: frozen, unknown keys are errors."""


class Load(_Section, frozen=True, kw_only=True):
    """What clients do while the injector is armed.

    `requests`: `count` of them, `concurrency` at a time. `lengths`: requests that ask for impossible lengths. `leave_waiting` and
    `leave_running`: half of the requests leave while they wait, or while they are answered. `shutdown`: board0's instance is told
    to stop while requests run and wait on it, then the whole fleet is. `swap`: the golden questions are asked again and again,
    `concurrency` at a time, while the alias is moved to the second artifact, and while it is rolled back.
    """

    kind: Kind = "requests"
    count: Positive = 8
    concurrency: Positive = 4
    prompt: Positive = 8
    output: Positive = 8
    repeat: Positive = 1
    """Send the load so often, waiting for the board to serve again in between: what comes back must be able to break again. Once
    all that was planned has fired no more is sent."""


class Expect(_Section, frozen=True, kw_only=True):
    """What the design says. Every field that is given must hold; board0 is the one that faults."""

    ok_min: Natural = 0
    """Requests that ended well."""
    failed_min: Natural = 0
    failed_max: Natural | None = 0
    """None: any number."""
    codes: tuple[str, ...] = ()
    """Error codes that failures may have; a failure with another one is wrong."""
    resets_min: Natural = 0
    resets_max: Natural = 0
    """Resets of the boards together."""
    state: str = "READY"
    """board0's state in the end: a generation's, or CONDEMNED."""
    new_generation: bool | None = None
    """board0 serves under another generation than before; None: of no matter."""
    faults_seen: tuple[str, ...] = ()
    """Kinds of fault that board0 or the supervisor must have seen, by name."""
    device_jobs: bool = True
    """False: no job may reach a device for this load."""
    cancelled_min: Natural = 0
    """Requests that waited on board0 and were taken out of its queue: none of their work had been, or was then, on the device."""
    drained: bool = False
    """Whatever had a lane on board0 when its instance was told to stop ended well."""
    stale_min: Natural = 0
    """Completions that the generation check dropped."""
    swaps: Natural = 0
    """Moves of the alias that ended as asked."""
    cpu_max: Annotated[float, Meta(gt=0)] | None = None
    """board0's worker uses at most so much of a core while the load goes on: who waits does not spin."""
    serves: bool = True
    """The fleet answers in the end, and golden passes."""
    exit_code: int | None = None
    """`shutdown`: of the fleet's keeper."""


class Scenario(_Section, frozen=True, kw_only=True):
    """One row of acceptance §12."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,40}$")]
    clause: str
    injects: str
    """In words, of the specification."""
    expected: str
    """In words, of the specification."""
    boards: Positive = 1
    inject: tuple[dict[str, Any], ...] = ()
    """Faults for board0's option `faults`; the firings planned are all their `at`."""
    every_life: bool = False
    """The plan counts anew in each worker process: it may fire more often than planned, never less."""
    scheduler: dict[str, Any] = {}
    """Sections over the scheduler's defaults."""
    load: Load = Load()
    expect: Expect = Expect()
    recover_s: Positive = 60
    """How long the end state may take."""

    @property
    def planned(self) -> int:
        """Firings that the plan wants."""
        return sum(len(fault.get("at", ())) for fault in self.inject)


class NotBuilt(_Section, frozen=True, kw_only=True):
    """A row of acceptance §12 that this command does not run, with the reason."""

    id: str
    clause: str
    reason: str


class Catalogue(_Section, frozen=True, kw_only=True):
    """`calculet-perf-faults/v1`."""

    schema: Literal["calculet-perf-faults/v1"]
    scenarios: tuple[Scenario, ...]
    not_run: tuple[NotBuilt, ...] = ()


class Outcome(msgspec.Struct, kw_only=True):
    """A line of `faults.jsonl`, `calculet-perf-fault/v1`."""

    schema: Literal["calculet-perf-fault/v1"] = "calculet-perf-fault/v1"
    scenario: str
    clause: str
    planned: int
    fired: int
    expected: str
    observed: str
    as_expected: bool
    valid: bool
    """Every planned fault fired; else nothing was shown."""
    golden_after: bool | None
    reset: bool
    recovery_ms: float | None
    """From the first firing until board0 served again; null: it never stopped, or nothing fired."""
    reasons: list[str]


class Seen(msgspec.Struct, kw_only=True):
    """What a scenario showed, as numbers."""

    fired: int = 0
    ok: int = 0
    codes: dict[str, int] = {}
    """Error code -> failures."""
    resets: int = 0
    state: str | None = None
    generation_before: int | None = None
    generation_after: int | None = None
    faults: list[str] = []
    device_jobs: int = 0
    cancelled: int = 0
    """Attempts on board0 that ended without ever having had a lane."""
    undrained: int = 0
    """Attempts on board0 that had a lane and did not complete."""
    stale: int = 0
    golden_after: bool | None = None
    swaps: int = 0
    mixed: int = 0
    """Answers that are neither artifact's."""
    cpu_share: float | None = None
    violations: list[str] = []
    """Broken promises of the fleet's history."""
    exit_code: int | None = None
    recovery_ms: float | None = None

    @property
    def failed(self) -> int:
        """Requests that did not end well."""
        return sum(self.codes.values())


def parse_catalogue(data: bytes, source: str) -> Catalogue:
    """A file of scenarios.

    Raises:
        ManifestError: names the file, the path in it and what is wrong.
    """
    found: Catalogue = convert(load_yaml(data, source), Catalogue, source)
    names = [scenario.id for scenario in found.scenarios]
    for name in names:
        if names.count(name) > 1:
            raise ManifestError(f"{source}: scenario {name!r} is there twice")
    return found


def judge(scenario: Scenario, seen: Seen) -> Outcome:
    """Hold what was seen against what the design says."""
    reasons = [text for text, wrong in _findings(scenario, seen) if wrong]
    valid = seen.fired >= scenario.planned if scenario.every_life else seen.fired == scenario.planned
    if not valid:
        reasons.insert(0, f"{scenario.planned} firings were planned, {seen.fired} fired: nothing is shown")
    return Outcome(
        scenario=scenario.id, clause=scenario.clause, planned=scenario.planned, fired=seen.fired, expected=scenario.expected,
        observed=describe(seen), as_expected=not reasons, valid=valid, golden_after=seen.golden_after, reset=seen.resets > 0,
        recovery_ms=seen.recovery_ms, reasons=reasons,
    )  # fmt: skip


def _findings(scenario: Scenario, seen: Seen) -> Sequence[tuple[str, bool]]:
    want, failed = scenario.expect, seen.failed
    strange = sorted(set(seen.codes) - set(want.codes))
    missing = sorted(set(want.faults_seen) - set(seen.faults))
    changed = seen.generation_before != seen.generation_after
    spins = want.cpu_max is not None and (seen.cpu_share is None or seen.cpu_share > want.cpu_max)
    resets_right, runs_on = want.resets_min <= seen.resets <= want.resets_max, want.exit_code is None
    return (
        (f"{seen.ok} requests ended well, at least {want.ok_min} should", seen.ok < want.ok_min),
        (f"{failed} requests failed, at least {want.failed_min} should", failed < want.failed_min),
        (f"{failed} requests failed, at most {want.failed_max} may", want.failed_max is not None and failed > want.failed_max),
        (f"failures with {', '.join(strange)}", bool(strange)),
        (f"{seen.resets} resets, {want.resets_min} to {want.resets_max} expected", not resets_right),
        (f"board0 is {seen.state}, not {want.state}", runs_on and seen.state != want.state),
        (f"nobody saw {', '.join(missing)}", bool(missing)),
        ("the generation did not change", want.new_generation is True and not changed),
        ("the generation changed", want.new_generation is False and changed),
        (f"{seen.device_jobs} jobs reached the device", not want.device_jobs and seen.device_jobs > 0),
        (
            f"{seen.cancelled} waiting requests were cancelled, at least {want.cancelled_min} should",
            seen.cancelled < want.cancelled_min,
        ),
        (f"{seen.undrained} requests that had begun on the device did not end well", want.drained and seen.undrained > 0),
        (f"{seen.stale} stale completions were dropped, at least {want.stale_min} should", seen.stale < want.stale_min),
        (f"{seen.swaps} swaps ended as asked, {want.swaps} should", seen.swaps != want.swaps),
        (f"{seen.mixed} answers are neither artifact's", seen.mixed > 0),
        (f"board0's worker used {_share(seen.cpu_share)} of a core, at most {_share(want.cpu_max)} may be", spins),
        ("golden failed afterwards, or nothing answered", want.serves and runs_on and not seen.golden_after),
        (f"the keeper ended with {seen.exit_code}, not {want.exit_code}", not runs_on and seen.exit_code != want.exit_code),
        (f"broken promises: {'; '.join(seen.violations[:3])}", bool(seen.violations)),
    )  # fmt: skip


def _share(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.0%}"


def describe(seen: Seen) -> str:
    """What was seen, in words."""
    parts = [f"{seen.ok} answers"]
    parts += [f"{count} x {code}" for code, count in sorted(seen.codes.items())]
    if seen.faults:
        parts.append("faults seen: " + ", ".join(seen.faults))
    if seen.cancelled:
        parts.append(f"{seen.cancelled} taken out of the queue")
    parts.append(f"{seen.resets} resets")
    if seen.state is not None:
        parts.append(f"board0 {seen.state}")
    if seen.generation_before != seen.generation_after:
        parts.append(f"generation {seen.generation_before} -> {seen.generation_after}")
    if seen.stale:
        parts.append(f"{seen.stale} stale completions dropped")
    if seen.swaps:
        parts.append(f"{seen.swaps} swaps")
    if seen.cpu_share is not None:
        parts.append(f"{seen.cpu_share:.0%} of a core")
    if seen.exit_code is not None:
        parts.append(f"exit {seen.exit_code}")
    return ", ".join(parts)


def verdict(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """How many were as expected, wrong, and invalid."""
    return {
        "as_expected": sum(one.as_expected for one in outcomes),
        "wrong": sum(one.valid and not one.as_expected for one in outcomes),
        "invalid": sum(not one.valid for one in outcomes),
    }  # fmt: skip
