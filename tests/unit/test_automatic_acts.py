"""What a supervisor decides about boards by itself: it is saved, however often the disk refuses, and never undoes an operator's word."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders_supervisor import a_report

from calculet_core import history
from calculet_core.config import RecallConfig
from calculet_supervisor.planner import BoardFacts
from calculet_supervisor.rollout import Rollout
from calculet_supervisor.shell import recovery
from calculet_supervisor.shell.control import Caller, Refused
from calculet_supervisor.shell.recovery import Recovery
from calculet_supervisor.shell.recovery_verbs import RecoveryVerbs
from calculet_supervisor.shell.rollout_verbs import RolloutVerbs
from calculet_supervisor.shell.store import Act, Memory, Store, Wanted, open_store
from calculet_supervisor.shell.verbs import Verbs
from calculet_supervisor.world import BoardSeen, Note, WorkerAside

CALLER = Caller(1000, 4242)


class Shell:
    """As much of a supervisor as acts on boards: a real store, verbs and judgement."""

    def __init__(self, store: Store, memory: Memory) -> None:
        boards = [SimpleNamespace(name="board0")]
        config = SimpleNamespace(boards=boards, recall=RecallConfig(probation_s=1.0))
        self.fleet: Any = SimpleNamespace(config=config)
        self.store, self.wanted, self.boards = store, dict(memory.boards), ("board0",)
        self.notes: list[Note] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.sightings: Any = SimpleNamespace(boards={})
        self.lives: dict[str, Any] = {}
        self.reconciler: Any = SimpleNamespace(attribution=None, lives=self.lives)
        self.rollouts: Any = SimpleNamespace(facts=lambda boards: {board: SimpleNamespace(failed=None) for board in boards})
        me: Any = self
        self.recovery, self.verbs = Recovery(me, memory), Verbs(me)

    def note(self, note: Note) -> None:
        self.notes.append(note)

    def decide_soon(self) -> None:
        pass

    def begin(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def settled(self) -> None:
        while self.tasks:
            await self.tasks.pop()

    def told(self, event: str) -> list[Note]:
        return [note for note in self.notes if note.event == event]


def play(path: Path, scene: Callable[[Shell], Awaitable[None]]) -> Memory:
    """Run a scene; what a successor recalls."""

    async def run() -> Memory:
        store = await open_store(path)
        try:
            shell = Shell(store, await store.recall())
            await scene(shell)
            await shell.settled()
            memory = await store.recall()
            assert memory.boards.get("board0", Wanted()) == shell.wanted.get("board0", Wanted()), "memory and disk differ"
            return memory
        finally:
            store.close()

    return asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "supervisor.sqlite"


def test_an_operators_word_that_is_being_saved_wins_over_a_verdict_and_the_audit_says_so(path: Path) -> None:
    audit: list[dict[str, Any]] = []

    async def scene(shell: Shell) -> None:
        word = asyncio.create_task(shell.verbs.drain({"board": "board0"}, CALLER))
        await asyncio.sleep(0)  # it is on its way to the disk
        shell.recovery.condemn("board0", "it failed three times")
        await word
        await shell.settled()
        audit.extend(await shell.store.audit())
        (note,) = shell.told(history.FLEET_OVERRULED)
        assert "it failed three times" in note.data["reason"]

    memory = play(path, scene)
    assert memory.boards["board0"] == Wanted(draining=True)
    verbs = [(act["verb"], act["uid"]) for act in audit]
    assert verbs == [("condemned overruled", None), ("drain", 1000)]
    assert "it failed three times" in audit[0]["detail"] and "came first" in audit[0]["detail"]


def test_a_word_on_top_of_a_verdict_that_is_being_saved_keeps_both(path: Path) -> None:
    async def scene(shell: Shell) -> None:
        shell.recovery.condemn("board0", "it failed three times")
        await shell.verbs.drain({"board": "board0"}, CALLER)
        await shell.settled()
        assert shell.told(history.FLEET_OVERRULED) == []

    assert play(path, scene).boards["board0"] == Wanted(draining=True, condemned="it failed three times")


def test_a_verdict_that_a_full_disk_refused_holds_and_is_saved_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SAVE_RETRY_S", 0.001)

    async def scene(shell: Shell) -> None:
        real, tries = shell.store.want, list[Any]()

        async def full(board: str, wanted: Wanted, acts: Any, over: int | None = None) -> Wanted | None:
            tries.append(acts)
            if len(tries) < 4:
                raise sqlite3.OperationalError("database or disk is full")
            return await real(board, wanted, acts, over)

        shell.store.want = full  # type: ignore[method-assign]
        shell.recovery.condemn("board0", "it failed three times")
        assert shell.wanted["board0"].condemned == "it failed three times"
        await shell.settled()
        assert len(tries) == 4

    assert play(path, scene).boards["board0"].condemned == "it failed three times"


def test_acts_that_follow_each_other_at_once_are_all_saved_and_told(path: Path) -> None:
    audit: list[dict[str, Any]] = []

    async def scene(shell: Shell) -> None:
        shell.recovery.condemn("board0", "first")
        shell.recovery.condemn("board0", "second")
        await shell.settled()
        audit.extend(await shell.store.audit())

    assert play(path, scene).boards["board0"].condemned == "second"
    assert [act["detail"] for act in audit] == ["second", "first"]


# ---------------------------------------------------------------- probation
def test_the_reset_of_a_probation_is_remembered_once_it_is_done(path: Path) -> None:
    async def scene(shell: Shell) -> None:
        await shell.store.want("board0", Wanted(probation=True, min_epoch=3), Act("probation", "board0"))
        shell.wanted["board0"] = (await shell.store.recall()).boards["board0"]
        shell.sightings.boards["board0"] = BoardSeen(pid=1, report=a_report(epoch=2, resets=1))
        shell.recovery.tick(0)
        assert not shell.wanted["board0"].probation_reset, "an old life's reset proves nothing"
        shell.sightings.boards["board0"] = BoardSeen(pid=2, report=a_report(epoch=3, resets=0))
        shell.recovery.tick(0)
        assert not shell.wanted["board0"].probation_reset
        shell.sightings.boards["board0"] = BoardSeen(pid=2, report=a_report(epoch=3, resets=1))
        for _ in range(3):
            shell.recovery.tick(0)
        assert len(shell.told(history.FLEET_PROBATION)) == 1

    assert play(path, scene).boards["board0"] == Wanted(probation=True, min_epoch=3, probation_reset=True)


# ---------------------------------------------------------------- workers in quarantine
def test_a_worker_in_quarantine_is_remembered_until_somebody_asks_for_a_new_life(path: Path) -> None:
    async def scene(shell: Shell) -> None:
        await shell.store.set_worker_aside("board0", WorkerAside("exit 70: a bug", 10**18, "c1"))
        await shell.store.set_worker_aside("board1", WorkerAside("exit 78: wrong", None, "c1"))
        await shell.store.set_worker_aside("board2", WorkerAside("exit 70: a bug", None, "c1"))
        await shell.store.set_worker_aside("board2", None)
        found = (await shell.store.recall()).asides
        assert set(found) == {"board0", "board1"}
        assert found["board1"] == WorkerAside("exit 78: wrong", None, "c1")
        assert found["board0"].retry_ns is not None and abs(found["board0"].retry_ns - 10**18) < 10**9
        await shell.verbs.drain({"board": "board0"}, CALLER)
        assert "board0" in (await shell.store.recall()).asides, "a drain asks for no new life"
        await shell.store.want("board0", Wanted(min_epoch=8), Act("restart", "board0"))
        shell.wanted["board0"] = (await shell.store.recall()).boards["board0"]
        assert set((await shell.store.recall()).asides) == {"board1"}

    play(path, scene)


# ---------------------------------------------------------------- a full disk
def test_an_operators_word_that_a_full_disk_refuses_is_not_done_and_says_so(path: Path) -> None:
    async def scene(shell: Shell) -> None:
        verbs = RecoveryVerbs(shell, shell.verbs)  # type: ignore[arg-type]
        await shell.verbs.drain({"board": "board0"}, CALLER)

        def fill() -> None:
            pages = shell.store._db.execute("PRAGMA page_count").fetchone()[0]
            shell.store._db.execute(f"PRAGMA max_page_count = {pages}")

        await shell.store._do(fill)
        with pytest.raises(Refused, match="condemn board0 could not be saved and was not done: database or disk is full") as refused:
            await verbs.condemn({"board": "board0", "reason": "x" * 100_000}, CALLER)
        assert refused.value.hint == "is the disk full?"
        assert shell.wanted["board0"] == Wanted(draining=True)
        assert [note.data["verb"] for note in shell.told(history.FLEET_ADMIN)] == ["drain"]
        await shell.store._do(lambda: shell.store._db.execute("PRAGMA max_page_count = 100000"))
        await verbs.condemn({"board": "board0", "reason": "it burns"}, CALLER)

    memory = play(path, scene)
    assert memory.boards["board0"] == Wanted(draining=True, condemned="it burns")


def test_a_rollout_that_a_full_disk_refuses_is_not_begun(path: Path) -> None:
    async def scene(shell: Shell) -> None:
        live: dict[str, Rollout] = {}

        async def open_rollout(rollout: Rollout, act: Act) -> Rollout:
            return await shell.store.open_rollout(rollout, act)

        seen = {"board0": BoardFacts(digest="a" * 64, state="READY", serves=True)}
        shell.fleet.config.models = [SimpleNamespace(alias="toy")]
        shell.rollouts = SimpleNamespace(
            live=live, boards=lambda alias: ("board0",), current=lambda alias: None, facts=lambda boards, alias=None: seen, open=open_rollout
        )
        shell.standing = SimpleNamespace(configuration=None)
        verbs = RolloutVerbs(shell)  # type: ignore[arg-type]

        def fill() -> None:
            pages = shell.store._db.execute("PRAGMA page_count").fetchone()[0]
            shell.store._db.execute(f"PRAGMA max_page_count = {pages}")

        await shell.store._do(fill)
        package = "/" + "p" * 100_000
        with pytest.raises(Refused, match="it could not be saved and was not done: database or disk is full"):
            await verbs.load({"alias": "toy", "package": package, "allow_downtime": True}, CALLER)
        await shell.store._do(lambda: shell.store._db.execute("PRAGMA max_page_count = 100000"))
        assert await shell.store.rollouts() == [] and live == {}
        assert (await verbs.load({"alias": "toy", "package": package, "allow_downtime": True}, CALLER))["rollout"] >= 1

    play(path, scene)
