"""Boards that do what a rollout's record wants of them, one step at a time, under a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from calculet_core.clock import MS, FakeClock
from calculet_core.config import RolloutConfig
from calculet_core.states.rollout import RolloutEvent
from calculet_supervisor import rollout as records
from calculet_supervisor.canary import Opinion
from calculet_supervisor.planner import BoardFacts, Planner
from calculet_supervisor.rollout import Artifact, Rollout

BLUE, GREEN = Artifact("b" * 64, "/packages/blue", "toy 1"), Artifact("9" * 64, "/packages/green", "toy 2")


def a_rollout(boards: int = 4, **fields: Any) -> Rollout:
    """Verified, about to be staged."""
    names = tuple(f"board{index}" for index in range(boards))
    values = {"floor": boards // 2, "green": GREEN, "blue": BLUE, **fields}
    begun = records.advance(Rollout(1, "toy", "load", names), 0.0, "begun", RolloutEvent.BEGIN)
    return records.verified(begun, 0.0, **values)


class Swap:
    """One rollout over boards that load in a step; `fails` tells which board cannot load what."""

    def __init__(self, rollout: Rollout, config: RolloutConfig | None = None, fails: Callable[[str, Artifact], bool] | None = None) -> None:
        self.rollout, self.config, self.clock = rollout, config or RolloutConfig(), FakeClock()
        self.fails = fails or (lambda board, artifact: False)
        self.planner = Planner(self.config)
        self.opinion: Opinion | None = None
        self.history = [rollout]
        blue = rollout.blue
        facts = BoardFacts(blue.digest, "READY", True) if blue else BoardFacts()
        self.facts = dict.fromkeys(rollout.boards, facts)
        self.published = (rollout.serving, rollout.share)
        self.fewest = self.serving()

    # ---------------------------------------------------------------- the world
    def serving(self) -> int:
        """Boards that get new requests, by what routers were told last."""
        on, share = self.published
        shown = {on.digest} if on else set()
        if share and self.rollout.green:
            shown.add(self.rollout.green.digest)
        return sum(seen.serves and seen.digest in shown for seen in self.facts.values())

    def see(self, board: str, **fields: Any) -> None:
        self.facts[board] = replace(self.facts[board], **fields)

    def obey(self) -> None:
        """Every board takes one step towards what is wanted of it; routers hear the latest."""
        self.published = (self.rollout.serving, self.rollout.share)
        for board, seen in self.facts.items():
            wanted = self.rollout.wanted(board)
            if seen.state == "DRAINING":  # an unload that has begun cannot be called back
                self.see(board, digest=None, state="UNLOADED")
            elif seen.out is not None or seen.digest == (wanted.digest if wanted else None):
                if seen.state == "CONFIGURING":
                    bad = wanted is not None and self.fails(board, wanted)
                    failed = wanted.digest if bad and wanted else None
                    self.see(board, state="FAILED" if bad else "READY", serves=not bad, trouble="golden: wrong" if bad else None, failed=failed)
            elif seen.serves:
                self.see(board, state="DRAINING", serves=False)
            elif wanted is None or seen.state == "FAILED":
                self.see(board, digest=None, state="UNLOADED", trouble=None, failed=None)
            else:
                self.see(board, digest=wanted.digest, state="CONFIGURING")
        self.fewest = min(self.fewest, self.serving())

    # ---------------------------------------------------------------- the planner
    def decide(self, acked: bool | None = None) -> bool:
        told = self.published == (self.rollout.serving, self.rollout.share)
        now_ns = self.clock.now_ns()
        following = self.planner.decide(self.rollout, self.facts, told if acked is None else acked, self.opinion, now_ns, now_ns / 1e9)
        if following is None:
            return False
        self.rollout = msgspec.json.decode(msgspec.json.encode(following), type=Rollout)
        self.history.append(self.rollout)
        return True

    def crash(self) -> None:
        """The planner's own memory is gone."""
        self.planner = Planner(self.config)

    def step(self, ms: int = 100) -> None:
        self.clock.advance(ms * MS)
        while self.decide():
            pass
        self.obey()

    def run(self, until: Callable[[Rollout], bool] = lambda rollout: rollout.over, limit: int = 200) -> Rollout:
        for _ in range(limit):
            if until(self.rollout):
                return self.rollout
            self.step()
        raise AssertionError(f"no end after {limit} steps: {self.rollout.state} {[step.text for step in self.rollout.log]}")

    def held(self) -> dict[str, str | None]:
        return {board: seen.digest for board, seen in self.facts.items()}
