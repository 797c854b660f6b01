"""Configuration files: `calculet-fleet/v1` and `calculet-scheduler/v1` (scheduling §15).

Parsed from bytes, without reading anything else. Unknown keys and wrong types are errors that carry the file and the path in
it, as in `configs/fleet.yaml: $.boards[1].device: ...`. The keys of scheduling §15 keep their names, places and defaults; the
others are documented additions.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from calculet_core.errors import ConfigError

PositiveInt = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,30}$")]
Alias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,126}$")]

TrafficClass = Literal["latency", "throughput"]
Address = Annotated[str, Meta(pattern=r"^[^\s:]+:[0-9]{1,5}$|^\[[0-9a-fA-F:]+\]:[0-9]{1,5}$")]

T = TypeVar("T")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: frozen, unknown keys are errors."""


# ------------------------------------------------------------------------------------------------ calculet-scheduler/v1
class AdmissionConfig(_Section, frozen=True):
    """Scheduling §5, §15."""

    max_waiting_requests: PositiveInt = 128
    """Requests that may wait for a lane and KV; above it 429 `over_capacity`."""
    max_waiting_prompt_tokens: PositiveInt = 262_144
    """Prompt tokens that may wait."""
    deadline_default_ms: PositiveInt = 120_000
    """Deadline of a request that asks for none."""
    # Additions.
    deadline_max_ms: PositiveInt = 600_000
    """Most that a request may ask for."""
    max_sequences: PositiveInt | None = None
    """None: as many as the board has lanes."""
    max_kv_tokens: PositiveInt | None = None
    """None: lanes x max_seq of the artifact."""


class QueuesConfig(_Section, frozen=True):
    """Scheduling §6, §15: weights are device turns."""

    decode_weight: PositiveInt = 8
    """Device turns of decode steps."""
    short_prefill_weight: PositiveInt = 4
    """Device turns of short prompts."""
    medium_prefill_weight: PositiveInt = 2
    """Device turns of medium prompts."""
    long_prefill_weight: PositiveInt = 1
    """Device turns of long prompts."""
    short_prefill_max_tokens: PositiveInt = 512
    """Longest short prompt."""
    medium_prefill_max_tokens: PositiveInt = 4096
    """Longest medium prompt."""
    # Additions.
    min_share: Annotated[float, Meta(ge=0, le=0.25)] = 0.05
    """Least share of the device's time of every class that has something to do, whatever the weights."""
    short_prefill_fills_lanes: bool = False
    """While short prompts wait, decode counts only for the part of a step that can be filled: lanes fill before steps run."""
    max_long_prefills: PositiveInt | None = 2
    """Long prompts that may hold a lane before their first token; others wait and hold up nobody. None: no limit."""


class BatchConfig(_Section, frozen=True):
    """Scheduling §7, §8, §15. Every profile must be in the artifact's manifest."""

    profiles: Annotated[tuple[PositiveInt, ...], Meta(min_length=1)] = (1,)
    """Compiled batch sizes to use."""
    batching_window_us: Natural = 0
    """How long a step that is not full may wait, from its oldest sequence on, for those who can join it: sequences of another job
    in flight, prompts that should be in KV by then, requests that are being tokenized. Never past a deadline or `token_sla_ms`."""
    # Additions.
    tenant_lane_share: Share = 0.5
    """Most of a batch's lanes that one tenant may take while others wait."""
    token_sla_ms: PositiveInt | None = None
    """Longest time from a token to the next that a batching window may bring about. None: only deadlines end it."""
    thresholds: dict[PositiveInt, PositiveInt] = {}
    """Profile -> from how many ready sequences on it is used; `calculet package derive-profiles` measures it. Absent: one
    more than the next smaller profile holds."""
    hysteresis_steps: Natural = 2
    """Steps in a row that must ask for a smaller profile before it is taken."""
    max_ready_wait_steps: PositiveInt = 2
    """A sequence that has been ready for so many expected steps makes the step take a profile that holds all."""


