"""What the engine shows of itself: heartbeat, hello, load and gauges. Reads only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from calculet_core import wire
from calculet_core.clock import S
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_worker.scheduling.arbiter import TURNS, Turn
from calculet_worker.scheduling.fairness import TenantShown
from calculet_worker.serving import Serving

if TYPE_CHECKING:
    from calculet_worker.engine import Engine

QUEUES = ("waiting", *(turn.label for turn in TURNS))


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Present values. Queues are `waiting`, `decode`, `short`, `medium` and `long`; an empty queue has no oldest wait."""

    queue_depth: dict[str, int]
    queue_oldest_s: dict[str, float]
    lanes: dict[str, int]
    """By `KvSequenceState` name."""
    kv_tokens: dict[str, int]
    """`used`, `reserved` and `total`."""
    kv_violations: int
    buffers: dict[str, int]
    """Output buffers: `total`, `leased`, `quarantined` and `free`."""
    inflight: int
    max_inflight: int
    waiting_tokens: int
    tokenizing: int
    active: int
    state: str
    generation: int
    limits: dict[str, int]
    """Configured and proven, by the names of the configuration; one that is not set is absent."""
    tenants: dict[str, TenantShown] = field(default_factory=dict)
    long_prefills: int = 0
    device_full: bool = False
    buffer_wait_s: float = 0.0
    """How long something has been ready for which no output buffer is free."""


def report_of(engine: Engine) -> wire.WorkerReport:
    """The heartbeat of acceptance §10 and the supervisor's judgement."""
    life, attempts, control, serving = engine.life, engine.attempts, engine.control, engine.serving
    record = life.record
    report = {
        "board": engine.board, "epoch": engine.epoch, "pid": engine.pid, "protocol": wire.PROTOCOL, "endpoint": engine.endpoint,
        "state": life.state.name, "generation": life.generation, "command_seq": control.command_seq,
        "command_error": control.command_error, "draining": life.draining or control.stopping, "steps": engine.steps,
        "fault": life.fault.value if life.fault else None, "fault_detail": life.fault_detail, "wants_reset": life.wants_reset,
        "condemned": life.condemned, "completed": attempts.completed, "failed": attempts.failed, "cancelled": attempts.cancelled,
        "tokens": attempts.tokens, "resets": life.resets, "load_step": life.step,
    }  # fmt: skip
    if record is not None:
        report |= {"digest": record.artifact_digest, "alias": record.alias}
    if serving is not None:
        kv, fair = serving.kv, serving.fair
        report |= {
            "inflight": len(serving.inflight), "max_inflight": serving.inflight.limit,
            "pingpong_off": _pingpong_off(engine), "lanes": kv.states(),
            "kv_tokens_reserved": kv.reserved_tokens, "kv_tokens_used": kv.used_tokens, "kv_tokens_total": kv.max_tokens,
            "active": kv.busy_lanes, "waiting": len(fair) + attempts.tokenizing, "waiting_tokens": fair.tokens,
            "queues": {turn.label: depth(serving, turn) for turn in TURNS},
        }  # fmt: skip
    return wire.WorkerReport(**report)  # type: ignore[arg-type]


def _pingpong_off(engine: Engine) -> str | None:
    guard = engine.pingpong
    return f"{guard.reason}: {guard.detail}" if guard.reason is not None else None


def hello_of(engine: Engine) -> wire.WorkerHello:
    """Who this worker is."""
    record = engine.life.record
    digest, alias = (record.artifact_digest, record.alias) if record else ("", "")
    return wire.WorkerHello(engine.board, engine.epoch, engine.pid, engine.life.generation, digest, alias, engine.life.state.name)


def load_of(engine: Engine) -> wire.Load:
    """How much there is to do."""
    serving, attempts = engine.serving, engine.attempts
    if serving is None:
        return wire.Load(0, 0, 0, 0, 0.0)
    kv, fair = serving.kv, serving.fair
    waiting = len(fair) + attempts.tokenizing
    lanes = len(kv.lanes) - kv.count(KvSequenceState.UNKNOWN)
    return wire.Load(kv.busy_lanes, lanes, waiting, fair.tokens, float(attempts.registry.cost))


def gauges_of(engine: Engine, now_ns: int) -> EngineGauges:
    """For metrics; looks at every lane and queue."""
    life, attempts, serving = engine.life, engine.attempts, engine.serving
    state, generation = life.state.name, life.generation
    if serving is None:
        outputs = engine.limits.output_buffers
        none = {"total": outputs, "leased": 0, "quarantined": 0, "free": outputs}
        depths = dict.fromkeys(QUEUES, 0)
        tokens = {"used": 0, "reserved": 0, "total": 0}
        lanes = {each.name: 0 for each in KvSequenceState}
        limit = engine.limits.max_inflight
        return EngineGauges(depths, {}, lanes, tokens, 0, none, 0, limit, 0, attempts.tokenizing, 0, state, generation, {})
    kv, fair, buffers, budget = serving.kv, serving.fair, serving.buffers, serving.admission.budget
    oldest = {"waiting": fair.oldest_ns(), "decode": serving.decode.oldest_ns()}
    oldest |= {turn.label: serving.prefill.oldest_ns(turn) for turn in TURNS if turn is not Turn.DECODE}
    return EngineGauges(
        queue_depth={"waiting": len(fair), **{turn.label: depth(serving, turn) for turn in TURNS}},
        queue_oldest_s={queue: (now_ns - since) / S for queue, since in oldest.items() if since is not None},
        lanes=kv.states(),
        kv_tokens={"used": kv.used_tokens, "reserved": kv.reserved_tokens, "total": kv.max_tokens},
        kv_violations=len(kv.invariants()),
        buffers={"total": buffers.total, "leased": buffers.leased, "quarantined": buffers.quarantined, "free": buffers.free},
        buffer_wait_s=0.0 if serving.no_buffer_ns is None else (now_ns - serving.no_buffer_ns) / S,
        inflight=len(serving.inflight),
        max_inflight=serving.inflight.limit,
        waiting_tokens=fair.tokens,
        tokenizing=attempts.tokenizing,
        active=kv.busy_lanes,
        state=state,
        generation=generation,
        tenants=fair.shown(),
        long_prefills=fair.long_prefills,
        device_full=serving.device_full,
        limits={
            "lanes": len(kv.lanes),
            "context": kv.max_seq,
            "max_kv_tokens": budget.max_kv_tokens,
            "max_waiting_requests": budget.max_waiting_requests,
            "max_waiting_prompt_tokens": budget.max_waiting_prompt_tokens,
            "max_inflight": serving.inflight.most,
            **({} if (longs := serving.config.queues.max_long_prefills) is None else {"max_long_prefills": longs}),
        },
    )


def depth(serving: Serving, turn: Turn) -> int:
    """Sequences in one of the four queues."""
    return len(serving.decode) if turn is Turn.DECODE else serving.prefill.depths[turn]
