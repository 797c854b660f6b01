"""Crash bundles: what there is to know about the unwanted end of a worker, put aside before its successor writes over it.

One folder a crash, `crashes/20261130T031500Z-board0-e7/` in the log folder, with plain files:

    exit.json      how it ended, why it was ended, its last report, versions, and whether the board's lock is free
    stacks.txt     where its threads were: at the supervisor's signal, and at the end
    log.txt        its last log lines
    journal.jsonl  its last journal lines: faults, generations, attempts; never a prompt or an answer
    fleet.jsonl    what the supervisor noted about the board

Files are read at once, in the supervisor's loop (a megabyte at most); they are written in a thread. A bundle is bounded, so is the
number of bundles, and a full disk costs the bundle, never the supervisor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from calculet_core import wire
from calculet_core.errors import ExitCode
from calculet_core.shell.files import lock_holder
from calculet_core.shell.fleet import Fleet
from calculet_supervisor.shell.tails import tail
from calculet_supervisor.world import Note

SCHEMA = "calculet-crash/v1"
PARTS = 4
"""Files that share the bundle's bytes; `exit.json` is small."""
CLASSES: Mapping[int, str] = {
    ExitCode.OK: "ended", ExitCode.FAILURE: "failed", ExitCode.BUG: "bug", ExitCode.BOARD_UNAVAILABLE: "board unavailable",
    ExitCode.CONFIG: "configuration",
}  # fmt: skip
"""Exit code -> its class, in words."""
log = logging.getLogger("calculet.crashes")


class CrashBundles:
    """Writes a fleet's bundles; `written` and `failed` count."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._config = fleet, fleet.config.crashes
        self._reports: dict[str, tuple[int | None, wire.WorkerReport | None]] = {}
        self.written = self.failed = 0

    def about_to_forget(self, board: str, pid: int | None, report: wire.WorkerReport | None) -> None:
        """The process is gone; this was the last that was known of it."""
        self._reports[board] = (pid, report)

    def gather(self, note: Note) -> dict[str, bytes]:
        """Read what there is about the exit that the note tells of; to be called before a successor can be started."""
        pid, report = self._reports.pop(note.board, (None, None))
        if self._config.keep == 0:
            return {}
        try:
            return self._read(note, pid, report)
        except OSError as error:
            self._fail(note.board, error)
            return {}

    async def keep(self, note: Note, files: dict[str, bytes]) -> None:
        """Write it."""
        if not files:
            return
        try:
            await asyncio.to_thread(self._write, note.board, note.epoch, files)
            self.written += 1
        except OSError as error:
            self._fail(note.board, error)

    def _fail(self, board: str, error: OSError) -> None:
        self.failed += 1
        log.error("board %s: no crash bundle: %s", board, error)

    def _read(self, note: Note, pid: int | None, report: wire.WorkerReport | None) -> dict[str, bytes]:
        fleet, board, share = self._fleet, note.board, self._config.max_bytes // PARTS
        process = f"worker-{board}"
        about = f'"board":"{board}"'.encode()
        fleet_lines = [line for line in tail(fleet.journal("supervisor"), share).splitlines(keepends=True) if about in line]
        return {
            "exit.json": json.dumps(self._exit(note, pid, report), indent=2).encode() + b"\n",
            "stacks.txt": tail(fleet.stacks(process), share),
            "log.txt": tail(fleet.log(process), share),
            "journal.jsonl": tail(fleet.journal(process), share),
            "fleet.jsonl": b"".join(fleet_lines),
        }

    def _exit(self, note: Note, pid: int | None, report: wire.WorkerReport | None) -> dict[str, Any]:
        code, number = note.data.get("code"), note.data.get("signal")
        kind = f"killed by signal {number}" if number else CLASSES.get(code, "unknown") if code is not None else "gone"
        holder = lock_holder(self._fleet.board_lock(note.board))
        return {
            "schema": SCHEMA,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "board": note.board,
            "epoch": note.epoch,
            "pid": pid,
            "class": kind,
            **note.data,
            "board_lock": "free" if holder is None else f"held by process {holder}",
            "last_report": None if report is None else msgspec.to_builtins(report),
            "versions": {
                "calculet": version("calculet"), "python": platform.python_version(), "kernel": platform.release(),
                "runtime": report.runtime if report else None, "driver": report.driver if report else None,
                "firmware": report.firmware if report else None, "artifact": report.digest if report else None,
            },
        }  # fmt: skip

    def _write(self, board: str, epoch: int | None, files: dict[str, bytes]) -> None:
        folder = self._fleet.crashes
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{board}-e{epoch or 0}"
        count = 1
        while (final := folder / (name if count == 1 else f"{name}-{count}")).exists():
            count += 1
        temporary = folder / f".{final.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, mode=0o750)
        for file, data in files.items():
            (temporary / file).write_bytes(data)
        temporary.rename(final)
        log.warning("board %s: what is known of the crash is in %s", board, final)
        for old in bundles(folder)[: -self._config.keep]:
            shutil.rmtree(old, ignore_errors=True)


def bundles(folder: Path) -> list[Path]:
    """The bundles of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