class ExecutorConfig(_Section, frozen=True):
    """Scheduling §14, §15."""

    max_inflight: Annotated[int, Meta(ge=1, le=2)] = 1
    """Jobs in flight; 2 is ping/pong."""
    fixed_engine: bool = False
    """Submit every job to one engine."""
    # Additions.
    rehearse_ahead_us: Natural = 1_000
    """How long before a step should end the host runs a tick on scratch data, so that the real one finds the processor warm: once
    for each step that takes four times as long. 0: never, and never on a device that computes on the host's own processors."""
    busy_backoff_ms: PositiveInt = 5
    """First pause after rc 17; it doubles."""
    busy_max_tries: PositiveInt = 8
    """Tries before the job's requests fail with `device_busy`."""
    job_timeout_factor: PositiveFloat = 20.0
    """A job that runs this many times its expected duration, and at least `job_timeout_min_ms`, is timed out (rc 13)."""
    job_timeout_min_ms: PositiveInt = 5_000
    """Floor of a job's time limit."""
    degrade_after_busy: PositiveInt = 3
    """Refusals (rc 17) of a second job in a row after which jobs go one at a time."""
    degrade_p99_factor: PositiveFloat = 1.8
    """Two in flight end when the P99 of a step is so many times what it is alone: above it they gain less than a tenth."""
    max_prefill_tokens_per_job: PositiveInt = 512
    """Where the artifact proves that prompts may be cut, a job takes at most this many tokens."""


class RecoveryConfig(_Section, frozen=True):
    """Acceptance §12, scheduling §15."""

    max_resets_per_10min: Natural = 2
    """Board resets in any ten minutes; above it the board is condemned."""
    restart_on_unknown_dma: bool = True
    """A job whose end cannot be proven: true = exit for a supervised restart, false = Failed until an operator acts."""
    # Additions.
    unload_residue_mib: Natural = 64
    """Memory that an unloaded board may show beyond what it showed empty; above it the board recovers instead of being Unloaded."""


class FairnessConfig(_Section, frozen=True):
    """Scheduling §5.3. An addition: §15 has no key for the cost formula's weight."""

    cost_decode_weight: PositiveFloat = 1.0
    """What a requested output token costs, a prompt token being 1."""
    starvation_after_ms: PositiveInt = 30_000
    """A request that waited longer for its lane counts as starved."""


class SchedulerConfig(_Section, frozen=True):
    """`calculet-scheduler/v1`; `model_alias` is where it applies."""

    schema: Literal["calculet-scheduler/v1"]
    model_alias: Alias
    admission: AdmissionConfig = AdmissionConfig()
    queues: QueuesConfig = QueuesConfig()
    batch: BatchConfig = BatchConfig()
    executor: ExecutorConfig = ExecutorConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    fairness: FairnessConfig = FairnessConfig()


# ------------------------------------------------------------------------------------------------ calculet-fleet/v1
class TlsConfig(_Section, frozen=True):
    """HTTPS with these PEM files, read again when they change; both or none."""

    certificate: str | None = None
    """The certificate, followed by its intermediates."""
    key: str | None = None
    """Its key, without a passphrase, that not everybody may read."""


