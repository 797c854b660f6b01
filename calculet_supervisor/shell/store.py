"""The supervisor's memory: SQLite in WAL mode with synchronous=FULL, used by one thread that nothing waits for but its callers.

It holds what an operator wants (and who said so), the counters of generations and view versions, and the spends of reset and
restart budgets. A spend is kept in wall-clock time, because the monotonic clock does not survive a boot. A database that cannot be
trusted is refused with the way to mend it: running on without it would hand out generations a second time.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from calculet_core.errors import ConfigError
from calculet_core.shell.files import write_atomic
from calculet_core.wire import FleetView

SCHEMA = 1
SPENDS_KEPT_S = 3600
AUDIT_KEPT = 10_000
BUSY_TIMEOUT_S = 5.0
T = TypeVar("T")

_TABLES = """
CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE board (name TEXT PRIMARY KEY, up INTEGER NOT NULL, draining INTEGER NOT NULL, min_epoch INTEGER NOT NULL) STRICT;
CREATE TABLE spend (kind TEXT NOT NULL, board TEXT NOT NULL, wall_ns INTEGER NOT NULL) STRICT;
CREATE INDEX spend_board ON spend (kind, board, wall_ns);
CREATE TABLE view (id INTEGER PRIMARY KEY CHECK (id = 1), body BLOB NOT NULL) STRICT;
CREATE TABLE audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, wall_s REAL NOT NULL, verb TEXT NOT NULL, board TEXT, uid INTEGER, pid INTEGER
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What operators want of one board."""

    up: bool = True
    draining: bool = False
    min_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that was remembered. Spends are monotonic nanoseconds, by (kind, board)."""

    boards: dict[str, Wanted]
    view: FleetView
    spends: dict[tuple[str, str], list[int]]


class Store:
    """Open it with `open_store`. Every method runs on the store's thread and returns after the commit."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._db, self._thread = connection, thread

    async def recall(self) -> Memory:
        """Read everything."""
        return await self._do(self._recall)

    async def mint_generation(self, at_least: int = 1) -> int:
        """The next generation, never handed out before; `at_least` is above every generation that was seen in use."""
        return await self._do(lambda: self._next("generation", at_least))

    async def spend(self, kind: str, board: str) -> None:
        """A budget was spent now."""
        await self._do(lambda: self._spend(kind, board))

    async def forgive(self, kind: str, board: str) -> None:
        """A budget's spends are forgotten."""
        await self._do(lambda: self._db.execute("DELETE FROM spend WHERE kind = ? AND board = ?", (kind, board)))

    async def want(self, board: str, wanted: Wanted, verb: str, uid: int | None, pid: int | None) -> None:
        """An operator's act: what is wanted from now on, with who said so, in one commit."""
        await self._do(lambda: self._want(board, wanted, verb, uid, pid))

    async def publish(self, view: FleetView, at_least: int, file: Path) -> FleetView:
        """Give the view its version, commit it, then write its file."""
        published = await self._do(lambda: self._publish(view, at_least))
        content = msgspec.json.encode(published) + b"\n"
        await asyncio.get_running_loop().run_in_executor(self._thread, write_atomic, file, content)
        return published

    async def audit(self, last: int = 100) -> list[dict[str, Any]]:
        """The newest administrative acts, newest first."""
        return await self._do(lambda: self._audit(last))

    def close(self) -> None:
        """Wait for what is under way, then close."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        def transaction() -> T:
            with self._db:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    # ---------------------------------------------------------------- on the store's thread
    def _recall(self) -> Memory:
        boards = {
            name: Wanted(bool(up), bool(draining), min_epoch)
            for name, up, draining, min_epoch in self._db.execute("SELECT name, up, draining, min_epoch FROM board")
        }
        body = self._db.execute("SELECT body FROM view").fetchone()
        view = msgspec.json.decode(body[0], type=FleetView) if body else FleetView(0)
        since_boot_ns = time.time_ns() - time.monotonic_ns()
        spends: dict[tuple[str, str], list[int]] = {}
        for kind, board, wall_ns in self._db.execute("SELECT kind, board, wall_ns FROM spend ORDER BY wall_ns"):
            spends.setdefault((kind, board), []).append(min(wall_ns - since_boot_ns, time.monotonic_ns()))
        return Memory(boards, view, spends)

    def _next(self, counter: str, at_least: int) -> int:
        row = self._db.execute("SELECT value FROM counter WHERE name = ?", (counter,)).fetchone()
        value = max((row[0] if row else 0) + 1, at_least)
        self._db.execute("INSERT OR REPLACE INTO counter VALUES (?, ?)", (counter, value))
        return value

    def _spend(self, kind: str, board: str) -> None:
        now_ns = time.time_ns()
        self._db.execute("DELETE FROM spend WHERE wall_ns < ?", (now_ns - SPENDS_KEPT_S * 10**9,))
        self._db.execute("INSERT INTO spend VALUES (?, ?, ?)", (kind, board, now_ns))

    def _want(self, board: str, wanted: Wanted, verb: str, uid: int | None, pid: int | None) -> None:
        row = (board, int(wanted.up), int(wanted.draining), wanted.min_epoch)
        self._db.execute("INSERT OR REPLACE INTO board VALUES (?, ?, ?, ?)", row)
        insert = "INSERT INTO audit (wall_s, verb, board, uid, pid) VALUES (?, ?, ?, ?, ?)"
        added = self._db.execute(insert, (time.time(), verb, board, uid, pid))
        self._db.execute("DELETE FROM audit WHERE id <= ?", ((added.lastrowid or 0) - AUDIT_KEPT,))

    def _publish(self, view: FleetView, at_least: int) -> FleetView:
        view = msgspec.structs.replace(view, version=self._next("view", at_least))
        self._db.execute("INSERT OR REPLACE INTO view VALUES (1, ?)", (msgspec.json.encode(view),))
        return view

    def _audit(self, last: int) -> list[dict[str, Any]]:
        names = ("wall_s", "verb", "board", "uid", "pid")
        rows = self._db.execute("SELECT wall_s, verb, board, uid, pid FROM audit ORDER BY id DESC LIMIT ?", (last,))
        return [dict(zip(names, row, strict=True)) for row in rows]


async def open_store(path: Path) -> Store:
    """Open the database, or make it.

    Raises:
        ConfigError: it is damaged, of a newer version, or cannot be opened; the message says how to mend it.
    """
    thread = ThreadPoolExecutor(1, "store")
    try:
        connection = await asyncio.get_running_loop().run_in_executor(thread, _open, path)
    except sqlite3.Error as error:
        thread.shutdown()
        what = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: not a usable database: {what}. Restore it from a backup; or move it away: operators' drains, stops and "
            "the audit log are then forgotten, while generations and versions go on above what the fleet view shows"
        ) from None
    except ConfigError:
        thread.shutdown()
        raise
    return Store(connection, thread)


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        found: int = db.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA:
            raise ConfigError(f"{path}: written by a newer Calculet (schema {found}, this one knows {SCHEMA}); use that one")
        check = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if check != "ok":
            raise sqlite3.DatabaseError(check)
        if found == 0:
            db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
        path.chmod(0o600)
    except BaseException:
        db.close()
        raise
    return db
