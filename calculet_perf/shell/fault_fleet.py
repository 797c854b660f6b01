"""A fleet of its own for one fault scenario: `calculet up` as a process, its supervisor's status, its boards' journals."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calculet_core.history import Budgets, Event, check
from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import Fleet, load_fleet
from calculet_core.shell.journal import read_journal
from calculet_perf.faults import Scenario

ALIAS = "model"
BOARD = "board0"
ARMED_S = 120
STOP_S = 60
POLL_S = 0.05


class FleetError(Exception):
    """The fleet did not come up or does not answer: the scenario could not be run."""


@dataclass(frozen=True, slots=True)
class Packages:
    """What scenarios serve: folders of signed artifacts, and the key that is believed."""

    first: Path
    second: Path | None
    """Another artifact, for swaps."""
    trust: Path


class FaultFleet:
    """One scenario's fleet. `transitions` are (monotonic_ns, state of board0) as the supervisor shows them."""

    def __init__(self, folder: Path, scenario: Scenario, packages: Packages, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self._second = folder, _free_port(), packages.second
        self._arm, self.log = folder / "arm.json", folder / "fired.jsonl"
        options = {"faults": list(scenario.inject), "faults_arm": str(self._arm), "faults_log": str(self.log)}
        boards: list[dict[str, Any]] = [{"name": f"board{n}", "device": device} for n in range(scenario.boards)]
        boards[0] |= {"options": options}
        scheduler = {"schema": "calculet-scheduler/v1", "model_alias": ALIAS, **scenario.scheduler}
        (folder / "scheduler.yaml").write_text(yaml.safe_dump(scheduler))
        config = {
            "schema": "calculet-fleet/v1", "run_dir": "run", "state_dir": "state", "log_dir": "log",
            "trusted_keys": [str(packages.trust.resolve())],
            "fault_injection": True, "router": {"listen": f"127.0.0.1:{self.port}"}, "boards": boards,
            "models": [{"alias": ALIAS, "package": str(packages.first.resolve()), "scheduler": "scheduler.yaml"}],
            "supervision": {"heartbeat_ms": 50},
        }  # fmt: skip
        self._config = folder / "fleet.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._fleet: Fleet = load_fleet(self._config)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._planned, self._ending = scenario.planned, False
        self.boards = [str(board["name"]) for board in boards]
        self.transitions: list[tuple[int, str | None]] = []
        self.exit_code: int | None = None

    # ---------------------------------------------------------------- life
    async def start(self, deadline_s: float = 60) -> None:
        """Up, and every board Ready.

        Raises:
            FleetError: not in time, or it ended.
        """
        command = [str(Path(sys.executable).parent / "calculet"), "up", "--config", str(self._config)]
        with (self.folder / "keeper.log").open("w") as log:
            self._keeper = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._watch = asyncio.ensure_future(self._watching())
        await self.until_states({"READY"}, self.boards, deadline_s)

    async def until_states(self, states: set[str], boards: list[str], deadline_s: float) -> None:
        """Wait until each of the boards is in one of the states.

        Raises:
            FleetError: not in time.
        """
        end = time.monotonic() + deadline_s
        while True:
            rows = {row["board"]: row for row in await self.rows()}
            if rows and all(rows.get(board, {}).get("state") in states for board in boards):
                return
            if self._keeper is not None and self._keeper.poll() is not None:
                raise FleetError(f"calculet up ended with {self._keeper.returncode}: {self._last_words()}")
            if time.monotonic() > end:
                found = ", ".join(f"{board} {rows.get(board, {}).get('state')}" for board in boards)
                raise FleetError(f"not {' or '.join(sorted(states))} within {deadline_s:g} s: {found}")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> int | None:
        """SIGTERM and its exit code; whatever does not end in time is killed with its group."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            self._watch = None
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return self.exit_code
        if keeper.poll() is None and not self._ending:
            keeper.send_signal(signal.SIGTERM)
        try:
            self.exit_code = await asyncio.to_thread(keeper.wait, STOP_S)
        except subprocess.TimeoutExpired:
            keeper.kill()  # its children hold the read end of its death pipe and end with it
            self.exit_code = await asyncio.to_thread(keeper.wait)
        return self.exit_code

    def terminate(self) -> None:
        """Ask for an orderly end, without waiting."""
        if self._keeper is not None and not self._ending:
            self._ending = True  # a second signal would mean "at once"
            self._keeper.send_signal(signal.SIGTERM)

    async def stop_board(self) -> None:
        """Tell board0's instance to end, as `calculet stop` does.

        Raises:
            FleetError: the supervisor refuses, or does not answer.
        """
        try:
            await asyncio.to_thread(call, self._fleet.control_socket, "stop", {"board": BOARD})
        except ControlError as error:
            raise FleetError(f"stop {BOARD}: {error.message}") from None

    async def swap(self, verb: str, deadline_s: float) -> bool:
        """`load` the second artifact, or `rollback`, and wait for the end; whether it ended as asked.

        Raises:
            FleetError: there is no second artifact, it is refused, or it does not end in time.
        """
        if self._second is None:
            raise FleetError("there is no second artifact to load (--second)")
        arguments = {"alias": ALIAS, **({"package": str(self._second.resolve())} if verb == "load" else {})}
        end = time.monotonic() + deadline_s
        try:
            number = (await asyncio.to_thread(call, self._fleet.control_socket, verb, arguments))["rollout"]
            while True:
                told = await asyncio.to_thread(call, self._fleet.control_socket, "rollouts", {"rollout": number})
                state = told["rollouts"][0]["state"]
                if state in ("DONE", "ROLLED_BACK", "REFUSED"):
                    return bool(state == "DONE")
                if time.monotonic() > end:
                    raise FleetError(f"{verb} is {state} after {deadline_s:g} s")
                await asyncio.sleep(POLL_S)
        except ControlError as error:
            raise FleetError(f"{verb}: {error.message}") from None

    # ---------------------------------------------------------------- the injector
    def arm(self) -> None:
        """From now on, for two minutes at most, the plan counts and fires; it is disarmed as soon as all that was planned fired."""
        self._arm.write_text(json.dumps({"until_ns": time.monotonic_ns() + ARMED_S * 10**9}))

    def disarm(self) -> None:
        """Twice is fine."""
        self._arm.unlink(missing_ok=True)

    def firings(self) -> list[dict[str, Any]]:
        """What fired."""
        try:
            return [json.loads(line) for line in self.log.read_text().splitlines()]
        except FileNotFoundError:
            return []

    # ---------------------------------------------------------------- what it shows
    async def rows(self) -> list[dict[str, Any]]:
        """The boards' rows of the supervisor's status; empty while it does not answer."""
        try:
            answer = await asyncio.to_thread(call, self._fleet.control_socket, "status", timeout_s=5)
        except ControlError:
            return []
        return list(answer["boards"])

    def events(self, process: str) -> list[Event]:
        """A process's journal."""
        return read_journal(self._fleet.journal(process))

    def violations(self, resets: int) -> list[str]:
        """Broken promises of the whole history; the fleet must have ended."""
        names = ["router", "supervisor", *(f"worker-{board}" for board in self.boards)]
        events = sorted((event for name in names for event in self.events(name)), key=lambda event: event.t)
        return [f"{violation.rule}: {violation.message}" for violation in check(events, Budgets(resets=resets))]

    async def _watching(self) -> None:
        while True:
            rows = {row["board"]: row for row in await self.rows()}
            state = rows.get(BOARD, {}).get("state")
            if not self.transitions or self.transitions[-1][1] != state:
                self.transitions.append((time.monotonic_ns(), state))
            if self._planned and len(self.firings()) >= self._planned:
                self.disarm()
            await asyncio.sleep(POLL_S / 2)

    def _last_words(self) -> str:
        lines = (self.folder / "keeper.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


_given: set[int] = set()
"""Ports of this process's fleets: one that is free may have been given to a fleet that has not taken it yet."""


def _free_port() -> int:
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port