class RouterConfig(_Section, frozen=True):
    """The HTTP front: address, limits and time-outs. Sizes in bytes, times in the unit of the name."""

    listen: Address = "127.0.0.1:8080"
    """Address and port."""
    admin_listen: Address | None = None
    """Address of the dashboard, read-only and without keys: keep it to yourselves; null: none."""
    max_connections: PositiveInt = 8192
    """Above it the connections that have waited longest for their client's next word give way; when all are being answered a
    new one gets 503 and is closed."""
    max_connections_per_address: PositiveInt | None = None
    """From one client address, above it 429; null: no limit (behind a proxy all have its address)."""
    max_open_streams: PositiveInt = 4096
    """Streamed answers that have not ended; above it 429."""
    max_pipelined_requests: PositiveInt = 32
    """Whole requests that may wait on one connection; reading pauses above it."""
    max_header_bytes: PositiveInt = 65_536
    """Above it 431."""
    max_body_bytes: PositiveInt = 16_777_216
    """Above it 413."""
    max_buffered_body_bytes: PositiveInt = 268_435_456
    """Bodies above 64 KiB that are being received, all together; above it the slowest get 429."""
    header_timeout_s: PositiveFloat = 20.0
    """From the first byte to the end of the headers."""
    body_timeout_s: PositiveFloat = 60.0
    """From the headers to the end of the body."""
    idle_timeout_s: PositiveFloat = 120.0
    """A kept-alive connection without a request is closed."""
    max_inflight_requests: PositiveInt = 4096
    """Requests accepted and not ended; above it 429."""
    max_lookups: PositiveInt = 32
    """Questions to `/tokenize` and `/detokenize` that are open; above it 429."""
    lookup_timeout_ms: PositiveInt = 20_000
    """A question without an answer by then is 503."""
    max_output_buffer_bytes: PositiveInt = 262_144
    """What a stream's reader may leave unread here before its request is cancelled; as much may wait unsent in the kernel."""
    write_timeout_s: PositiveFloat = 60.0
    """A client that takes nothing of a whole answer for so long, or acknowledges nothing, is cut off."""
    tcp_keepalive_s: PositiveFloat = 60.0
    """Silence after which a connection's peer is probed; three probes without an answer, a third of it apart, end it."""
    ping_interval_s: PositiveFloat = 10.0
    """Silence after which a stream gets its headers and a comment line."""
    accept_timeout_ms: PositiveInt = 3_000
    """A worker that has not answered a submission by then loses it to another."""
    reach_wait_ms: Natural = 1_000
    """How long a request waits where no board can take it and the fleet has one for it that this router is about to reach: its
    link is being made, or has only just fallen silent. 0: it is refused at once, as where there is none."""
    max_resends: Natural = 2
    """Sends after a lost worker, before the first generated token."""
    lease_interval_ms: PositiveInt = 1_000
    """How often a router renews its lease; a worker waits three of them."""
    worker_silence_ms: PositiveInt = 5_000
    """A worker link without any message for so long is suspect and gets no new requests."""
    drain_timeout_s: PositiveFloat = 30.0
    """How long streams may finish after SIGTERM."""
    drain_idle_s: PositiveFloat = 1.0
    """After SIGTERM a kept-alive connection may bring one more request within so long; its answer says `connection: close`."""
    tls: TlsConfig = TlsConfig()
    require_keys: bool = False
    """true: without a valid API key 401, even while no key was made; false: so from the first key on."""


class TimeSharedConfig(_Section, frozen=True):
    """Several models that take turns on one board (scheduling §13.1), for models that are rarely asked for: one is there, requests
    for the others wait, and a switch is a drain, a verified load and golden cases."""

    min_residence_s: PositiveFloat = 60.0
    """A model stays at least so long once it serves."""
    max_wait_s: PositiveFloat = 30.0
    """After that it goes when it has nothing to do, and at the latest when a request for another one has waited so long."""
    max_waiting_requests: PositiveInt = 64
    """Requests of each model that may wait for their turn at a router; above it 429."""


class BoardConfig(_Section, frozen=True):
    """One board. `options` belong to the device backend, which checks them."""

    name: Name
    device: str
    """A backend: `sim` or `llamacpp`."""
    dram_gib: PositiveFloat = 32.0
    """DRAM of the board; an artifact's reservation must fit."""
    options: dict[str, Any] = {}
    """Of the backend."""
    pool: TrafficClass | None = None
    """Requests of tenants of that class go here first; where none of their pool is ready, anywhere. None: for everybody."""
    profiles: Annotated[tuple[PositiveInt, ...], Meta(min_length=1)] | None = None
    """Compiled batches of this board instead of its alias's `batch.profiles`: for pools where only one can be resident."""
    time_shared: TimeSharedConfig | None = None
    """Models that are placed here take turns. None: one model has the board."""
    listen: Address | None = None
    """Where routers reach the worker over TCP instead of a Unix socket, always encrypted (CURVE): the address that routers use. A
    port of 0: another one for each life of the worker. Needs `calculet keys curve`. None: a Unix socket."""
    synchronous: bool = False
    """Submit and wait on one thread: the reference that M1 compares with, never for production."""


