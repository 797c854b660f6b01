"""The step trace: one line for each sequence's part of each device job (acceptance §2.3, §4).

A worker writes it while `trace.steps` is on. The names of acceptance §4 keep their places and units (milliseconds); `at_ns` holds
the moments of §2.3 on the host's CLOCK_MONOTONIC, so that a client on the same host can join them. What cannot be had is null,
never 0. No prompt, no answer, no token.

A slot is a lane with KV for prompt and output together, so `slot_assigned` and `admitted` are one moment here. `bf16_ms` is null
where the device returns float32.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from calculet_core.jobs import JobTimings

MS = 1e6


class StepBatch(msgspec.Struct, frozen=True):
    """The job that the step was a lane of: its device time is shared by all its lanes and must not be summed over them."""

    compiled: int
    active: int


class StepMoments(msgspec.Struct, frozen=True):
    """Acceptance §2.3, in order."""

    accepted: int
    slot_assigned: int
    admitted: int
    job_prepared: int
    submit_start: int | None
    submit_ok: int | None
    wait_done: int | None
    logits_ready: int
    sampled: int
    token_flushed: int | None
    """When the worker's message with the token left; null where the step brought none."""


class StepTrace(msgspec.Struct, frozen=True):
    """`calculet-step/v1`."""

    schema: Literal["calculet-step/v1"]
    request_id: str
    attempt: int
    job_id: int
    seq_id: int
    kind: str
    step: int
    """Index of the token that the step draws: 0 for every part of a prompt."""
    queue_ms: float
    """Ready to job prepared."""
    prepare_ms: float | None
    """Job prepared to submitted."""
    h2d_ms: float | None
    device_wait_ms: float | None
    d2h_ms: float | None
    bf16_ms: float | None
    """Of the whole job, between `wait_done` and `logits_ready`."""
    sampling_ms: float | None
    """Of the whole job: its lanes are sampled together."""
    engine: str
    kv_before: int
    kv_after: int
    output_status: str
    board: str
    epoch: int
    generation: int
    batch: StepBatch
    at_ns: StepMoments


def ms(ns: int | None) -> float | None:
    """Nanoseconds as milliseconds, to the microsecond."""
    return None if ns is None else round(ns / MS, 3)


def device_ms(timings: JobTimings) -> tuple[float | None, float | None, float | None]:
    """`h2d_ms`, `device_wait_ms`, `d2h_ms`."""
    return ms(timings.h2d_ns), ms(timings.wait_ns), ms(timings.d2h_ns)
