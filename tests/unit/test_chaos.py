"""Chaos: who may order what, how messages are spoiled, what a run is judged by, and that a fault ends by its carrier's clock."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from builders_router import Desk
from hypothesis import given
from hypothesis import strategies as st

from calculet_core import chaos, history, wire
from calculet_core.chaos import FrameTrouble, FullDisk, KillRouter, KillWorker, Phase, TroubleFrames
from calculet_core.clock import S
from calculet_core.config import ChaosConfig
from calculet_core.history import Budgets, Event
from calculet_core.shell.journal import Journal, read_journal
from calculet_perf.chaos import (
    Act,
    Ordered,
    Run,
    Scenario,
    Step,
    Tally,
    broken_promises,
    judge,
    open_requests,
    parse_catalogue,
    plan,
)
from calculet_perf.manifest import ManifestError
from calculet_perf.shell.chaos_load import reference
from calculet_router import actions
from calculet_supervisor.shell.chaos import ChaosVerbs
from calculet_supervisor.shell.control import Caller, Refused
from calculet_worker.mangling import Mangler
from calculet_worker.shell.chaos import Tap, WorkerChaos

CALLER = Caller(1000, 4242)
SHIPPED = (files("calculet_perf") / "scenarios" / "chaos.yaml").read_bytes()


# ---------------------------------------------------------------- orders
class Fake:
    """What the verb needs of a supervisor; `sent` are the messages to workers and routers."""

    def __init__(self, **config: Any) -> None:
        self.fleet = SimpleNamespace(config=SimpleNamespace(chaos=ChaosConfig(**config)), path="fleet.yaml")
        self.boards = ("board0", "board1")
        self.acts: list[Any] = []
        self.sent: list[tuple[str, wire.Disturb]] = []
        self.store = SimpleNamespace(record=self._record)
        self.sightings = SimpleNamespace(boards={"board0": SimpleNamespace(pid=77)}, routers={})
        self.ordered: list[str] = []

    async def _record(self, act: Any) -> None:
        self.acts.append(act)

    def note(self, note: Any) -> None:
        pass

    def chaos_ordered(self, fault: str) -> None:
        self.ordered.append(fault)

    def send(self, board: str, message: wire.Disturb) -> bool:
        self.sent.append((board, message))
        return board == "board0"


def order(fake: Fake, fault: Any, board: Any = "board0", name: Any = "o1") -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        verbs = ChaosVerbs(fake, Journal(None, 1, 1))  # type: ignore[arg-type]
        return await verbs.table()["chaos"]({"order": name, "fault": fault, "board": board}, CALLER)

    return asyncio.run(ask())


def test_without_the_switch_every_order_is_refused_and_nothing_is_recorded() -> None:
    fake = Fake()
    with pytest.raises(Refused, match="does not allow chaos") as refused:
        order(fake, {"fault": "kill_worker"})
    assert "chaos: {enabled: true}" in str(refused.value.hint)
    assert (fake.acts, fake.sent, fake.ordered) == ([], [], [])


def test_an_order_is_recorded_with_who_gave_it_before_its_carrier_hears_of_it() -> None:
    fake = Fake(enabled=True)
    answer = order(fake, {"fault": "kill_worker", "phase": "decoding", "for_s": 5})
    assert [(act.verb, act.board, act.uid, act.detail) for act in fake.acts] == [("chaos", "board0", 1000, "kill_worker decoding (order o1)")]
    assert (answer["pid"], answer["carried_by"]) == (77, "worker-board0")
    board, message = fake.sent[0]
    assert (board, message.order, message.fault) == ("board0", "o1", KillWorker(phase=Phase.DECODING, for_s=5))
    assert fake.ordered == ["kill_worker"]


@pytest.mark.parametrize(
    ("fault", "board", "name", "words"),
    [
        ({"fault": "meteor"}, "board0", "o", r"\$.fault.fault: .*meteor"),
        ({"fault": "kill_worker", "phase": "sleeping"}, "board0", "o", r"\$.fault.phase: .*sleeping"),
        ({"fault": "frames", "trouble": "slow"}, "board0", "o", "for_s"),
        ({"fault": "frames", "trouble": "slow", "for_s": 31}, "board0", "o", r"31 is above chaos.max_fault_s \(30\)"),
        ({"fault": "kill_worker"}, "board9", "o", "there is no board 'board9'"),
        ({"fault": "kill_worker"}, None, "o", "there is no board None"),
        ({"fault": "kill_worker"}, "board1", "o", "no living worker"),
        ({"fault": "kill_router"}, None, "o", "no router has reported"),
        ({"fault": "kill_worker"}, "board0", "x" * 65, r"\$.order"),
        ({"fault": "kill_worker"}, "board0", 7, r"\$.order"),
        (None, "board0", "o", r"\$.fault"),
    ],
)
def test_a_wrong_order_is_refused_by_name(fault: Any, board: Any, name: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        order(Fake(enabled=True, max_fault_s=30), fault, board, name)


# ---------------------------------------------------------------- carrying
STARVED = """
import asyncio, os, sys, time
from pathlib import Path
from calculet_core import wire
from calculet_core.chaos import FullDisk, NoDescriptors
from calculet_core.shell.chaos import Carrier
from calculet_core.shell.journal import Journal