class ModelConfig(_Section, frozen=True):
    """What an alias serves and where. Paths are relative to the file."""

    alias: Alias
    package: str
    """Folder of a signed package."""
    boards: tuple[Name, ...] = ()
    """Empty: every board."""
    scheduler: str | None = None
    """A `calculet-scheduler/v1` file; None: its defaults with the artifact's proven profiles."""
    chiplet: int | None = None
    """Always refused: a model on one chiplet of a board is C3; single-chiplet artifacts and chip-scoped operations are unproven."""


class TenantConfig(_Section, frozen=True):
    """Weights and limits; never set by a request. None: no limit."""

    name: Name
    weight: PositiveFloat = 1.0
    """Share of service against other tenants."""
    max_active: PositiveInt | None = None
    """Requests let in and not ended, in the whole fleet."""
    max_waiting_tokens: PositiveInt | None = None
    """Prompt tokens waiting for a lane, in the whole fleet."""
    requests_per_s: PositiveFloat | None = None
    """Request rate of the whole fleet; bursts of one second."""
    models: tuple[Alias, ...] = ()
    """Aliases that it may use; empty: all."""
    traffic_class: TrafficClass | None = None
    """Which pool of boards its requests prefer (scheduling §8). None: boards without a pool, then any."""


class RestartConfig(_Section, frozen=True):
    """How often a worker is started again, and how soon."""

    max_restarts: PositiveInt = 5
    """Automatic restarts of a board's worker in `window_s`."""
    window_s: PositiveFloat = 60.0
    """The restart budget's window."""
    backoff_base_ms: PositiveInt = 100
    """First back-off, at most; full jitter."""
    backoff_max_ms: PositiveInt = 10_000
    """Cap of the back-off."""
    stable_after_s: PositiveFloat = 30.0
    """Up for so long: the failure count starts again at 0."""
    half_open_after_s: PositiveFloat = 300.0
    """A worker whose budget is spent is tried again so much later."""


class SupervisionConfig(_Section, frozen=True):
    """Heartbeats and limits of the supervisor."""

    heartbeat_ms: PositiveInt = 500
    """How often a worker reports."""
    heartbeat_timeout_ms: PositiveInt = 5_000
    """Silence after which a worker is replaced."""
    hang_timeout_ms: PositiveInt = 30_000
    """Jobs in flight and no step for so long: the board hangs."""
    startup_timeout_ms: PositiveInt = 60_000
    """From spawn to the first report."""
    load_timeout_ms: PositiveInt = 600_000
    """From the load command to Ready."""
    drain_timeout_ms: PositiveInt = 30_000
    """How long a worker may drain before it is stopped."""
    service_timeout_ms: Annotated[int, Meta(ge=1000)] = 30_000
    """Silence after which `calculet up` ends router or supervisor and starts it again; under systemd: their units' WatchdogSec."""
    restart: RestartConfig = RestartConfig()


class CanaryConfig(_Section, frozen=True):
    """When a canary is good enough to go on, and when it goes back."""

    hold_s: Annotated[float, Meta(ge=0)] = 60.0
    """How long it must look well."""
    min_requests: PositiveInt = 100
    """Requests that green must have answered; also the fewest that a P99 is taken of."""
    min_errors: PositiveInt = 3
    """Fewer failures than that prove nothing."""
    max_error_gap: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """How much larger green's share of failed requests may be than blue's."""
    max_p99_ratio: Annotated[float, Meta(ge=1)] = 1.5
    """How much larger green's P99 may be than blue's: time to the first token, and between tokens."""
    min_p99_gap_ms: Annotated[float, Meta(ge=0)] = 20.0
    """A smaller difference of P99 is nothing."""


class RolloutConfig(_Section, frozen=True):
    """Swaps of a model across boards (`calculet load`, `rollback`, `unload`)."""

    drain_timeout_ms: PositiveInt = 120_000
    """How long a board's running requests may take before it changes its model; then they fail, or are sent again."""
    stall_timeout_s: PositiveFloat = 900.0
    """A swap in which nothing has moved for so long goes back."""
    canary: CanaryConfig = CanaryConfig()


