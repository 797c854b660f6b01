"""Chaos scenarios as data, their plans, and the judgement of a run against a fleet that goes on running.

Unlike `faults`, which starts a fleet for each scenario, chaos is ordered on one that serves, and is a black box but for three
windows that every operator has: the control channel (to order, and to look), the journals (what fired, and whether promises were
kept), and HTTP (what clients got). A fault that was planned and did not fire makes the run invalid: nothing was shown.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from calculet_core import history
from calculet_core.chaos import AnyFault, FullDisk, name_of
from calculet_core.clock import S
from calculet_core.history import Budgets, Checker, Event
from calculet_perf.manifest import ManifestError, convert, load_yaml

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]

SILENT = frozenset({"incomplete_stream", "bad_http", "bad_event", "client_timeout", "stream_error"})
"""Ends of a request that tell its client nothing: never right, whatever was broken."""
LANES = frozenset({history.BOARD_LANE_BOUND, history.BOARD_LANE_FREE, history.BOARD_LANE_LOST})
FULL_DISK = name_of(FullDisk(process="router", for_s=1))
WRITTEN_WITHIN_NS = 1 * S
"""A process writes its journal several times a second; what a full disk swallowed began at most so much before."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: frozen, unknown keys are errors."""


class Step(_Section, frozen=True, kw_only=True):
    """One fault. `board` where it is about one: the busiest that serves, the one of the step before, or another one than that."""

    fault: AnyFault
    board: Literal["busiest", "same", "other"] = "busiest"
    together: bool = False
    """With the step before, not after it: a double fault."""


class Load(_Section, frozen=True, kw_only=True):
    """What clients do meanwhile: requests arrive by a Poisson process, whatever becomes of those before."""

    rate: Seconds = 25.0
    """Requests a second."""
    max_inflight: Positive = 64
    """Arrivals above it are left out, and not counted as sent."""
    outputs: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (4, 16, 48, 160)
    """Lengths of answers, drawn evenly."""
    prompts: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (3, 12, 40)
    """Lengths of prompts, drawn evenly."""


class Random(_Section, frozen=True, kw_only=True):
    """Acts are drawn evenly, at a Poisson process's times."""

    duration_s: Seconds = 60.0
    mean_interval_s: Seconds = 5.0
    acts: Annotated[tuple[tuple[Step, ...], ...], Meta(min_length=1)]


class Scenario(_Section, frozen=True, kw_only=True):
    """A scenario has `steps`, or `random`."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,40}$")]
    injects: str
    expected: str
    steps: tuple[Step, ...] = ()
    random: Random | None = None
    load: Load = Load()
    codes: tuple[str, ...] = ()
    """Error codes that requests may end with."""
    recover_s: Seconds = 60.0
    """How long the fleet may take to be whole again."""


class Catalogue(_Section, frozen=True, kw_only=True):
    """`calculet-perf-chaos-scenarios/v1`."""

    schema: Literal["calculet-perf-chaos-scenarios/v1"]
    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True)
class Act:
    """Steps that belong together, and when they are due, in seconds of the load's time; None: when the fleet is whole again."""

    at_s: float | None
    steps: tuple[Step, ...]


class Ordered(msgspec.Struct, kw_only=True):
    """One planned fault, as it went."""

    fault: str
    board: str | None
    orders: list[str] = []
    """Names under which it was ordered; more than one when it had not fired in its time."""
    ordered_s: float | None = None
    """Since the load's begin."""
    fired_s: float | None = None
    healed_s: float | None = None
    whole_s: float | None = None
    """When every board that served before served again, and the router answered."""


class Outcome(msgspec.Struct, kw_only=True):
    """What `--json` prints, `calculet-perf-chaos/v1`."""

    schema: Literal["calculet-perf-chaos/v1"] = "calculet-perf-chaos/v1"
    scenario: str
    seed: int
    seconds: float
    planned: int
    fired: int
    valid: bool
    """Every planned fault fired, and somebody was answered; else nothing was shown."""
    passed: bool
    """Valid, and every promise was kept."""
    sent: int
    ok: int
    left_out: int
    """Arrivals that were not sent because too many were in flight."""
    codes: dict[str, int]
    """Error code -> requests that ended with it."""
    worker_restarts: int
    board_resets: int
    slowest_recovery_s: float | None
    """From an order to a whole fleet."""
    golden_after: bool | None
    baseline: bool
    """Lanes, KV and queues were empty in the end."""
    invalid: list[str]
    """Why nothing was shown."""
    broken: list[str]
    """Promises that were not kept."""
    faults: list[Ordered]


