"""What a run consists of, as data: traffic, faults with their moments, operators' acts, settings. All of it follows from a seed.

Each fault and each request comes from a source of randomness of its own, so that leaving one out, as shrinking does, moves no other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from calculet_core.config import (
    AdmissionConfig,
    BatchConfig,
    CanaryConfig,
    ExecutorConfig,
    RecallConfig,
    RecoveryConfig,
    RestartConfig,
    RolloutConfig,
    RouterConfig,
    SchedulerConfig,
    SupervisionConfig,
    TenantConfig,
)
from simulation.timeline import stream

ALIAS = "toy"
TENANTS = (
    TenantConfig(name="default"), TenantConfig(name="gold", weight=3.0, traffic_class="latency"),
    TenantConfig(name="bulk", max_active=3, traffic_class="throughput"), TenantConfig(name="metered", requests_per_s=0.5),
)  # fmt: skip
HITCH_EVERY_S, HITCH_MS = 0.8, 450
"""How often, and how long at most, a router stands still on a busy host: less than anybody's time-out."""
POOLS = (None, "latency", "throughput")

DEVICE_FAULTS = (
    "busy", "unavailable", "invalid_shape", "invalid_dtype", "other_code", "wait_timeout", "stale_completion", "slow",
    "ccu_exception", "nan_output", "inf_output", "release_refused", "configure_refused", "reset_fails",
)  # fmt: skip
"""Tags of `calculet_worker.device.faults`."""
HOST_FAULTS = (
    "kill_worker", "kill_router", "kill_supervisor", "pause_worker", "hang_worker", "pause_router", "pause_supervisor", "cut_data",
    "cut_control", "partition_data", "partition_control", "slow_data", "double_data", "reorder_data", "double_control",
    "reorder_control", "truncate_data", "truncate_control", "kill_keeper", "stop_worker", "stop_router", "stop_supervisor", "disk_full", "stuck_dma", "bad_board",
)  # fmt: skip
"""What happens to processes, links, the disk and the silicon."""
ACTS = ("drain", "stop", "restart", "load", "load", "rollback", "promote")
"""`apply` of a changed configuration is beside them. `resume` and `start` follow the first two. `load` is of a package of another colour; its `target` says which."""


@dataclass(frozen=True)
class Traffic:
    """What clients do."""

    per_s: float = 2.0
    prompt_tokens: tuple[int, int] = (4, 200)
    mean_output: float = 16.0
    max_output: int = 64
    disconnects: float = 0.05
    streams: float = 0.5
    twice: float = 0.1
    """Share of calls that ask for two answers."""
    slow_readers: float = 0.02
    retries: float = 0.5
    """Share of clients that try again after 429 and 503."""
    short_deadlines: float = 0.05
    stops: float = 0.1
    """Share with a stop token."""
    invalid: float = 0.01
    questions: float = 0.03
    """How many ask about tokens, for each client."""
    burst_every_s: float | None = 30.0
    burst_size: int = 24


@dataclass(frozen=True)
class Fault:
    """One fault. `target` is a board, or a router's or link's number; `ms` how long, `actions` how many actions later.

    `hang_worker` has no end: only the supervisor can help."""

    at_ns: int
    kind: str
    target: int = 0
    ms: int = 0
    actions: int = 0


@dataclass(frozen=True)
class Act:
    """What an operator does: `verb` at a time, and its opposite some seconds later."""

    at_ns: int
    verb: str
    target: int
    back_after_ms: int


def _scheduler() -> SchedulerConfig:
    return SchedulerConfig(
        "calculet-scheduler/v1", ALIAS, AdmissionConfig(max_waiting_requests=48, deadline_default_ms=60_000),
        batch=BatchConfig(profiles=(1, 4, 8)), executor=ExecutorConfig(max_inflight=2, job_timeout_min_ms=2_000),
    )  # fmt: skip


