"""Runs one fault scenario from a fresh fleet to its outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from calculet_core.history import (
    ATTEMPT_DONE,
    BOARD_FAULT,
    BOARD_LANE_BOUND,
    BOARD_STALE,
    FLEET_FAULT_SEEN,
    FLEET_RESET_GRANTED,
    Event,
)
from calculet_perf.client.observation import Asked
from calculet_perf.client.observation import Seen as Answer
from calculet_perf.faults import Kind, Outcome, Scenario, Seen, judge
from calculet_perf.shell.fault_fleet import ALIAS, BOARD, FaultFleet, FleetError, Packages
from calculet_perf.shell.golden_probe import LENGTHS, PATH, golden_answers, golden_question, question
from calculet_perf.shell.http import AskError, HttpClient, Target
from calculet_perf.workloads.requests import ids_of

RESET_BUDGET = 2
BEATS, BEAT_S = 4, 0.02
"""Heartbeats in a row that must tell of the end state, each at least so long after the one before."""
GONE_S = 1.0
"""A board whose worker has no heartbeat any more is looked at for so long."""
LONGEST_SWAP_S, LONGEST_WAIT_S = 60.0, 5.0


def attempts_without_end(events: Sequence[Event]) -> tuple[int, int]:
    """(attempts that failed or were cancelled without ever having had a lane, those that had one), by a board's journal."""
    lanes = {(event.request, event.attempt) for event in events if event.event == BOARD_LANE_BOUND}
    ended = [event for event in events if event.event == ATTEMPT_DONE and event.data.get("outcome") in ("failed", "cancelled")]
    had = sum((event.request, event.attempt) in lanes for event in ended)
    return len(ended) - had, had