class RecallConfig(_Section, frozen=True):
    """How boards are set aside and come back."""

    breaker_share: Share = 0.5
    """Share of boards that may go bad within `breaker_window_s`; then nothing automatic happens until an operator says so."""
    breaker_window_s: PositiveFloat = 300.0
    """Five minutes."""
    probation_s: PositiveFloat = 600.0
    """How long a board that came back must serve without a fault before it counts like the others."""
    probation_weight: Share = 0.1
    """Its share of work until then, others having 1."""


class JournalConfig(_Section, frozen=True):
    """Each process appends events to its own size-capped file."""

    max_bytes: PositiveInt = 33_554_432
    """A file above it is rotated."""
    keep: Natural = 3
    """Older files to keep."""


class UsageConfig(_Section, frozen=True):
    """Records of what tenants used: `STATE_DIR/usage/usage-DATE.jsonl`, one line for each request."""

    keep_days: PositiveInt = 400
    """Files of older days are removed."""
    sync_interval_ms: PositiveInt = 1_000
    """Synced to disk at most so often; a power cut loses what came since."""


class TraceConfig(_Section, frozen=True):
    """Traces for measuring (acceptance §2.3); off in production."""

    steps: bool = False
    """Workers write one line for each sequence's part of each device job to `trace/steps-BOARD.jsonl` in `log_dir`."""
    max_bytes: PositiveInt = 268_435_456
    """A file above it is rotated."""
    keep: Natural = 3
    """Older files to keep."""


class TracingConfig(_Section, frozen=True):
    """OpenTelemetry spans of requests, for a collector; needs `pip install 'calculet[otel]'`. Headers for the collector, a key say,
    come from the environment variable OTEL_EXPORTER_OTLP_HEADERS and are nowhere written."""

    endpoint: Annotated[str, Meta(pattern=r"^https?://[^\s/]+(/\S*)?$")] | None = None
    """The collector, OTLP over HTTP: `http://127.0.0.1:4318`; without a path `/v1/traces` is added. None: no spans."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the requests that came without a `traceparent` to trace. A client's own decision is followed."""
    jobs: bool = False
    """Also a span for each sequence's part of each device job: two a token, for hours of search and not for every day."""
    max_queue: PositiveInt = 8192
    """Spans that may wait to be sent, and attempts that a worker follows at once; what is beyond is dropped and counted."""
    batch: PositiveInt = 512
    """Spans in one message to the collector."""
    interval_ms: PositiveInt = 1000
    """Longest that a span waits for others to be sent with."""
    timeout_ms: PositiveInt = 5000
    """How long a collector may take for one message, with all its repetitions."""


class ConstraintsConfig(_Section, frozen=True):
    """JSON schemas and tools that answers must keep to. Each is compiled by the worker once and kept."""

    max_schema_bytes: PositiveInt = 131_072
    """All schemas of one request together, as JSON; above it 400."""
    max_tools: PositiveInt = 128
    """Tools of one request; above it 400."""
    compile_fuel: PositiveInt = 2_000_000
    """Most work that compiling may be, about 50,000 a millisecond; above it 400."""
    step_fuel: PositiveInt = 200_000
    """Most work before one token, about 14,000 a millisecond; above it the answer ends with `constraint_failed`."""
    compile_timeout_ms: PositiveInt = 3_000
    """A schema that is not ready by then is refused: 400 when it was being compiled, 429 when others were."""
    max_compiling: PositiveInt = 64
    """Requests whose schema is being compiled or waits for that; above it 429."""
    cache_entries: PositiveInt = 64
    """Compiled schemas that a worker keeps."""


class CrashConfig(_Section, frozen=True):
    """What is kept of workers' crashes, in `crashes` of the log folder."""

    keep: Natural = 20
    """Bundles to keep; the oldest go. 0: none are made."""
    max_bytes: PositiveInt = 1_048_576
    """Most that one bundle takes: stacks, log, journal and the supervisor's notes share it."""


