"""Where the shells meet the operating system: what their modules' names stand for while a world runs.

The shells themselves are the product's. What they call `time`, `connect_dealer`, `Journal` and so on is replaced here, and only
here, by something that lives in the world's timeline; who calls is told by the loop that runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import sys
import time
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from calculet_core.artifact import Package
from calculet_core.history import Event
from calculet_core.shell import holding
from calculet_core.shell.limits import SharedLimits
from calculet_router.shell import app as router_app
from calculet_router.shell import endpoints, worker_link
from calculet_supervisor.shell import app as supervisor_app
from calculet_supervisor.shell import config_verbs, configuring, ground, rollouts, router_restarts
from calculet_worker.events import PackageVerified
from calculet_worker.shell import app as worker_app
from calculet_worker.shell import prompts, reporting
from calculet_worker.shell.tokenizing import PromptTokenizer
from simulation.clients import ObservedReply
from simulation.transport import Link, Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from simulation.processes import Process
    from simulation.world import World

PIDFDS = 1_000_000
TOKENIZE_NS = 60_000
NS_PER_TOKEN = 200
QUICK_TOKENS = 32
SAID = {
    "stood still for %.1f s: no router is blamed for that": "{kind} stood still",
    "stood still for %.1f s: no worker is blamed for that": "{kind} stood still",
    "router %08x: a message could not be sent": "worker could not send",
    "board %s: %s could not be sent": "a command could not be sent",
    "board %s: aborted: %s": "supervisor aborted a worker",
    "board %s: killed: %s": "supervisor killed a worker",
    "an action failed and will be decided again: %s": "an action failed and is decided again",
    "the fleet view cannot be saved, and is tried again: %s": "a view could not be saved",
    "the keeper is gone": "a router lost its keeper",
}
"""Lines of the shells' logs that tell of a branch that ran."""


def here() -> Process:
    """Whose code runs."""
    loop: Any = asyncio.get_running_loop()
    process: Process = loop.process
    return process


class System:
    """`os`, as far as a process asks who it is and who else lives."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getpid(self) -> int:
        return here().pid

    def urandom(self, size: int) -> bytes:
        return here().rng.randbytes(size)

    def pidfd_open(self, pid: int) -> int:
        """Readable once that process has ended."""
        loop, process = here().loop, self._world.process_of(pid)
        if process is None:
            raise ProcessLookupError(3, "No such process")
        process.watchers.append((loop.process, lambda: loop.process.call(loop.readable, PIDFDS + pid)))
        return PIDFDS + pid

    def close(self, fd: int) -> None:
        """Of a pidfd."""


class VirtualJournal:
    """What a shell writes down is the world's history."""

    def __init__(self, path: Path | None, max_bytes: int, keep: int) -> None:
        self._process = here()

    def append(self, event: Event) -> None:
        """An event that is ready."""
        process = self._process
        if process.crashes:
            process.acted()
        process.world.see(event, process)

    def write(self, event: str, **fields: Any) -> None:
        """One that happens now."""
        known = {name: fields.pop(name) for name in ("request", "attempt", "board", "epoch", "generation", "job") if name in fields}
        self.append(Event(event=event, t=self._process.timeline.now, data=fields, **known))

    def flush(self) -> None:
        """At once is soon enough."""

    close = flush


SERIES = SimpleNamespace(observe=lambda value: None, inc=lambda amount=1: None, set=lambda value: None)


class Counters:
    """Metrics: nobody scrapes."""

    requests = failed = resent = 0

    def __init__(self, *args: Any, **labels: Any) -> None:
        self._process = here()

    def count(self, *args: Any, **labels: Any) -> None:
        """Something happened."""

    ended = error = limited = resend = note = settle = watch = compiled = count

    def collectors(self, name: str, **labels: str) -> Any:
        """Of one series."""
        return SERIES

    def bad_message(self, reason: str) -> None:
        """A message was ignored."""
        self._process.world.saw(f"{self._process.kind} ignored a message: {reason}")


