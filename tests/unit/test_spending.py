"""A spend that could not be saved is owed, and saved before anything depends on it."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from calculet_supervisor.shell.spending import Spending


class FullDisk:
    """A store that fails so many times, then saves."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.saved: list[tuple[str, str]] = []

    async def spend(self, kind: str, board: str) -> None:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise sqlite3.OperationalError("database or disk is full")
        self.saved.append((kind, board))


def test_what_could_not_be_saved_is_saved_before_the_next_grant() -> None:
    async def scene() -> None:
        store = FullDisk(1)
        spending = Spending(store)  # type: ignore[arg-type]
        with pytest.raises(sqlite3.OperationalError):
            await spending.save("reset", "board0")
        assert spending.owes and store.saved == []
        await spending.settle("reset", "board1")
        assert store.saved == []
        await spending.settle("reset", "board0")
        assert store.saved == [("reset", "board0")] and not spending.owes

    asyncio.run(scene())


def test_everything_owed_is_saved_once_however_many_try() -> None:
    async def scene() -> None:
        store = FullDisk(3)
        spending = Spending(store)  # type: ignore[arg-type]
        for board in ("board0", "board0", "board1"):
            with pytest.raises(sqlite3.OperationalError):
                await spending.save("restart", board)
        await asyncio.gather(*(spending.settle_all() for _ in range(3)))
        assert sorted(store.saved) == [("restart", "board0")] * 2 + [("restart", "board1")]
        assert not spending.owes

    asyncio.run(scene())