def _supervision() -> SupervisionConfig:
    return SupervisionConfig(
        drain_timeout_ms=8_000, hang_timeout_ms=10_000, load_timeout_ms=60_000, startup_timeout_ms=20_000,
        restart=RestartConfig(half_open_after_s=60.0),
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Configuration of the fleet, and how finely the run looks at time-outs and lanes."""

    tenants: tuple[TenantConfig, ...] = TENANTS
    router: RouterConfig = field(default_factory=lambda: RouterConfig(max_output_buffer_bytes=2_000))
    scheduler: SchedulerConfig = field(default_factory=_scheduler)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    supervision: SupervisionConfig = field(default_factory=_supervision)
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(8_000, 60.0, CanaryConfig(hold_s=3.0, min_requests=5))
    )
    recall: RecallConfig = field(default_factory=lambda: RecallConfig(breaker_window_s=60.0, probation_s=10.0))
    router_tick_s: float = 0.1
    supervisor_tick_s: float = 0.1
    housekeeping_s: float = 0.2
    idle_tick_s: float = 1.0
    """Of what only writes files and counters."""
    check_every: int = 16
    """Events of an engine between two looks at its lanes' invariants."""
    high_water: int = 2_000
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    lanes: int = 8


@dataclass(frozen=True)
class Scenario:
    """A whole run. `requests` None: all; else the numbers of the clients that come at all."""

    seed: int
    seconds: float
    boards: int = 2
    routers: int = 1
    traffic: Traffic = Traffic()
    settings: Settings = field(default_factory=Settings)
    faults: tuple[Fault, ...] = ()
    acts: tuple[Act, ...] = ()
    requests: frozenset[int] | None = None
    pools: tuple[str | None, ...] = ()
    """Of the first boards; the others are in none."""

    def words(self) -> str:
        """For a person."""
        some = "all" if self.requests is None else len(self.requests)
        return (
            f"seed {self.seed}: {self.seconds:g} s, {self.boards} boards, {self.routers} routers, {len(self.faults)} faults, "
            f"{len(self.acts)} acts, {some} requests"
        )


def faults_at_random(seed: int, seconds: float, boards: int, every_s: Mapping[str, float]) -> tuple[Fault, ...]:
    """Poisson in time: `every_s` maps a kind to its mean time between two."""
    found = []
    for kind, mean_s in every_s.items():
        rng = stream(seed, f"faults {kind}")
        at_s = rng.expovariate(1 / mean_s)
        while at_s < seconds:
            found.append(_a_fault(rng, kind, int(at_s * 1e9), boards))
            at_s += rng.expovariate(1 / mean_s)
    return tuple(sorted(found, key=lambda fault: (fault.at_ns, fault.kind)))


def _a_fault(rng: random.Random, kind: str, at_ns: int, boards: int) -> Fault:
    target = rng.randrange(boards)
    actions = rng.choice((0, 0, rng.randrange(40)))
    long = {"pause_worker": (50, 4_000), "pause_router": (50, 5_000), "pause_supervisor": (50, 12_000),
            "partition_data": (100, 9_000), "partition_control": (100, 9_000), "slow_data": (500, 6_000),
            "double_data": (100, 5_000), "reorder_data": (100, 3_000), "double_control": (100, 9_000),
            "reorder_control": (100, 9_000), "truncate_data": (100, 3_000), "truncate_control": (100, 9_000), "disk_full": (200, 8_000),
            "slow": (20, 6_000)}  # fmt: skip
    ms = rng.randrange(*long[kind]) if kind in long else 0
    return Fault(at_ns, kind, target, ms, actions)


def acts_at_random(seed: int, seconds: float, boards: int, every_s: float) -> tuple[Act, ...]:
    """Operators at work."""
    rng, found = stream(seed, "acts"), []
    at_s = rng.expovariate(1 / every_s)
    while at_s < seconds:
        found.append(Act(int(at_s * 1e9), rng.choice(ACTS), rng.randrange(boards), rng.randrange(500, 20_000)))
        at_s += rng.expovariate(1 / every_s)
    return tuple(found)


def applies_at_random(seed: int, seconds: float, boards: int, every_s: float) -> tuple[Act, ...]:
    """Somebody changes the configuration and applies it; two of three times workers restart for it."""
    rng, found = stream(seed, "applies"), []
    at_s = 6.0 + rng.expovariate(1 / every_s)
    while at_s < seconds:
        found.append(Act(int(at_s * 1e9), "apply", 0, rng.randrange(1_000)))
        at_s += rng.expovariate(1 / every_s)
    return tuple(found)


def applies(seed: int, seconds: float = 60.0) -> Scenario:
    """One configuration after the other is applied under load, on a host that is so busy that routers stand still for moments: no
    client may notice."""
    rng = stream(seed, "applies of a well fleet")
    boards, routers = rng.choice((2, 3)), rng.choice((1, 2))
    traffic = Traffic(per_s=rng.choice((3.0, 8.0)), disconnects=0.02, slow_readers=0.0, short_deadlines=0.0, burst_every_s=None)
    busy = tuple(
        Fault(int((2.0 + index * HITCH_EVERY_S + rng.random()) * 1e9), "pause_router", rng.randrange(routers), rng.randrange(20, HITCH_MS))
        for index in range(int(seconds / HITCH_EVERY_S))
    )
    return Scenario(seed, seconds, boards, routers, traffic, faults=busy, acts=applies_at_random(seed, seconds, boards, 12.0))


def rough(seed: int, seconds: float = 45.0) -> Scenario:
    """A short run in which much breaks at once; what is mixed differs from seed to seed."""
    rng = stream(seed, "scenario")
    boards, routers = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2))
    kinds = [*DEVICE_FAULTS, *HOST_FAULTS]
    chosen = rng.sample(kinds, rng.randrange(3, 9))
    if "reset_fails" in chosen and "ccu_exception" not in chosen:
        chosen.append("ccu_exception")  # without a reset none can fail
    every_s = {kind: rng.uniform(8, 40) for kind in sorted(chosen)}
    traffic = Traffic(
        per_s=rng.choice((0.7, 2.0, 5.0)), disconnects=rng.choice((0.0, 0.05, 0.3)), streams=rng.choice((0.2, 0.5, 0.9)),
        burst_every_s=rng.choice((None, 20.0, 10.0)), burst_size=rng.choice((10, 30, 70)),
    )  # fmt: skip
    acts = acts_at_random(seed, seconds, boards, rng.choice((15.0, 60.0)))
    if stream(seed, "applies at all").random() < 0.3:
        acts += applies_at_random(seed, seconds, boards, 15.0)
    return Scenario(
        seed, seconds, boards, routers, traffic, faults=faults_at_random(seed, seconds, boards, every_s), acts=acts,
        pools=tuple(rng.choice(POOLS) for _ in range(boards)) if rng.random() < 0.4 else (),
    )  # fmt: skip


