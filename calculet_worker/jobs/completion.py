"""What a completion means (scheduling §7.4): it is the job we wait for, its status is good, and its numbers are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calculet_core.faults import FAULT_POLICY, FaultKind, fault_of_status
from calculet_core.jobs import Completion
from calculet_core.requests import SequenceState
from calculet_worker.jobs.inflight import InflightJob
from calculet_worker.output.sampling import RowFacts, row_facts


@dataclass(frozen=True, slots=True)
class Good:
    """`logits` is float32 [active sequences, vocabulary], a row for each in the job's order; None when none were wanted."""

    logits: Any
    best: Any
    """The best id of each row, int64 [active sequences]."""


@dataclass(frozen=True, slots=True)
class Stale:
    """Of another generation, or of a job that nobody waits for: its buffers are freed and nothing else happens."""


@dataclass(frozen=True, slots=True)
class Faulty:
    """The output may not be used."""

    kind: FaultKind
    detail: str


@dataclass(frozen=True, slots=True)
class Partial:
    """The fault is confined to some rows' lanes. `logits` and `best` have a row for each of the other sequences, in the job's
    order."""

    kind: FaultKind
    detail: str
    failed: list[SequenceState]
    others: list[SequenceState]
    logits: Any
    best: Any


def judge(
    completion: Completion,
    entry: InflightJob | None,
    vocab_size: int,
    isolated: bool = False,
    facts: RowFacts | None = None,
) -> Good | Stale | Faulty | Partial:
    """`entry` is the job in flight with the completion's id. `isolated`: the artifact proves that a lane's fault is that lane's.

    `facts` are those of all rows of the completion's logits; None: they are found here.
    """
    if entry is None or completion.generation != entry.job.generation:
        return STALE
    kind = fault_of_status(completion.status)
    if kind is not None:
        found = Faulty(kind, f"job {completion.job_id}: output status {completion.status}")
        return _confined(found, completion.failed_rows, completion, entry, vocab_size, facts) if isolated else found
    if not entry.job.want_logits:
        return _NOTHING_WANTED
    logits, rows = completion.logits, len(entry.sequences)
    if not _has_shape(logits, rows, vocab_size):
        shape = None if logits is None else logits.shape
        return Faulty(FaultKind.OTHER, f"job {completion.job_id}: logits {shape}, expected [{rows}, {vocab_size}]")
    if logits.dtype != np.float32:
        return Faulty(FaultKind.INVALID_DTYPE, f"job {completion.job_id}: logits are {logits.dtype}, expected float32")
    if facts is None:
        facts = row_facts(logits[:rows])
    if not facts.finite[:rows].all():
        bad = [row for row in range(rows) if not facts.finite[row]]
        found = Faulty(FaultKind.BAD_NUMBERS, f"job {completion.job_id}: NaN or Inf in rows {bad}")
        return _confined(found, bad, completion, entry, vocab_size, facts) if isolated and len(bad) < rows else found
    return Good(logits[:rows], facts.best[:rows])


def _confined(
    found: Faulty,
    failed_rows: Sequence[int] | None,
    completion: Completion,
    entry: InflightJob,
    vocab_size: int,
    facts: RowFacts | None,
) -> Faulty | Partial:
    """The fault as that of some lanes, where it may be and everything else of the output is good."""
    sequences, failed = entry.sequences, set(failed_rows or ())
    if not FAULT_POLICY[found.kind].confinable or not failed or not failed <= set(range(len(sequences))):
        return found
    kept = [row for row in range(len(sequences)) if row not in failed]
    logits = best = None
    if kept:
        if not _has_shape(completion.logits, len(sequences), vocab_size):
            return found
        if facts is None:
            facts = row_facts(completion.logits[: len(sequences)])
        if not facts.finite[kept].all():
            return found
        logits, best = completion.logits[kept], facts.best[kept]
    detail = f"{found.detail} in rows {sorted(failed)} alone" if found.kind is not FaultKind.BAD_NUMBERS else found.detail
    return Partial(found.kind, detail, [sequences[row] for row in sorted(failed)], [sequences[row] for row in kept], logits, best)


def _has_shape(logits: Any, rows: int, vocab_size: int) -> bool:
    return logits is not None and logits.ndim == 2 and logits.shape[0] >= rows and logits.shape[1] == vocab_size


STALE, _NOTHING_WANTED = Stale(), Good(None, None)
