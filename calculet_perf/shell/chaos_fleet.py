"""The running fleet as a chaos driver sees it: its status, its journals as they grow, and the channel for orders."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from pathlib import Path
from typing import Any

import msgspec

from calculet_core.chaos import AnyFault
from calculet_core.history import CHAOS_FIRED, CHAOS_HEALED, Event
from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.journal import Tail

ANSWER_S = 5.0
READY = "READY"
EMPTY = ("active", "waiting", "inflight", "lanes_used", "kv_tokens_reserved")
"""What is 0 on a board at rest."""


class NotNow(Exception):
    """The order was not taken, and may be taken later."""


class ChaosFleet:
    """One fleet. `events` are what its journals have got since this was made, in the order in which they were read."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet, self.config = fleet, fleet.config
        self.boards = next(
            model_.boards or tuple(board.name for board in fleet.config.boards)
            for model_ in fleet.config.models if model_.alias == model
        )  # fmt: skip
        self.events: list[Event] = []
        self.fired: dict[str, Event] = {}
        """By order."""
        self.healed: dict[str, Event] = {}
        self._tails: dict[Path, Tail] = {}
        for path in self._paths():
            self._tails[path] = Tail(path)
            self._tails[path].skip()

    # ---------------------------------------------------------------- looking
    def read(self) -> None:
        """Take in what was written since."""
        for path in self._paths():
            tail = self._tails.get(path)
            if tail is None:
                tail = self._tails[path] = Tail(path)
            for event in tail.more():
                self.events.append(event)
                if event.event == CHAOS_FIRED:
                    self.fired[str(event.data.get("order"))] = event
                elif event.event == CHAOS_HEALED:
                    self.healed[str(event.data.get("order"))] = event

    async def rows(self) -> dict[str, dict[str, Any]]:
        """The model's boards by name, as `calculet status` shows them; empty while no supervisor answers."""
        status = await self.status()
        return {row["board"]: row for row in (status or {}).get("boards", []) if row["board"] in self.boards}

    async def status(self) -> dict[str, Any] | None:
        """None while no supervisor answers."""
        try:
            return await asyncio.to_thread(call, self._fleet.control_socket, "status", timeout_s=ANSWER_S)
        except ControlError:
            return None

    async def missing(self, serving: tuple[str, ...], dead: Set[int]) -> str | None:
        """What keeps the fleet from being whole, in words; processes of `dead` were killed, and do not count as there."""
        status = await self.status()
        if status is None or status["supervisor"]["pid"] in dead:
            return "the supervisor does not answer"
        rows = {row["board"]: row for row in status["boards"]}
        absent = [
            f"{board} is {rows[board]['state'] or 'down'}"
            for board in serving
            if rows[board]["state"] != READY or rows[board]["pid"] in dead
        ]
        if all(router["pid"] in dead for router in status["routers"]):
            absent.append("no router has reported")
        return ", ".join(absent) or None

    def leftovers(self, rows: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Board -> what is not empty there."""
        found = {}
        for board, row in rows.items():
            if left := [f"{name} {row[name]}" for name in EMPTY if row[name]]:
                found[board] = ", ".join(left)
        return found

    def _paths(self) -> list[Path]:
        return sorted(self._fleet.log_dir.glob("*.jsonl"))

    # ---------------------------------------------------------------- ordering
    async def order(self, name: str, fault: AnyFault, board: str | None) -> int:
        """Have a fault carried; the pid of the process that it is about.

        Raises:
            NotNow: nobody answers, or it cannot be carried at the moment.
            ControlError: it will never be taken: chaos is not allowed here.
        """
        arguments = {"order": name, "fault": msgspec.to_builtins(fault), "board": board}
        try:
            answer = await asyncio.to_thread(call, self._fleet.control_socket, "chaos", arguments, timeout_s=ANSWER_S)
            return int(answer["pid"])
        except SupervisorUnreachable as error:
            raise NotNow(str(error)) from None
        except ControlError as error:
            if error.message.startswith(("$.", "this fleet", "unknown verb")):
                raise
            raise NotNow(str(error)) from None
