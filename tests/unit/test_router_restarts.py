"""Which router is replaced next: one at a time, from what routers report, whatever a supervisor that was killed had in mind."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

from calculet_core import wire
from calculet_core.clock import S
from calculet_supervisor.shell.router_restarts import COMES_NS, GOES_NS, TELL_NS, RouterRestarts
from calculet_supervisor.shell.store import Act


class Scene:
    """Routers that report what they are given; whom the supervisor told to end."""

    def __init__(self, *, keeper: bool = False, since: str | None = None) -> None:
        self.routers: dict[bytes, Any] = {}
        self.told: list[str] = []
        self.replaced: list[int] = []
        self.keeper, self.file_is_right, self.now_ns = keeper, True, time.monotonic_ns()
        supervisor: Any = SimpleNamespace(
            sightings=SimpleNamespace(routers=self.routers), store=SimpleNamespace(flag=self._flag), fleet=SimpleNamespace(path="fleet.yaml"),
            note=lambda note: None, begin=lambda work: asyncio.run(work), replace_router=self._replace, send_to=self._send,
        )  # fmt: skip
        self.restarts = RouterRestarts(
            supervisor, since, lambda: 2, lambda report: report.config_start == "old", lambda: self.file_is_right
        )

    async def _flag(self, name: str, value: str, act: Act) -> None:
        self.flag = value

    def _replace(self, pid: int) -> bool:
        self.replaced.append(pid)
        return self.keeper

    def _send(self, identity: bytes, message: wire.Message) -> bool:
        assert isinstance(message, wire.RetireRouter)
        self.told.append(identity.decode())
        return True

    def reports(self, identity: str, number: int, start: str = "new", *, draining: bool = False, began_s: float = 0.0) -> None:
        report = wire.RouterReport(
            number, os.getpid(), 1, 3, config_start=start, name=identity.partition("/")[0], draining=draining, began_s=began_s
        )
        self.routers[identity.encode()] = SimpleNamespace(report=report)

    def gone(self, identity: str) -> None:
        del self.routers[identity.encode()]

    def tick(self, seconds: float = 0.1) -> bool:
        self.now_ns += int(seconds * S)
        return self.restarts.tick(self.now_ns)


def test_the_next_is_told_when_the_one_before_has_a_successor() -> None:
    scene = Scene()
    scene.reports("router/1", 1, "old")
    scene.reports("router-2/1", 2, "old")
    assert scene.tick() and len(scene.told) == 1
    first, second = (scene.told[0], {"router/1": "router-2/1", "router-2/1": "router/1"}[scene.told[0]])
    number = {"router/1": 1, "router-2/1": 2}
    scene.reports(first, number[first], "old", draining=True)
    assert scene.tick(20) and scene.told == [first] and scene.restarts.left()
    scene.gone(first)
    assert scene.tick() and scene.told == [first], "nobody is there in its place yet"
    scene.reports(first.replace("/1", "/2"), 3)
    scene.tick()
    assert scene.tick() and scene.told == [first, second]


def test_a_router_that_does_not_go_is_told_again_and_said_in_the_end() -> None:
    scene = Scene()
    scene.reports("router/1", 1, "old")
    scene.tick()
    scene.tick(TELL_NS / S + 1)
    assert scene.told == ["router/1"] * 2
    scene.tick(GOES_NS / S)
    assert not scene.tick() and "was told to end" in str(scene.restarts.stays) and scene.restarts.left() == [], "once for each reason"


def test_one_that_ended_without_a_successor_stops_the_rest() -> None:
    scene = Scene()
    scene.reports("router/1", 1, "old")
    scene.tick()
    scene.gone("router/1")
    scene.tick(COMES_NS / S + 1)
    assert "nobody has reported in its place" in str(scene.restarts.stays)


def test_a_new_supervisor_waits_for_one_that_drains_already_and_tells_nobody_twice() -> None:
    scene = Scene()
    scene.reports("router/1", 1, "old", draining=True)
    assert scene.tick() and scene.told == []


def test_an_operators_word_is_committed_and_holds_for_those_that_began_before_it() -> None:
    scene = Scene(keeper=True)
    scene.reports("router/1", 1, began_s=time.time() - 5)
    assert not scene.tick()
    assert asyncio.run(scene.restarts.order(Act("restart routers"))) == ["router"]
    assert scene.tick() and scene.replaced == [os.getpid()] and scene.told == [], "the keeper does it"
    after = Scene(keeper=True, since=scene.flag)
    after.reports("router/1", 1, began_s=time.time() - 5)
    assert after.tick() and after.replaced, "a supervisor that was killed goes on"
    after.gone("router/1")
    after.reports("router-b/1", 2, began_s=time.time() + 5)
    after.tick()
    assert not after.tick() and len(after.replaced) == 1, "who began later is new"
    ahead = Scene(keeper=True, since=repr(time.time() + 3600))
    ahead.reports("router/1", 1, began_s=time.time() - 5)
    assert not ahead.tick(), "a clock that was set back makes nobody old"


def test_a_file_that_is_not_what_was_applied_and_a_keeper_that_cannot_leave_the_router_as_it_is() -> None:
    scene = Scene(keeper=True)
    scene.reports("router/1", 1, "old")
    scene.file_is_right = False
    assert not scene.tick() and scene.replaced == [] and "is not what was applied" in str(scene.restarts.stays)
    other = Scene(keeper=True)
    other.reports("router/1", 1, "old")
    other.tick()
    other.restarts.refused(os.getpid(), "the address is taken")
    assert not other.tick() and "stays as it was: the address is taken" in str(other.restarts.stays)
