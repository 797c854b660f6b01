"""Client, server and device records of one request, brought together (acceptance §1, §2.3, §15).

Steps are joined by request id (the server's own, else the label that was sent) and job id, device samples by time. What the steps
do not account for is `unattributed`: it is shown as such and never added to TTFT. A request's steps follow one another, so that
their times cannot be more than its end-to-end time; a negative rest is therefore an error of the join and says so. A batched job
writes one step for every sequence in it: its device time belongs to each of these requests, and once to the board.

Everything streams: per request some numbers are kept, per job one number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from calculet_perf.records import RequestRecord, RuntimeMs, ServerMs, StepRecord

GOOD_STATUS = frozenset(("done", "ok"))
"""`output_status` of a success, lower case; null is unknown and not listed as a failure."""
JOIN_TOLERANCE_MS, JOIN_TOLERANCE_SHARE = 1.0, 0.01
"""Two clocks read around the same moments may disagree by this much before a negative rest is an error."""

PREFILL, DECODE = 0, 1
QUEUE, PREPARE, H2D, WAIT, D2H, BF16, SAMPLING = range(7)
PARTS = ("queue", "prepare", "h2d", "device_wait", "d2h", "bf16", "sampling")


class Decomposition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, ms; null: no step told it."""

    queue: float | None
    prepare: float | None
    h2d: float | None
    device_wait: float | None
    d2h: float | None
    bf16: float | None
    sampling: float | None
    unattributed: float | None
    """E2E less all of these; null without an E2E or without steps."""
    join_error: bool
    """The parts are more than the whole."""
    complete: bool
    """There is a step for every token."""


def _nothing() -> list[float | None]:
    return [None] * len(PARTS)