async def main(folder):
    carrier = Carrier("router", Journal(folder / "router.jsonl", 1 << 20, 1))
    fault = FullDisk(process="router", for_s=1) if sys.argv[2] == "disk" else NoDescriptors(process="router", for_s=1)
    late = wire.Disturb("late", fault, time.monotonic_ns() - 1)
    assert carrier.take(late)
    (folder / "before").write_bytes(b"x")
    assert carrier.take(wire.Disturb("o1", fault, time.monotonic_ns() + 400_000_000))
    try:
        (folder / "during").write_bytes(b"x")
    except OSError as error:
        print(error.errno)
    deadline = time.monotonic() + 30
    while True:
        await asyncio.sleep(0.01)
        try:
            (folder / "after").write_bytes(b"x")
            break
        except OSError:
            assert time.monotonic() < deadline

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(("what", "errno", "fault"), [("disk", 27, "full_disk router"), ("files", 24, "no_descriptors router")])
def test_a_starved_process_is_whole_again_by_its_own_clock(tmp_path: Path, what: str, errno: int, fault: str) -> None:
    done = subprocess.run([sys.executable, "-c", STARVED, str(tmp_path), what], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(errno)), done.stderr
    told = [(event.event, event.data["order"], event.data["fault"]) for event in read_journal(tmp_path / "router.jsonl")]
    assert told == [(history.CHAOS_FIRED, "o1", fault), (history.CHAOS_HEALED, "o1", fault)], "an order that came too late is nothing"


def test_a_worker_touches_its_link_only_while_the_trouble_lasts(tmp_path: Path) -> None:
    async def scene() -> tuple[list[Any], list[bytes]]:
        carried = WorkerChaos("board0", 3, Journal(tmp_path / "worker-board0.jsonl", 1 << 20, 1))
        out: list[Any] = []
        way = carried.way(out.append)
        message = [b"router", *wire.encode(wire.Lease(1, 2, 3))]
        way(message)
        fault = TroubleFrames(trouble=FrameTrouble.DUPLICATED, rate=1, for_s=1)
        import time

        carried.take(wire.Disturb("o1", fault, time.monotonic_ns() + 100_000_000))
        way(message)
        async with asyncio.timeout(30):
            while way.mangler is not None:
                await asyncio.sleep(0.005)
        way(message)
        return out, message

    out, message = asyncio.run(scene())
    assert out == [message] * 4, "as it is, twice, as it is"
    fired, healed = read_journal(tmp_path / "worker-board0.jsonl")
    assert (fired.event, fired.board, fired.epoch) == (history.CHAOS_FIRED, "board0", 3)
    assert (healed.event, healed.data["count"]) == (history.CHAOS_HEALED, 1)


# ---------------------------------------------------------------- messages
def a_message() -> list[bytes]:
    return [b"id", *wire.encode(wire.Cancel(1 << 60, 2, 3, "gone"))]


