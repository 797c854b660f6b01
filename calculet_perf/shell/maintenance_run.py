"""One maintenance window on a fleet that serves, step by step and written down as it goes (acceptance §12.4)."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.files import FileLock, LockHeld
from calculet_perf.maintenance import Findings, Health, Line, Step, Touched, chained, errors_of, grown, judge, tenants_of
from calculet_perf.shell.golden_probe import golden_answers
from calculet_perf.shell.http import AskError, HttpClient

GLANCE_S = 0.1
OUTPUT_KEPT = 16_384


class WindowError(Exception):
    """The window cannot be opened; `code` is the exit code. Nothing was done."""

    def __init__(self, code: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


class Log:
    """The chained log, for one window: nobody else may append meanwhile.

    Raises:
        WindowError: somebody else writes it, or its folder is not there.
    """

    def __init__(self, path: Path, template: Line) -> None:
        self._path, self._template = path, template
        try:
            self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        except LockHeld:
            raise WindowError(2, f"{path}: another window is open, and writes it") from None
        except OSError as error:
            raise WindowError(2, f"{path}: {error.strerror}") from None

    def write(self, step: Step, health: Health | None = None, touched: Touched | None = None, **detail: Any) -> None:
        """Append a line, synced before anything else is done."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        line = Line(**{name: getattr(self._template, name) for name in Line.__struct_fields__})
        line.utc, line.monotonic_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
        line.step, line.health, line.touched, line.detail = step, health, touched, detail
        data = chained(line, lines[-1] if lines else None)
        with self._path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Others may append."""
        self._lock.release()


class Window:
    """The steps. `say` tells the person what is done; every step is logged after it."""

    def __init__(self, control: Path, client: HttpClient, board: str, log: Log, say: Callable[[str], None]) -> None:
        self._control, self._client, self._board, self._log, self._say = control, client, board, log, say
        self._errors: dict[str, int] = {}

    async def look(self) -> tuple[Health, Touched]:
        """The board and its users now.

        Raises:
            WindowError: the fleet cannot be asked, or has no such board.
        """
        row, boards = await self._row()
        alias = row.get("alias")
        serving = sum(other.get("state") == "READY" for other in boards)
        samples = await self._samples()
        golden = await golden_answers(self._client, alias, serving) if alias and serving else None
        device = await self._device()
        health = Health(
            state=row.get("state"), generation=row.get("generation"), artifact=row.get("digest"), fault=row.get("fault"),
            resets=row.get("resets"), resets_left=row.get("resets_left"), restarts_left=row.get("restarts_left"),
            running=row.get("active"), waiting=row.get("waiting"), in_flight=row.get("inflight"),
            runtime=device.get("runtime"), driver=device.get("driver"), firmware=device.get("firmware"),
            power_mode=device.get("power_mode"), golden=golden,
        )  # fmt: skip
        errors = errors_of(samples)
        touched = Touched(
            running=row.get("active"), waiting=row.get("waiting"), tenants=tenants_of(samples), errors=grown(self._errors, errors)
        )
        self._errors = self._errors or errors
        return health, touched

    async def others(self) -> int:
        """Boards besides this one that serve."""
        _, boards = await self._row()
        return sum(row.get("state") == "READY" and row["board"] != self._board for row in boards)

    async def run(self, before: Health, reason: str, command: list[str] | None, timeout_s: float, recover_s: float) -> Findings:
        """Set aside, act, bring back, look again. The board is brought back whatever the command did."""
        begin = time.monotonic()
        self._say(f"setting {self._board} aside: it finishes what runs, then its worker ends")
        try:
            await self._ask("condemn", reason=reason)
            aside = await self._until(lambda row: row.get("pid") is None, recover_s)
            self._log.write("set_aside", None, None, worker_ended=aside)
            code = await self._act(command, timeout_s) if aside else None
        finally:
            self._say(f"bringing {self._board} back: reset, golden cases, a small share of work first")
            await self._ask("probation")
            self._log.write("brought_back")
        serves = await self._until(lambda row: row.get("state") == "READY" and row.get("pid") is not None, recover_s)
        recovery_ms = (time.monotonic() - begin) * 1e3
        after, touched = (await self.look()) if serves else (None, None)
        findings = judge(before, after, code, recovery_ms)
        if not aside:
            findings.reasons.insert(0, "the board was never free of work: nothing was done to it")
        self._log.write("closed", after, touched, findings={name: getattr(findings, name) for name in findings.__struct_fields__})
        return findings

    async def _act(self, command: list[str] | None, timeout_s: float) -> int | None:
        if command is None:
            self._log.write("acted", None, None, note="no command: the board's own reset follows when it is brought back")
            return None
        self._say(f"running {' '.join(command)}")
        begin = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
        except OSError as error:
            self._log.write("acted", None, None, exit_code=127, seconds=0.0, output=str(error))
            return 127
        timed_out = False
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            timed_out = True
            process.kill()
            output = b""
            await process.wait()
        code = process.returncode if process.returncode is not None else 1
        text = output[-OUTPUT_KEPT:].decode("utf-8", "replace")
        seconds = round(time.monotonic() - begin, 3)
        self._log.write("acted", None, None, exit_code=code, seconds=seconds, timed_out=timed_out, output=text)
        return code

    # ---------------------------------------------------------------- the fleet
    async def _ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return await asyncio.to_thread(call, self._control, verb, {"board": self._board, **arguments})

    async def _row(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        try:
            status = await asyncio.to_thread(call, self._control, "status")
        except ControlError as error:
            raise WindowError(3, f"the supervisor cannot be asked: {error.message}", error.hint) from None
        boards = list(status["boards"])
        row = next((row for row in boards if row["board"] == self._board), None)
        if row is None:
            raise WindowError(2, f"there is no board {self._board}", f"there are {', '.join(row['board'] for row in boards)}")
        return row, boards

    async def _until(self, holds: Callable[[dict[str, Any]], bool], deadline_s: float) -> bool:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            try:
                row, _ = await self._row()
            except WindowError:
                row = {}
            if row and holds(row):
                return True
            await asyncio.sleep(GLANCE_S)
        return False

    async def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        try:
            text = (await self._client.fetch("/metrics")).body.decode("utf-8", "replace")
        except AskError as error:
            raise WindowError(3, f"the router cannot be asked: {error}", "--url says where it listens") from None
        wanted = ("calculet_router_errors", "calculet_router_tenant_active")
        lines = [line for line in text.splitlines() if line.startswith(wanted) or line.startswith("# TYPE calculet_router_")]
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        return [(sample.name, dict(sample.labels), sample.value) for family in families for sample in family.samples]

    async def _device(self) -> dict[str, Any]:
        try:
            boards = json.loads((await self._client.fetch("/version")).body).get("boards", [])
        except (AskError, ValueError):
            return {}
        return next((board.get("device") or {} for board in boards if board.get("board") == self._board), {})
