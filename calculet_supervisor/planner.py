"""The next step of a swap, from its committed record and what is seen of its boards (scheduling §11 steps 5-11).

`decide` is asked whenever something changes and answers with the record's next version, or None while there is nothing to do but
wait; the caller commits it before anything follows from it. STAGING moves boards from blue to green as long as at least `floor`
boards serve, the boards that are down anyway counted as missing. SHIFTING moves the alias in one message and waits until every
router has acknowledged it. DRAINING_BLUE moves the rest. The first failure of green goes back to blue: at once while enough blue
boards are left, else board by board.

Where fewer than twice `floor` boards are left, one side alone cannot hold the floor: then new requests are shared between blue and
green in proportion while the alias moves, each request answered by one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from calculet_core.clock import S
from calculet_core.config import RolloutConfig
from calculet_core.states.rollout import RolloutEvent, RolloutState
from calculet_supervisor.canary import Opinion, Verdict
from calculet_supervisor.rollout import Artifact, Rollout, abort, advance

_R, _E = RolloutState, RolloutEvent
MAX_DEATHS = 2
"""Lives of a worker that may end while green is loaded there, before green is given up."""


@dataclass(frozen=True, slots=True)
class BoardFacts:
    """What is seen of one board. `digest` and `state` are its generation's, None without a live worker or a generation."""

    digest: str | None = None
    state: str | None = None
    serves: bool = False
    """Ready, and takes new requests."""
    out: str | None = None
    """Why it cannot take part: stopped, drained, condemned, its restart budget spent. None: it can."""
    trouble: str | None = None
    """Why its last load failed; `failed` is the digest that was to be loaded."""
    failed: str | None = None
    exits: int = 0
    reached: bool = True
    """Every router would send it a request: a board that serves counts for the floor, and as moved, from then on."""
    unknown: bool = False
    """Its worker lives and has not reported yet: a supervisor that has just started knows nothing about it."""


Facts = Mapping[str, BoardFacts]


@dataclass(slots=True)
class _Watch:
    """What is not worth committing: since when the record stands, and the deaths that were there before a board was moved."""

    rollout: Rollout
    since_ns: int
    exits: dict[str, int]
    settled: set[str]