def through(trouble: FrameTrouble, count: int = 400, **fields: Any) -> tuple[Mangler, list[tuple[float, list[bytes]]]]:
    mangler = Mangler(TroubleFrames(trouble=trouble, for_s=1, **fields), random.Random(7))
    messages = [[b"id", *wire.encode(wire.Cancel(number, 2, 3, "gone"))] for number in range(count)]
    return mangler, [one for message in messages for one in mangler.take(message)] + mangler.rest()


@pytest.mark.parametrize("trouble", [FrameTrouble.TRUNCATED, FrameTrouble.CORRUPT])
def test_spoiled_messages_are_none_and_the_others_are_untouched(trouble: FrameTrouble) -> None:
    mangler, out = through(trouble, rate=0.1)
    assert len(out) == 400
    wrong = []
    for number, (_, frames) in enumerate(out):
        try:
            assert wire.decode(*frames[1:]) == wire.Cancel(number, 2, 3, "gone")
        except wire.WireError:
            wrong.append(number)
    assert len(wrong) == mangler.count and 15 < len(wrong) < 80


@given(body=st.binary(max_size=40), kind=st.sampled_from(sorted(wire.KINDS)), seed=st.integers(0, 1000), cut=st.booleans())
def test_whatever_is_spoiled_is_no_message(body: bytes, kind: bytes, seed: int, cut: bool) -> None:
    trouble = FrameTrouble.TRUNCATED if cut else FrameTrouble.CORRUPT
    mangler = Mangler(TroubleFrames(trouble=trouble, for_s=1, rate=1), random.Random(seed))
    ((_, frames),) = mangler.take([kind, body])
    with pytest.raises(wire.WireError):
        wire.decode(*frames)


def test_reordered_and_duplicated_lose_nothing() -> None:
    numbers = {trouble: [wire.decode(*frames[1:]).request_id for _, frames in through(trouble, rate=0.2)[1]]  # type: ignore[union-attr]
               for trouble in (FrameTrouble.REORDERED, FrameTrouble.DUPLICATED)}  # fmt: skip
    reordered, duplicated = numbers[FrameTrouble.REORDERED], numbers[FrameTrouble.DUPLICATED]
    assert sorted(reordered) == list(range(400)) != reordered
    assert sorted(set(duplicated)) == list(range(400)) and len(duplicated) > 420


def test_what_is_late_stays_in_order_when_the_trouble_is_over() -> None:
    async def scene() -> list[int]:
        out: list[int] = []
        tap = Tap(lambda frames: out.append(int(frames[0])))
        tap.mangler = Mangler(TroubleFrames(trouble=FrameTrouble.SLOW, for_s=1, delay_ms=30), random.Random(1))
        for number in range(3):
            tap([b"%d" % number, b"x"])
        assert out == []
        tap.calm()
        tap([b"3", b"x"])
        async with asyncio.timeout(30):
            while len(out) < 4:
                await asyncio.sleep(0.005)
        tap([b"4", b"x"])
        return out

    assert asyncio.run(scene()) == [0, 1, 2, 3, 4]


def test_a_message_that_comes_twice_costs_nobody_a_request() -> None:
    desk = Desk("board0")
    desk.ask()
    submit = desk.sent()[0]
    desk.accept(submit)
    desk.token(submit, text="a")
    seq = desk.dispatcher.roster.find("board0", 1).seq  # type: ignore[union-attr]
    again = desk.tick("board0", seq=seq, pieces=[wire.Piece(submit.request_id, submit.attempt, 1, "a")])
    assert again == [actions.Ignored("duplicate", 1)]
    assert desk.failures() == [] and not desk.all(actions.LostMessages)


# ---------------------------------------------------------------- plans
def a_scenario(**fields: Any) -> Scenario:
    return msgspec.convert({"id": "one", "injects": "i", "expected": "e", "steps": [{"fault": {"fault": "kill_router"}}], **fields}, Scenario)


def test_the_shipped_scenarios_have_every_fault_phase_and_trouble() -> None:
    scenarios = parse_catalogue(SHIPPED, "chaos.yaml").scenarios
    alone = [step.fault for one in scenarios for step in one.steps]
    drawn = [step.fault for one in scenarios if one.random for act in one.random.acts for step in act]
    for faults in (alone, drawn):
        assert {type(fault) for fault in faults} == set(chaos.AnyFault.__args__)  # type: ignore[attr-defined]
        assert {fault.phase for fault in faults if isinstance(fault, KillWorker)} == {*Phase, None}
        assert {fault.trouble for fault in faults if isinstance(fault, TroubleFrames)} == set(FrameTrouble)
    assert any(len(one.steps) == 2 for one in scenarios), "double faults"