class RouterCounters(Counters):
    """A router's tell what became of calls."""

    def ended(self, action: Any, *rest: Any) -> None:
        self._process.world.saw(f"call {action.outcome}")

    def resend(self, reason: str) -> None:
        self._process.world.saw(f"resent: {reason}")

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        if name == "calculet_router_bad_messages":
            self._process.world.saw(f"router ignored: {labels['reason']}")
        elif name == "calculet_router_slow_readers":
            self._process.world.saw("a slow reader was dropped")

    def limited(self, limit: str) -> None:
        self._process.world.saw(f"a limit took effect: {limit}")


class UsageBook:
    """The usage log's records, for the checker."""

    written = lost = 0

    def __init__(self, *args: Any) -> None:
        self._process = here()

    def append(self, action: Any) -> None:
        """A call that was let in has ended."""
        self._process.world.checker.billed(action)

    def flush(self) -> None:
        """Nothing waits."""

    close = flush


class Tokenizer(PromptTokenizer):
    """The artifact's; a prompt of more than a few tokens goes to the pool, so that both ways are used."""

    @staticmethod
    def is_quick(prompt: Any, size: int) -> bool:
        return len(prompt.token_ids or ()) <= QUICK_TOKENS


class TokenizingPool:
    """A thread that takes its time."""

    def __init__(self) -> None:
        self._process = here()

    def encode(self, tokenizer: PromptTokenizer, prompt: Any, done: Callable[[Any], None]) -> None:
        """`done` in a while."""
        size = len(prompt.token_ids or prompt.text or ())
        self._process.later(TOKENIZE_NS + NS_PER_TOKEN * size, lambda: done(tokenizer.encode_or_error(prompt)))

    def close(self) -> None:
        """It goes with its process."""


def tokenizer_of(package: Package) -> Tokenizer:
    """Made once: packages do not change."""
    found = _tokenizers.get(package.digest)
    if found is None:
        found = _tokenizers[package.digest] = Tokenizer(package)
    return found


_tokenizers: dict[str, Tokenizer] = {}


class Nothing:
    """Something that can be closed, and is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Of anything."""

    def close(self) -> None:
        """Gladly."""

    destroy = look = lambda self, **_: None
    usable, expires_s = True, 0


def connect_dealer(context: Any, endpoint: str, on_frames: Any, identity: bytes | None = None, *_: Any, **__: Any) -> Link:
    """As in `calculet_core.shell.link`."""
    process, path = here(), endpoint.removeprefix("ipc://")
    name = path.rsplit("/", 1)[-1]
    if name.startswith("w-"):
        return Link(process, path, f"data {name[2:].rsplit('-', 1)[0]}", on_frames, identity, process.world.settings.high_water)
    return Link(process, path, f"control {process.name}", on_frames, identity)


def bind_router(context: Any, path: Any, on_frames: Any, *_: Any) -> Listener:
    """As in `calculet_core.shell.link`."""
    return Listener(here(), str(path), on_frames)


def open_limits(path: Path, limited: Any, grace_ns: int) -> SharedLimits:
    """The real ledger; a process that dies lets go of its column, as the kernel sees to it."""
    ledger = SharedLimits(path, limited, grace_ns)
    here().watchers.append((here(), lambda: _let_go(ledger)))
    return ledger


def _let_go(ledger: SharedLimits) -> None:
    if ledger._fd >= 0:
        ledger._lock(1 + ledger._slot, fcntl.F_UNLCK)
        os.close(ledger._fd)
        ledger._fd = -1


async def _serve_nothing(*args: Any) -> Nothing:
    return Nothing()


async def _serve_control(path: Any, verbs: Any, on_bad: Any = None) -> Nothing:
    here().serves_verbs(verbs)
    return Nothing()


def _patches(world: World) -> list[tuple[ModuleType, str, Any]]:
    system, context = System(world), SimpleNamespace(Context=Nothing, ZMQError=OSError)
    settings = world.settings

    def verify(fleet: Any, board: Any, keys: Any, versions: Any, action: Any) -> tuple[PackageVerified, Tokenizer]:
        package = world.packages[action.digest]
        tokenizer = tokenizer_of(package)
        return PackageVerified(action.generation, package, tokenizer.vocabulary, settings.scheduler), tokenizer

    def death_pipe(on_death: Callable[[], None]) -> bool:
        here().on_keepers_death = on_death
        return True

    everywhere: dict[str, Any] = {
        "zmq": context, "Journal": VirtualJournal, "connect_dealer": connect_dealer, "bind_router": bind_router,
        "serve_metrics": _serve_nothing, "watch_death_pipe": death_pipe, "rss_bytes": lambda: 0, "sd_notify": lambda state: False,
        "watchdog_interval_s": lambda: None, "open_limits": open_limits,
    }  # fmt: skip
    found = [
        (module, name, value) for module in (worker_app, router_app, supervisor_app, worker_link, reporting)
        for name, value in everywhere.items() if name in vars(module)
    ]  # fmt: skip
    for module in list(sys.modules.values()):
        if module.__name__.startswith("calculet_") and vars(module).get("time") is time:
            found.append((module, "time", world.timeline))
    found += [(module, "load_fleet", lambda path: world.fleet) for module in (configuring, config_verbs, holding)]
    found += [(module, "is_alive", lambda pid: world.process_of(pid) is not None) for module in (supervisor_app, router_restarts)]
    found += [(module, "set_level", lambda level: None) for module in (worker_app, router_app)]
    return found + [
        (config_verbs, "configured_packages", lambda fleet, versions: {}), (config_verbs, "read_package", world.package_at),
        (worker_app, "os", system), (worker_app, "threading", SimpleNamespace(excepthook=None)), (worker_app, "Telemetry", Counters),
        (prompts, "TokenizingPool", TokenizingPool), (worker_app, "verify", verify), (worker_app, "HOUSEKEEPING_S", settings.housekeeping_s),
        (worker_app, "Executor", lambda device, deliver, rehearse: here().device_thread(deliver)),
        (router_app, "os", system), (router_app, "secrets", SimpleNamespace(randbits=lambda bits: here().incarnation)),
        (router_app, "KeyWatch", world.key_watch), (router_app, "open_tls", lambda fleet, config: None),
        (router_app, "RouterTelemetry", RouterCounters), (router_app, "UsageLog", UsageBook), (router_app, "bind", lambda listen: Socket()),
        (router_app, "raise_file_limit", lambda wanted: None), (router_app, "tune_gc", lambda: None),
        (router_app, "orphans_of", lambda *_: []), (router_app, "TICK_S", settings.router_tick_s),
        (router_app, "FLUSH_S", settings.idle_tick_s), (router_app, "LOOK_S", settings.idle_tick_s), (endpoints, "Reply", ObservedReply),
        (worker_link, "os", system),
        (supervisor_app, "random", SimpleNamespace(Random=lambda: here().rng)), (supervisor_app, "Telemetry", Counters),
        (supervisor_app, "serve_control", _serve_control), (supervisor_app, "can_dump", lambda pid: True),
        (supervisor_app, "TICK_S", settings.supervisor_tick_s),
        (ground, "leave_standing", lambda fleet, standing: None), (ground, "is_left", lambda fleet: True),
        (rollouts, "examine", world.examine), (rollouts, "read_package", world.package_at),
    ]  # fmt: skip


class Socket:
    """Bound to an address."""

    family = None

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8080

    def setblocking(self, flag: bool) -> None:
        """It is not read."""


class Said(logging.Handler):
    """The shells' warnings and errors: some tell of a branch that ran, and an exception that one of them swallowed is a bug."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        loop: Any = asyncio._get_running_loop()
        if (name := SAID.get(str(record.msg))) is not None:
            self._world.saw(name.format(kind=loop.process.kind) if loop is not None else name)
        if loop is None or not loop.process.alive:
            return
        process = loop.process
        self._world.tracer(process.name, "says", record.getMessage())
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, sqlite3.Error | OSError):
            self._world.bug(process, error)


@contextmanager
def virtual(world: World) -> Iterator[None]:
    """While this lasts, what shells do happens in that world."""
    patches = _patches(world)
    if gone := [f"{module.__name__}.{name}" for module, name, _ in patches if name not in vars(module)]:
        raise AssertionError(f"the product has no {', '.join(gone)} any more: what do its shells ask instead?")
    real = [(module, name, vars(module)[name]) for module, name, _ in patches]
    log, said = logging.getLogger("calculet"), Said(world)
    level, propagates = log.level, log.propagate
    for module, name, value in patches:
        setattr(module, name, value)
    log.addHandler(said)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(said)
        log.setLevel(level)
        log.propagate = propagates
        for module, name, value in real:
            setattr(module, name, value)