class ScenarioRun:
    """One scenario against its fleet."""

    def __init__(self, scenario: Scenario, fleet: FaultFleet) -> None:
        self._scenario, self._fleet = scenario, fleet
        self._numbers = 0

    async def run(self) -> Outcome:
        """Everything, and the judgement.

        Raises:
            FleetError: the fleet did not come up; nothing can be said of the scenario.
        """
        scenario, fleet, seen = self._scenario, self._fleet, Seen()
        try:
            await fleet.start()
            client = self._client()
            before = await self._golden(client) if await self._serves(client, 30) else None
            if before is None:
                raise FleetError("golden failed before anything was injected")
            row = await self._told(lambda row: _idle(row), time.monotonic() + scenario.recover_s)
            seen.generation_before, steps = row.get("generation"), row.get("steps") or 0
            fleet.arm()
            spent = cpu_s(row.get("pid"))
            begin = time.monotonic()
            for number in range(scenario.load.repeat):
                if number:
                    if len(fleet.firings()) >= scenario.planned:
                        break
                    await self._serves(client, 20)
                await self._load(client, seen, before)
            if spent is not None and (now := cpu_s(row.get("pid"))) is not None:
                seen.cpu_share = (now - spent) / (time.monotonic() - begin)
            if scenario.expect.exit_code is None:
                await self._settle(client, seen, before, steps)
        finally:
            fleet.disarm()
            seen.exit_code = await fleet.stop()
        if scenario.expect.exit_code is None:
            seen.exit_code = None
        self._histories(seen)
        return judge(scenario, seen)

    # ---------------------------------------------------------------- loads
    async def _load(self, client: HttpClient, seen: Seen, before: list[str]) -> None:
        load = self._scenario.load
        if load.kind == "lengths":
            self._count(seen, await self._lengths(client))
        elif load.kind in ("leave_waiting", "leave_running"):
            leaving, staying = self._client(), load.count // 2
            gone = asyncio.gather(*(leaving.ask(self._asked(), PATH) for _ in range(load.count - staying)))
            rest = asyncio.gather(*(client.ask(self._asked(), PATH) for _ in range(staying)))
            await self._until_working(load.kind)
            leaving.close()
            self._count(seen, [one for one in await gone if one.error_code != "client_interrupted"])
            self._count(seen, await rest)
        elif load.kind == "swap":
            await self._swap(client, seen, before)
        elif load.kind == "shutdown":
            answers = asyncio.gather(*(client.ask(self._asked(), PATH) for _ in range(load.count)))
            await self._until_working(load.kind)
            await self._fleet.stop_board()
            self._count(seen, await answers)
            self._fleet.terminate()
        else:
            todo = iter(range(load.count))

            async def user() -> list[Answer]:
                return [await client.ask(self._asked(), PATH) for _ in todo]

            for found in await asyncio.gather(*(user() for _ in range(load.concurrency))):
                self._count(seen, found)

    async def _swap(self, client: HttpClient, seen: Seen, before: list[str]) -> None:
        """To the second artifact and back, while clients go on asking."""
        answers: list[tuple[int, Answer]] = []
        over = False

        async def user(number: int) -> None:
            place = number % len(LENGTHS)
            while not over:
                answers.append((place, await client.ask(golden_question(ALIAS, LENGTHS[place]), PATH)))

        users = asyncio.gather(*(user(number) for number in range(self._scenario.load.concurrency)))
        try:
            seen.swaps += await self._fleet.swap("load", LONGEST_SWAP_S)
            after = await self._golden(client)
            seen.swaps += await self._fleet.swap("rollback", LONGEST_SWAP_S)
        finally:
            over = True
            await users
        self._count(seen, [answer for _, answer in answers])
        known = [before, *([after] if after is not None else [])]
        seen.mixed = sum(
            answer.error_code is None and answer.token_hash not in {hashes[place] for hashes in known} for place, answer in answers
        )

    async def _until_working(self, kind: Kind) -> None:
        """board0 runs something, and where clients are to leave a queue there is one."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while time.monotonic() < deadline:
            row = await self._row()
            if row.get("active") and (row.get("waiting") or kind == "leave_running"):
                return
            await asyncio.sleep(BEAT_S / 2)

    async def _lengths(self, client: HttpClient) -> list[Answer]:
        context = await self._context(client)
        limits = [0, -1, context + 1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64]
        bodies = [{"prompt": [65] * 4, "max_tokens": limit} for limit in limits]
        bodies += [{"prompt": [65] * (context + 1), "max_tokens": 1}, {"prompt": [65] * (context - 1), "max_tokens": 2}]
        return [await client.ask(self._asked(**body), PATH) for body in bodies]

    def _asked(self, **body: object) -> Asked:
        load = self._scenario.load
        self._numbers += 1
        prompt = ids_of(f"fault/{self._numbers}", load.prompt, 33, 123)
        return question(ALIAS, self._numbers, {"prompt": prompt, "max_tokens": load.output, **body})

    # ---------------------------------------------------------------- afterwards
    async def _settle(self, client: HttpClient, seen: Seen, before: list[str], steps: int) -> None:
        """Wait for the end state, then golden."""
        scenario, fleet = self._scenario, self._fleet

        def ended(row: dict[str, Any]) -> bool:
            return state_of(row) == scenario.expect.state and len(fleet.firings()) >= scenario.planned and _idle(row)

        row = await self._told(ended, time.monotonic() + scenario.recover_s)
        fleet.disarm()
        seen.state, seen.generation_after = state_of(row), row.get("generation")
        seen.device_jobs = max(0, (row.get("steps") or 0) - steps)
        if scenario.expect.serves and await self._serves(client, scenario.recover_s):
            seen.golden_after = await self._golden(client) == before

    async def _told(self, holds: Callable[[dict[str, Any]], bool], deadline: float) -> dict[str, Any]:
        """board0's row, once several heartbeats in a row that were sent from now on tell that it holds: a board that is about to
        fault still looks Ready in the one before. The last row when it never does."""
        count, last, since = 0, time.monotonic(), None
        while True:
            row = await self._row()
            now, age = time.monotonic(), row.get("heartbeat_age_s")
            if not holds(row):
                count, since = 0, None
            elif age is None or row.get("pid") is None:  # no worker that could tell anything
                since = now if since is None else since
                if now - since > GONE_S:
                    return row
            elif now - age > last + BEAT_S:
                count, last = count + 1, now - age
            if count >= BEATS or now > deadline:
                return row
            await asyncio.sleep(BEAT_S / 2)

    async def _serves(self, client: HttpClient, deadline_s: float) -> bool:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            try:
                if (await client.fetch("/health")).status == 200:
                    return True
            except AskError:
                pass
            await asyncio.sleep(0.1)
        return False

    def _histories(self, seen: Seen) -> None:
        fleet, firings = self._fleet, self._fleet.firings()
        seen.fired = len(firings)
        supervisor = fleet.events("supervisor")
        seen.resets = sum(event.event == FLEET_RESET_GRANTED for event in supervisor)
        board = fleet.events(f"worker-{BOARD}")
        told = [event.data.get("fault") for event in supervisor if event.event == FLEET_FAULT_SEEN]
        told += [event.data.get("kind") for event in board if event.event == BOARD_FAULT]
        seen.faults = sorted({str(fault) for fault in told if fault})
        seen.stale = sum(event.event == BOARD_STALE for event in board)
        seen.cancelled, seen.undrained = attempts_without_end(board)
        seen.violations = fleet.violations(RESET_BUDGET)
        if firings:
            later = [(at, state) for at, state in fleet.transitions if at > firings[0]["t"]]
            left = next((place for place, (_, state) in enumerate(later) if state != "READY"), None)
            back = None if left is None else next((at for at, state in later[left:] if state == "READY"), None)
            seen.recovery_ms = None if back is None else (back - firings[0]["t"]) / 1e6

    # ---------------------------------------------------------------- small parts
    async def _golden(self, client: HttpClient) -> list[str] | None:
        return await golden_answers(client, ALIAS, len(self._fleet.boards))

    async def _context(self, client: HttpClient) -> int:
        models = msgspec.json.decode((await client.fetch("/v1/models")).body)
        return int(models["data"][0]["max_model_len"])

    async def _row(self) -> dict[str, Any]:
        return next((row for row in await self._fleet.rows() if row["board"] == BOARD), {})

    def _client(self) -> HttpClient:
        return HttpClient(Target("127.0.0.1", self._fleet.port), timeout_s=60)

    def _count(self, seen: Seen, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.error_code is None:
                seen.ok += 1
            else:
                seen.codes[answer.error_code] = seen.codes.get(answer.error_code, 0) + 1


async def run_scenario(scenario: Scenario, folder: Path, packages: Packages, device: str) -> Outcome:
    """One scenario in a folder of its own.

    Raises:
        FleetError: the fleet did not come up.
        ConfigError: the package, key or device is wrong.
    """
    return await ScenarioRun(scenario, FaultFleet(folder, scenario, packages, device)).run()


def cpu_s(pid: int | None) -> float | None:
    """CPU seconds of a process so far; None: it is gone, or nobody knows it."""
    if pid is None:
        return None
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _idle(row: dict[str, Any]) -> bool:
    return not any(row.get(what) for what in ("active", "waiting", "inflight"))


def state_of(row: dict[str, Any]) -> str | None:
    """A board's state in the end: that of its generation, or CONDEMNED when it was set aside, whatever its worker still says."""
    return "CONDEMNED" if row.get("condemned") else row.get("state")