def parse_catalogue(data: bytes, source: str) -> Catalogue:
    """A file of scenarios.

    Raises:
        ManifestError: names the file, the path in it and what is wrong.
    """
    found: Catalogue = convert(load_yaml(data, source), Catalogue, source)
    names = [scenario.id for scenario in found.scenarios]
    for index, scenario in enumerate(found.scenarios):
        where = f"{source}: $.scenarios[{index}]"
        if scenario.id in names[:index]:
            raise ManifestError(f"{where}.id: scenario {scenario.id!r} is there twice")
        if bool(scenario.steps) == (scenario.random is not None):
            raise ManifestError(f"{where}: a scenario has steps, or random")
        acts = scenario.random.acts if scenario.random is not None else (scenario.steps,)
        firsts = [act[0] for act in acts if act]
        if any(step.together or step.board != "busiest" for step in firsts):
            raise ManifestError(f"{where}: a first step has no step before it")
    return found


def plan(
    scenario: Scenario, rng: random.Random, duration_s: float | None = None, mean_interval_s: float | None = None
) -> list[Act]:
    """What is to happen; the same for the same generator. The two arguments go before a random scenario's own."""
    if scenario.random is None:
        acts: list[Act] = []
        for step in scenario.steps:
            if step.together:
                acts[-1] = Act(None, (*acts[-1].steps, step))
            else:
                acts.append(Act(None, (step,)))
        return acts
    drawn, end_s = scenario.random, duration_s or scenario.random.duration_s
    found: list[Act] = []
    at_s = 0.0
    while True:
        at_s += rng.expovariate(1 / (mean_interval_s or drawn.mean_interval_s))
        if at_s >= end_s and found:
            return found
        found.append(Act(min(at_s, end_s), rng.choice(drawn.acts)))


# ------------------------------------------------------------------------------------------------ answers
@dataclass(slots=True)
class Tally:
    """What clients got. `wrong` are broken promises, in words."""

    sent: int = 0
    ok: int = 0
    left_out: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def count(self, label: str, error: str | None, got: str | None, tokens: int | None, right: Reference) -> None:
        """One end: `got` is the hash of the text that came, if any did."""
        if error is None:
            self.ok += 1
            if got != right.whole or (tokens is not None and tokens != right.tokens):
                self.wrong.append(f"{label}: its answer ({tokens} tokens) is not the reference's ({right.tokens})")
            return
        self.codes[error] = self.codes.get(error, 0) + 1
        if error in SILENT:
            self.wrong.append(f"{label}: ended with {error}: its client was told nothing")
        if got is not None and got not in right.beginnings:
            self.wrong.append(f"{label}: what came before {error} is no beginning of the reference")


@dataclass(frozen=True, slots=True)
class Reference:
    """What a prompt is answered with, undisturbed; hashes as `client.answers` makes them."""

    whole: str
    beginnings: frozenset[str]
    """Of every prefix of the text."""
    tokens: int


# ------------------------------------------------------------------------------------------------ history
def broken_promises(events: Sequence[Event], begin_ns: int, budgets: Budgets) -> list[str]:
    """Promises that the journals of all processes show broken since `begin_ns`; `events` by time, and from some time before."""
    checker = Checker(budgets)
    for event in told(events, begin_ns):
        checker.see(event)
    return [f"{one.rule}: {one.message}" for one in checker.finish() if one.at_ns >= begin_ns]