class Planner:
    """Plans all rollouts; what it remembers (`_Watch`) may be lost with the process."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._watches: dict[int, _Watch] = {}

    def decide(
        self, rollout: Rollout, facts: Facts, acked: bool, opinion: Opinion | None, now_ns: int, wall_s: float
    ) -> Rollout | None:
        """The next version, or None. `acked`: every router acts on where the record says the alias is."""
        watch = self._watches.get(rollout.id)
        if watch is None:
            watch = self._watches[rollout.id] = _Watch(rollout, now_ns, {}, set())
        if watch.rollout != rollout:
            watch.rollout, watch.since_ns = rollout, now_ns
        side = _Side(rollout, facts)
        if any(side.facts[board].unknown for board in side.live) and not self._stalled(watch, now_ns):
            return None  # a board that serves must not be taken for one that does not
        self._look(watch, side)
        if (dark := _darkness(side, wall_s)) is not None:
            return dark
        step = _STEPS.get(_R[rollout.state])
        following = step(self, watch, side, acked, opinion, now_ns, wall_s) if step else None
        if following is not None and following.over:
            del self._watches[rollout.id]
        return following

    def _look(self, watch: _Watch, side: _Side) -> None:
        for board in side.rollout.assigned:
            watch.exits.setdefault(board, side.facts[board].exits)
            if board in side.greens:
                watch.settled.add(board)
        for board in [board for board in watch.exits if board not in side.rollout.assigned]:
            del watch.exits[board]

    def _stalled(self, watch: _Watch, now_ns: int) -> bool:
        return now_ns - watch.since_ns > self._config.stall_timeout_s * S

    def _failure(self, watch: _Watch, side: _Side, now_ns: int, wall_s: float) -> Rollout | None:
        """Green failed on a board that was moved, or nothing has moved for too long."""
        rollout = side.rollout
        for board in rollout.assigned:
            seen = side.facts[board]
            if rollout.green is not None and seen.failed == rollout.green.digest:
                return abort(rollout, wall_s, seen.trouble or "it failed", board)
            if board not in watch.settled and seen.exits - watch.exits[board] >= MAX_DEATHS:
                return abort(rollout, wall_s, f"its worker died {MAX_DEATHS} times with green", board)
        if self._stalled(watch, now_ns):
            why = f"nothing has moved for {self._config.stall_timeout_s:g} s: {side.words()}"
            return abort(rollout, wall_s, why, next(iter(side.moving), None))
        return None

    # ---------------------------------------------------------------- one method per state
    def _staging(
        self, watch: _Watch, side: _Side, acked: bool, opinion: Opinion | None, now_ns: int, wall_s: float
    ) -> Rollout | None:
        rollout = side.rollout
        canary = rollout.canary > 0 and not rollout.promoted
        if canary and side.moving == [] and len(side.greens) >= side.canary_boards:
            watch.since_ns = now_ns  # a canary may take its time
            return self._failure(watch, side, now_ns, wall_s) or _judge(rollout, opinion, wall_s)
        if failure := self._failure(watch, side, now_ns, wall_s):
            return failure
        goal = side.canary_boards if canary else side.goal
        if not side.moving and len(side.greens) >= goal:
            text = f"the alias moves to {rollout.green}, which {', '.join(side.greens)} serve{'s' * (len(side.greens) == 1)}"
            return advance(rollout, wall_s, text, _E.STAGED, on_green=True, share=0.0)
        if side.mixed and not canary:
            share = round(max(rollout.canary, len(side.greens) / max(1, len(side.greens) + len(side.blues))), 3)
            if side.greens and abs(share - rollout.share) > 0.001:
                return advance(rollout, wall_s, f"green gets {share:.0%} of new requests", share=share)
        return _take(side, wall_s) if len(side.greens) + len(side.moving) < goal else None

    def _shifting(
        self, watch: _Watch, side: _Side, acked: bool, opinion: Opinion | None, now_ns: int, wall_s: float
    ) -> Rollout | None:
        if failure := self._failure(watch, side, now_ns, wall_s):
            return failure
        return advance(side.rollout, wall_s, "every router has acknowledged the alias", _E.SHIFTED) if acked else None

    def _draining(
        self, watch: _Watch, side: _Side, acked: bool, opinion: Opinion | None, now_ns: int, wall_s: float
    ) -> Rollout | None:
        if failure := self._failure(watch, side, now_ns, wall_s):
            return failure
        rollout, rest = side.rollout, [board for board in side.live if board not in side.rollout.assigned]
        if rest:
            if len(side.moving) >= rollout.max_unavailable:
                return None
            text = f"{rest[0]} leaves {rollout.blue or 'its rest'} for {rollout.green}"
            return advance(rollout, wall_s, text, assigned=(*rollout.assigned, rest[0]))
        if side.moving or not acked:
            return None
        later = [f"{board} ({seen.out})" for board, seen in side.facts.items() if seen.out is not None]
        text = "done" + (f"; to follow when they are back: {', '.join(later)}" if later else "") + _dark_words(rollout)
        return advance(rollout, wall_s, text, _E.DRAINED, assigned=rollout.boards)

    def _rolling_back(
        self, watch: _Watch, side: _Side, acked: bool, opinion: Opinion | None, now_ns: int, wall_s: float
    ) -> Rollout | None:
        rollout, stalled = side.rollout, self._stalled(watch, now_ns)
        if rollout.on_green:
            enough = 1 if rollout.urgent else max(1, min(rollout.floor, len(side.live) // 2, max(1, len(side.greens))))
            if rollout.blue is None or len(side.blues) >= enough:
                return advance(rollout, wall_s, f"the alias moves back to {rollout.blue or 'nothing'}", on_green=False)
            for board in sorted(rollout.assigned, key=lambda board: side.facts[board].serves):
                idle = board not in side.greens
                if idle or len(side.greens) - 1 >= rollout.floor or stalled:
                    return advance(rollout, wall_s, f"{board} goes back to blue", assigned=_without(rollout.assigned, board))
            return None
        if not (rollout.acknowledged or stalled):  # a router that still sends to green must find it
            text = "every router has acknowledged the alias"
            return advance(rollout, wall_s, text, acknowledged=True) if acked else None
        if rollout.assigned:
            text = f"back to {rollout.blue or 'nothing'}: {', '.join(rollout.assigned)}"
            return advance(rollout, wall_s, text, assigned=())
        lost = [board for board in side.live if not side.holds(board, rollout.blue)]
        hopeless = [board for board in lost if rollout.blue is not None and side.facts[board].failed == rollout.blue.digest]
        if len(lost) > len(hopeless) and not stalled:
            return None
        text = "rolled back" + (f"; not restored: {', '.join(lost)}" if lost else "") + _dark_words(rollout)
        return advance(rollout, wall_s, text, _E.RESTORED)


_STEPS = {
    _R.STAGING: Planner._staging,
    _R.SHIFTING: Planner._shifting,
    _R.DRAINING_BLUE: Planner._draining,
    _R.ROLLING_BACK: Planner._rolling_back,
}


class _Side:
    """A rollout's boards, counted."""

    def __init__(self, rollout: Rollout, facts: Facts) -> None:
        self.rollout = rollout
        self.facts = {board: facts.get(board, BoardFacts()) for board in rollout.boards}
        self.live = [board for board in rollout.boards if self.facts[board].out is None]
        reached = [board for board in self.live if self.facts[board].reached]
        self.greens = [board for board in reached if board in rollout.assigned and self.serves(board, rollout.green)]
        self.blues = [board for board in reached if board not in rollout.assigned and self.serves(board, rollout.blue)]
        self.moving = [board for board in self.live if board in rollout.assigned and board not in self.greens]
        floor = rollout.floor
        self.mixed = rollout.blue is not None and len(self.live) < 2 * floor
        """One side alone cannot hold the floor."""
        half = 0 if self.mixed else math.ceil(len(self.live) / 2)
        self.goal = 1 if rollout.blue is None or not self.blues else max(1, floor, half)
        self.canary_boards = max(1, math.ceil(rollout.canary * len(self.live)))

    def serves(self, board: str, artifact: Artifact | None) -> bool:
        """Whether it takes new requests for the artifact."""
        seen = self.facts[board]
        return artifact is not None and seen.serves and seen.digest == artifact.digest

    def holds(self, board: str, artifact: Artifact | None) -> bool:
        """Whether it has come to rest with the artifact, or with none."""
        return self.serves(board, artifact) if artifact is not None else self.facts[board].digest is None

    def counted(self) -> int:
        """Boards that serve new requests now."""
        rollout = self.rollout
        if rollout.on_green:
            return len(self.greens)
        return len(self.blues) + (len(self.greens) if rollout.share > 0 else 0)

    def dark(self) -> bool:
        """Whether no board at all takes new requests now."""
        rollout = self.rollout
        shown = [rollout.serving, *((rollout.green,) if rollout.share > 0 else ())]
        return not any(self.serves(board, artifact) for board in self.live for artifact in shown)

    def words(self) -> str:
        """For people: what the boards are doing."""
        return ", ".join(
            f"{board} {seen.out or seen.state or 'has no worker'}" + (" (not reached by every router)" if not seen.reached else "")
            for board, seen in self.facts.items()
        )


