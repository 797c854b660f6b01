"""What a completion means (scheduling §7.4): it is the job we wait for, its status is good, and its numbers are numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from calculet_core.faults import FaultKind, fault_of_status
from calculet_core.jobs import Completion
from calculet_worker.jobs.inflight import InflightJob
from calculet_worker.output.sampling import finite_rows


@dataclass(frozen=True, slots=True)
class Good:
    """`logits` is float32 [active sequences, vocabulary], a row for each in the job's order; None when none were wanted."""

    logits: Any


@dataclass(frozen=True, slots=True)
class Stale:
    """Of another generation, or of a job that nobody waits for: its buffers are freed and nothing else happens."""


@dataclass(frozen=True, slots=True)
class Faulty:
    """The output may not be used."""

    kind: FaultKind
    detail: str


def judge(completion: Completion, entry: InflightJob | None, vocab_size: int) -> Good | Stale | Faulty:
    """`entry` is the job in flight with the completion's id."""
    if entry is None or completion.generation != entry.job.generation:
        return _STALE
    kind = fault_of_status(completion.status)
    if kind is not None:
        return Faulty(kind, f"job {completion.job_id}: output status {completion.status}")
    if not entry.job.want_logits:
        return _NOTHING_WANTED
    logits, rows = completion.logits, len(entry.sequences)
    if logits is None or logits.ndim != 2 or logits.shape[0] < rows or logits.shape[1] != vocab_size:
        shape = None if logits is None else logits.shape
        return Faulty(FaultKind.OTHER, f"job {completion.job_id}: logits {shape}, expected [{rows}, {vocab_size}]")
    if logits.dtype != np.float32:
        return Faulty(FaultKind.INVALID_DTYPE, f"job {completion.job_id}: logits are {logits.dtype}, expected float32")
    logits = logits[:rows]
    if not (finite := finite_rows(logits)).all():
        bad = [row for row in range(rows) if not finite[row]]
        return Faulty(FaultKind.BAD_NUMBERS, f"job {completion.job_id}: NaN or Inf in rows {bad}")
    return Good(logits)


_STALE, _NOTHING_WANTED = Stale(), Good(None)