class LogConfig(_Section, frozen=True):
    """What processes say on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below it are left out. `CALCULET_LOG_LEVEL` of a process's environment goes before it."""


class ChaosConfig(_Section, frozen=True):
    """Faults on purpose in a running fleet (`calculet chaos`): for fleets that are there to be broken."""

    enabled: bool = False
    """Processes that started with it carry the faults that an administrator orders. Without it nobody does, and nothing is even
    looked at."""
    max_fault_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """No fault may be ordered for longer; whoever carries one ends it by its own clock."""


class FleetConfig(_Section, frozen=True):
    """`calculet-fleet/v1`: one host. Relative paths start at the file's own folder."""

    schema: Literal["calculet-fleet/v1"]
    boards: Annotated[tuple[BoardConfig, ...], Meta(min_length=1)]
    models: Annotated[tuple[ModelConfig, ...], Meta(min_length=1)]
    run_dir: str = "../.calculet/run"
    """Sockets. A path too long for a socket gets a short stand-in under /tmp."""
    state_dir: str = "../.calculet/state"
    """What must survive a restart."""
    log_dir: str = "../.calculet/log"
    """Journals and logs."""
    trusted_keys: tuple[str, ...] = ()
    """Public keys (PEM) that package signatures are checked with."""
    router: RouterConfig = RouterConfig()
    tenants: tuple[TenantConfig, ...] = (TenantConfig(name="default"),)
    supervision: SupervisionConfig = SupervisionConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    rollout: RolloutConfig = RolloutConfig()
    recall: RecallConfig = RecallConfig()
    journal: JournalConfig = JournalConfig()
    crashes: CrashConfig = CrashConfig()
    usage: UsageConfig = UsageConfig()
    trace: TraceConfig = TraceConfig()
    tracing: TracingConfig = TracingConfig()
    constraints: ConstraintsConfig = ConstraintsConfig()
    fault_injection: bool = False
    """Allows `FaultyDevice` on boards that ask for it; never in production."""
    chaos: ChaosConfig = ChaosConfig()
    log: LogConfig = LogConfig()


SOCKET_PATH_MAX = 107
"""Longest path of a Unix socket on Linux, in bytes."""
_LONGEST_SOCKET_NAME = len("/w-.sock") + 31 + len("-12345678")
"""`w-BOARD-EPOCH.sock` with the longest board name."""


def parse_fleet(data: bytes, source: str) -> FleetConfig:
    """Parse and cross-check a `calculet-fleet/v1` file.

    Raises:
        ConfigError: names `source`, the path in it and what is wrong.
    """
    config = _parse(data, source, FleetConfig)
    _unique(source, "boards", [board.name for board in config.boards])
    _unique(source, "models", [model.alias for model in config.models], key="alias")
    _unique(source, "tenants", [tenant.name for tenant in config.tenants])
    if not any(tenant.name == "default" for tenant in config.tenants):
        raise ConfigError(f"{source}: $.tenants: one of them must be named 'default'; it gets requests without a key")
    if (config.router.tls.certificate is None) != (config.router.tls.key is None):
        raise ConfigError(f"{source}: $.router.tls: certificate and key belong together")
    aliases = {model.alias for model in config.models}
    for index, tenant in enumerate(config.tenants):
        for place, alias in enumerate(tenant.models):
            if alias not in aliases:
                where, known = f"{source}: $.tenants[{index}].models[{place}]", ", ".join(sorted(aliases))
                raise ConfigError(f"{where}: no model has the alias {alias!r} (aliases: {known})")
    boards = {board.name: board for board in config.boards}
    names = set(boards)
    owner: dict[str, str] = {}
    for index, model in enumerate(config.models):
        if model.chiplet is not None:
            raise ConfigError(
                f"{source}: $.models[{index}].chiplet: single-chiplet models are C3 (unproven): they need artifacts for one "
                "chiplet, and configure, queue, memory and reset of one chip alone (scheduling §13.3)"
            )
        for place, board in enumerate(model.boards):
            if board not in names:
                raise ConfigError(
                    f"{source}: $.models[{index}].boards[{place}]: no board named {board!r} (boards: {', '.join(sorted(names))})"
                )
        for board in boards_of(config, model):
            if boards[board].time_shared is not None:
                if len(boards_of(config, model)) > 1:
                    where = f"{source}: $.models[{index}].boards"
                    raise ConfigError(f"{where}: board {board!r} is time-shared; a model that takes turns has that board only")
            elif board in owner:
                raise ConfigError(
                    f"{source}: $.models[{index}].boards: board {board!r} already serves {owner[board]!r}; a board holds one model "
                    "(co-residence is C3: unproven; boards[].time_shared lets models take turns)"
                )
            owner[board] = model.alias
    if idle := sorted(names - set(owner)):
        raise ConfigError(f"{source}: $.boards: no model is placed on {', '.join(idle)}")
    return config