def _take(side: _Side, wall_s: float) -> Rollout | None:
    """Move one more board, if the floor allows it. A board that does not serve costs nothing; of the others, one where green has
    not failed before goes first."""
    rollout = side.rollout
    left = [board for board in side.live if board not in rollout.assigned]
    missing = len(side.rollout.boards) - len(side.live) + len(side.moving)
    for board in sorted(left, key=lambda board: (side.facts[board].serves, board in rollout.avoid)):
        free = not side.facts[board].serves
        if free or (missing < rollout.max_unavailable and side.counted() - 1 >= rollout.floor):
            text = f"{board} leaves {rollout.blue or 'its rest'} for {rollout.green}"
            return advance(rollout, wall_s, text, assigned=(*rollout.assigned, board))
    return None


def _judge(rollout: Rollout, opinion: Opinion | None, wall_s: float) -> Rollout | None:
    """A canary's next step: begin, go on, or go back."""
    if rollout.share != rollout.canary:
        return advance(rollout, wall_s, f"canary: {rollout.canary:.0%} of new requests go to green", share=rollout.canary)
    if opinion is None or opinion.verdict is Verdict.WAIT:
        return None
    if opinion.verdict is Verdict.BAD:
        return abort(rollout, wall_s, f"canary: {opinion.words}")
    return advance(rollout, wall_s, f"the canary is good: {opinion.words}", promoted=True)


def _darkness(side: _Side, wall_s: float) -> Rollout | None:
    """Keep the time in which nobody served the alias."""
    rollout = side.rollout
    if _R[rollout.state] in (_R.PENDING, _R.VERIFYING) or rollout.serving is None:
        return None
    dark = side.dark()
    if dark and rollout.dark_since is None:
        return advance(rollout, wall_s, "no board serves the alias from here on", dark_since=wall_s)
    if not dark and rollout.dark_since is not None:
        passed = max(0.0, wall_s - rollout.dark_since)
        return advance(rollout, wall_s, f"served again after {passed:.3f} s", dark_since=None, dark_s=rollout.dark_s + passed)
    return None


def _dark_words(rollout: Rollout) -> str:
    return f"; nobody served for {rollout.dark_s:.3f} s" if rollout.dark_s else ""


def _without(boards: tuple[str, ...], board: str) -> tuple[str, ...]:
    return tuple(other for other in boards if other != board)


def unfit(boards: tuple[str, ...], facts: Facts, floor: int, max_unavailable: int, allow_downtime: bool) -> str | None:
    """Why a swap cannot begin, with the arithmetic; None: it can."""
    serving = [board for board in boards if facts[board].serves]
    out = [f"{board} ({facts[board].out})" for board in boards if facts[board].out is not None]
    if len(out) == len(boards):
        return f"no board can take part: {', '.join(out)}"
    if not serving:
        return None
    down = f" ({', '.join(out)} not counted)" if out else ""
    if floor >= len(serving):
        left = len(serving) - 1
        return f"{len(serving)} of {len(boards)} boards serve{down}; moving one leaves {left}, below the floor of {floor}"
    if len(out) >= max_unavailable:
        return f"{len(out)} of {len(boards)} boards are out already: {', '.join(out)}; max-unavailable is {max_unavailable}"
    if len(serving) == 1 and not allow_downtime:
        return f"only {serving[0]} serves{down}: it cannot be moved without a time in which nobody answers (503)"
    return None
