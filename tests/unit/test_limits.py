"""What tenants may use together: rates, and the ledger that the processes of a host share."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from calculet_core.clock import MS, S
from calculet_core.limits import Limits, LocalLimits, Rate
from calculet_core.shell import limits as shared
from calculet_core.shell.limits import LimitsUnavailable, SharedLimits, open_limits

SPAWN = multiprocessing.get_context("spawn")


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


# ---------------------------------------------------------------- rates
@pytest.mark.parametrize(("per_s", "burst"), [(10.0, 1.0), (4.0, 4.0), (0.5, 1.0), (333.0, 333.0)])
def test_in_any_time_no_more_is_taken_than_burst_and_rate_allow(per_s: float, burst: float) -> None:
    rate, rng, now, due = Rate(per_s, burst), random.Random(3), 5 * S, -(1 << 62)
    taken: list[int] = []
    for _ in range(3_000):
        now += rng.choice((0, 1, MS, 20 * MS, 200 * MS))
        if (after := rate.take(due, now)) is not None:
            due = after
            taken.append(now)
    for first, start in enumerate(taken):
        end = next((last for last in range(first, len(taken)) if taken[last] > start + 2 * S), len(taken))
        assert end - first <= burst + 2 * per_s + 1e-6
    assert len(taken) > 50


def test_a_rate_tells_how_much_is_there_and_how_long_to_wait() -> None:
    rate, due = Rate(4.0, 4.0), 0
    assert rate.level(due, 10 * S) == 4.0 and rate.wait_s(due, 10 * S) == 0
    for left in (3.0, 2.0, 1.0, 0.0):
        due = rate.take(due, 10 * S) or pytest.fail("it was there")
        assert rate.level(due, 10 * S) == pytest.approx(left)
    assert rate.take(due, 10 * S) is None and rate.wait_s(due, 10 * S) == pytest.approx(0.25)
    assert rate.take(due, 10 * S + 250 * MS) is not None


def test_a_rate_from_before_a_reboot_is_an_empty_burst_and_no_more() -> None:
    rate = Rate(2.0, 2.0)
    assert rate.level(10**18, 1 * S) == 0 and rate.wait_s(10**18, 1 * S) == pytest.approx(0.5)
    assert rate.take(10**18, 1 * S + 500 * MS) is None, "the clock that wrote it is further on"
    assert rate.take(rate.take(0, 1 * S) or 0, 1 * S) is not None


# ---------------------------------------------------------------- the ledger
@pytest.mark.parametrize("kind", ["local", "shared"])
def test_holders_together_never_pass_a_limit(kind: str, tmp_path: Path) -> None:
    names = {"a": 7, "b": 40}
    local = LocalLimits()
    holders: list[Limits] = [local] * 3 if kind == "local" else [SharedLimits(tmp_path / "l", names, 0) for _ in range(3)]
    taken: dict[tuple[int, str], list[int]] = {(holder, name): [] for holder in range(3) for name in names}
    rng, refused = random.Random(1), 0
    for _ in range(4_000):
        number, name = rng.randrange(3), rng.choice(list(names))
        mine = taken[number, name]
        if mine and rng.random() < 0.45:
            holders[number].give(name, mine.pop())
        else:
            amount = rng.randint(1, 5)
            before = sum(sum(taken[holder, name]) for holder in range(3))
            fits = before + amount <= names[name]
            assert holders[number].take(name, amount, names[name]) is fits, "all of the limit can be used, by anybody"
            refused += not fits
            if fits:
                mine.append(amount)
        assert {holder.total(name) for holder in holders} == {sum(sum(taken[holder, name]) for holder in range(3))}
    assert refused > 100


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_what_was_not_taken_cannot_be_given_back(kind: str, tmp_path: Path) -> None:
    holder: Limits = LocalLimits() if kind == "local" else SharedLimits(tmp_path / "l", ["a"], 0)
    assert holder.take("a", 2, 2)
    holder.give("a", 2)
    with pytest.raises(ValueError, match=r"tenant a: 1 given back, 0 were taken"):
        holder.give("a", 1)


def test_one_rate_for_all(tmp_path: Path) -> None:
    first, second = SharedLimits(tmp_path / "l", ["a", "b"], 0), SharedLimits(tmp_path / "l", ["b", "a"], 0)
    rate = Rate(2.0, 2.0)
    assert first.take_rate("a", rate, 10 * S) and second.take_rate("a", rate, 10 * S)
    assert not first.take_rate("a", rate, 10 * S) and first.due_ns("a") == second.due_ns("a")
    assert first.take_rate("b", rate, 10 * S), "each tenant has its own"


def exact(ledger: SharedLimits) -> int:
    """The total while nobody can take. Without the lock one that is given here and taken there meanwhile may be counted twice."""
    assert ledger._enter(60)
    try:
        return ledger.total("t")
    finally:
        ledger._leave()


def hammer(path: Path, seed: int, limit: int, stop: Path, failures: Path) -> None:
    """Takes and gives as fast as it can; sees with its own eyes whether the total is ever above the limit. It shares nothing but
    files with the test: whoever is killed holds no lock of theirs."""
    ledger, rng, mine = SharedLimits(path, ["t"], 0), random.Random(seed), 0
    while not stop.exists():
        if mine and rng.random() < 0.5:
            ledger.give("t", mine)
            mine = 0
        elif ledger.take("t", amount := rng.randint(1, 3), limit):
            mine += amount
        if (total := exact(ledger)) > limit:
            failures.write_text(f"{seed}: {total}")
            return


def test_processes_that_take_as_fast_as_they_can_never_pass_a_limit_kill_nine_included(tmp_path: Path) -> None:
    path, stop, failures = tmp_path / "l", tmp_path / "stop", tmp_path / "failures"
    workers = [SPAWN.Process(target=hammer, args=(path, seed, 8, stop, failures)) for seed in range(3)]
    for worker in workers:
        worker.start()
    ledger = SharedLimits(path, ["t"], 0)
    until(lambda: ledger.total("t") > 0)
    seen, start = set[int](), time.monotonic()
    while time.monotonic() < start + (1 if len(seen) > 4 else 60):
        seen.add(exact(ledger))
    os.kill(workers[0].pid or 0, signal.SIGKILL)
    workers[0].join(60)
    stop.touch()
    for worker in workers[1:]:
        worker.join(60)
    assert not failures.exists() and max(seen) <= 8 and len(seen) > 4
    ledger.sweep()
    assert ledger.total("t") == 0, "what the dead had taken is there again"


def hold(path: Path, ready: Event) -> None:
    """Takes three and lives on."""
    ledger = SharedLimits(path, ["t"], 0)
    assert ledger.take("t", 3, 4)
    ready.set()
    time.sleep(600)


def test_what_a_killed_process_had_let_in_counts_until_it_cannot_run_any_more(tmp_path: Path) -> None:
    ready = SPAWN.Event()
    other = SPAWN.Process(target=hold, args=(tmp_path / "l", ready))
    other.start()
    assert ready.wait(60)
    mine = SharedLimits(tmp_path / "l", ["t"], grace_ns=300 * MS)
    assert not mine.take("t", 2, 4) and mine.take("t", 1, 4)
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join(60)
    seen_ns = time.monotonic_ns()
    mine.sweep()
    assert not mine.take("t", 1, 4), "its requests may still run"
    until(lambda: mine.take("t", 3, 4))
    assert time.monotonic_ns() - seen_ns >= 300 * MS and mine.total("t") == 4


def test_a_process_that_leaves_with_something_taken_is_like_one_that_was_killed(tmp_path: Path) -> None:
    first, second = (SharedLimits(tmp_path / "l", ["t"], 50 * MS) for _ in range(2))
    assert first.take("t", 2, 2)
    first.close()
    first.close()
    assert not second.take("t", 1, 2)
    until(lambda: second.take("t", 2, 2))


def test_while_somebody_stands_still_in_the_middle_a_limit_fails_closed_and_nobody_waits_long(tmp_path: Path) -> None:
    path = tmp_path / "l"
    first, second = (SharedLimits(path, ["t"], 0) for _ in range(2))
    assert second.take("t", 1, 9)
    assert first._enter(0)
    before, cpu = time.monotonic(), time.thread_time()
    assert not second.take("t", 1, 9) and not second.take_rate("t", Rate(5.0, 5.0), 1 * S)
    assert time.monotonic() - before < 5 and time.thread_time() - cpu < 0.015, "it waits asleep"
    second.give("t", 1)
    first._leave()
    assert second.take("t", 9, 9)


def test_a_column_is_used_again_and_a_full_ledger_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l"
    for _ in range(2 * shared.HOLDERS):
        SharedLimits(path, ["t"], 3_600 * S).close()
    held = [SharedLimits(path, ["t"], 0) for _ in range(shared.HOLDERS)]
    with pytest.raises(LimitsUnavailable, match=r"l: 64 processes hold limits, and no more can"):
        SharedLimits(path, ["t"], 0)
    held.pop().close()
    SharedLimits(path, ["t"], 0)
    with pytest.raises(LimitsUnavailable, match="512 tenants have limits"):
        SharedLimits(tmp_path / "many", [f"t{number}" for number in range(shared.TENANTS + 1)], 0)


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l"
    path.write_bytes(b"hello")
    with pytest.raises(LimitsUnavailable, match=r"l: it has 5 bytes, \d+ are expected"):
        SharedLimits(path, ["t"], 0)
    path.write_bytes(b"\1" * shared._SIZE)
    with pytest.raises(LimitsUnavailable, match="not a ledger of limits"):
        SharedLimits(path, ["t"], 0)
    with pytest.raises(LimitsUnavailable, match="No such file"):
        SharedLimits(tmp_path / "nowhere" / "l", ["t"], 0)
    monkeypatch.setattr(shared, "JOIN_PATIENCE_S", 0.0)
    first = SharedLimits(tmp_path / "busy", ["t"], 0)
    assert first._enter(0)
    with pytest.raises(LimitsUnavailable, match="another process holds its lock"):
        SharedLimits(tmp_path / "busy", ["t"], 0)


def test_threads_of_several_holders_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    holders = [SharedLimits(tmp_path / "l", ["t"], 0) for _ in range(3)]
    above: list[int] = []

    def work(ledger: SharedLimits) -> None:
        for _ in range(500):
            if ledger.take("t", 1, 2):
                if (total := exact(ledger)) > 2:
                    above.append(total)
                ledger.give("t", 1)

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert above == [] and holders[0].total("t") == 0


def test_a_tenant_that_gets_its_limit_later_shares_it_with_those_who_had_it_before(tmp_path: Path) -> None:
    first, second = SharedLimits(tmp_path / "l", [], 0), SharedLimits(tmp_path / "l", [], 0)
    assert second.total("late") == 0
    assert first.take("late", 2, 3) and not second.take("late", 2, 3) and second.take("late", 1, 3)
    assert first.total("late") == second.total("late") == 3
    rate = Rate(1.0, 1.0)
    assert first.take_rate("late", rate, 10 * S) and not second.take_rate("late", rate, 10 * S)


def test_a_ledger_that_nobody_needs_is_no_file_and_is_there_with_the_first_limit(tmp_path: Path) -> None:
    first, second = (open_limits(tmp_path / "l", [], 0) for _ in range(2))
    assert (first.total("late"), list(tmp_path.iterdir())) == (0, [])
    first.sweep()
    with pytest.raises(ValueError, match="nothing was taken"):
        first.give("late", 1)
    assert first.take("late", 2, 3) and not second.take("late", 2, 3) and second.take("late", 1, 3)
    first.give("late", 2)
    assert second.total("late") == 1
    for ledger in (first, second):
        ledger.close()


def test_a_limit_whose_ledger_cannot_be_opened_refuses(tmp_path: Path) -> None:
    ledger = open_limits(tmp_path / "no such folder" / "l", [], 0)
    assert not ledger.take("late", 1, 3) and not ledger.take_rate("late", Rate(1.0, 1.0), 10 * S)
