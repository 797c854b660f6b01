"""The supervisor's memory survives it, and is refused when it cannot be trusted."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calculet_core import wire
from calculet_core.clock import S
from calculet_core.errors import ConfigError
from calculet_supervisor.shell.store import SCHEMA, Store, Wanted, open_store


def with_store(path: Path, work: Callable[[Store], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        store = await open_store(path)
        try:
            return await work(store)
        finally:
            store.close()

    return asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "supervisor.sqlite"


def test_generations_are_never_handed_out_twice_and_start_above_what_was_seen_in_use(path: Path) -> None:
    async def mint(store: Store) -> list[int]:
        return [await store.mint_generation() for _ in range(3)]

    assert with_store(path, mint) == [1, 2, 3]
    assert with_store(path, mint) == [4, 5, 6]
    assert with_store(path, lambda store: store.mint_generation(at_least=40)) == 40
    assert with_store(path, mint) == [41, 42, 43]


def test_a_view_is_committed_with_a_growing_version_before_its_file_is_written(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet-view.json"
    for version in (1, 2):
        view = with_store(path, lambda store: store.publish(wire.FleetView(0), 1, file))
        assert view.version == version
        assert msgspec.json.decode(file.read_bytes(), type=wire.FleetView) == view
        assert with_store(path, lambda store: store.recall()).view == view
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError):
        with_store(path, lambda store: store.publish(wire.FleetView(0), 1, file))
    assert with_store(path, lambda store: store.recall()).view.version == 3


def test_what_an_operator_wants_is_remembered_with_who_said_so(path: Path) -> None:
    wanted = Wanted(up=False, draining=True, min_epoch=7)
    with_store(path, lambda store: store.want("board0", wanted, "stop", 1000, 42))
    assert with_store(path, lambda store: store.recall()).boards == {"board0": wanted}
    act = with_store(path, lambda store: store.audit())[0]
    assert (act["verb"], act["board"], act["uid"], act["pid"]) == ("stop", "board0", 1000, 42)
    assert abs(act["wall_s"] - time.time()) < 60


def test_spends_come_back_as_times_of_this_boots_clock_and_can_be_forgiven(path: Path) -> None:
    with_store(path, lambda store: store.spend("reset", "board0"))
    with_store(path, lambda store: store.spend("restart", "board0"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE spend SET wall_ns = wall_ns - ? WHERE kind = 'reset'", (100 * S,))
    spends = with_store(path, lambda store: store.recall()).spends
    assert 99 * S < time.monotonic_ns() - spends["reset", "board0"][0] < 160 * S
    with_store(path, lambda store: store.forgive("restart", "board0"))
    assert set(with_store(path, lambda store: store.recall()).spends) == {("reset", "board0")}


def test_a_spend_from_the_future_counts_as_now(path: Path) -> None:
    with_store(path, lambda store: store.spend("reset", "board0"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE spend SET wall_ns = wall_ns + ?", (10_000 * S,))
    assert with_store(path, lambda store: store.recall()).spends["reset", "board0"][0] <= time.monotonic_ns()


def test_a_store_of_a_newer_version_is_left_alone(path: Path) -> None:
    with_store(path, lambda store: store.mint_generation())
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    with pytest.raises(ConfigError, match="newer Calculet"):
        with_store(path, lambda store: store.recall())


@pytest.mark.parametrize("damage", ["garbage", "page"])
def test_a_damaged_store_is_refused_with_the_way_to_mend_it(path: Path, damage: str) -> None:
    with_store(path, lambda store: store.want("board0", Wanted(), "drain", 0, 0))
    data = bytearray(path.read_bytes())
    path.write_bytes(b"no database" * 999 if damage == "garbage" else data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(ConfigError, match=r"supervisor\.sqlite.*Restore it from a backup; or move it away"):
        with_store(path, lambda store: store.recall())
