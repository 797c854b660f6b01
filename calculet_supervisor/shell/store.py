"""The supervisor's memory: SQLite in WAL mode with synchronous=FULL, used by one thread that nothing waits for but its callers.

It holds what an operator wants (and who said so), what each alias stands for and has stood for, rollouts with every step they
took, the counters of generations and view versions, the spends of reset and restart budgets, and what was set aside and why. Times
are wall-clock, because the monotonic clock does not survive a boot. A database that cannot be trusted is refused with the way to
mend it: running on without it would hand out generations a second time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from calculet_core.errors import ConfigError
from calculet_core.shell.files import sync_folder, write_atomic
from calculet_core.wire import FleetView
from calculet_supervisor.attribution import Failure
from calculet_supervisor.rollout import AliasVersion, Rollout
from calculet_supervisor.world import WorkerAside

SCHEMA = 3
SPENDS_KEPT_S = 3600
FAILURES_KEPT_S = 86_400
AUDIT_KEPT = 10_000
ROLLOUTS_KEPT = 200
VERSIONS_KEPT = 50
"""Of each alias, and of the configuration."""
BUSY_TIMEOUT_S = 5.0
_PASSING = {
    sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO, sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES, sqlite3.SQLITE_PERM: errno.EACCES, sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}  # fmt: skip
"""What SQLite says of the machine and not of the database."""
log = logging.getLogger("calculet.store")
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
_LATER = {
    2: """