def swaps(seed: int, seconds: float = 60.0) -> Scenario:
    """One swap after the other, while what carries them out is killed."""
    rng, boards = stream(seed, "swaps"), 3
    every_s = {"kill_supervisor": 18.0, "kill_worker": 25.0, "disk_full": 25.0, "cut_control": 20.0, "pause_router": 30.0}
    verbs = rng.choices(("load", "rollback", "promote"), (6, 2, 1), k=int(seconds / 6))
    acts = tuple(
        Act(int((3 + 5.5 * index + rng.random()) * 1e9), verb, rng.randrange(boards), rng.randrange(1000))
        for index, verb in enumerate(verbs)
    )
    return Scenario(
        seed, seconds, boards, 2, Traffic(per_s=4.0, burst_every_s=None), faults=faults_at_random(seed, seconds, boards, every_s), acts=acts
    )


def corners(seed: int, seconds: float = 40.0) -> tuple[Scenario, ...]:
    """Runs for what rough ones reach seldom: boards that are full while others are not, links that break under load."""

    def under(boards: int, pools: tuple[str | None, ...], **every_s: float) -> Scenario:
        traffic = Traffic(14.0, mean_output=40.0, disconnects=0.1, burst_every_s=6.0, burst_size=60)
        return Scenario(seed, seconds, boards, 2, traffic, faults=faults_at_random(seed, seconds, boards, every_s), pools=pools)

    return (
        under(2, (None, "latency")),
        under(2, (), cut_data=2.0, partition_data=8.0),
        under(2, (), cut_control=4.0, kill_supervisor=15.0, disk_full=8.0),
    )


def day(seed: int, hours: float = 24.0, boards: int = 4, per_s: float = 1.0) -> Scenario:
    """Ordinary days with ordinary trouble. Heartbeats and time-outs are looked at less often, to be fast."""
    seconds = hours * 3600
    every_s = dict.fromkeys(DEVICE_FAULTS, 3600.0) | dict.fromkeys(HOST_FAULTS, 5400.0)
    every_s |= {"busy": 600.0, "kill_worker": 1_200.0, "ccu_exception": 1_800.0, "nan_output": 1_800.0}
    every_s |= dict.fromkeys(("invalid_shape", "invalid_dtype", "other_code", "stuck_dma", "reset_fails", "hang_worker"), 10_800.0)
    every_s["kill_keeper"] = 28_800.0
    settings = Settings()
    settings = replace(
        settings, router_tick_s=0.5, supervisor_tick_s=1.0, housekeeping_s=0.8, idle_tick_s=60.0, check_every=256,
        supervision=SupervisionConfig(heartbeat_ms=2_000, heartbeat_timeout_ms=10_000),
        router=structs.replace(settings.router, lease_interval_ms=2_500, worker_silence_ms=8_000),
    )  # fmt: skip
    traffic = Traffic(per_s=per_s, burst_every_s=900.0, burst_size=40, disconnects=0.03)
    return Scenario(
        seed, seconds, boards, 2, traffic, settings, faults_at_random(seed, seconds, boards, every_s),
        acts_at_random(seed, seconds, boards, 3_600.0), pools=("latency", "throughput")[: boards // 2],
    )  # fmt: skip