def boards_of(config: FleetConfig, model: ModelConfig) -> tuple[str, ...]:
    """The boards that a model is placed on."""
    return model.boards or tuple(board.name for board in config.boards)


def parse_scheduler(data: bytes, source: str) -> SchedulerConfig:
    """Parse a `calculet-scheduler/v1` file.

    Raises:
        ConfigError: names `source`, the path in it and what is wrong.
    """
    config = _parse(data, source, SchedulerConfig)
    if config.queues.short_prefill_max_tokens >= config.queues.medium_prefill_max_tokens:
        raise ConfigError(f"{source}: $.queues.medium_prefill_max_tokens: must be above short_prefill_max_tokens")
    if len(set(config.batch.profiles)) != len(config.batch.profiles):
        raise ConfigError(f"{source}: $.batch.profiles: the same profile twice")
    _check_thresholds(config.batch, source)
    if config.admission.deadline_default_ms > config.admission.deadline_max_ms:
        raise ConfigError(f"{source}: $.admission.deadline_default_ms: above deadline_max_ms")
    return config


def _check_thresholds(batch: BatchConfig, source: str) -> None:
    last = 0
    for profile, ready in sorted(batch.thresholds.items()):
        where = f"{source}: $.batch.thresholds[{profile}]"
        if profile not in batch.profiles:
            raise ConfigError(f"{where}: B{profile} is not among $.batch.profiles")
        if ready > profile:
            raise ConfigError(f"{where}: {ready} ready sequences do not fit B{profile}")
        if ready <= last:
            raise ConfigError(f"{where}: must be above the smaller profile's {last}")
        last = ready


def check_profiles(config: SchedulerConfig, proven: tuple[int, ...], digest: str, source: str) -> None:
    """Scheduling §15: a profile that the manifest does not have stops the start.

    Raises:
        ConfigError: as in `$.batch.profiles[1]: B8 is not in manifest 3f2a... (it has B1)`.
    """
    check_sizes(config.batch.profiles, proven, digest, f"{source}: $.batch.profiles")


def check_sizes(profiles: tuple[int, ...], proven: tuple[int, ...], digest: str, where: str) -> None:
    """The same for any list of compiled batches; `where` is its file and path.

    Raises:
        ConfigError: names the place in the list.
    """
    for index, profile in enumerate(profiles):
        if profile not in proven:
            has = ", ".join(f"B{size}" for size in proven) or "none"
            raise ConfigError(f"{where}[{index}]: B{profile} is not in manifest {digest[:12]} (it has {has})")


def run_dir_for(path: str, uid: int) -> str:
    """Where sockets live: `path`, or a short stand-in under /tmp when a socket in it would pass Linux's 107 bytes."""
    if len(path.encode()) + _LONGEST_SOCKET_NAME <= SOCKET_PATH_MAX:
        return path
    return f"/tmp/calculet-{uid}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def _parse(data: bytes, source: str, kind: type[T]) -> T:
    try:
        value = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{source}: {where}not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: $: expected a mapping, got {type(value).__name__}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise ConfigError(f"{source}: {path.rstrip('`') or '$'}: {message}") from None


def _unique(source: str, section: str, names: list[str], key: str = "name") -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{source}: $.{section}[{index}].{key}: {name!r} is there twice")
