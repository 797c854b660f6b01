"""Tenants' limits for all processes of a host: one small file that they map, so that a limit holds however many serve.

A process has a column of its own that only it writes. To take, it takes the file's lock, adds up a tenant's row, and adds to its
own cell if the sum allows: some microseconds, no message, nobody to ask and so nobody to miss. The kernel drops a process's locks
however it ends. By the lock on its column others see that it is dead; its column counts on for `grace_ns` (what it had let in may
still run) and is then cleared by whoever looks. Every cell is one aligned word, so a kill leaves no half-written number.

A lock that cannot be had for `PATIENCE_S` (its holder was stopped in those microseconds) is a refusal: a limit fails closed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Collection, Iterable
from hashlib import blake2b
from pathlib import Path

from calculet_core.limits import Rate

MAGIC = 0x3153_4D49_4C41_43  # "CALIMS1"
HOLDERS = 64
"""Processes at once, those that died in the last `grace_ns` included."""
TENANTS = 512
"""Tenants with a limit, ever, until the file goes."""
PATIENCE_S, JOIN_PATIENCE_S = 0.01, 5.0
PAUSE_S = 0.0001

_WORD = 8
_HEADER = 1
_HOLDER_AT = _HEADER
"""Two words a holder: pid (0: nobody has the column), and when somebody saw that it is dead."""
_ROW_AT = _HOLDER_AT + 2 * HOLDERS
_ROW = 2 + HOLDERS
"""Key, rate, and a cell a holder."""
_SIZE = _WORD * (_ROW_AT + _ROW * TENANTS)
_FLOCK = struct.Struct("hhqqi0q")
"""`struct flock`: type, whence, start, length, pid."""
_MUTEX = 0
NEVER_NS = -(1 << 62)
log = logging.getLogger("calculet.limits")


class LimitsUnavailable(OSError):
    """The file cannot be used; the message names it and says why."""


def open_limits(path: Path, limited: Collection[str], grace_ns: int) -> SharedLimits | LimitsLater:
    """The ledger `path` for the tenants `limited`, and for those that get a limit later. While nobody has one there is no file.

    Raises:
        LimitsUnavailable: it cannot be used, and somebody has a limit.
    """
    return SharedLimits(path, limited, grace_ns) if limited else LimitsLater(path, grace_ns)


class LimitsLater:
    """The ledger `path`, opened when the first limit asks for it. Where it cannot be opened then, who has the limit is refused."""

    def __init__(self, path: Path, grace_ns: int) -> None:
        self._path, self._grace_ns = path, grace_ns
        self._ledger: SharedLimits | None = None
        self._said = ""

    def _opened(self) -> SharedLimits | None:
        if self._ledger is None:
            try:
                self._ledger = SharedLimits(self._path, (), self._grace_ns)
            except LimitsUnavailable as error:
                if self._said != str(error):
                    self._said = str(error)
                    log.error("tenants with limits are refused: %s", error)
        return self._ledger

    def take(self, tenant: str, amount: int, limit: int) -> bool:
        """See `Limits`."""
        ledger = self._opened()
        return ledger is not None and ledger.take(tenant, amount, limit)

    def give(self, tenant: str, amount: int) -> None:
        """See `Limits`."""
        if self._ledger is None:
            raise ValueError(f"tenant {tenant}: {amount} given back, nothing was taken")
        self._ledger.give(tenant, amount)

    def total(self, tenant: str) -> int:
        """See `Limits`."""
        return 0 if self._ledger is None else self._ledger.total(tenant)

    def take_rate(self, tenant: str, rate: Rate, now_ns: int) -> bool:
        """See `Limits`."""
        ledger = self._opened()
        return ledger is not None and ledger.take_rate(tenant, rate, now_ns)

    def due_ns(self, tenant: str) -> int:
        """See `Limits`."""
        return NEVER_NS if self._ledger is None else self._ledger.due_ns(tenant)

    def sweep(self) -> None:
        """See `SharedLimits`."""
        if self._ledger is not None:
            self._ledger.sweep()

    def close(self) -> None:
        """See `SharedLimits`."""
        if self._ledger is not None:
            self._ledger.close()


class SharedLimits:
    """The ledger `path`, for the tenants named and for whoever else takes from it.

    Args:
        grace_ns: for how long what a dead process had taken still counts.

    Raises:
        LimitsUnavailable: the file cannot be opened, is another one, or has no room.
    """

    def __init__(self, path: Path, tenants: Iterable[str], grace_ns: int) -> None:
        self.path, self._grace_ns = path, grace_ns
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LimitsUnavailable(error.errno, f"{path}: {error.strerror}") from None
        try:
            self._slot, self._rows = self._join(tenants)
        except BaseException:
            os.close(self._fd)
            raise

    def _join(self, tenants: Iterable[str]) -> tuple[int, dict[str, int]]:
        if not self._enter(JOIN_PATIENCE_S):
            raise LimitsUnavailable(errno.EBUSY, f"{self.path}: another process holds its lock")
        try:
            size = os.fstat(self._fd).st_size
            if size not in (0, _SIZE):
                raise LimitsUnavailable(errno.EINVAL, f"{self.path}: it has {size} bytes, {_SIZE} are expected")
            os.ftruncate(self._fd, _SIZE)
            self._words = memoryview(mmap.mmap(self._fd, _SIZE)).cast("q")
            if size == 0:
                self._words[0] = MAGIC
            elif self._words[0] != MAGIC:
                raise LimitsUnavailable(errno.EINVAL, f"{self.path}: it is not a ledger of limits")
            self._slot = -1
            self._sweep(time.monotonic_ns())
            rows = {tenant: self._row_of(tenant) for tenant in tenants}
            return self._take_column(), rows
        finally:
            self._leave()

    def _take_column(self) -> int:
        for slot in range(HOLDERS):
            if not self._words[_HOLDER_AT + 2 * slot] and self._lock(1 + slot, fcntl.F_WRLCK):
                self._words[_HOLDER_AT + 2 * slot], self._words[_HOLDER_AT + 2 * slot + 1] = os.getpid(), 0
                return slot
        raise LimitsUnavailable(errno.ENOSPC, f"{self.path}: {HOLDERS} processes hold limits, and no more can")

    def _row_of(self, tenant: str) -> int:
        """The tenant's row; a new one when it has none."""
        key = int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "little", signed=True) or 1
        for probe in range(TENANTS):
            row = _ROW_AT + _ROW * ((key + probe) % TENANTS)
            if self._words[row] in (0, key):
                self._words[row] = key
                return row
        raise LimitsUnavailable(errno.ENOSPC, f"{self.path}: {TENANTS} tenants have limits, and no more can")

    # ---------------------------------------------------------------- the ledger
    def take(self, tenant: str, amount: int, limit: int) -> bool:
        """See `Limits`. Also False while the lock cannot be had."""
        if not self._enter(PATIENCE_S):
            return False
        try:
            row = self._known(tenant)
            if self.total(tenant) + amount > limit:
                self._sweep(time.monotonic_ns())
                if self.total(tenant) + amount > limit:
                    return False
            self._words[row + 2 + self._slot] += amount
            return True
        except LimitsUnavailable as error:
            log.error("tenant %s is refused: %s", tenant, error)
            return False
        finally:
            self._leave()

    def give(self, tenant: str, amount: int) -> None:
        """See `Limits`. Needs no lock: nobody else writes the cell."""
        cell = self._rows[tenant] + 2 + self._slot
        left = self._words[cell] - amount
        if left < 0:
            raise ValueError(f"tenant {tenant}: {amount} given back, {left + amount} were taken")
        self._words[cell] = left

    def total(self, tenant: str) -> int:
        """See `Limits`."""
        if (row := self._rows.get(tenant)) is None:
            return 0
        row += 2
        return sum(self._words[row : row + HOLDERS])

    def take_rate(self, tenant: str, rate: Rate, now_ns: int) -> bool:
        """See `Limits`. Also False while the lock cannot be had."""
        if not self._enter(PATIENCE_S):
            return False
        try:
            row = self._known(tenant)
            due_ns = rate.take(self._words[row + 1], now_ns)
            if due_ns is None:
                return False
            self._words[row + 1] = due_ns
            return True
        except LimitsUnavailable as error:
            log.error("tenant %s is refused: %s", tenant, error)
            return False
        finally:
            self._leave()

    def due_ns(self, tenant: str) -> int:
        """See `Limits`."""
        row = self._rows.get(tenant)
        return NEVER_NS if row is None else self._words[row + 1]

    def _known(self, tenant: str) -> int:
        """The tenant's row, with the lock held: it may have got its limit while this process runs."""
        if tenant not in self._rows:
            self._rows[tenant] = self._row_of(tenant)
        return self._rows[tenant]

    # ---------------------------------------------------------------- the dead
    def sweep(self) -> None:
        """Note who is dead, and clear what died long enough ago. To be called now and then, so that nothing counts for long."""
        if self._enter(PATIENCE_S):
            try:
                self._sweep(time.monotonic_ns())
            finally:
                self._leave()

    def close(self) -> None:
        """Leave. What is still taken counts on as a dead process's does."""
        if self._fd < 0:
            return
        words, slot = self._words, self._slot
        if not any(words[row + 2 + slot] for row in self._rows.values()):
            words[_HOLDER_AT + 2 * slot] = 0
        self._lock(1 + slot, fcntl.F_UNLCK)  # the mapping keeps the file open
        os.close(self._fd)
        self._fd = -1

    def _sweep(self, now_ns: int) -> None:
        words = self._words
        for slot in range(HOLDERS):
            at = _HOLDER_AT + 2 * slot
            if not words[at] or slot == self._slot or self._alive(slot):
                continue
            if not 0 < words[at + 1] <= now_ns:
                words[at + 1] = now_ns
            if now_ns - words[at + 1] >= self._grace_ns:
                for row in range(_ROW_AT, len(words), _ROW):
                    words[row + 2 + slot] = 0
                words[at] = 0

    # ---------------------------------------------------------------- locks
    def _enter(self, patience_s: float) -> bool:
        """The file's lock; False when it cannot be had in time."""
        if self._lock(_MUTEX, fcntl.F_WRLCK):
            return True
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            time.sleep(PAUSE_S)
            if self._lock(_MUTEX, fcntl.F_WRLCK):
                return True
        return False

    def _leave(self) -> None:
        self._lock(_MUTEX, fcntl.F_UNLCK)

    def _lock(self, at: int, kind: int) -> bool:
        """A byte's lock, which belongs to this opening of the file and ends with it."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _alive(self, slot: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 1 + slot, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK
