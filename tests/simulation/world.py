"""The fleet and everything around it, put together from a scenario; `run` ends with a checked history.

`saw` counts what happened at least once ("sometimes" assertions): a search proves nothing about a branch that never ran.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from builders_sim import a_sim_package

from calculet_core import history, wire
from calculet_core.artifact import Package
from calculet_core.clock import S
from calculet_core.config import BoardConfig, CrashConfig, FleetConfig, ModelConfig, SchedulerConfig
from calculet_core.history import Event
from calculet_core.shell.fleet import Fleet
from calculet_supervisor.rollout import Artifact, Rollout
from calculet_supervisor.shell.examining import Unfit, artifact_of
from simulation.checker import FleetChecker
from simulation.clients import Clients
from simulation.device import Hardware
from simulation.disk import Disk
from simulation.injector import Injector
from simulation.keeper import Keeper
from simulation.operators import Operators
from simulation.ports import Nothing, virtual
from simulation.router import KEYS
from simulation.scenario import ALIAS, HITCH_MS, RARE, Scenario, Settings
from simulation.timeline import Timeline, stream

if TYPE_CHECKING:
    from simulation.processes import Process
    from simulation.supervisor import SupervisorHost
    from simulation.transport import Link, Listener
    from simulation.worker import WorkerHost

Tracer = Callable[[str, str, Any], None]
QUIET_S = 900.0
"""Liveness: everything has come to rest so long after the last fault. A half-open restart and a reset window are within it."""
PROBE_S = 30.0
UNAPPLIED = ("does not run it", "has not taken it live", "to be restarted", "started with something else")
"""Of what is left to do for the configuration that was applied."""
GAPS = {"cut_data", "partition_data", "pause_router", "pause_worker", "hang_worker", "double_data", "reorder_data", "truncate_data"}
"""Faults after which a worker's numbers may have gaps: a broken connection, a lease that lapsed meanwhile, a link that plays tricks."""
_NAMED = {
    history.FLEET_RESET_GRANTED: "reset granted", history.FLEET_RESET_DENIED: "reset denied", history.FLEET_WORKER_ADOPTED: "worker adopted",
    history.BOARD_STALE: "stale completion dropped", history.BOARD_LANE_LOST: "lane lost", history.BOARD_RESET: "board reset",
    history.FLEET_CONDEMNED: "board condemned", history.FLEET_QUARANTINED: "artifact quarantined", history.FLEET_BREAKER: "breaker moved",
}  # fmt: skip


@functools.cache
def packages(sizes: tuple[int, ...], lanes: int) -> tuple[Package, ...]:
    """What boards can serve: blue, which is configured; green; and one whose golden cases are another's."""
    found: list[Package] = []
    for name, mark in (("blue", "5a"), ("green", "6b"), ("bad", "7c")):
        package = a_sim_package(sizes=sizes, lanes=lanes, image_sha256=mark * 32)
        golden = found[0].golden if name == "bad" else package.golden
        found.append(dataclasses.replace(package, root=Path("/packages") / name, digest=mark * 32, golden=golden))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class HostFleet(Fleet):
    """With its scheduler file's content beside it."""

    scheduler: SchedulerConfig = dataclasses.field(kw_only=True)

    def scheduler_of(self, alias: str) -> SchedulerConfig:
        return self.scheduler


def fleet_of(settings: Settings, boards: dict[str, Any], placed: dict[str, Package], root: Path) -> Fleet:
    """The configuration, as its file says it, and the folders where its processes find each other."""
    config = FleetConfig(
        "calculet-fleet/v1",
        tuple(BoardConfig(board, "sim", pool=pool, time_shared=settings.time_shared if len(placed) > 1 else None) for board, pool in boards.items()),
        tuple(ModelConfig(alias, str(package.root)) for alias, package in placed.items()),
        router=settings.router, tenants=settings.tenants, supervision=settings.supervision, recovery=settings.recovery,
        rollout=settings.rollout, recall=settings.recall, crashes=CrashConfig(keep=0),
    )  # fmt: skip
    return HostFleet(config, root / "fleet.yaml", root, root, root, scheduler=settings.scheduler)


def _silent(where: str, what: str, detail: Any) -> None:
    return None


class World:
    """Make one with a scenario, then `run`."""

    def __init__(self, scenario: Scenario, tracer: Tracer = _silent) -> None:
        self.scenario, self.settings, self.tracer = scenario, scenario.settings, tracer
        self.timeline = Timeline(scenario.seed)
        self.alias = ALIAS
        self.boards = [f"board{index}" for index in range(scenario.boards)]
        self.packages = {package.digest: package for package in packages(self.settings.batch_sizes, self.settings.lanes)}
        self.package = next(iter(self.packages.values()))
        self.digests: dict[int, str] = {}
        """Generation -> the artifact that was configured as it."""
        self.sometimes: Counter[str] = Counter()
        self.faults_fired: Counter[str] = Counter()
        self._hash = hashlib.blake2b(digest_size=16)
        self._encode = msgspec.msgpack.Encoder().encode
        self.links: list[Link] = []
        self.listeners: dict[str, Listener] = {}
        """Sockets that are bound, by path."""
        self.disk = Disk()
        self.pools: dict[str, str | None] = dict(zip_longest(self.boards, scenario.pools[: len(self.boards)]))
        blue, green, _ = self.packages.values()
        self.placed: dict[str, Package] = {ALIAS: blue} | ({RARE: green} if scenario.shared else {})
        """What the configuration serves under which alias."""
        self.fleet = fleet_of(self.settings, self.pools, self.placed, self.disk.root)
        """What the configuration's file says now; who starts reads it."""
        self.edits = 0
        self.undisturbed = all(act.verb == "apply" for act in scenario.acts) and all(
            fault.kind == "pause_router" and fault.ms <= HITCH_MS for fault in scenario.faults
        )
        """Nothing happens but applies: no client may notice any of them once every board has served."""
        self._served = False
        self.hardware = {board: Hardware(board, self.timeline) for board in self.boards}
        for hardware in self.hardware.values():
            hardware.on_keeping = functools.partial(self.fired, "keep_memory")
        self.armed: dict[str, list[Any]] = {}
        self.checker = FleetChecker(self)
        self.clients = Clients(self)
        self.keeper = Keeper(self, scenario.routers)
        self.operators = Operators(self)
        self.injector = Injector(self)

    # ---------------------------------------------------------------- running
    def run(self) -> World:
        """Everything the scenario has, then quiet until all has settled; the history is checked."""
        with virtual(self):
            try:
                self.keeper.begin()
                self.clients.begin()
                self.timeline.run_until(self.timeline.now + int(self.scenario.seconds * S))
                self._settle()
                self.checker.finish()
            finally:
                self._end()
        if self.checker.fair_looks:
            self.sometimes["fairness was judged"] += self.checker.fair_looks
        if self.timeline.overtaken:
            self.sometimes["a moment was shuffled"] += self.timeline.overtaken
        return self

    def run_until_broken(self, rules: set[str], look_s: float = 1.0) -> set[str]:
        """Stop as soon as one of the rules is broken; which were."""
        end = self.timeline.now + int(self.scenario.seconds * S)
        with virtual(self):
            try:
                self.keeper.begin()
                self.clients.begin()
                while self.timeline.now < end and not self.checker.rules() & rules:
                    self.timeline.run_until(min(end, self.timeline.now + int(look_s * S)))
                if not self.checker.rules() & rules:
                    self._settle()
                    self.checker.finish()
            finally:
                self._end()
        return self.checker.rules() & rules

    def _end(self) -> None:
        for process in self.processes():
            process.has_ended()
            self._count_firings(process)
        self.disk.close()

    def _settle(self) -> None:
        self.clients.quiet = self.injector.quiet = True
        self.armed.clear()
        for hardware in self.hardware.values():
            hardware.keeps = False
        for process in self.processes():
            process.forget_crash()
        for worker in self.keeper.workers.values():
            if worker.booted:
                worker.plan.faults = []
        self.timeline.run_until(max(self.timeline.now, self.injector.until_ns) + S)
        end = self.timeline.now + int(QUIET_S * S)
        while self.timeline.now < end and (left := self.unsettled()):
            self.timeline.run_until(min(end, self.timeline.now + S))
        if left := self.unsettled():
            self.broken("liveness", f"not settled {QUIET_S:g} s after the last fault: {left[:8]}")
        else:
            self._probe()
        self.timeline.run_until(self.timeline.now + 2 * S)

    def _probe(self) -> None:
        """Where boards serve, every ordinary request is served."""
        ready = sum(worker.serves for worker in self.keeper.workers.values())
        if not ready:
            return
        probes = self.clients.probe(2 * ready * self.scenario.routers)
        end = self.timeline.now + int(PROBE_S * S)
        while self.timeline.now < end and any(probe.outcome is None for probe in probes):
            self.timeline.run_until(self.timeline.now + S // 4)
        wrong = [f"{probe.request:x}: {probe.outcome} {probe.code}" for probe in probes if probe.outcome != "completed"]
        if wrong:
            self.broken("serves_again", f"{ready} boards are ready, and of {len(probes)} requests were not served: {wrong[:4]}")

    def unsettled(self) -> list[str]:
        """What has not come to rest, in words."""
        left = self.clients.unsettled()
        if self.operators.busy:
            left.append(f"{self.operators.busy} operators' acts")
        supervisor = self.keeper.supervisor
        if supervisor is None or not supervisor.serving or supervisor.stopped:
            return [*left, "supervisor"]
        ready = sum(worker.serves for worker in self.keeper.workers.values())
        for index in range(self.scenario.routers):
            router = self.keeper.routers.get(f"router{index}")
            if router is None or not router.listening or router.stopped:
                left.append(f"router{index} is not up")
            elif router.dispatcher.ready() != ready:
                left.append(f"router{index} can use {router.dispatcher.ready()} boards of {ready}")
        if self.scenario.shared:
            sharing = supervisor.app.time_sharing
            left += [f"{alias} could not be loaded, and is not tried again yet" for alias in self.placed if sharing._is_sour(alias)]
        if self.edits:
            left += [words for words in supervisor.app.configuring.left() if any(part in words for part in UNAPPLIED)]
        left += [f"rollout {one.id}: {one.state}" for one in supervisor.rollouts.live.values()]
        if supervisor.recovery.breaker.reason is not None:
            left.append("the breaker is open")
        for board in self.boards:
            if words := self._unsettled_board(board, supervisor):
                left.append(f"{board}: {words}")
        return left

    def _unsettled_board(self, board: str, supervisor: SupervisorHost) -> str | None:
        worker, wish = self.keeper.workers.get(board), supervisor.wish(board)
        if worker is None:
            return None if not wish.up else "no worker"
        if not worker.booted or worker.stopped:
            return "its worker starts" if not worker.booted else "its worker is stopped"
        report = worker.engine.report(self.timeline.now)
        if report.state == "FAILED" and report.condemned is not None and "resets" in report.condemned:
            return None  # the window reopens in ten minutes
        busy = {state: count for state, count in report.lanes.items() if count and state != "FREE"}
        current = supervisor.rollouts.current(supervisor.app.time_sharing.alias_of(board))
        if current is not None and report.digest != current.digest:
            return f"holds {report.digest[:4]}, the alias is {current.digest[:4]}"
        if report.state != "READY" or busy or report.waiting or report.inflight or not wish.up:
            return f"{report.state} {busy} waiting={report.waiting} inflight={report.inflight} {report.condemned or ''}"
        return None

    # ---------------------------------------------------------------- what happens
    def see(self, event: Event, source: Any) -> None:
        """An event of the history: hashed, counted, checked."""
        self._hash.update(self._encode(event))
        if event.event == history.BOARD_JOB:
            return
        self.tracer(getattr(source, "name", ""), event.event, event)
        if event.event == history.FLEET_ROLLOUT:
            self.sometimes[f"rollout {event.data['state'].lower()}"] += 1
        if name := _NAMED.get(event.event):
            self.sometimes[name] += 1
        elif event.event == history.BOARD_FAULT:
            self.sometimes[f"board fault: {event.data['kind']}"] += 1
        elif event.event == history.BOARD_GOLDEN and not event.data["passed"]:
            self.sometimes["golden failed"] += 1
        elif event.event == history.FLEET_WORKER_EXITED and event.data.get("quarantined"):
            self.sometimes["worker quarantined"] += 1
        elif event.event == history.FLEET_WORKER_KILLED:
            self.sometimes[f"worker replaced: {event.data['reason'].split(' within')[0]}"] += 1
        self.checker.see(event, source)

    def note(self, what: str, detail: str) -> None:
        """Part of the trace, not of the product's history."""
        self._hash.update(f"{self.timeline.now} {what} {detail}".encode())
        self.tracer("", what, detail)

    def saw(self, what: str) -> None:
        """It happens."""
        self.sometimes[what] += 1

    def fired(self, kind: str) -> None:
        """A fault really happened."""
        self.faults_fired[kind] += 1

    def broken(self, rule: str, message: str) -> None:
        """A promise was broken."""
        self.tracer("", "VIOLATION", f"{rule}: {message}")
        self.checker.broken(rule, message)

    def tell(self, where: str, what: str, frames: list[bytes]) -> None:
        """For the tracer: a message, if somebody listens."""
        if self.tracer is not _silent:
            with suppress(wire.WireError):
                self.tracer(where, what, wire.decode(*frames))

    def bug(self, process: Process, error: BaseException) -> None:
        """A product's code raised."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].name}, {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "?"
        self.broken("no_bug", f"{process.name}: {type(error).__name__}: {error} ({where})")

    def messages_lost(self, router: Process, board: str, expected: int, got: int) -> None:
        """A gap in a worker's numbers: only a link or a process in trouble may explain it."""
        self.saw("router saw a gap")
        if not GAPS & self.faults_fired.keys():
            self.broken("no_lost_message", f"{router.name}: {board} sent {got} after {expected - 1}, and no link was in trouble")

    @property
    def trace_hash(self) -> str:
        """Of everything that happened: equal for equal seeds."""
        return self._hash.hexdigest()

    # ---------------------------------------------------------------- who is where
    def package_at(self, root: Path) -> Package:
        """Of a folder."""
        return next(package for package in self.packages.values() if package.root == root)

    @staticmethod
    def key_watch(path: Path, take: Callable[[Any], None]) -> Nothing:
        """Of `KeyWatch`: the keys of all tenants, which do not change."""
        take(KEYS)
        return Nothing()

    def examine(self, rollout: Rollout, context: Any) -> tuple[Package, dict[str, Artifact | None]]:
        """Of `examining`, the static half of a load, without files: a package is what its folder's name says."""
        green_digest = rollout.green.digest if rollout.green is not None else ""
        package = self.package_at(Path(rollout.package)) if rollout.verb == "load" else self.packages[green_digest]
        green = artifact_of(package)
        if rollout.blue is not None and rollout.blue.digest == green.digest:
            raise Unfit(f"{rollout.alias} already serves {green}")
        if (reason := context.quarantined.get(green.digest)) is not None and not rollout.override:
            raise Unfit(f"{green} was set aside: {reason}")
        return package, {"green": green, "blue": rollout.blue}

    def edit(self, restart: bool) -> None:
        """Somebody changes the configuration's file: something that routers take live, and something for which workers restart."""
        self.edits += 1
        config = self.fleet.config
        router = msgspec.structs.replace(config.router, max_inflight_requests=4_000 + self.edits)
        journal = msgspec.structs.replace(config.journal, max_bytes=config.journal.max_bytes + restart)
        self.fleet = dataclasses.replace(self.fleet, config=msgspec.structs.replace(config, router=router, journal=journal))
        self.note("the configuration is edited", f"restart={restart}")

    def must_serve(self) -> bool:
        """Whether whoever asks now has to be served, whatever is being applied."""
        if not self.undisturbed or self._served:
            return self.undisturbed
        routers = self.keeper.routers.values()
        self._served = len(routers) == self.scenario.routers and all(
            router.listening and router.dispatcher.ready() == len(self.boards) for router in routers
        )
        return self._served

    def processes(self) -> list[Process]:
        """All that live."""
        keeper = self.keeper
        supervisor = [keeper.supervisor] if keeper.supervisor is not None else []
        return [*keeper.workers.values(), *keeper.routers.values(), *supervisor]

    def rng(self, name: str) -> random.Random:
        """An own source for each purpose."""
        return stream(self.scenario.seed, name)

    def process_of(self, pid: int) -> Process | None:
        """That lives."""
        return next((process for process in self.processes() if process.pid == pid), None)

    def clients_expected(self, request: int) -> list[int] | None:
        """The reference answer."""
        return self.clients.expected(request)

    def worker_spawned(self, board: str, epoch: int) -> None:
        """The keeper started a worker."""
        self.note("worker spawned", f"{board} epoch {epoch}")

    def worker_ended(self, worker: WorkerHost) -> None:
        """Its faults that fired are counted, the others wait for its successor."""
        self._count_firings(worker)
        if worker.booted and worker.plan.faults and not self.injector.quiet:
            self.armed.setdefault(worker.board, []).extend(worker.plan.faults)

    def _count_firings(self, process: Process) -> None:
        plan = getattr(process, "plan", None)
        if plan is not None:
            for firing in plan.firings:
                self.faults_fired[firing.fault.__struct_config__.tag] += 1
            plan.firings.clear()
