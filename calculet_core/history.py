"""What happened, as events, and a checker that says whether it was right.

Journals, chaos runs and the simulation all produce `Event`s with the names below. The checker knows the promises: exactly one
terminal per request, no token after it, no answer that mixes generations, nobody else's tokens, KV and leases back at their
baseline, generations and epochs monotone, resets and restarts within their budgets. It is pure, so that the same code judges a
live fleet's journals and a million simulated requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from calculet_core.clock import S
from calculet_core.ids import request_id_text

# Names. The prefix says who writes it: `request.` router, `attempt.` worker, `board.` worker, `fleet.` supervisor.
REQUEST_ACCEPTED = "request.accepted"
REQUEST_SENT = "request.sent"
REQUEST_TROUBLE = "request.trouble"
"""An attempt came to nothing: `reason` (a row of the router's retry table), `code`, `message`."""
REQUEST_MOVED = "request.moved"
"""Before anything was written, it begins anew with another artifact of its alias: `digest`, `was`."""
REQUEST_WAITING = "request.waiting_model"
"""Another model has its board: it waits for its turn (`RequestState.WAITING_MODEL`): `model`."""
REQUEST_TOKENS = "request.tokens"
"""Tokens written to the client: `n`, and `ids` where a test records them."""
REQUEST_DONE = "request.done"
"""The client's terminal: `outcome` completed, failed or cancelled; `code` when failed."""
ATTEMPT_ADMITTED = "attempt.admitted"
ATTEMPT_TOKENS = "attempt.tokens"
ATTEMPT_DONE = "attempt.done"
"""The worker's terminal of one attempt: `outcome`, `code`."""
BOARD_GENERATION = "board.generation"
"""`state` is a `ModelState` name."""
BOARD_LANE_BOUND = "board.lane_bound"
BOARD_LANE_FREE = "board.lane_free"
BOARD_LANE_LOST = "board.lane_lost"
BOARD_IDLE = "board.idle"
"""Nothing runs: `lanes_busy`, `kv_reserved`, `leases` must be 0 (lost lanes apart)."""
BOARD_FAULT = "board.fault"
BOARD_RESET = "board.reset"
BOARD_GOLDEN = "board.golden"
"""`passed` tells how it went."""
BOARD_JOB = "board.job"
"""One device submission ended: `kind`, `queue`, `result`, `rows`, `compiled`, `ns`. For counters; too many for a journal."""
BOARD_STALE = "board.stale"
"""A completion was dropped by the generation or job check."""
BOARD_PINGPONG = "board.pingpong"
"""How many jobs may be in flight has changed: `limit`, `reason` (null: as configured), `detail`."""
FLEET_WORKER_STARTED = "fleet.worker_started"
FLEET_WORKER_EXITED = "fleet.worker_exited"
FLEET_RESET_GRANTED = "fleet.reset_granted"
FLEET_RESET_DENIED = "fleet.reset_denied"
FLEET_WORKER_ADOPTED = "fleet.worker_adopted"
"""A restarted supervisor found the worker alive."""
FLEET_WORKER_KILLED = "fleet.worker_killed"
"""Silent, hanging or overdue: `reason`, and `signal`."""
FLEET_FAULT_SEEN = "fleet.fault_seen"
"""A report showed a new fault: `fault`, `detail`, `digest`."""
FLEET_VIEW_PUBLISHED = "fleet.view_published"
FLEET_ROLLOUT = "fleet.rollout"
"""A step of a model swap, committed: `rollout`, `alias`, `verb` (load, rollback), `state`, `text`."""
FLEET_SWITCH = "fleet.switch"
"""Another model's turn on a time-shared board: `alias`, `was`, `reason`."""
FLEET_CONDEMNED = "fleet.condemned"
"""A board was set aside: `reason`."""
FLEET_PROBATION = "fleet.probation"
"""A board that was set aside comes back: its reset is done (`reset`), it has proved itself (`passed`)."""
FLEET_OVERRULED = "fleet.overruled"
"""Something automatic about a board was not done, since an operator's word came first: `act`, `reason`."""
FLEET_QUARANTINED = "fleet.quarantined"
"""An artifact was set aside: `digest`, `reason`."""
FLEET_BREAKER = "fleet.breaker"
"""Automatic action stops (`open` true, `reason`), or an operator lets it go on."""
FLEET_ADMIN = "fleet.admin"
"""An operator's act, committed: `verb`, `uid`."""
FLEET_UNUSABLE = "fleet.unusable"
"""What the configuration names cannot be used, and what was in force goes on; or that is over."""
FLEET_CONFIGURED = "fleet.configured"
"""A configuration was committed: `version`, `digest`, `changes`; or a board is restarted for it: `version`."""
CHAOS_FIRED = "chaos.fired"
"""An ordered fault has begun: `order`, `fault`, `process`; written by whoever carries it."""
CHAOS_HEALED = "chaos.healed"
"""It is over: `order`, `fault`, `process`, and `count` of what it spoiled."""


class Event(msgspec.Struct, omit_defaults=True):
    """One line of a journal. The name comes first, so that a person can scan a file."""

    event: str
    t: int
    """CLOCK_MONOTONIC nanoseconds (virtual in a simulation)."""
    request: int | None = None
    attempt: int | None = None
    board: str | None = None
    epoch: int | None = None
    generation: int | None = None
    job: int | None = None
    data: dict[str, Any] = {}
    wall: float | None = None
    """UTC seconds; for correlation between hosts only."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise, with the event that showed it."""

    rule: str
    message: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Budgets:
    """What the checker holds a fleet to. None: not checked."""

    resets: int | None = None
    reset_window_ns: int = 600 * S
    restarts: int | None = None
    restart_window_ns: int = 60 * S


Reference = Callable[[int], Sequence[int] | None]
"""Request id -> the tokens that the model gives for it, or None when unknown. Compared as a prefix."""


@dataclass(slots=True)
class _RequestTrack:
    accepted: bool = False
    done: str | None = None
    tokens: list[int] = field(default_factory=list)
    generations: set[int] = field(default_factory=set)


class Checker:
    """Feed events in time order with `see`, then call `finish`; `violations` collects what was broken."""

    def __init__(self, budgets: Budgets = Budgets(), reference: Reference | None = None, require_done: bool = True) -> None:
        self.violations: list[Violation] = []
        self.counts: dict[str, int] = defaultdict(int)
        self._budgets, self._reference, self._require_done = budgets, reference, require_done
        self._requests: dict[int, _RequestTrack] = {}
        self._attempt_done: set[tuple[int, int, str, int]] = set()
        self._generation: dict[str, int] = {}
        self._epoch: dict[str, int] = {}
        self._lanes: dict[tuple[str, int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        self._lost: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        self._ready_needs_golden: dict[tuple[str, int], bool] = {}
        self._windows: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._last_ns = 0
        self._handlers: Mapping[str, Callable[[Event], None]] = {
            REQUEST_ACCEPTED: self._accepted,
            REQUEST_TOKENS: self._tokens,
            REQUEST_DONE: self._done,
            ATTEMPT_DONE: self._attempt_ended,
            BOARD_GENERATION: self._generation_state,
            BOARD_GOLDEN: self._golden,
            BOARD_LANE_BOUND: self._lane_bound,
            BOARD_LANE_FREE: self._lane_free,
            BOARD_LANE_LOST: self._lane_lost,
            BOARD_IDLE: self._idle,
            FLEET_RESET_GRANTED: self._reset_granted,
            FLEET_WORKER_STARTED: self._worker_started,
        }

    def see(self, event: Event) -> None:
        """Take one event."""
        self.counts[event.event] += 1
        self._last_ns = max(self._last_ns, event.t)
        if handler := self._handlers.get(event.event):
            handler(event)

    def finish(self) -> list[Violation]:
        """After the last event: every accepted request has ended."""
        for request, track in self._requests.items():
            if track.accepted and track.done is None and self._require_done:
                self._broken("one_terminal", f"request {request_id_text(request)} was accepted and never ended", self._last_ns)
        return self.violations

    # ---------------------------------------------------------------- requests
    def _accepted(self, event: Event) -> None:
        track = self._track(event)
        if track.accepted:
            self._broken("unique_ids", f"request {request_id_text(event.request or 0)} was accepted twice", event.t)
        track.accepted = True

    def _tokens(self, event: Event) -> None:
        track, name = self._track(event), request_id_text(event.request or 0)
        if track.done is not None:
            self._broken("no_token_after_terminal", f"request {name}: tokens after {track.done}", event.t)
        if event.generation is not None:
            track.generations.add(event.generation)
            if len(track.generations) > 1:
                self._broken("one_generation", f"request {name}: answer mixes generations {sorted(track.generations)}", event.t)
        if ids := event.data.get("ids"):
            start = len(track.tokens)
            track.tokens.extend(ids)
            expected = self._reference(event.request or 0) if self._reference else None
            if expected is not None and list(ids) != list(expected[start : start + len(ids)]):
                self._broken("no_crosstalk", f"request {name}: tokens from {start} on are not its own", event.t)

    def _done(self, event: Event) -> None:
        track, name = self._track(event), request_id_text(event.request or 0)
        outcome = str(event.data.get("outcome"))
        if track.done is not None:
            self._broken("one_terminal", f"request {name}: ended twice, {track.done} and {outcome}", event.t)
        track.done = outcome
        self.counts[f"done.{outcome}"] += 1
        if outcome == "failed" and not event.data.get("code"):
            self._broken("explicit_error", f"request {name}: failed without a code", event.t)
        expected = self._reference(event.request or 0) if self._reference else None
        if outcome == "completed" and expected is not None and len(track.tokens) != len(expected):
            message = f"request {name}: completed with {len(track.tokens)} of {len(expected)} tokens"
            self._broken("whole_answer", message, event.t)

    def _attempt_ended(self, event: Event) -> None:
        key = (event.request or 0, event.attempt or 0, event.board or "", event.epoch or 0)
        if event.data.get("outcome") == "refused":
            return  # nothing was begun: who asks twice is refused twice
        if key in self._attempt_done:
            self._broken("one_terminal", f"attempt {key[1]} of {request_id_text(key[0])} ended twice on {key[2]}", event.t)
        self._attempt_done.add(key)

    def _track(self, event: Event) -> _RequestTrack:
        return self._requests.setdefault(event.request or 0, _RequestTrack())

    # ---------------------------------------------------------------- boards
    def _generation_state(self, event: Event) -> None:
        board, generation, state = event.board or "", event.generation or 0, event.data.get("state")
        if generation < self._generation.get(board, 0):
            self._broken("monotone_generations", f"{board}: generation {generation} after {self._generation[board]}", event.t)
        self._generation[board] = max(generation, self._generation.get(board, 0))
        key = (board, generation)
        if state == "CONFIGURING":
            self._ready_needs_golden[key] = True
        if state == "READY" and self._ready_needs_golden.pop(key, False):
            self._broken("golden_before_ready", f"{board}: generation {generation} became Ready without golden", event.t)

    def _golden(self, event: Event) -> None:
        if event.data.get("passed"):
            self._ready_needs_golden.pop((event.board or "", event.generation or 0), None)

    def _lane_bound(self, event: Event) -> None:
        key, lane = self._place(event), int(event.data["lane"])
        if lane in self._lost[key]:
            self._broken("unknown_never_reused", f"{key[0]}: lane {lane} was lost in generation {key[2]} and bound again", event.t)
        if lane in self._lanes[key]:
            self._broken("one_sequence_per_lane", f"{key[0]}: lane {lane} bound twice without being freed", event.t)
        self._lanes[key][lane] = (event.request or 0, event.attempt or 0)

    def _lane_free(self, event: Event) -> None:
        key, lane = self._place(event), int(event.data["lane"])
        if self._lanes[key].pop(lane, None) is None:
            self._broken("single_release", f"{key[0]}: lane {lane} freed without being bound", event.t)

    def _lane_lost(self, event: Event) -> None:
        key, lane = self._place(event), int(event.data["lane"])
        self._lanes[key].pop(lane, None)
        self._lost[key].add(lane)

    def _idle(self, event: Event) -> None:
        leaks = {name: event.data.get(name) for name in ("lanes_busy", "kv_reserved", "leases") if event.data.get(name)}
        if leaks:
            self._broken("baseline", f"{event.board}: idle with {leaks}", event.t)
        if left := self._lanes[self._place(event)]:
            self._broken("baseline", f"{event.board}: idle with lanes {sorted(left)} bound", event.t)

    def _place(self, event: Event) -> tuple[str, int, int]:
        return (event.board or "", event.epoch or 0, event.generation or 0)

    # ---------------------------------------------------------------- fleet
    def _reset_granted(self, event: Event) -> None:
        self._spend("resets", event, self._budgets.resets, self._budgets.reset_window_ns)

    def _worker_started(self, event: Event) -> None:
        board, epoch = event.board or "", event.epoch or 0
        if epoch and epoch <= self._epoch.get(board, 0):
            self._broken("monotone_epochs", f"{board}: epoch {epoch} after {self._epoch[board]}", event.t)
        self._epoch[board] = max(epoch, self._epoch.get(board, 0))
        if event.data.get("automatic"):
            self._spend("restarts", event, self._budgets.restarts, self._budgets.restart_window_ns)

    def _spend(self, name: str, event: Event, limit: int | None, window_ns: int) -> None:
        spends = self._windows[name, event.board or ""]
        spends.append(event.t)
        recent = [at for at in spends if at > event.t - window_ns]
        if limit is not None and len(recent) > limit:
            self._broken("within_budget", f"{event.board}: {len(recent)} {name} in {window_ns / S:g} s, {limit} allowed", event.t)
        self._windows[name, event.board or ""] = recent

    def _broken(self, rule: str, message: str, at_ns: int) -> None:
        self.violations.append(Violation(rule, message, at_ns))


def check(
    events: Iterable[Event], budgets: Budgets = Budgets(), reference: Reference | None = None, require_done: bool = True
) -> list[Violation]:
    """All violations of a complete history in time order."""
    checker = Checker(budgets, reference, require_done)
    for event in events:
        checker.see(event)
    return checker.finish()