def test_a_plan_is_its_seeds_and_draws_every_act() -> None:
    scenario = next(one for one in parse_catalogue(SHIPPED, "chaos.yaml").scenarios if one.random)
    first, again, other = (plan(scenario, random.Random(seed), 900, 5) for seed in (1, 1, 2))
    assert first == again != other
    assert all(act.at_s is not None and act.at_s <= 900 for act in first) and 120 < len(first) < 260
    assert scenario.random is not None and {act.steps for act in first} == set(scenario.random.acts)
    assert len(plan(scenario, random.Random(3), 0.001, 1000)) == 1, "there is always one"


def test_steps_that_go_together_are_one_act() -> None:
    kill = {"fault": {"fault": "kill_router"}}
    found = plan(a_scenario(steps=[kill, {**kill, "together": True}, kill]), random.Random(0))
    assert [len(act.steps) for act in found] == [2, 1] and all(act == Act(None, act.steps) for act in found)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({"steps": []}, r"\$.scenarios\[0\]: a scenario has steps, or random"),
        ({"steps": [{"fault": {"fault": "kill_worker"}, "board": "other"}]}, "a first step has no step before it"),
        ({"steps": [{"fault": {"fault": "kill_wrker"}}]}, r"\$.scenarios\[0\].steps\[0\].fault.fault: .*kill_wrker"),
        ({"surprise": 1}, r"\$.scenarios\[0\]: .*surprise"),
    ],
)
def test_a_wrong_catalogue_names_the_place(scenario: dict[str, Any], words: str) -> None:
    one = {"id": "x", "injects": "i", "expected": "e", "steps": [{"fault": {"fault": "kill_router"}}], **scenario}
    with pytest.raises(ManifestError, match=words):
        parse_catalogue(json.dumps({"schema": "calculet-perf-chaos-scenarios/v1", "scenarios": [one]}).encode(), "mine.yaml")


# ---------------------------------------------------------------- judgement
RIGHT = reference("abc", 3)


def a_run(**fields: Any) -> Run:
    tally = Tally(sent=2)
    for _ in range(2):
        tally.count("r", None, RIGHT.whole, 3, RIGHT)
    fired = Ordered(fault="kill_router", board=None, ordered_s=1.0, fired_s=1.1, whole_s=2.5)
    return Run(a_scenario(codes=["worker_lost"]), 7, **{"planned": 1, "faults": [fired], "tally": tally, "golden_after": True, **fields})


def test_a_run_that_kept_every_promise_passes() -> None:
    outcome = judge(a_run())
    assert (outcome.passed, outcome.valid, outcome.broken, outcome.slowest_recovery_s) == (True, True, [], 1.5)


def test_a_fault_that_did_not_fire_makes_the_run_invalid() -> None:
    outcome = judge(a_run(planned=2))
    assert (outcome.passed, outcome.valid, outcome.broken) == (False, False, [])
    assert outcome.invalid == ["2 faults were planned, 1 fired (some were not ordered)"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: run.tally.count("r3", "worker_lost", RIGHT.whole, None, RIGHT), "2 requests were sent, 3 ended"),
        (lambda run: setattr(run.tally, "sent", 3), "3 requests were sent, 2 ended"),
        (lambda run: run.tally.codes.update(internal_error=1), "ended with internal_error"),
        (lambda run: setattr(run, "broken", ["one_terminal: x"]), "one_terminal"),
        (lambda run: setattr(run, "not_whole", "board0 is down"), "not whole again after 60 s: board0 is down"),
        (lambda run: setattr(run, "leftovers", {"board1": "lanes_used 2"}), "not at its baseline: board1: lanes_used 2"),
        (lambda run: setattr(run, "golden_after", False), "golden failed afterwards"),
    ],
)
def test_whatever_was_not_kept_is_named(change: Any, words: str) -> None:
    run = a_run()
    change(run)
    outcome = judge(run)
    assert not outcome.passed and any(words in reason for reason in outcome.broken), outcome.broken


