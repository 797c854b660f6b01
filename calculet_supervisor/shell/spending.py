"""Spends of the reset and restart budgets, and what follows from a spent one, on their way to the disk.

A spend that could not be saved (a full disk) is owed: it is saved before the next thing that depends on it, and tried again
meanwhile. Otherwise a budget would be whole again for a successor, which knows only what is in the store.
"""

from __future__ import annotations

from collections import Counter

from calculet_supervisor.shell.store import Store
from calculet_supervisor.world import WorkerAside


class Spending:
    """Of one supervisor. A spend counts from the moment it is saved, which can only make a budget smaller."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owed: Counter[tuple[str, str]] = Counter()

    @property
    def owes(self) -> bool:
        """Whether something is not saved, and nobody is saving it."""
        return any(self._owed.values())

    async def save(self, kind: str, board: str) -> None:
        """A budget was spent now.

        Raises:
            sqlite3.Error: it could not be saved; it stays owed.
        """
        self._owed[kind, board] += 1
        await self.settle(kind, board)

    async def settle(self, kind: str, board: str) -> None:
        """What is owed of this budget is saved before this returns.

        Raises:
            sqlite3.Error: it could not be saved; it stays owed.
        """
        while self._owed[kind, board]:
            self._owed[kind, board] -= 1
            try:
                await self._store.spend(kind, board)
            except BaseException:
                self._owed[kind, board] += 1
                raise

    async def settle_all(self) -> None:
        """Everything that is owed.

        Raises:
            sqlite3.Error: something could not be saved; it stays owed.
        """
        for kind, board in list(self._owed):
            await self.settle(kind, board)


class Asides:
    """Workers whose restart budget is spent, of one supervisor; the newest word about each counts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owed: dict[str, WorkerAside | None] = {}

    @property
    def owes(self) -> bool:
        """Whether something is not saved, and nobody is saving it."""
        return bool(self._owed)

    async def save(self, board: str, aside: WorkerAside | None) -> None:
        """A worker was set aside, or (None) has a budget again.

        Raises:
            sqlite3.Error: it could not be saved; it stays owed.
        """
        self._owed.pop(board, None)
        try:
            await self._store.set_worker_aside(board, aside)
        except BaseException:
            self._owed.setdefault(board, aside)
            raise

    async def settle_all(self) -> None:
        """Everything that is owed.

        Raises:
            sqlite3.Error: something could not be saved; it stays owed.
        """
        for board in list(self._owed):
            await self.save(board, self._owed[board])
