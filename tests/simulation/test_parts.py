"""The simulation's own parts: a tool that judges others has to be right itself."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import httptools
import pytest

from calculet_core.clock import MS, S
from calculet_core.config import TenantConfig
from calculet_core.history import Violation
from calculet_supervisor.shell.store import Act, Wanted
from calculet_worker.device.faults import AnyFault
from simulation import scenario as plans
from simulation import search, transport
from simulation.clients import Clients
from simulation.device import ArmedPlan
from simulation.disk import VirtualStore
from simulation.http import Reading
from simulation.injector import Injector
from simulation.ports import virtual
from simulation.processes import Crashed, Process
from simulation.scenario import DEVICE_FAULTS, HOST_FAULTS, Fault, Scenario, Traffic, rough
from simulation.search import as_code, shrink
from simulation.shares import FairShares, TenantLimits
from simulation.timeline import LIVELOCK_STEPS, START_NS, Lane, Livelock, Timeline
from simulation.transport import Pipe, Tricks
from simulation.world import World

NOTHING = Scenario(1, 1.0, requests=frozenset())


@pytest.fixture
def world() -> Any:
    found = World(NOTHING)
    with virtual(found):
        yield found
    found.disk.close()


# ---------------------------------------------------------------- time and links
def test_things_happen_in_order_of_their_time_then_of_their_asking() -> None:
    timeline, seen = Timeline(), list[str]()
    for delay, name in ((5, "c"), (1, "a"), (5, "d"), (2, "b")):
        timeline.after(delay, seen.append, name)
    timeline.run_until(timeline.now + 10)
    assert seen == ["a", "b", "c", "d"]


def order_of_one_moment(seed: int) -> list[str]:
    """Three lanes in each of which four things follow each other at one moment."""
    timeline, seen = Timeline(seed), list[str]()

    def step(lane: Lane, name: str, number: int) -> None:
        seen.append(f"{name}{number}")
        if number < 4:
            timeline.put(lane, 0, step, (lane, name, number + 1))

    for name in "abc":
        lane = timeline.lane(name)
        timeline.put(lane, MS, step, (lane, name, 1))
    timeline.run_until(timeline.now + MS)
    return seen


def test_what_is_due_at_one_moment_is_shuffled_by_the_seed_and_each_lane_keeps_its_order() -> None:
    orders = [order_of_one_moment(seed) for seed in range(40)]
    assert orders == [order_of_one_moment(seed) for seed in range(40)]
    assert all([one for one in order if one[0] == name] == [f"{name}{number}" for number in (1, 2, 3, 4)] for order in orders for name in "abc")
    assert {order[0] for order in orders} == {"a1", "b1", "c1"}, "each may come first"
    assert len({tuple(order) for order in orders}) > 20, "and they take turns in many ways"


def test_timers_of_one_lane_overtake_only_when_they_were_set_at_different_moments() -> None:
    overtaken = 0
    for seed in range(40):
        timeline, seen = Timeline(seed), list[int]()
        lane = timeline.lane("one")
        for number in range(3):
            timeline.put(lane, 5 * MS, seen.append, (number,))
        timeline.put(lane, MS, lambda: timeline.put(lane, 4 * MS, seen.append, (9,)), ())  # noqa: B023
        timeline.run_until(timeline.now + 10 * MS)
        assert [number for number in seen if number != 9] == [0, 1, 2]
        overtaken += seen[-1] != 9
    assert 5 < overtaken < 35


@pytest.mark.parametrize("seed", range(5))
def test_a_processs_call_soon_is_first_come_first_served(seed: int) -> None:
    world, seen = World(replace(NOTHING, seed=seed)), list[int]()
    with virtual(world):
        for pid in (1, 2):
            loop = Process(world, f"process{pid}", pid).loop
            for number in range(6):
                loop.call_soon(loop.call_soon, seen.append, 10 * pid + number)
        world.timeline.run_until(world.timeline.now)
    world.disk.close()
    assert [one for one in seen if one < 20] == list(range(10, 16)) and [one for one in seen if one >= 20] == list(range(20, 26))


def test_time_that_does_not_move_is_an_error() -> None:
    timeline = Timeline()

    def again() -> None:
        timeline.after(0, again)

    again()
    with pytest.raises(Livelock, match=str(LIVELOCK_STEPS)):
        timeline.run_until(timeline.now + 1)


def test_a_supervisor_that_outlives_its_keeper_is_followed_by_one_and_not_by_two() -> None:
    world, started = World(NOTHING), list[int]()
    keeper, timeline = world.keeper, world.timeline
    with virtual(world):
        try:
            keeper.begin()
            timeline.run_until(timeline.now + S)
            first = keeper.supervisor
            assert first is not None
            first.stop()
            keeper.die()
            timeline.run_until(timeline.now + 2 * S)
            keeper._delay = lambda process: S  # type: ignore[method-assign]  # longer than the successor takes
            start = keeper._start_supervisor
            keeper._start_supervisor = lambda: (started.append(1), start())[1]  # type: ignore[method-assign]
            first.resume()
            timeline.run_until(timeline.now + 5 * S)
        finally:
            world._end()
    assert len(started) == 1, "the next keeper's own"


class Peer:
    """Two processes and a pipe between them."""

    def __init__(self, world: World, high_water: int = 100) -> None:
        self.world, self.got = world, list[int]()
        self.reader = Process(world, "reader", 1)
        self.pipe = Pipe(world, world.rng("pipe"), self.reader, lambda frames: self.got.append(int(frames[0])), high_water)

    def send(self, *numbers: int) -> list[bool]:
        return [self.pipe.send([b"%d" % number]) for number in numbers]

    def wait(self, ns: int = S) -> None:
        self.world.timeline.run_until(self.world.timeline.now + ns)


def test_a_pipe_delivers_once_and_in_order_whatever_the_latencies(world: World) -> None:
    peer = Peer(world)
    for number in range(50):
        peer.send(number)
        peer.wait(10_000)
    peer.wait()
    assert peer.got == list(range(50))


def test_a_reader_that_does_not_read_fills_the_pipe_and_gets_everything_later(world: World) -> None:
    peer = Peer(world, high_water=3)
    peer.reader.stop()
    assert peer.send(1, 2, 3, 4) == [True, True, True, False] and peer.pipe.dropped == 1
    peer.wait()
    assert peer.got == []
    peer.reader.resume()
    peer.wait()
    assert peer.got == [1, 2, 3]


def test_a_connection_that_breaks_loses_a_tail_and_never_the_middle(world: World) -> None:
    peer = Peer(world)
    peer.send(*range(10))
    assert peer.pipe.cut(kept_share=0.5) == 5
    peer.wait()
    assert peer.got == [0, 1, 2, 3, 4] and peer.send(11) == [False]


def test_nothing_reaches_a_dead_process_and_a_stopped_one_gets_it_later(world: World) -> None:
    process, seen = Process(world, "p", 1), list[int]()
    process.stop()
    process.later(MS, seen.append, 1)
    world.timeline.run_until(world.timeline.now + S)
    assert seen == []
    process.resume()
    assert seen == [1]
    process.later(MS, seen.append, 2)
    process.has_ended()
    world.timeline.run_until(world.timeline.now + S)
    assert seen == [1]


def test_a_crash_comes_after_so_many_actions(world: World) -> None:
    process = Process(world, "p", 1)
    process.crash_after(2)
    process.acted()
    process.acted()
    with pytest.raises(Crashed):
        process.acted()


@pytest.mark.parametrize(
    ("tricks", "got"), [(Tricks.DOUBLE, [10, 10, 20, 20]), (Tricks.REORDER, [20, 10]), (Tricks.TRUNCATE, [1, 2])]
)
def test_a_link_can_play_tricks(world: World, monkeypatch: pytest.MonkeyPatch, tricks: Tricks, got: list[int]) -> None:
    monkeypatch.setattr(transport, "TRICKED", 1.0)
    peer = Peer(world)
    peer.pipe.tricks = tricks
    peer.send(10, 20)
    peer.wait()
    assert peer.got == got
    peer.pipe.tricks = Tricks.NONE
    peer.send(30)
    peer.wait()
    assert peer.got == [*got, 30]


# ---------------------------------------------------------------- the loop
def test_asyncio_itself_lives_in_virtual_time(world: World) -> None:
    process, seen = Process(world, "p", 1), list[Any]()
    lock = asyncio.Lock()

    async def work(name: str) -> str:
        async with lock:
            await asyncio.sleep(2.0)
            seen.append((name, asyncio.get_running_loop().time() - START_NS / S))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.Event().wait()
        return name

    for name in "ab":
        process.call(process.loop.run, work(name), lambda value, error: seen.append(value))
    world.timeline.run_until(world.timeline.now + 10 * S)
    assert seen == [("a", 2.0), "a", ("b", 4.0), "b"] and asyncio._get_running_loop() is None


def test_a_killed_process_is_closed_then_and_there(world: World) -> None:
    process, seen = Process(world, "p", 1), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
            seen.append("went on")
        finally:
            seen.append("closed")
            await asyncio.sleep(1.0)
            seen.append("waited")

    process.call(process.loop.run, work(), lambda value, error: seen.append("told"))
    world.timeline.run_until(world.timeline.now + S // 2)
    process.has_ended()
    assert seen == ["closed"]
    world.timeline.run_until(world.timeline.now + 10 * S)
    assert seen == ["closed"]


def test_what_a_callback_raises_and_what_a_shell_only_logs_is_a_bug(world: World) -> None:
    process = Process(world, "p", 1)

    def logs() -> None:
        try:
            raise ValueError("caught")
        except ValueError:
            logging.getLogger("calculet.some_shell").exception("a periodic task failed")

    process.later(MS, lambda: 1 // 0)
    process.later(2 * MS, logs)
    world.timeline.run_until(world.timeline.now + S)
    assert [violation.rule for violation in world.checker.violations] == ["no_bug", "no_bug"]
    assert "ZeroDivisionError" in world.checker.violations[0].message and "caught" in world.checker.violations[1].message


def test_names_stand_for_virtual_things_only_while_a_world_runs() -> None:
    world = World(NOTHING)
    clocks = [module for name, module in sys.modules.items() if name.startswith("calculet_") and hasattr(module, "time")]
    before = [vars(module)["time"] for module in clocks]
    with virtual(world):
        inside = [vars(module)["time"] for module in clocks]
    assert [vars(module)["time"] for module in clocks] == before
    assert len(clocks) > 10 and all(now is world.timeline for now, real in zip(inside, before, strict=True) if real is time)
    world.disk.close()


def test_a_world_needs_no_thread_and_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else something of the operating system came into a shell, and nobody has told `ports`."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this is not virtual")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    outcome = search.judge(Scenario(11, 8.0, traffic=Traffic(8.0), faults=(Fault(5 * S, "kill_keeper"),)))
    assert outcome.worst() is None and outcome.completed > 10


# ---------------------------------------------------------------- clients
def an_answer(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def chunk(text: str, finish: str | None = None) -> str:
    return json.dumps({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def test_a_client_reads_a_stream_byte_by_byte() -> None:
    over: list[bool] = []
    reading = Reading(1, lambda: over.append(True))
    for byte in an_answer(chunk("ab"), chunk("c", "stop"), "[DONE]"):
        reading.feed(bytes([byte]))
    assert (reading.texts, reading.finished, reading.said_done, over) == (["abc"], [True], True, [True])


def test_a_client_does_not_take_text_after_an_end() -> None:
    with pytest.raises(httptools.HttpParserError):
        Reading(1, lambda: None).feed(an_answer(chunk("a", "stop"), chunk("b")))


# ---------------------------------------------------------------- the disk
def asked(world: World, store: VirtualStore, process: Process, draining: bool) -> list[Any]:
    answers: list[Any] = []
    work = store.want("board0", Wanted(draining=draining), Act("drain", "board0"))
    process.call(process.loop.run, work, lambda value, error: answers.append(error))
    return answers


def test_what_was_committed_survives_and_what_was_not_does_not(world: World) -> None:
    first = Process(world, "supervisor", 1)
    store = VirtualStore(first, world.disk, world.fleet.store)
    answers = asked(world, store, first, draining=True)
    world.timeline.run_until(world.timeline.now + S)
    assert answers == [None]
    asked(world, store, first, draining=False)
    first.has_ended()
    store.close()
    world.timeline.run_until(world.timeline.now + S)
    second = VirtualStore(Process(world, "supervisor", 2), world.disk, world.fleet.store)
    assert second.read().boards == {"board0": Wanted(draining=True)}
    second.close()


def test_a_full_disk_refuses_and_the_time_of_a_spend_is_virtual(world: World) -> None:
    process = Process(world, "supervisor", 1)
    store = VirtualStore(process, world.disk, world.fleet.store)
    world.disk.full = True
    answers = asked(world, store, process, draining=True)
    world.timeline.run_until(world.timeline.now + S)
    assert isinstance(answers[0], sqlite3.OperationalError)
    world.disk.full = False
    process.call(process.loop.run, store.spend("reset", "board0"), lambda value, error: answers.append(error))
    world.timeline.run_until(world.timeline.now + S)
    (spent_ns,) = store.read().spends["reset", "board0"]
    assert answers[1] is None and 0 < world.timeline.now - spent_ns < S
    store.close()


# ---------------------------------------------------------------- faults and scenarios
def test_every_fault_of_the_products_catalogue_can_be_armed_and_every_other_has_a_method() -> None:
    tags = {kind.__struct_config__.tag for kind in AnyFault.__args__}
    assert set(DEVICE_FAULTS) == tags
    assert all(hasattr(Injector, f"_{kind}") for kind in HOST_FAULTS)


def test_an_armed_fault_fires_once() -> None:
    from calculet_worker.device.faults import Busy, Hook

    plan = ArmedPlan()
    plan.arm(Busy(rate=1.0))
    assert isinstance(plan.visit(Hook.SUBMIT), Busy)
    assert plan.visit(Hook.SUBMIT) is None and len(plan.firings) == 1


def test_leaving_a_client_or_a_fault_out_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rough(4, 10.0)
    assert rough(4, 10.0) == whole
    assert set(whole.faults) <= set(rough(4, 20.0).faults)
    came: list[dict[int, Any]] = []
    monkeypatch.setattr(Clients, "_begin_client", lambda self, client: came[-1].update({client.number: (client.prompt, client.max_tokens)}))
    for requests in (None, frozenset({3, 5})):
        came.append({})
        world = World(replace(NOTHING, requests=requests, traffic=Traffic(4.0)))
        world.clients.begin()
        world.timeline.run_until(world.timeline.now + 10 * S)
        world.disk.close()
    everybody, some = came
    assert len(everybody) > 10 and set(some) == {3, 5} and all(everybody[number] == some[number] for number in some)


def test_shrinking_leaves_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is broken when the two faults at 3 s and 7 s and client 5 are there."""

    def broken(scenario: Scenario) -> Any:
        kinds = {fault.at_ns for fault in scenario.faults}
        there = scenario.requests is None or 5 in scenario.requests
        found = (Violation("rule", "", search.START_NS + 8 * S),) if {3 * S, 7 * S} <= kinds and there else ()
        return search.Outcome(scenario, found, search.Counter(), search.Counter(), "", 0, 0, 0.0, 0.0)

    class Counted:
        def __init__(self, scenario: Scenario) -> None:
            self.clients = type("C", (), {"arrived": 20})

        def run(self) -> None:
            return None

    monkeypatch.setattr(search, "judge", broken)
    monkeypatch.setattr(search, "World", Counted)
    faults = tuple(Fault(second * S, "busy") for second in range(1, 40))
    small = shrink(Scenario(1, 40.0, 3, 2, faults=faults, acts=(plans.Act(S, "drain", 0, 5),)), "rule", 500)
    assert [fault.at_ns // S for fault in small.faults] == [3, 7]
    assert (small.acts, small.boards, small.routers, small.requests) == ((), 1, 1, frozenset({5})) and small.seconds < 9
    assert eval(as_code(small)) == small


# ---------------------------------------------------------------- the checker
def test_fair_shares_are_told_from_unfair_ones() -> None:
    both = {"gold": 100.0, "default": 100.0}
    fair, unfair = FairShares({"gold": 3.0, "default": 1.0}), FairShares({"gold": 3.0, "default": 1.0})
    for turn in range(200):
        assert fair.admitted("default" if turn % 4 == 0 else "gold", 100, both) is None
    found = [unfair.admitted("default" if turn % 2 == 0 else "gold", 100, both) for turn in range(200)]
    assert found[:3] == [None] * 3 and found[-1] is not None and "default and gold" in found[-1]


def test_tenants_limits_are_counted_for_all_routers_together() -> None:
    limits = TenantLimits([TenantConfig("few", max_active=2), TenantConfig("slow", requests_per_s=0.5)])
    both = (1, 2)
    assert [limits.accepted(router, "few", S, True, both) for router in both] == [None] * 2
    assert "3 requests of few" in (limits.accepted(1, "few", S, False, both) or "")
    assert limits.accepted(3, "few", S, True, (3,)) is None, "what dead routers had let in is nobody's any more"
    limits.ended(1, "few")
    limits.ended(1, "few")
    assert limits.accepted(1, "few", S, True, both) is None
    assert [limits.accepted(router, "slow", at * S, True, both) for router, at in ((1, 1), (2, 3), (1, 5))] == [None] * 3
    assert "calls of slow" in (limits.accepted(2, "slow", 6 * S, True, both) or "")


def test_a_tenant_that_does_not_wait_is_owed_nothing() -> None:
    shares = FairShares({"gold": 1.0, "default": 1.0})
    for _ in range(100):
        assert shares.admitted("gold", 100, {"gold": 100.0}) is None
    assert shares.admitted("default", 100, {"gold": 100.0, "default": 100.0}) is None


def test_a_large_request_that_waits_makes_room_for_small_ones() -> None:
    shares = FairShares({"gold": 1.0, "default": 1.0})
    assert shares.admitted("default", 10, {"gold": 10.0, "default": 10.0}) is None
    found = [shares.admitted("gold", 10, {"gold": 10.0, "default": 300.0}) for _ in range(100)]
    assert found[:60] == [None] * 60 and found[-1] is not None, "320 by two"


def test_the_reference_of_the_clients_is_the_boards(world: World) -> None:
    from calculet_worker.device.sim_rule import reference_tokens

    assert world.clients.tokens(world.package.digest, (1, 2, 3), 9) == reference_tokens(world.package.manifest, [1, 2, 3], 9)


def test_traffic_without_trouble_is_served_whole() -> None:
    quiet = Scenario(2, 10.0, traffic=Traffic(4.0, disconnects=0.0, slow_readers=0.0, invalid=0.0, short_deadlines=0.0, burst_every_s=None))
    ready = search.judge(quiet)
    assert ready.worst() is None and ready.completed > 20
    assert ready.sometimes["client got worker_lost"] == ready.sometimes["resent: worker_lost"] == 0
