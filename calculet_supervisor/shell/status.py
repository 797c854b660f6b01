"""What `calculet status --json` prints: `calculet-status/v1`.

Fields are only ever added within a version of the schema. Absent is null, never 0. Times are seconds or the unit in the name.

    {"schema": "calculet-status/v1", "config": path, "version": text, "breaker": reason or null,
     "unusable": {"configuration": reason or null, "packages": {alias: reason}},
     "rollouts": [{"id", "alias", "verb", "state", "share", "text", "from", "to", "digest", "boards", "assigned", "floor", "begun",
                   "reason", "steps": [{"wall_s", "text"}]}],
     "supervisor": {"pid", "uptime_s", "view_version", "rss_bytes"},
     "boards": [{"board", "device", "state", "process", "pid", "epoch", "generation", "alias", "digest", "wanted_digest", "up",
                 "draining", "worker_draining", "lanes_used", "lanes_total", "kv_tokens_reserved", "kv_tokens_total", "active",
                 "waiting", "waiting_tokens", "queues": {queue: depth}, "inflight", "max_inflight", "pingpong_off",
                 "steps", "tokens", "completed", "failed",
                 "cancelled", "faults", "fault", "why", "load_step", "resets", "resets_left", "failures", "restarts_left",
                 "retry_in_s", "heartbeat_age_s", "condemned", "probation", "chips": [{...}], "rss_bytes", "unreached_by": [router],
                 "time_shared": null or {"aliases", "resident", "waiting": {alias: {"requests", "oldest_s"}}, "switches",
                                         "min_residence_s", "max_wait_s"}}],
     "routers": [{"router", "pid", "url", "view_version", "inflight", "requests", "failed", "resent", "links", "rss_bytes",
                  "versions": [{"digest", "requests", "failed"}], "waiting": {alias: {"count", "oldest_ns"}}}]}

`unusable` is what the configuration's file says or names and cannot be used now: what was in force goes on.
`unreached_by` has the routers that would not send its generation a request, or not yet: to them a READY board does not serve.
`state` is the model generation's (scheduling §10), or null while no worker reports; `process` is the worker process's; `why` says
in words what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from calculet_core.config import BoardConfig
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_core.states.worker_process import ProcessState
from calculet_core.wire import WorkerReport
from calculet_supervisor.health import SERVING
from calculet_supervisor.life import Life
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.resets import Resets
from calculet_supervisor.rollout import Rollout
from calculet_supervisor.shell.sightings import RouterSeen
from calculet_supervisor.world import BoardSeen, BoardWish

SCHEMA = "calculet-status/v1"
STEPS_SHOWN = 12
_FREE = KvSequenceState.FREE.name
_WAITS = (ProcessState.BACKOFF, ProcessState.QUARANTINED)
_COPIED = (
    "epoch", "generation", "alias", "digest", "kv_tokens_reserved", "kv_tokens_total", "active", "waiting", "waiting_tokens",
    "queues", "inflight", "max_inflight", "pingpong_off", "steps", "tokens", "completed", "failed", "cancelled", "fault",
    "load_step", "resets", "rss_bytes",
)  # fmt: skip


def board_status(
    board: BoardConfig, alias: str, wish: BoardWish, seen: BoardSeen, reconciler: Reconciler, resets: Resets, now_ns: int,
    condemned: str | None = None, time_shared: dict[str, Any] | None = None, unreached_by: Sequence[str] = (),
) -> dict[str, Any]:
    """One board's row."""
    report, life = seen.report, reconciler.lives.get(board.name)
    row: dict[str, Any] = {"board": board.name, "device": board.device, "state": report.state if report else None, "pid": seen.pid}
    row |= {name: getattr(report, name) if report else None for name in _COPIED}
    if report is not None and not report.generation:
        row |= {"generation": None, "digest": None}
    total = sum(report.lanes.values()) if report else None
    row |= {
        "alias": alias,
        "wanted_digest": wish.placement.digest if wish.placement else None,
        "up": wish.up,
        "draining": wish.draining,
        "worker_draining": report.draining if report else None,
        "lanes_total": total,
        "lanes_used": total - report.lanes.get(_FREE, 0) if report and total is not None else None,
        "faults": reconciler.attribution.by_board[board.name],
        "resets_left": resets.left(board.name, now_ns),
        "why": why(life, seen, condemned),
        "condemned": condemned,
        "probation": wish.probation,
        "time_shared": time_shared,
        "unreached_by": list(unreached_by),
        "process": life.state.name if life else "ABSENT",
        "failures": life.restarts.failures if life else 0,
        "restarts_left": life.restarts.left(now_ns) if life else None,
        "retry_in_s": round((life.retry_ns - now_ns) / 1e9, 3) if life and life.retry_ns is not None else None,
        "heartbeat_age_s": round((now_ns - seen.report_ns) / 1e9, 3) if report else None,
        "chips": [msgspec.structs.asdict(chip) for chip in report.chips] if report else [],
    }
    return row


def router_status(seen: RouterSeen) -> dict[str, Any]:
    """One router's row."""
    report = msgspec.structs.asdict(seen.report)
    counted = [{"digest": one.digest, "requests": one.requests, "failed": one.failed} for one in seen.report.versions]
    waiting = {alias: msgspec.structs.asdict(wait) for alias, wait in seen.report.waiting.items()}
    return {**report, "versions": counted, "waiting": waiting, "router": f"{seen.report.router:08x}"}


def rollout_status(rollout: Rollout) -> dict[str, Any]:
    """A swap that is under way; `digest` is what its boards shall hold in the end, `steps` the last that were committed."""
    green, blue = rollout.green, rollout.blue
    copied = ("id", "alias", "verb", "state", "share", "floor", "begun", "reason")
    row: dict[str, Any] = {name: getattr(rollout, name) for name in copied}
    return row | {
        "text": rollout.log[-1].text, "from": str(blue) if blue else None, "to": str(green) if green else None,
        "digest": green.digest if green else None, "boards": list(rollout.boards), "assigned": list(rollout.assigned),
        "steps": [msgspec.structs.asdict(step) for step in rollout.log[-STEPS_SHOWN:]],
    }  # fmt: skip


def why(life: Life | None, seen: BoardSeen, condemned: str | None = None) -> str | None:
    """What is wrong with a board, in words; None when nothing is. `condemned` is why it was set aside."""
    report = seen.report
    if condemned is not None:
        return f"set aside: {condemned}"
    if report is not None:
        wrong = report.condemned or report.fault_detail or report.command_error or report.fault
        return wrong or (_waits_for_reset(life, report) if life else None)
    return life.why if life else None


def _waits_for_reset(life: Life, report: WorkerReport) -> str | None:
    answer = life.reset
    if answer is None or answer.reason is None or (answer.epoch, answer.generation) != (report.epoch, report.generation):
        return None
    return f"waits for a reset before it is loaded: {answer.reason}"


def outlook(life: Life | None, seen: BoardSeen, aside: str | None = None) -> dict[str, Any]:
    """For whoever watches a start: ready, still starting, or failed and why (with the exit code, where there was one). `aside`
    is why it is not to serve."""
    report = seen.report
    if aside is not None:
        return {"state": "failed", "why": aside, "code": None}
    if report is not None:
        waits = life is not None and life.failed_ns is not None
        state = "ready" if report.state in SERVING else "failed" if report.state == "FAILED" or waits else "starting"
    else:
        state = "failed" if life is not None and life.state in _WAITS else "starting"
    code = seen.last_exit.code if report is None and seen.last_exit else None
    return {"state": state, "why": why(life, seen) if state == "failed" else None, "code": code}
