"""Runs one fault scenario from a fresh fleet to its outcome."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from calculet_core.history import BOARD_FAULT, BOARD_STALE, FLEET_FAULT_SEEN, FLEET_RESET_GRANTED
from calculet_perf.client.observation import Asked
from calculet_perf.client.observation import Seen as Answer
from calculet_perf.faults import Outcome, Scenario, Seen, judge
from calculet_perf.shell.fault_fleet import ALIAS, BOARD, FaultFleet, FleetError
from calculet_perf.shell.http import AskError, HttpClient, Target
from calculet_perf.workloads.requests import ids_of

PATH = "/v1/completions"
SETTLE_S = 1.0
GOLDEN = (4, 12)
RESET_BUDGET = 2
_encode = msgspec.json.Encoder().encode


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
            row = await self._quiet_row()
            seen.generation_before, steps = row.get("generation"), row.get("steps") or 0
            fleet.arm()
            for number in range(scenario.load.repeat):
                if number:
                    await self._serves(client, 20)
                await self._load(client, seen)
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
    async def _load(self, client: HttpClient, seen: Seen) -> None:
        load = self._scenario.load
        if load.kind == "lengths":
            self._count(seen, await self._lengths(client))
        elif load.kind in ("leave_waiting", "leave_running"):
            leaving, staying = self._client(), load.count // 2
            gone = asyncio.gather(*(leaving.ask(self._asked(), PATH) for _ in range(load.count - staying)))
            rest = asyncio.gather(*(client.ask(self._asked(), PATH) for _ in range(staying)))
            await asyncio.sleep(0.05)
            leaving.close()
            self._count(seen, [one for one in await gone if one.error_code != "client_interrupted"])
            self._count(seen, await rest)
        elif load.kind == "shutdown":
            answers = asyncio.gather(*(client.ask(self._asked(), PATH) for _ in range(load.count)))
            await asyncio.sleep(0.1)
            self._fleet.terminate()
            self._count(seen, await answers)
        else:
            todo = iter(range(load.count))

            async def user() -> list[Answer]:
                return [await client.ask(self._asked(), PATH) for _ in todo]

            for found in await asyncio.gather(*(user() for _ in range(load.concurrency))):
                self._count(seen, found)

    async def _lengths(self, client: HttpClient) -> list[Answer]:
        context = await self._context(client)
        limits = [0, -1, context + 1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64]
        bodies = [{"prompt": [65] * 4, "max_tokens": limit} for limit in limits]
        bodies += [{"prompt": [65] * (context + 1), "max_tokens": 1}, {"prompt": [65] * (context - 1), "max_tokens": 2}]
        return [await client.ask(self._asked(**body), PATH) for body in bodies]

    def _asked(self, **body: object) -> Asked:
        load = self._scenario.load
        self._numbers += 1
        given = {
            "model": ALIAS, "prompt": ids_of(f"fault/{self._numbers}", load.prompt, 33, 123), "max_tokens": load.output,
            "stream": True, "temperature": 0, "ignore_eos": True, **body,
        }  # fmt: skip
        return Asked(self._numbers, _encode(given), f"fault-{self._numbers}", True)

    # ---------------------------------------------------------------- afterwards
    async def _settle(self, client: HttpClient, seen: Seen, before: list[str], steps: int) -> None:
        """Wait for the end state, then golden."""
        scenario, fleet = self._scenario, self._fleet
        deadline = time.monotonic() + scenario.recover_s
        row: dict[str, Any] = {}
        await asyncio.sleep(SETTLE_S)  # what the load broke is in the supervisor's view some heartbeats later
        while time.monotonic() < deadline:
            row = await self._row()
            if state_of(row) == scenario.expect.state and len(fleet.firings()) >= scenario.planned and self._calm(seen):
                break
            await asyncio.sleep(0.1)
        fleet.disarm()
        seen.state, seen.generation_after = state_of(row), row.get("generation")
        seen.device_jobs = max(0, (row.get("steps") or 0) - steps)
        if scenario.expect.serves and await self._serves(client, scenario.recover_s):
            seen.golden_after = await self._golden(client) == before

    def _calm(self, seen: Seen) -> bool:
        """Nothing has changed for a moment: a board that is about to fault still looks Ready."""
        changes = self._fleet.transitions
        return bool(changes) and time.monotonic_ns() - changes[-1][0] > SETTLE_S * 1e9

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
        seen.violations = fleet.violations(RESET_BUDGET)
        if firings:
            later = [(at, state) for at, state in fleet.transitions if at > firings[0]["t"]]
            left = next((place for place, (_, state) in enumerate(later) if state != "READY"), None)
            back = None if left is None else next((at for at, state in later[left:] if state == "READY"), None)
            seen.recovery_ms = None if back is None else (back - firings[0]["t"]) / 1e6

    # ---------------------------------------------------------------- small parts
    async def _golden(self, client: HttpClient) -> list[str] | None:
        """Hashes of fixed greedy answers, each asked twice per board; None when one failed or two of a kind differ."""
        hashes = []
        for length in GOLDEN:
            given = self._asked(prompt=ids_of(f"golden/{length}", length, 33, 123), max_tokens=8)
            answers = [await client.ask(given, PATH) for _ in range(2 * len(self._fleet.boards))]
            found = {answer.token_hash for answer in answers}
            if any(answer.error_code for answer in answers) or len(found) != 1:
                return None
            hashes.append(str(found.pop()))
        return hashes

    async def _context(self, client: HttpClient) -> int:
        models = msgspec.json.decode((await client.fetch("/v1/models")).body)
        return int(models["data"][0]["max_model_len"])

    async def _quiet_row(self) -> dict[str, Any]:
        """board0's row once its count of steps has stood still over several heartbeats."""
        row = await self._row()
        while True:
            await asyncio.sleep(0.3)
            last, row = row, await self._row()
            if last.get("steps") == row.get("steps"):
                return row

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


async def run_scenario(scenario: Scenario, folder: Path, package: Path, trust: Path, device: str) -> Outcome:
    """One scenario in a folder of its own.

    Raises:
        FleetError: the fleet did not come up.
        ConfigError: the package, key or device is wrong.
    """
    return await ScenarioRun(scenario, FaultFleet(folder, scenario, package, trust, device)).run()


def state_of(row: dict[str, Any]) -> str | None:
    """A board's state in the end: that of its generation, or CONDEMNED when it was set aside, whatever its worker still says."""
    return "CONDEMNED" if row.get("condemned") else row.get("state")
