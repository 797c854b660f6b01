"""Bringing a fleet to what was applied: one board at a time, only where another serves, and never again and again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from builders_supervisor import a_report

from calculet_core import wire
from calculet_core.applying import leaves_of, live_with, started_with
from calculet_core.shell.fleet import load_fleet, standing_of
from calculet_supervisor.shell.configuring import Configuring
from calculet_supervisor.shell.sightings import RouterSeen, Sightings
from calculet_supervisor.shell.store import Act, Applied, Wanted
from calculet_supervisor.world import BoardSeen

BASE: dict[str, Any] = {
    "schema": "calculet-fleet/v1", "boards": [{"name": "b0", "device": "sim"}, {"name": "b1", "device": "sim"}],
    "models": [{"alias": "toy", "package": "toy"}],
}  # fmt: skip


class Scene:
    """A supervisor that runs the file, boards that report what they are given, and what is sent and saved."""

    def __init__(self, folder: Path, *, allow_downtime: bool = False, applied: dict[str, Any] | None = None) -> None:
        path = folder / "fleet.yaml"
        path.write_text(json.dumps(applied or BASE))
        kept = standing_of(load_fleet(path)).encode()
        path.write_text(json.dumps(BASE))
        self.fleet = load_fleet(path)
        leaves = leaves_of(standing_of(self.fleet))
        self.right = {board: started_with(leaves, "worker", board) for board in ("b0", "b1")}
        self.wrong = f"{self.right['b0'].partition('.')[0]}.other"
        self.live = {role: live_with(leaves, role) for role in ("worker", "router")}
        self.boards, self.wanted, self._outs = ("b0", "b1"), {}, {}
        self.sightings = Sightings()
        self.sightings.identities = {"b0": b"i0", "b1": b"i1"}
        self.sent: list[tuple[bytes, wire.TakeConfiguration]] = []
        self.restarts: list[str] = []
        self.begun: list[Any] = []
        self.started_s = -100.0
        self.unloaded: set[str] = set()
        self.rollouts = SimpleNamespace(placement=lambda board: (None if board in self.unloaded else "its artifact", None))
        self.store = SimpleNamespace(want=self._want)
        self.now_ns = 0
        memory: Any = SimpleNamespace(applied=Applied(2, 0.0, allow_downtime, kept), flags={})
        self.configuring = Configuring(self, memory)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- what a supervisor is asked
    def begin(self, work: Any) -> None:
        self.begun.append(work)

    def send_to(self, identity: bytes, message: wire.TakeConfiguration) -> bool:
        self.sent.append((identity, message))
        return True

    def out(self, board: str) -> str | None:
        return self._outs.get(board)

    def last_epoch(self, board: str) -> int:
        return int(self.sightings.boards[board].report.epoch)

    def note(self, note: Any) -> None:
        self.restarts.append(note.board)

    def decide_soon(self) -> None:
        pass

    async def _want(self, board: str, wanted: Wanted, act: Act) -> None:
        assert act.verb == "configure"

    # ---------------------------------------------------------------- what happens
    def reports(self, board: str, start: str, epoch: int = 1, state: str = "READY", live: str | None = None, **fields: Any) -> None:
        report = a_report(board, epoch, 100, state, config_start=start, config_live=live or self.live["worker"], **fields)
        self.sightings.boards[board] = BoardSeen(100, report=report)

    def router(self, serves: dict[str, int] | None, identity: bytes = b"r") -> None:
        report = wire.RouterReport(7, 2, wire.PROTOCOL, 3, config_live=self.live["router"], serves=serves)
        self.sightings.routers[identity] = RouterSeen(report, self.now_ns)

    def tick(self, seconds: float = 10) -> list[str]:
        """Boards that were restarted."""
        self.now_ns += int(seconds * 1e9)
        before = len(self.restarts)
        self.configuring.tick(self.now_ns)

        async def work() -> None:
            for one in self.begun:
                await one

        asyncio.run(work())
        self.begun.clear()
        return self.restarts[before:]


def test_boards_move_one_at_a_time_and_the_next_when_the_one_before_serves(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.reports("b0", scene.wrong)
    scene.reports("b1", scene.wrong)
    assert scene.tick() == ["b0"]
    assert scene.wanted["b0"].min_epoch == 2
    assert scene.tick() == [], "its old life still reports"
    scene.sightings.boards["b0"] = BoardSeen()
    assert scene.tick() == [], "nobody reports"
    scene.reports("b0", scene.right["b0"], epoch=2, state="WARMING")
    assert scene.tick() == [] and any("b0 is not ready: WARMING" in line for line in scene.configuring.left())
    scene.reports("b0", scene.right["b0"], epoch=2)
    assert scene.tick() == ["b1"]
    scene.reports("b1", scene.right["b1"], epoch=2)
    assert scene.tick() == [] and scene.configuring.left() == []


def test_the_next_board_waits_until_every_router_reaches_the_one_before(tmp_path: Path) -> None:
    """A board that is ready and that a router has not greeted yet serves nobody there: a 503 while another one drains."""
    scene = Scene(tmp_path)
    scene.router({"b0": 5, "b1": 6})
    scene.router(None, b"starting")
    scene.reports("b0", scene.wrong, generation=5)
    scene.reports("b1", scene.wrong, generation=6)
    assert scene.tick() == ["b0"]
    scene.reports("b0", scene.right["b0"], epoch=2, generation=7)
    assert scene.tick() == [] and "b0 is ready, and not reached yet by router 00000007" in scene.configuring.left()
    scene.router({"b0": 7, "b1": 6})
    scene.router({"b1": 6}, b"second")
    assert scene.tick() == []
    scene.router({"b0": 7, "b1": 6}, b"second")
    assert scene.tick() == ["b1"]


def test_nobody_is_restarted_before_the_routers_had_time_to_report(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.reports("b0", scene.wrong)
    scene.reports("b1", scene.right["b1"])
    scene.started_s = time.monotonic()
    assert scene.tick() == []
    scene.started_s -= 10
    assert scene.tick() == ["b0"]


def test_the_last_board_that_serves_is_left_alone_unless_downtime_was_allowed(tmp_path: Path) -> None:
    for allowed in (False, True):
        scene = Scene(tmp_path, allow_downtime=allowed)
        scene.reports("b0", scene.wrong)
        scene.sightings.boards["b1"] = BoardSeen()
        scene._outs["b1"] = "stopped"
        assert scene.tick() == (["b0"] if allowed else [])


def test_a_board_that_starts_with_something_else_again_is_not_restarted_again_and_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.reports("b0", scene.wrong)
    scene.reports("b1", scene.right["b1"])
    assert scene.tick() == ["b0"]
    scene.reports("b0", scene.wrong, epoch=2)
    assert [scene.tick() for _ in range(3)] == [[], [], []]
    assert scene.configuring.left() == ["worker-b0 started with something else again"]


def test_while_the_file_is_another_than_what_was_applied_nobody_is_restarted(tmp_path: Path, monkeypatch: Any) -> None:
    scene = Scene(tmp_path)
    monkeypatch.setattr("calculet_supervisor.shell.configuring.LOOK_AGAIN_S", 0)
    scene.reports("b0", scene.wrong)
    scene.reports("b1", scene.right["b1"])
    scene.fleet.path.write_text(json.dumps({**BASE, "trace": {"steps": True}}))
    assert [scene.tick() for _ in range(2)] == [[], []]
    scene.fleet.path.write_text(json.dumps(BASE))
    assert scene.tick() == ["b0"]


def test_a_supervisor_that_does_not_run_what_was_applied_brings_nobody_anywhere(tmp_path: Path) -> None:
    scene = Scene(tmp_path, applied={**BASE, "recovery": {"max_resets_per_10min": 9}})
    scene.reports("b0", scene.wrong, live="other")
    scene.reports("b1", scene.wrong)
    assert scene.tick() == [] and scene.sent == []
    assert "does not run it" in scene.configuring.left()[0]


def test_who_holds_something_else_live_is_told_and_told_again_less_often_when_it_said_why(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    vocabulary = scene.live["worker"].partition(".")[0]
    scene.reports("b0", scene.right["b0"], live=f"{vocabulary}.other")
    scene.reports("b1", scene.right["b1"], live="another.version")
    router = wire.RouterReport(1, 2, 1, 3, config_start="x", config_live=f"{vocabulary}.other", config_error="not what was applied")
    scene.sightings.routers[b"r"] = SimpleNamespace(report=router)
    expected: Callable[[str], wire.TakeConfiguration] = lambda role: wire.TakeConfiguration(2, scene.live[role])  # noqa: E731
    scene.tick(3)
    assert sorted(scene.sent, key=str) == sorted([(b"r", expected("router")), (b"i0", expected("worker"))], key=str), "another version is not told"
    scene.tick(1)
    assert len(scene.sent) == 2
    scene.tick(3)
    assert [identity for identity, _ in scene.sent[2:]] == [b"i0"], "the router has said why"
    scene.tick(30)
    assert sorted(identity for identity, _ in scene.sent[3:]) == [b"i0", b"r"]


def test_a_board_whose_model_is_unloaded_is_not_waited_for_and_moves_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.unloaded = {"b0", "b1"}
    scene.reports("b0", scene.wrong, state="UNLOADED")
    scene.reports("b1", scene.right["b1"], state="UNLOADED")
    assert scene.tick() == ["b0"]
    scene.reports("b0", scene.right["b0"], epoch=2, state="UNLOADED")
    assert scene.tick() == [] and scene.configuring.left() == []