@pytest.mark.parametrize(
    ("error", "got", "tokens", "wrong"),
    [
        (None, RIGHT.whole, 3, False),
        (None, RIGHT.whole, 2, True),
        (None, reference("abd", 3).whole, 3, True),
        (None, None, 0, True),
        ("worker_lost", None, None, False),
        ("worker_lost", reference("ab", 2).whole, 2, False),
        ("worker_lost", reference("ax", 2).whole, 2, True),
        ("incomplete_stream", reference("ab", 2).whole, 2, True),
        ("client_timeout", None, None, True),
    ],
)
def test_an_answer_is_the_references_or_a_beginning_of_it_with_a_reason(error: str | None, got: str | None, tokens: int | None, wrong: bool) -> None:
    tally = Tally(sent=1)
    tally.count("r", error, got, tokens, RIGHT)
    assert bool(tally.wrong) is wrong


def at(second: float, name: str, request: int | None = None, **fields: Any) -> Event:
    return Event(name, int(second * S), request, **fields)


def test_promises_are_judged_of_what_began_in_the_run() -> None:
    before = [at(1, history.REQUEST_ACCEPTED, 1), at(2, history.REQUEST_ACCEPTED, 2), at(3, history.REQUEST_DONE, 2, data={"outcome": "completed"})]
    during = [at(11, history.REQUEST_ACCEPTED, 3), at(12, history.REQUEST_DONE, 3, data={"outcome": "completed"})]
    assert broken_promises([*before, *during], 10 * S, Budgets()) == []
    assert open_requests([*before, *during], 10 * S) == 0
    lost = [*before, *during, at(13, history.REQUEST_ACCEPTED, 4)]
    assert open_requests(lost, 10 * S) == 1
    assert any("never ended" in one for one in broken_promises(lost, 10 * S, Budgets()))
    twice = [*before, *during, at(13, history.REQUEST_DONE, 3, data={"outcome": "failed", "code": "x"})]
    assert any("ended twice" in one for one in broken_promises(twice, 10 * S, Budgets()))


def test_what_a_full_disk_swallowed_is_not_held_against_anybody() -> None:
    fault = chaos.words(FullDisk(process="router", for_s=3))
    fired = at(11, history.CHAOS_FIRED, data={"order": "o", "fault": fault, "process": "router"})
    healed = at(14, history.CHAOS_HEALED, data={"order": "o", "fault": fault, "process": "router"})
    swallowed, lost = at(12, history.REQUEST_ACCEPTED, 1), at(30, history.REQUEST_ACCEPTED, 2)
    assert broken_promises([fired, swallowed, healed], 10 * S, Budgets()) == []
    assert len(broken_promises([fired, swallowed, healed, lost], 10 * S, Budgets())) == 1, "what came later is"


def test_lanes_of_a_worker_whose_disk_was_full_are_left_to_its_status() -> None:
    fault = chaos.words(FullDisk(process="worker", for_s=3))
    place = {"board": "board0", "epoch": 1, "generation": 1}
    bound = [at(second, history.BOARD_LANE_BOUND, 1, data={"lane": 0}, **place) for second in (11, 12)]
    told = at(10.5, history.CHAOS_FIRED, board="board0", epoch=1, data={"order": "o", "fault": fault, "process": "worker-board0"})
    assert len(broken_promises(bound, 10 * S, Budgets())) == 1
    assert broken_promises([told, *bound], 10 * S, Budgets()) == []
    other = [msgspec.structs.replace(event, epoch=2) for event in bound]
    assert len(broken_promises([told, *other], 10 * S, Budgets())) == 1, "its successor's are judged"


def test_words_and_kinds() -> None:
    assert chaos.words(KillWorker(phase=Phase.TELLING)) == "kill_worker telling"
    assert (chaos.words(KillRouter()), chaos.lasts_s(KillRouter()), chaos.needs_board(KillRouter())) == ("kill_router", 0, False)
    assert chaos.needs_board(FullDisk(process="worker", for_s=1)) and not chaos.needs_board(FullDisk(process="router", for_s=1))
    assert Step(fault=KillRouter()).board == "busiest"
