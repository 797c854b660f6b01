"""Drives one chaos scenario against a running fleet, from undisturbed answers to the judgement.

Nothing has to be undone here: whoever carries a fault ends it by its own clock. So this may be killed at any time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from calculet_core.chaos import KillRouter, KillSupervisor, KillWorker, StealLock, lasts_s, needs_board, words
from calculet_core.clock import S
from calculet_core.config import FleetConfig
from calculet_core.history import FLEET_RESET_GRANTED, FLEET_WORKER_STARTED, Budgets
from calculet_core.shell.control_client import ControlError
from calculet_perf.chaos import (
    Act,
    Ordered,
    Outcome,
    Run,
    Scenario,
    Step,
    broken_promises,
    judge,
    open_requests,
    plan,
)
from calculet_perf.shell.chaos_fleet import READY, ChaosFleet, NotNow
from calculet_perf.shell.chaos_load import ChaosLoad, NoReference
from calculet_perf.shell.http import AskError, HttpClient

LOOK_S = 0.1
ORDER_TRY_S = 60.0
"""How long an order is tried for while it cannot be taken."""
FIRE_GRACE_S = 3.0
"""From a fault's time to where it counts as not fired."""
FIRE_TRIES = 3
BETWEEN_S = 0.5
"""From a whole fleet to the next step."""
SPARE_RESTARTS = 2
"""A board is spared when its budget has fewer: chaos shall not end in a budget that is spent by design."""
KILLS = KillWorker | KillRouter | KillSupervisor | StealLock
RESTED_S, ACCOUNTED_S = 60.0, 30.0
BEFORE_NS = 2 * S
Say = Callable[[str], None]


class CannotRun(Exception):
    """The fleet is not in a state to be disturbed, or does not allow it."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command's options say beyond the scenario."""

    seed: int
    requests: int = 0
    """At least so many, however long it takes."""
    duration_s: float | None = None
    mean_interval_s: float | None = None