@dataclass(slots=True)
class _Totals:
    """Of one request: ms by kind and part (None until a step tells it), and how many steps."""

    ms: tuple[list[float | None], list[float | None]] = field(default_factory=lambda: (_nothing(), _nothing()))
    steps: list[int] = field(default_factory=lambda: [0, 0])
    last: tuple[int, int, str] = (-1, -1, "")
    """Of the steps that were a success: the largest (generation, step) and its board."""


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step whose job did not end as a success."""

    request_id: str
    job_id: int
    kind: str
    step: int
    status: str
    board: str | None
    generation: int | None


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """Of all joined jobs, each counted once; None where no step told it."""

    jobs: int
    busy_ms: float | None
    active_lanes: int | None
    compiled_lanes: int | None

    @property
    def fill_ratio(self) -> float | None:
        """active / compiled over decode jobs (acceptance §7)."""
        return self.active_lanes / self.compiled_lanes if self.active_lanes is not None and self.compiled_lanes else None


class StepJoin:
    """Feed all steps with `add`, then ask for requests with `decompose` or `apply`."""

    def __init__(self) -> None:
        self._requests: dict[str, _Totals] = {}
        self._jobs: dict[str | None, set[int]] = {}
        self._busy_ms: float | None = None
        self._active = self._compiled = 0
        self._joined: set[str] = set()
        self.bad: list[BadStep] = []
        self.steps = 0
        self.vendor_steps = 0
        """Steps with any of the vendor's counters (acceptance §17)."""
        self.statuses: Counter[str] = Counter()

    def add(self, step: StepRecord) -> None:
        """Take one step, in any order."""
        self.steps += 1
        totals = self._requests.get(step.request_id)
        if totals is None:
            totals = self._requests[step.request_id] = _Totals()
        kind = PREFILL if step.kind == "prefill" else DECODE
        totals.steps[kind] += 1
        row = totals.ms[kind]
        for part, value in enumerate(
            (step.queue_ms, step.prepare_ms, step.h2d_ms, step.device_wait_ms, step.d2h_ms, step.bf16_ms, step.sampling_ms)
        ):
            if value is not None:
                row[part] = (row[part] or 0.0) + value
        self._job(step)
        good = step.output_status is None or step.output_status.lower() in GOOD_STATUS
        if good and (place := (step.generation or 0, step.step, step.board or "")) > totals.last:
            totals.last = place
        if step.vendor is not None:
            self.vendor_steps += 1
        status = step.output_status
        if status is not None:
            self.statuses[status] += 1
            if not good:
                self.bad.append(BadStep(step.request_id, step.job_id, step.kind, step.step, status, step.board, step.generation))

    def _job(self, step: StepRecord) -> None:
        seen = self._jobs.setdefault(step.board, set())
        key = (step.generation or 0) << 48 | step.job_id
        if key in seen:
            return
        seen.add(key)
        if step.device_wait_ms is not None:
            self._busy_ms = (self._busy_ms or 0.0) + step.device_wait_ms
        if step.batch is not None and step.kind == "decode":
            self._active += step.batch.active
            self._compiled += step.batch.compiled

    def went_on(self, bad: BadStep) -> bool:
        """The same sequence took a later step after this one on the same board and generation: its bad output was used."""
        generation, step, board = self._requests[bad.request_id].last
        return board == (bad.board or "") and generation == (bad.generation or 0) and step > bad.step

    def device(self) -> DeviceTotals:
        """Of all steps so far."""
        known = self._compiled > 0
        jobs = sum(len(seen) for seen in self._jobs.values())
        return DeviceTotals(jobs, self._busy_ms, self._active if known else None, self._compiled if known else None)

    def unmatched(self) -> int:
        """Steps of requests that `apply` and `decompose` were not asked about: golden, other clients', or lost records."""
        return sum(sum(totals.steps) for name, totals in self._requests.items() if name not in self._joined)

    def _find(self, record: RequestRecord) -> _Totals | None:
        for name in _names_of(record):
            if name in self._requests:
                self._joined.add(name)
                return self._requests[name]
        return None

    def decompose(self, record: RequestRecord) -> Decomposition | None:
        """Where the request's time went; None: no step of it."""
        totals = self._find(record)
        return None if totals is None else _decomposition(record, totals)

    def apply(self, record: RequestRecord) -> RequestRecord:
        """The record with `server_ms`, `runtime_ms`, `unattributed_ms` and `server_trace_joined` filled from its steps."""
        totals = self._find(record)
        if totals is None:
            return record
        whole, (prefill, decode) = _decomposition(record, totals), totals.ms
        server, runtime = record.server_ms, RuntimeMs(
            h2d_prefill=prefill[H2D], infer_prefill=prefill[WAIT], d2h_prefill=prefill[D2H],
            h2d_decode=decode[H2D], infer_decode=decode[WAIT], d2h_decode=decode[D2H],
        )  # fmt: skip
        server = ServerMs(
            queue=_first(whole.queue, server.queue),
            prefill=_first(_sum(prefill), server.prefill),
            decode_total=_first(_sum(decode), server.decode_total),
            postprocess=_first(_sum((whole.bf16, whole.sampling)), server.postprocess),
            sampling=_first(whole.sampling, server.sampling),
        )
        quality = msgspec.structs.replace(record.quality, server_trace_joined=whole.complete and not whole.join_error)
        return msgspec.structs.replace(
            record, server_ms=server, runtime_ms=runtime, unattributed_ms=whole.unattributed, quality=quality
        )


def _names_of(record: RequestRecord) -> Iterator[str]:
    """What steps may call the request: the server's id, bare where the answer puts a kind before it, or the label that was sent."""
    if record.server_request_id is not None:
        yield record.server_request_id
        yield record.server_request_id.rsplit("-", 1)[-1]
    if record.request_id is not None:
        yield record.request_id


def _decomposition(record: RequestRecord, totals: _Totals) -> Decomposition:
    prefill, decode = totals.ms
    parts = [_sum((before, after)) for before, after in zip(prefill, decode, strict=True)]
    attributed, e2e = _sum(parts), record.durations_ms.e2e
    rest = None if e2e is None or attributed is None else e2e - attributed
    allowed = -(JOIN_TOLERANCE_MS + JOIN_TOLERANCE_SHARE * (e2e or 0.0))
    tokens = record.workload.actual_output_tokens
    complete = totals.steps[PREFILL] > 0 and tokens is not None and totals.steps[DECODE] >= tokens - 1
    return Decomposition(
        **dict(zip(PARTS, parts, strict=True)),
        unattributed=rest,
        join_error=rest is not None and rest < allowed,
        complete=complete,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _first(value: float | None, other: float | None) -> float | None:
    return other if value is None else value
