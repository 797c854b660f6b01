"""Drives loads, ways back and unloads on the fleet that is measured, through the channel that its operators use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call
from calculet_core.shell.fleet import Fleet, load_fleet
from calculet_core.shell.packages import read_package
from calculet_perf.manifest import ManifestError, SwapsPart
from calculet_perf.swapping import Kind, SwapBoard, SwapCycle, wrong_boards

GLANCE_S = 0.2
OVER = ("DONE", "ROLLED_BACK", "REFUSED")
READY, EMPTY = "READY", "UNLOADED"


class FleetUnreachable(Exception):
    """Nobody answers on the fleet's control channel. Exit code 3."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A package on the fleet's host."""

    digest: str
    package: str


class _Failed(Exception):
    """The cycle was not as asked; says why."""


class SwapFleet:
    """One model of one fleet. `home` is what it serves when the stage begins, and again when it ends."""

    def __init__(self, fleet: Fleet, alias: str, part: SwapsPart, other: Loaded, run_id: str) -> None:
        self._fleet, self._alias, self.part, self.other, self._run_id = fleet, alias, part, other, run_id
        self.home = other
        model = next(model for model in fleet.config.models if model.alias == alias)
        self.boards = model.boards or tuple(board.name for board in fleet.config.boards)

    @classmethod
    def open(cls, config: Path, alias: str, part: SwapsPart, folder: Path, run_id: str) -> SwapFleet:
        """From the manifest's `fleet` section; nothing is asked yet.

        Raises:
            ManifestError: the configuration, the model or the other package is not there or wrong; names the field.
        """
        try:
            fleet = load_fleet(config)
        except ConfigError as error:
            raise ManifestError(f"$.fleet.config: {error}") from None
        aliases = [model.alias for model in fleet.config.models]
        if alias not in aliases:
            raise ManifestError(f"$.fleet.config: {config} has no model {alias!r} (it has: {', '.join(aliases)})")
        path = (folder / part.other).resolve()
        try:
            other = Loaded(read_package(path).digest, str(path))
        except (ArtifactError, OSError) as error:
            raise ManifestError(f"$.fleet.swaps.other: {error}") from None
        return cls(fleet, alias, part, other, run_id)

    @property
    def in_pauses(self) -> bool:
        """No cycle may happen under load."""
        return self.part.allow_downtime

    # ---------------------------------------------------------------- before and after a stage
    async def look(self, generations: dict[str, int]) -> None:
        """See what is served and whether it can be swapped; sets `home`.

        Args:
            generations: board -> generation, as the measured server tells; it must be this fleet's.

        Raises:
            ManifestError: it is another fleet, or cannot be swapped as asked.
            FleetUnreachable: nobody answers.
        """
        try:
            answer = await self._ask("generations")
        except ControlError as error:
            raise FleetUnreachable(f"the fleet of $.fleet.config cannot be asked: {error.message}") from None
        rows = {row["board"]: row for row in answer["boards"] if row["board"] in self.boards}
        strange = [name for name, number in generations.items() if name in rows and rows[name]["generation"] != number]
        if strange:
            raise ManifestError(
                f"$.fleet.config: is not the fleet at $.server.url: {strange[0]} has generation {generations[strange[0]]} there, "
                f"{rows[strange[0]]['generation']} here"
            )
        alias = next(one for one in answer["aliases"] if one["alias"] == self._alias)
        if alias["artifact"] is None:
            raise ManifestError(f"$.model.alias: {self._alias} is not loaded")
        self.home = Loaded(alias["artifact"]["digest"], alias["artifact"]["package"])
        if self.home.digest == self.other.digest:
            raise ManifestError(f"$.fleet.swaps.other: is what {self._alias} serves already ({self.other.digest[:12]})")
        serving = sum(row["state"] == READY and not row["out"] for row in rows.values())
        if serving < 2 and not self.part.allow_downtime:
            raise ManifestError(
                f"$.fleet.swaps: {serving} board serves {self._alias}, and swaps under load need two; "
                "`allow_downtime: true` has them in pauses of the load"
            )

    async def at_home(self) -> bool:
        """Whether the model stands for what the stage found; False when nobody tells."""
        try:
            return await self._current() == self.home.digest
        except ControlError:
            return False

    async def go_home(self, home: Loaded) -> None:
        """A stage that was interrupted goes on from what it found first.

        Raises:
            ManifestError: the fleet could not be brought back.
            FleetUnreachable: nobody answers.
        """
        self.home = home
        try:
            await self._settle(time.monotonic() + self.part.timeout_s)
            if await self._current() != home.digest:
                await self._load(home, time.monotonic() + self.part.timeout_s)
        except SupervisorUnreachable as error:
            raise FleetUnreachable(f"the fleet of $.fleet.config cannot be asked: {error.message}") from None
        except (ControlError, _Failed) as error:
            raise ManifestError(f"$.fleet: {self._alias} could not be brought back to {home.digest[:12]}: {error}") from None

    # ---------------------------------------------------------------- one cycle
    async def cycle(self, number: int, kind_of: Callable[[bool], Kind], utc: str, write: Callable[[SwapCycle], None]) -> SwapCycle:
        """Have one cycle done and written; what fails is a record that says why, never an exception.

        Args:
            kind_of: the kind, by whether the cycle leads home.
        """
        start_ns, deadline = time.monotonic_ns(), time.monotonic() + self.part.timeout_s
        record = SwapCycle(
            run_id=self._run_id, number=number, kind=kind_of(False), under_load=False, from_digest=None, from_package=None,
            to_digest=self.other.digest, utc=utc, start_ns=start_ns, end_ns=start_ns, ok=False,
        )  # fmt: skip
        try:
            await self._settle(deadline)
            current = await self._current()
            to = self.home if current == self.other.digest else self.other
            record.kind, record.from_digest, record.to_digest = kind_of(to is self.home), current, to.digest
            record.from_package = {one.digest: one.package for one in (self.home, self.other)}.get(current or "")
            record.under_load = record.kind != "home" and not self.pauses(record.kind)
            if record.kind == "home" and current == self.home.digest:
                raise _Failed("it is at home already")
            record.boards = [await self._before(name) for name in self.boards]
            await self._do(record, to, deadline)
            await self._after(record, deadline)
        except SupervisorUnreachable as error:
            record.why = f"the supervisor did not answer: {error.message}"
        except ControlError as error:
            record.why = f"refused: {error.message}"
        except _Failed as error:
            record.why = str(error)
        except asyncio.CancelledError:
            record.interrupted, record.why = True, "stopped by whoever measured"
            record.end_ns = time.monotonic_ns()
            write(record)
            raise
        record.end_ns, record.ok = time.monotonic_ns(), record.why is None
        write(record)
        return record

    def pauses(self, kind: Kind) -> bool:
        """Whether a cycle of this kind needs a pause of the load."""
        return kind in ("unload_load", "home") or self.in_pauses

    async def _do(self, record: SwapCycle, to: Loaded, deadline: float) -> None:
        if record.kind == "unload_load":
            begin = time.monotonic()
            await self._ask("unload", alias=self._alias)
            rows = await self._until(_all_empty, "every board is empty", deadline)
            record.unload_s = time.monotonic() - begin
            for board in record.boards:
                board.device_bytes_empty = device_bytes(rows[board.board])
        verb: dict[str, Any] = {"verb": "load", "package": to.package}
        if record.kind == "rollback":
            verb = {"verb": "rollback"}
        asked = await self._ask(**verb, alias=self._alias, allow_downtime=self.in_pauses or record.kind in ("unload_load", "home"))
        record.rollout = int(asked["rollout"])
        record.state = await self._over(record.rollout, deadline)

    async def _after(self, record: SwapCycle, deadline: float) -> None:
        """Every board's own word, which may follow the rollout's by a moment."""
        with suppress(_Failed):
            await self._until(
                lambda rows: all(row["state"] == READY and row["digest"] == record.to_digest for row in rows.values()), "", deadline
            )
        rows = await self._rows()
        for board in record.boards:
            row = rows[board.board]
            board.generation_after, board.digest_after, board.state_after = row["generation"], row["digest"], row["state"]
            board.device_bytes_after, board.rss_bytes_after = device_bytes(row), row["rss_bytes"] or None
        if wrong := wrong_boards(record.boards, record.to_digest):
            raise _Failed("; ".join(wrong))

    async def _before(self, name: str) -> SwapBoard:
        row = (await self._rows())[name]
        return SwapBoard(board=name, generation_before=row["generation"], device_bytes_before=device_bytes(row))

    async def _load(self, to: Loaded, deadline: float) -> None:
        asked = await self._ask("load", alias=self._alias, package=to.package, allow_downtime=True)
        await self._over(int(asked["rollout"]), deadline)

    async def _over(self, rollout: int, deadline: float) -> str:
        """The rollout's last state, which must be DONE."""
        while True:
            row = await self._rollout(rollout)
            if row is not None and row["state"] in OVER:
                if row["state"] != "DONE":
                    raise _Failed(f"rollout {rollout}: {row['state']}: {row['reason']}")
                return str(row["state"])
            if time.monotonic() > deadline:
                last = row["state"] if row else "not told"
                raise _Failed(f"rollout {rollout} had no end within {self.part.timeout_s:g} s ({last})")
            await asyncio.sleep(GLANCE_S)

    async def _settle(self, deadline: float) -> None:
        """Nobody else's swap is under way, nor one of ours that was interrupted."""
        while (rows := (await self._patient("rollouts"))["rollouts"]) and any(
            row["alias"] == self._alias and row["state"] not in OVER for row in rows
        ):
            if time.monotonic() > deadline:
                raise _Failed(f"another swap of {self._alias} was under way for {self.part.timeout_s:g} s")
            await asyncio.sleep(GLANCE_S)

    # ---------------------------------------------------------------- the channel
    async def _ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return await asyncio.to_thread(call, self._fleet.control_socket, verb, arguments)

    async def _patient(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Only a question: a supervisor that is being restarted is asked again for a while."""
        end = time.monotonic() + min(60.0, self.part.timeout_s)
        while True:
            try:
                return await self._ask(verb, **arguments)
            except SupervisorUnreachable:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(GLANCE_S)

    async def _current(self) -> str | None:
        aliases = (await self._patient("generations"))["aliases"]
        artifact = next(one for one in aliases if one["alias"] == self._alias)["artifact"]
        return None if artifact is None else str(artifact["digest"])

    async def _rollout(self, number: int) -> dict[str, Any] | None:
        rows = (await self._patient("rollouts", rollout=number))["rollouts"]
        return dict(rows[0]) if rows else None

    async def _rows(self) -> dict[str, dict[str, Any]]:
        status = await self._patient("status")
        return {row["board"]: row for row in status["boards"] if row["board"] in self.boards}

    async def _until(
        self, holds: Callable[[dict[str, dict[str, Any]]], bool], what: str, deadline: float
    ) -> dict[str, dict[str, Any]]:
        while not holds(rows := await self._rows()):
            if time.monotonic() > deadline:
                states = ", ".join(f"{name} {row['state']}" for name, row in rows.items())
                raise _Failed(f"{what}: not within {self.part.timeout_s:g} s ({states})")
            await asyncio.sleep(GLANCE_S)
        return rows


def _all_empty(rows: dict[str, dict[str, Any]]) -> bool:
    return all(row["state"] == EMPTY for row in rows.values())


def device_bytes(row: dict[str, Any]) -> float | None:
    """Memory in use of a board's chips together; None: no chip tells."""
    told = [chip["memory_used_bytes"] for chip in row["chips"] if chip.get("memory_used_bytes") is not None]
    return float(sum(told)) if told else None