class ChaosRun:
    """One scenario on one fleet."""

    def __init__(
        self, scenario: Scenario, wishes: Wishes, fleet: ChaosFleet, client: HttpClient, load: ChaosLoad, say: Say
    ) -> None:
        self._scenario, self._wishes, self._fleet = scenario, wishes, fleet
        self._client, self._load, self._say = client, load, say
        self._rng = random.Random(f"{scenario.id} {wishes.seed}")
        self._name = f"{scenario.id}-{wishes.seed}-{time.monotonic_ns() // 10**6:x}"
        self._serving: tuple[str, ...] = ()
        self._last_board: str | None = None
        self._orders = 0
        self._begin_s = 0.0
        self._pids: dict[str, int] = {}
        """Order -> process that it is about."""
        self._dead: set[int] = set()
        """Processes that were killed for certain."""

    async def run(self) -> Outcome:
        """Everything, and the judgement.

        Raises:
            CannotRun: it could not begin; nothing can be said.
        """
        scenario, run = self._scenario, Run(self._scenario, self._wishes.seed)
        acts = plan(scenario, self._rng, self._wishes.duration_s, self._wishes.mean_interval_s)
        run.planned = sum(len(act.steps) for act in acts)
        golden = await self._prepare()
        begin_ns, self._begin_s = time.monotonic_ns(), time.monotonic()
        self._load.begin()
        run.tally = self._load.tally
        reader = asyncio.create_task(self._keep_reading())
        try:
            for act in acts:
                await self._perform(act, run.faults)
            await self._load.end(self._wishes.requests)
            run.seconds = time.monotonic() - self._begin_s
            await self._settle(run, golden)
        finally:
            reader.cancel()
            await asyncio.wait([reader])
        await self._account(run, begin_ns)
        return judge(run)

    # ---------------------------------------------------------------- before
    async def _prepare(self) -> list[str]:
        rows = await self._fleet.rows()
        if not rows:
            raise CannotRun("no supervisor answers: `calculet up` or systemctl starts the fleet")
        self._serving = tuple(board for board, row in rows.items() if row["state"] == READY)
        if not self._serving:
            raise CannotRun("no board of the model is READY")
        needed = 2 if any(step.board == "other" for step in self._scenario.steps) else 1
        if len(self._serving) < needed:
            raise CannotRun(f"scenario {self._scenario.id} needs {needed} boards that serve, there is {len(self._serving)}")
        try:
            await self._load.learn()
            golden = await self._load.golden(len(self._serving))
        except NoReference as error:
            raise CannotRun(str(error)) from None
        if golden is None:
            raise CannotRun("golden failed before anything was disturbed")
        return golden

    # ---------------------------------------------------------------- faults
    async def _perform(self, act: Act, faults: list[Ordered]) -> None:
        if act.at_s is None:
            await asyncio.sleep(BETWEEN_S)
        else:
            await asyncio.sleep(max(0.0, self._begin_s + act.at_s - time.monotonic()))
        found: list[Ordered] = []
        for step in act.steps:
            found.append(Ordered(fault=words(step.fault), board=None))
            faults.append(found[-1])
            await self._order(step, found[-1])
        for step, ordered in zip(act.steps, found, strict=True):
            await self._see_it_fire(step, ordered)
        for step, ordered in zip(act.steps, found, strict=True):
            if lasts_s(step.fault) and ordered.fired_s is not None and ordered.orders:
                await self._until(partial(self._is_over, ordered), lasts_s(step.fault) + FIRE_GRACE_S)
        whole = await self._whole()
        for ordered in found:
            ordered.whole_s = self._now() if whole is None and ordered.fired_s is not None else None
            self._say(_line(ordered))

    async def _order(self, step: Step, ordered: Ordered) -> None:
        """Until it is taken; given up after a while."""
        end = time.monotonic() + ORDER_TRY_S
        while time.monotonic() < end:
            board = await self._choose(step) if needs_board(step.fault) else None
            if board is not None or not needs_board(step.fault):
                self._orders += 1
                name = f"{self._name}-{self._orders}"
                try:
                    pid = await self._fleet.order(name, step.fault, board)
                except NotNow:
                    pass
                except ControlError as error:
                    raise CannotRun(f"{error.message}; {error.hint}" if error.hint else error.message) from None
                else:
                    ordered.orders.append(name)
                    self._pids[name] = pid
                    ordered.board, ordered.ordered_s = board, self._now()
                    self._last_board = board or self._last_board
                    return
            await asyncio.sleep(LOOK_S)

    async def _choose(self, step: Step) -> str | None:
        """A board that serves and can bear it; None: none at the moment."""
        if step.board == "same":
            return self._last_board
        rows = [row for row in (await self._fleet.rows()).values() if row["state"] == READY and row["board"] in self._serving]
        if step.board == "other":
            rows = [row for row in rows if row["board"] != self._last_board]
        rows = [row for row in rows if (row["restarts_left"] or 0) >= SPARE_RESTARTS]
        if not rows:
            return None
        busiest = max(row["active"] or 0 for row in rows)
        return str(self._rng.choice([row["board"] for row in rows if (row["active"] or 0) == busiest]))

    async def _see_it_fire(self, step: Step, ordered: Ordered) -> None:
        """A phase that its board did not visit in time is ordered again."""
        for attempt in range(FIRE_TRIES):
            if not ordered.orders:
                return
            if await self._until(partial(self._has_fired, ordered), lasts_s(step.fault) + FIRE_GRACE_S):
                fired = self._fleet.fired[ordered.orders[-1]]
                ordered.fired_s = round(fired.t / 1e9 - self._begin_s, 3)
                if isinstance(step.fault, KILLS):
                    self._dead.add(self._pids[ordered.orders[-1]])
                return
            if attempt + 1 < FIRE_TRIES:
                await self._order(step, ordered)

    def _has_fired(self, ordered: Ordered) -> bool:
        return ordered.orders[-1] in self._fleet.fired

    def _is_over(self, ordered: Ordered) -> bool:
        """It healed, or its process has died with it: that is seen by the fleet being whole again."""
        healed = self._fleet.healed.get(ordered.orders[-1])
        if healed is not None:
            ordered.healed_s = round(healed.t / 1e9 - self._begin_s, 3)
        return healed is not None or ordered.fault.startswith("kill_worker")

    # ---------------------------------------------------------------- afterwards
    async def _settle(self, run: Run, golden: list[str]) -> None:
        run.not_whole = await self._whole()
        if run.not_whole is None:
            run.golden_after = await self._load.golden(len(self._serving)) == golden
        end = time.monotonic() + RESTED_S
        while True:
            rows = await self._fleet.rows()
            run.leftovers = self._fleet.leftovers(rows) if rows else {"-": "the supervisor does not answer"}
            if not run.leftovers or time.monotonic() > end:
                return
            await asyncio.sleep(LOOK_S)

    async def _account(self, run: Run, begin_ns: int) -> None:
        """Read the journals to their end, and hold them against the promises."""
        end = time.monotonic() + ACCOUNTED_S
        while True:
            self._fleet.read()
            events = sorted(self._fleet.events, key=lambda event: event.t)
            if not open_requests(events, begin_ns) or time.monotonic() > end:
                break
            await asyncio.sleep(1.0)
        run.broken = broken_promises(events, begin_ns, budgets_of(self._fleet.config))
        since = [event for event in events if event.t >= begin_ns]
        run.restarts = sum(event.event == FLEET_WORKER_STARTED and bool(event.data.get("automatic")) for event in since)
        run.resets = sum(event.event == FLEET_RESET_GRANTED for event in since)

    # ---------------------------------------------------------------- small parts
    async def _whole(self) -> str | None:
        """Wait until every board that served serves and a router answers; what is missing when that takes too long."""
        end, missing = time.monotonic() + self._scenario.recover_s, "nothing was seen"
        while time.monotonic() < end:
            found = await self._fleet.missing(self._serving, self._dead)
            if found is None and not await self._answers():
                found = "no router answers"
            if found is None:
                return None
            missing = found
            await asyncio.sleep(LOOK_S)
        return missing

    async def _answers(self) -> bool:
        with suppress(AskError):
            return (await self._client.fetch("/health", timeout_s=2)).status == 200
        return False

    async def _keep_reading(self) -> None:
        while True:
            self._fleet.read()
            await asyncio.sleep(LOOK_S)

    async def _until(self, condition: Callable[[], Any], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            await asyncio.sleep(LOOK_S / 4)
        return True

    def _now(self) -> float:
        return round(time.monotonic() - self._begin_s, 3)


def budgets_of(config: FleetConfig) -> Budgets:
    """What the checker holds the fleet to."""
    restart = config.supervision.restart
    return Budgets(config.recovery.max_resets_per_10min, restarts=restart.max_restarts, restart_window_ns=int(restart.window_s * S))


def _line(ordered: Ordered) -> str:
    where = f" on {ordered.board}" if ordered.board else ""
    if ordered.fired_s is None:
        return f"{ordered.fault}{where}: did not fire"
    span = "the fleet did not become whole again in its time"
    if ordered.whole_s is not None and ordered.ordered_s is not None:
        span = f"whole again {ordered.whole_s - ordered.ordered_s:.1f} s after the order"
    return f"{ordered.fired_s:8.1f} s  {ordered.fault}{where}; {span}"