ALTER TABLE board ADD COLUMN condemned TEXT;
ALTER TABLE board ADD COLUMN probation INTEGER NOT NULL DEFAULT 0;
ALTER TABLE board ADD COLUMN reset_generation INTEGER NOT NULL DEFAULT 0;
ALTER TABLE audit ADD COLUMN detail TEXT;
CREATE TABLE rollout (id INTEGER PRIMARY KEY, alias TEXT NOT NULL, open INTEGER NOT NULL, body BLOB NOT NULL) STRICT;
CREATE UNIQUE INDEX one_open_rollout ON rollout (alias) WHERE open;
CREATE TABLE alias_version (
    version INTEGER PRIMARY KEY AUTOINCREMENT, alias TEXT NOT NULL, body BLOB NOT NULL
) STRICT;
CREATE INDEX alias_version_alias ON alias_version (alias, version);
CREATE TABLE quarantine (digest TEXT PRIMARY KEY, reason TEXT NOT NULL, wall_s REAL NOT NULL) STRICT;
CREATE TABLE failure (wall_s REAL NOT NULL, body BLOB NOT NULL) STRICT;
CREATE TABLE flag (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
""",
    3: """
ALTER TABLE board ADD COLUMN probation_reset INTEGER NOT NULL DEFAULT 0;
ALTER TABLE board ADD COLUMN version INTEGER NOT NULL DEFAULT 0;
CREATE TABLE worker_aside (board TEXT PRIMARY KEY, why TEXT NOT NULL, until_ns INTEGER, config TEXT NOT NULL) STRICT;
CREATE TABLE configuration (
    version INTEGER PRIMARY KEY AUTOINCREMENT, wall_s REAL NOT NULL, allow_downtime INTEGER NOT NULL, body BLOB NOT NULL
) STRICT;
""",
}
"""What each later schema adds to the one before."""
_BOARD = "name, up, draining, min_epoch, condemned, probation, reset_generation, probation_reset, version"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What operators want of one board."""

    up: bool = True
    draining: bool = False
    min_epoch: int = 0
    condemned: str | None = None
    """Why the board was set aside; None: it was not."""
    probation: bool = False
    """It came back from being condemned and has not proved itself yet."""
    reset_generation: int = 0
    """An operator ordered a reset of this generation."""
    probation_reset: bool = False
    """The reset with which its probation begins is done; later lives of its worker need none."""
    version: int = field(default=0, compare=False)
    """Of the committed word; the store counts it."""


@dataclass(frozen=True, slots=True)
class Act:
    """Who did what; `board` and `detail` are what it was about. Without `uid` and `pid` the supervisor itself acted."""

    verb: str
    board: str | None = None
    uid: int | None = None
    pid: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A configuration that was put in force."""

    version: int
    wall_s: float
    allow_downtime: bool
    body: bytes
    """`calculet_core.applying.Standing`, encoded."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that was remembered. Spends are monotonic nanoseconds, by (kind, board)."""

    boards: dict[str, Wanted]
    view: FleetView
    spends: dict[tuple[str, str], list[int]]
    versions: dict[str, list[AliasVersion]] = field(default_factory=dict)
    """By alias, oldest first."""
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """Those that are under way, by alias."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Artifact digest -> why it was set aside."""
    failures: list[Failure] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    asides: dict[str, WorkerAside] = field(default_factory=dict)
    """Workers whose restart budget is spent, by board; `retry_ns` as this boot's monotonic clock."""
    applied: Applied | None = None
    """The newest; None: this is the fleet's first start."""


class Store:
    """Open it with `open_store`. Every method runs on the store's thread and returns after the commit."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor, path: Path) -> None:
        self._db, self._thread, self._path = connection, thread, path
        self._inode = _inode(self._path)

    @property
    def is_astray(self) -> bool:
        """Whether the file at its path is not the one that is written: somebody deleted it, or put another one there."""
        return _inode(self._path) != self._inode

    async def stand_by(self) -> None:
        """A database that was deleted is written again, with everything that was ever acknowledged.

        Raises:
            sqlite3.Error: it cannot be; or another file is in its place.
        """
        await self._do(lambda: None)

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

    async def want(self, board: str, wanted: Wanted, acts: Act | Sequence[Act], over: int | None = None) -> Wanted | None:
        """What is wanted of a board from now on, with who said so, in one commit; as it stands there. `over`: only on top of that
        version; None: somebody else's word was committed since, and nothing was written."""
        every = (acts,) if isinstance(acts, Act) else tuple(acts)
        return await self._do(lambda: self._want(board, wanted, every, over))

    async def set_worker_aside(self, board: str, aside: WorkerAside | None) -> None:
        """A worker's restart budget is spent; None: it has another one."""
        await self._do(lambda: self._set_worker_aside(board, aside))

    async def record(self, act: Act) -> None:
        """An act that changes nothing which is kept here, for the audit log."""
        await self._do(lambda: self._audit_act(act))

    async def open_rollout(self, rollout: Rollout, act: Act) -> Rollout:
        """A new rollout, with its id.

        Raises:
            sqlite3.IntegrityError: one of the same alias is under way.
        """
        return await self._do(lambda: self._open_rollout(rollout, act))

    async def save_rollout(
        self, rollout: Rollout, version: AliasVersion | None = None, act: Act | None = None
    ) -> AliasVersion | None:
        """A rollout's next step, what its alias stands for from now on, and who said so, in one commit; the version as numbered."""
        return await self._do(lambda: self._save_rollout(rollout, version, act))

    async def save_version(self, version: AliasVersion, act: Act) -> AliasVersion:
        """What an alias stands for from now on, without a rollout; as numbered."""

        def work() -> AliasVersion:
            self._audit_act(act)
            return self._add_version(version)

        return await self._do(work)

    async def rollouts(self, last: int = 20) -> list[Rollout]:
        """The newest rollouts, newest first."""
        return await self._do(lambda: self._rollouts(last))

    async def quarantine(self, digest: str, reason: str | None, act: Act) -> None:
        """Set an artifact aside; without a reason: take it back."""
        await self._do(lambda: self._quarantine(digest, reason, act))

    async def failed(self, failure: Failure) -> None:
        """An artifact failed on a board."""
        await self._do(lambda: self._failed(failure))

    async def flag(self, name: str, value: str | None, act: Act) -> None:
        """Set a named value; None removes it."""
        await self._do(lambda: self._flag(name, value, act))

    async def publish(self, view: FleetView, at_least: int, file: Path) -> FleetView:
        """Give the view its version, commit it, then write its file."""
        published = await self._do(lambda: self._publish(view, at_least))
        content = msgspec.json.encode(published) + b"\n"
        await asyncio.get_running_loop().run_in_executor(self._thread, write_atomic, file, content)
        return published

    async def configure(self, body: bytes, allow_downtime: bool, act: Act) -> Applied:
        """Put a configuration in force, with who said so."""
        return await self._do(lambda: self._configure(body, allow_downtime, act))

    async def audit(self, last: int = 100) -> list[dict[str, Any]]:
        """The newest administrative acts, newest first."""
        return await self._do(lambda: self._audit(last))

    def close(self) -> None:
        """Wait for what is under way, then close."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        def transaction() -> T:
            if self.is_astray:
                self._write_again()
            with self._db:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    # ---------------------------------------------------------------- on the store's thread
    def _write_again(self) -> None:
        """The open connection still has all of a deleted file; what is committed into that would go with this process."""
        if self._path.exists():
            raise sqlite3.OperationalError(f"{self._path} was replaced while it is in use; a new supervisor takes that one")
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            temporary.parent.mkdir(exist_ok=True, mode=0o750)
            temporary.unlink(missing_ok=True)
            _copy(self._db, temporary)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            temporary.rename(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise sqlite3.OperationalError(f"{self._path} was deleted and cannot be written again: {error.strerror}") from None
        old, self._db = self._db, _connect(self._path)
        self._inode = _inode(self._path)
        old.close()
        log.warning("%s was deleted while it is in use; it is there again, nothing is lost", self._path)

    def _recall(self) -> Memory:
        boards = {
            name: Wanted(bool(up), bool(draining), min_epoch, condemned, bool(probation), generation, bool(was_reset), version)
            for name, up, draining, min_epoch, condemned, probation, generation, was_reset, version in self._db.execute(
                f"SELECT {_BOARD} FROM board"
            )
        }
        body = self._db.execute("SELECT body FROM view").fetchone()
        view = msgspec.json.decode(body[0], type=FleetView) if body else FleetView(0)
        since_boot_ns = time.time_ns() - time.monotonic_ns()
        spends: dict[tuple[str, str], list[int]] = {}
        for kind, board, wall_ns in self._db.execute("SELECT kind, board, wall_ns FROM spend ORDER BY wall_ns"):
            spends.setdefault((kind, board), []).append(min(wall_ns - since_boot_ns, time.monotonic_ns()))
        versions: dict[str, list[AliasVersion]] = {}
        for number, body in self._db.execute("SELECT version, body FROM alias_version ORDER BY version"):
            found = msgspec.structs.replace(msgspec.json.decode(body, type=AliasVersion), version=number)
            versions.setdefault(found.alias, []).append(found)
        rows = self._db.execute("SELECT body FROM rollout WHERE open ORDER BY id").fetchall()
        rollouts = [msgspec.json.decode(body, type=Rollout) for (body,) in rows]
        recent = self._db.execute("SELECT body FROM failure WHERE wall_s > ? ORDER BY wall_s", (time.time() - FAILURES_KEPT_S,))
        return Memory(
            boards, view, spends, versions, {rollout.alias: rollout for rollout in rollouts},
            dict(self._db.execute("SELECT digest, reason FROM quarantine").fetchall()),
            [msgspec.json.decode(body, type=Failure) for (body,) in recent],
            dict(self._db.execute("SELECT name, value FROM flag").fetchall()),
            {
                board: WorkerAside(why, None if until_ns is None else until_ns - since_boot_ns, config)
                for board, why, until_ns, config in self._db.execute("SELECT board, why, until_ns, config FROM worker_aside")
            },
            self._applied(),
        )  # fmt: skip

    def _applied(self) -> Applied | None:
        newest = "SELECT version, wall_s, allow_downtime, body FROM configuration ORDER BY version DESC LIMIT 1"
        row = self._db.execute(newest).fetchone()
        return Applied(row[0], row[1], bool(row[2]), row[3]) if row else None

    def _configure(self, body: bytes, allow_downtime: bool, act: Act) -> Applied:
        row = (time.time(), int(allow_downtime), body)
        added = self._db.execute("INSERT INTO configuration (wall_s, allow_downtime, body) VALUES (?, ?, ?)", row)
        version = added.lastrowid or 0
        self._db.execute("DELETE FROM configuration WHERE version <= ?", (version - VERSIONS_KEPT,))
        self._audit_act(act)
        return Applied(version, row[0], allow_downtime, body)

    def _next(self, counter: str, at_least: int) -> int:
        row = self._db.execute("SELECT value FROM counter WHERE name = ?", (counter,)).fetchone()
        value = max((row[0] if row else 0) + 1, at_least)
        self._db.execute("INSERT OR REPLACE INTO counter VALUES (?, ?)", (counter, value))
        return value

    def _spend(self, kind: str, board: str) -> None:
        now_ns = time.time_ns()
        self._db.execute("DELETE FROM spend WHERE wall_ns < ?", (now_ns - SPENDS_KEPT_S * 10**9,))
        self._db.execute("INSERT INTO spend VALUES (?, ?, ?)", (kind, board, now_ns))

    def _want(self, board: str, wanted: Wanted, acts: tuple[Act, ...], over: int | None) -> Wanted | None:
        found = self._db.execute("SELECT version, min_epoch FROM board WHERE name = ?", (board,)).fetchone()
        version, min_epoch = found or (0, 0)
        if over is not None and over != version:
            return None
        if wanted.min_epoch > min_epoch:  # a new life was asked for: whatever the budget said of the old ones
            self._set_worker_aside(board, None)
        row = (
            board, int(wanted.up), int(wanted.draining), wanted.min_epoch, wanted.condemned, int(wanted.probation),
            wanted.reset_generation, int(wanted.probation_reset), version + 1,
        )  # fmt: skip
        self._db.execute(f"INSERT OR REPLACE INTO board ({_BOARD}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        for act in acts:
            self._audit_act(act)
        return replace(wanted, version=version + 1)

    def _set_worker_aside(self, board: str, aside: WorkerAside | None) -> None:
        if aside is None:
            self._db.execute("DELETE FROM worker_aside WHERE board = ?", (board,))
            return
        until_ns = None if aside.retry_ns is None else aside.retry_ns + time.time_ns() - time.monotonic_ns()
        self._db.execute("INSERT OR REPLACE INTO worker_aside VALUES (?, ?, ?, ?)", (board, aside.why, until_ns, aside.config))

    def _audit_act(self, act: Act) -> None:
        insert = "INSERT INTO audit (wall_s, verb, board, uid, pid, detail) VALUES (?, ?, ?, ?, ?, ?)"
        added = self._db.execute(insert, (time.time(), act.verb, act.board, act.uid, act.pid, act.detail))
        self._db.execute("DELETE FROM audit WHERE id <= ?", ((added.lastrowid or 0) - AUDIT_KEPT,))

    def _open_rollout(self, rollout: Rollout, act: Act) -> Rollout:
        rollout = msgspec.structs.replace(rollout, id=self._next("rollout", 1))
        row = (rollout.id, rollout.alias, msgspec.json.encode(rollout))
        self._db.execute("INSERT INTO rollout (id, alias, open, body) VALUES (?, ?, 1, ?)", row)
        self._db.execute("DELETE FROM rollout WHERE NOT open AND id <= ?", (rollout.id - ROLLOUTS_KEPT,))
        self._audit_act(act)
        return rollout

    def _save_rollout(self, rollout: Rollout, version: AliasVersion | None, act: Act | None) -> AliasVersion | None:
        row = (int(not rollout.over), msgspec.json.encode(rollout), rollout.id)
        self._db.execute("UPDATE rollout SET open = ?, body = ? WHERE id = ?", row)
        if act is not None:
            self._audit_act(act)
        return self._add_version(version) if version is not None else None

    def _add_version(self, version: AliasVersion) -> AliasVersion:
        row = (version.alias, msgspec.json.encode(version))
        added = self._db.execute("INSERT INTO alias_version (alias, body) VALUES (?, ?)", row)
        old = "SELECT version FROM alias_version WHERE alias = ? ORDER BY version DESC LIMIT -1 OFFSET ?"
        self._db.execute(f"DELETE FROM alias_version WHERE version IN ({old})", (version.alias, VERSIONS_KEPT))
        return msgspec.structs.replace(version, version=added.lastrowid or 0)

    def _rollouts(self, last: int) -> list[Rollout]:
        rows = self._db.execute("SELECT body FROM rollout ORDER BY id DESC LIMIT ?", (last,)).fetchall()
        return [msgspec.json.decode(body, type=Rollout) for (body,) in rows]

    def _quarantine(self, digest: str, reason: str | None, act: Act) -> None:
        if reason is None:
            self._db.execute("DELETE FROM quarantine WHERE digest = ?", (digest,))
        else:
            self._db.execute("INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?)", (digest, reason, time.time()))
        self._audit_act(act)

    def _failed(self, failure: Failure) -> None:
        self._db.execute("DELETE FROM failure WHERE wall_s < ?", (time.time() - FAILURES_KEPT_S,))
        self._db.execute("INSERT INTO failure VALUES (?, ?)", (failure.wall_s, msgspec.json.encode(failure)))

    def _flag(self, name: str, value: str | None, act: Act) -> None:
        if value is None:
            self._db.execute("DELETE FROM flag WHERE name = ?", (name,))
        else:
            self._db.execute("INSERT OR REPLACE INTO flag VALUES (?, ?)", (name, value))
        self._audit_act(act)

    def _publish(self, view: FleetView, at_least: int) -> FleetView:
        view = msgspec.structs.replace(view, version=self._next("view", at_least))
        self._db.execute("INSERT OR REPLACE INTO view VALUES (1, ?)", (msgspec.json.encode(view),))
        return view

    def _audit(self, last: int) -> list[dict[str, Any]]:
        names = ("wall_s", "verb", "board", "uid", "pid", "detail")
        rows = self._db.execute(f"SELECT {', '.join(names)} FROM audit ORDER BY id DESC LIMIT ?", (last,))
        return [dict(zip(names, row, strict=True)) for row in rows]


async def open_store(path: Path) -> Store:
    """Open the database, or make it.

    Raises:
        ConfigError: it is damaged or of a newer version; the message says how to mend it.
        OSError: it cannot be opened now: a full or read-only disk, say. It is not damaged.
    """
    thread = ThreadPoolExecutor(1, "store")
    try:
        connection = await asyncio.get_running_loop().run_in_executor(thread, _open, path)
    except sqlite3.Error as error:
        thread.shutdown()
        what, copy = " ".join(str(error).split()), backup_of(path)
        if (number := _PASSING.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)) is not None:
            words = f"{what}. It is not damaged: make room, or let it be written (`calculet doctor`)"
            raise OSError(number, words, str(path)) from None
        mend = f"`rm -f {path}-wal {path}-shm; cp {copy} {path}`" if copy.exists() else "from a backup"
        raise ConfigError(
            f"{path}: not a usable database: {what}. Restore it {mend}; or move it away: operators' drains, stops, rollouts and "
            "the audit log are then forgotten, while generations and versions go on above what the fleet view shows. What serves "
            "goes on serving meanwhile"
        ) from None
    except ConfigError:
        thread.shutdown()
        raise
    return Store(connection, thread, path)


def backup_of(path: Path) -> Path:
    """Where the last good copy is kept; written when a supervisor starts."""
    return path.with_name(f"{path.name}.backup")


def _open(path: Path) -> sqlite3.Connection:
    db = _connect(path)
    try:
        found: int = db.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA:
            raise ConfigError(f"{path}: written by a newer Calculet (schema {found}, this one knows {SCHEMA}); use that one")
        check = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if check != "ok":
            raise sqlite3.DatabaseError(check)
        if found == 0:
            db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = 1; COMMIT;")
        for version in range(max(1, found) + 1, SCHEMA + 1):
            db.executescript(f"BEGIN; {_LATER[version]} PRAGMA user_version = {version}; COMMIT;")
        path.chmod(0o600)
        if found:
            _back_up(db, backup_of(path))
    except BaseException:
        db.close()
        raise
    return db


def _copy(db: sqlite3.Connection, path: Path) -> None:
    with closing(sqlite3.connect(path)) as copy:
        db.backup(copy)
    path.chmod(0o600)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
    except BaseException:
        db.close()
        raise
    return db


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _back_up(db: sqlite3.Connection, path: Path) -> None:
    """A copy beside the database, complete or not there at all. Without room for it the supervisor still starts."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        _copy(db, temporary)
        temporary.rename(path)
    except (sqlite3.Error, OSError) as error:
        log.warning("%s could not be written: %s", path, error)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