def told(events: Sequence[Event], begin_ns: int) -> Iterator[Event]:
    """Without what cannot be judged: requests that were there before, and what a full disk has swallowed on our order. Where a
    worker's disk was full, its lanes are judged by its status in the end; where a router's was, its clients are."""
    blind = [event for event in events if event.event == history.CHAOS_FIRED and is_full_disk(event)]
    places = {(event.board, event.epoch) for event in blind if event.board is not None}
    swallowed = [_end_of(event, events) for event in blind if event.board is None]
    accepted = {event.request: event.t for event in events if event.event == history.REQUEST_ACCEPTED}
    done = {event.request for event in events if event.event == history.REQUEST_DONE}
    unsure = {
        request
        for request, at in accepted.items()
        if at < begin_ns or (request not in done and any(at <= end for end in swallowed))
    }
    for event in events:
        own = event.request is not None and event.event.startswith("request.")
        if own and (event.request in unsure or event.request not in accepted):
            continue
        in_gap = (event.board, event.epoch) in places
        configuring = event.event == history.BOARD_GENERATION and event.data.get("state") == "CONFIGURING"
        if in_gap and (event.event in LANES or event.event == history.BOARD_IDLE or configuring):
            continue
        yield event


def is_full_disk(event: Event) -> bool:
    """Whether a chaos event is about one."""
    return str(event.data.get("fault", "")).startswith(FULL_DISK)


def _end_of(fired: Event, events: Iterable[Event]) -> int:
    """When the fault was over, a moment added; without its word for it (its process was killed): a very long time."""
    for event in events:
        if event.event == history.CHAOS_HEALED and event.data.get("order") == fired.data.get("order"):
            return event.t + WRITTEN_WITHIN_NS
    return 1 << 62


def open_requests(events: Iterable[Event], begin_ns: int) -> int:
    """Requests accepted since then that no journal has seen end yet: a killed router's are found by its successor."""
    kept = list(told(list(events), begin_ns))
    done = {event.request for event in kept if event.event == history.REQUEST_DONE}
    return sum(event.event == history.REQUEST_ACCEPTED and event.request not in done for event in kept)


# ------------------------------------------------------------------------------------------------ judgement
@dataclass(slots=True)
class Run:
    """What a run has shown."""

    scenario: Scenario
    seed: int
    seconds: float = 0.0
    planned: int = 0
    faults: list[Ordered] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    broken: list[str] = field(default_factory=list)
    restarts: int = 0
    resets: int = 0
    golden_after: bool | None = None
    leftovers: Mapping[str, Any] = field(default_factory=dict)
    """What was not empty in the end, by board."""
    not_whole: str | None = None
    """What was missing from the fleet in the end."""


def judge(run: Run) -> Outcome:
    """Hold it against what was promised."""
    scenario, tally = run.scenario, run.tally
    fired = sum(one.fired_s is not None for one in run.faults)
    strange = sorted(code for code in tally.codes if code not in scenario.codes and code not in SILENT)
    ended = tally.ok + sum(tally.codes.values())
    broken = [f"{tally.sent} requests were sent, {ended} ended"] if ended != tally.sent else []
    broken += [f"requests ended with {code}, which nothing here explains" for code in strange]
    broken += tally.wrong[:10] + [f"and {len(tally.wrong) - 10} more wrong answers"] * (len(tally.wrong) > 10)
    broken += run.broken[:10] + [f"and {len(run.broken) - 10} more broken promises"] * (len(run.broken) > 10)
    broken += [f"not whole again after {scenario.recover_s:g} s: {run.not_whole}"] if run.not_whole else []
    broken += [f"not at its baseline: {board}: {what}" for board, what in run.leftovers.items()]
    broken += ["golden failed afterwards"] if run.not_whole is None and not run.golden_after else []
    missing = ", ".join(one.fault for one in run.faults if one.fired_s is None) or "some were not ordered"
    invalid = [f"{run.planned} faults were planned, {fired} fired ({missing})"] if fired != run.planned else []
    invalid += ["no request was answered"] if not tally.ok else []
    spans = [one.whole_s - one.ordered_s for one in run.faults if one.whole_s is not None and one.ordered_s is not None]
    return Outcome(
        scenario=scenario.id, seed=run.seed, seconds=round(run.seconds, 3), planned=run.planned, fired=fired, valid=not invalid,
        passed=not (invalid or broken), sent=tally.sent, ok=tally.ok, left_out=tally.left_out,
        codes=dict(sorted(tally.codes.items())),
        worker_restarts=run.restarts, board_resets=run.resets, slowest_recovery_s=round(max(spans), 3) if spans else None,
        golden_after=run.golden_after, baseline=not run.leftovers, invalid=invalid, broken=broken,
        faults=run.faults,
    )  # fmt: skip
