"""The keeper's watchdog: who tells that it lives is left alone, who has fallen silent is named once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from calculet_core.shell.sd_notify import sd_notify, watchdog_interval_s
from calculet_supervisor.shell.watchdog import STALL_S, Watchdog

LIMIT_S = 10.0


class Clock:
    """Moves on when it is told to, in steps that are no stall."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def under_watch(work: Callable[[Watchdog, Clock, list[int]], None]) -> None:
    async def run() -> None:
        clock, silent = Clock(), list[int]()
        watchdog = Watchdog(LIMIT_S, silent.append, clock)
        try:
            work(watchdog, clock, silent)
        finally:
            watchdog.close()

    asyncio.run(run())


def pass_time(watchdog: Watchdog, clock: Clock, seconds: float) -> None:
    end_s = clock.s + seconds
    while clock.s < end_s:
        clock.s += STALL_S / 2
        watchdog.check()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Watchdog], None]:
    def of(watchdog: Watchdog) -> None:
        for name, value in watchdog.environment.items():
            monkeypatch.setenv(name, value)

    return of


def test_one_that_speaks_is_left_alone_and_one_that_falls_silent_is_named_once(environment: Callable[[Watchdog], None]) -> None:
    def work(watchdog: Watchdog, clock: Clock, silent: list[int]) -> None:
        environment(watchdog)
        assert watchdog_interval_s() == LIMIT_S / 2
        watchdog.watch(os.getpid())
        for _ in range(5):
            assert sd_notify("WATCHDOG=1")
            watchdog.listen()
            pass_time(watchdog, clock, LIMIT_S * 0.8)
        assert silent == []
        pass_time(watchdog, clock, LIMIT_S)
        assert silent == [os.getpid()]
        pass_time(watchdog, clock, LIMIT_S * 3)
        assert silent == [os.getpid()]

    under_watch(work)


def test_a_start_may_take_its_time(environment: Callable[[Watchdog], None]) -> None:
    def work(watchdog: Watchdog, clock: Clock, silent: list[int]) -> None:
        watchdog.watch(os.getpid())
        pass_time(watchdog, clock, LIMIT_S * 5)
        assert silent == []

    under_watch(work)


def test_a_keeper_that_did_not_run_itself_blames_nobody(environment: Callable[[Watchdog], None]) -> None:
    def work(watchdog: Watchdog, clock: Clock, silent: list[int]) -> None:
        environment(watchdog)
        watchdog.watch(os.getpid())
        assert sd_notify("WATCHDOG=1")
        watchdog.listen()
        clock.s += LIMIT_S * 100
        watchdog.check()
        pass_time(watchdog, clock, LIMIT_S * 0.8)
        assert silent == []
        pass_time(watchdog, clock, LIMIT_S)
        assert silent == [os.getpid()]

    under_watch(work)


def test_a_strangers_word_counts_for_nobody(environment: Callable[[Watchdog], None]) -> None:
    def work(watchdog: Watchdog, clock: Clock, silent: list[int]) -> None:
        environment(watchdog)
        watchdog.watch(os.getpid())
        assert sd_notify("WATCHDOG=1")
        watchdog.listen()
        script = "from calculet_core.shell.sd_notify import sd_notify; assert sd_notify('WATCHDOG=1')"
        pass_time(watchdog, clock, LIMIT_S * 0.8)
        subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ}, timeout=60)
        watchdog.listen()
        pass_time(watchdog, clock, LIMIT_S)
        assert silent == [os.getpid()]

    under_watch(work)


def test_it_listens_by_itself(environment: Callable[[Watchdog], None]) -> None:
    async def run() -> None:
        silent: list[int] = []
        watchdog = Watchdog(0.2, silent.append)
        environment(watchdog)
        watchdog.watch(os.getpid())
        assert sd_notify("READY=1")
        deadline_s = time.monotonic() + 30
        while not silent and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        watchdog.close()
        assert silent == [os.getpid()]

    asyncio.run(run())


def test_a_process_without_descriptors_still_tells_that_it_lives(environment: Callable[[Watchdog], None]) -> None:
    script = """
import os, resource
from calculet_core.shell.sd_notify import sd_notify
assert sd_notify("READY=1")
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
assert sd_notify("WATCHDOG=1")
os._exit(0)
"""

    def work(watchdog: Watchdog, clock: Clock, silent: list[int]) -> None:
        environment(watchdog)
        subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ}, timeout=60)

    under_watch(work)
