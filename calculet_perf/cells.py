"""Requests sorted into cells, so that statistics can be made of them: one pass, some numbers a request.

A cell is one case of the matrix; what ran on a throttled board is a stratum of its own (acceptance §8.7). A failed request is an
infinitely slow sample of every metric that the cell's successes have. What is left out is left out for a reason registered before
(`runinfo.exclusion`), and counted.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from calculet_perf.records import RequestRecord
from calculet_perf.runinfo import CaseRecord, exclusion
from calculet_perf.statistics import Floats
from calculet_perf.statistics.compare import Direction, Rounds
from calculet_perf.statistics.throughput import Spans, Steady, slices, steady


class Metric(NamedTuple):
    """A number of every request."""

    title: str
    unit: str
    direction: Direction


METRICS: dict[str, Metric] = {
    "ttfh": Metric("time to headers", "ms", Direction.LOWER_IS_BETTER),
    "ttfe": Metric("time to first event", "ms", Direction.LOWER_IS_BETTER),
    "ttft": Metric("time to first token", "ms", Direction.LOWER_IS_BETTER),
    "tpot": Metric("time per output token", "ms", Direction.LOWER_IS_BETTER),
    "e2e": Metric("end to end", "ms", Direction.LOWER_IS_BETTER),
    "scheduled_ttft": Metric("first token from the scheduled start", "ms", Direction.LOWER_IS_BETTER),
    "scheduled_e2e": Metric("end to end from the scheduled start", "ms", Direction.LOWER_IS_BETTER),
    "queue": Metric("queue time", "ms", Direction.LOWER_IS_BETTER),
}
THROUGHPUT = Metric("aggregate output tokens", "tokens/s", Direction.HIGHER_IS_BETTER)
THROTTLED = "throttled"


def _doubles() -> array[float]:
    """Eight bytes a number: a run of days has millions."""
    return array("d")


@dataclass(slots=True)
class CaseLoad:
    """What a case had open at any time, whatever the stratum of its requests: throughput is of the board, not of a request."""

    spans: dict[int, array[float]] = field(default_factory=lambda: defaultdict(_doubles))
    """Round -> start, end, first and last token in seconds, tokens; of one request after the other."""
    counted: dict[int, float] = field(default_factory=dict)
    """Round -> tokens per second as the run itself counted per chunk."""
    throttled: set[int] = field(default_factory=set)
    """Rounds with any request on a throttled board: their throughput belongs to that stratum."""

    def add(self, record: RequestRecord) -> None:
        """Take one request that counts, a failed one too: it occupied the load."""
        client, round_ = record.client_ns, record.case.round
        if record.quality.throttled:
            self.throttled.add(round_)
        if client.request_start is None or client.response_end is None:
            return
        first, last = (math.nan if at is None else at / 1e9 for at in (client.first_token, client.last_token))
        tokens = float(record.workload.actual_output_tokens or 0) if record.ok else 0.0
        self.spans[round_].extend((client.request_start / 1e9, client.response_end / 1e9, first, last, tokens))


@dataclass(slots=True)
class Cell:
    """One case in one stratum."""

    id: str
    stratum: str
    arrival: str
    prompt_tokens: int | None
    output_tokens: int | None
    concurrency: int | None
    stream: bool
    load: CaseLoad
    active_lanes: int | None = None
    success: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """By error code."""
    failed: Counter[int] = field(default_factory=Counter)
    """By round."""
    fill_ratios: list[float] = field(default_factory=list)
    """Of each round that tells it."""
    lane_wastes: list[float] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    """Why a round was not executed as planned."""
    coalesced: int = 0
    """Requests whose first chunk carried more than one token, or whose events shared a read: TPOT is an average over fewer gaps."""
    _values: dict[str, dict[int, array[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(_doubles)))

    @property
    def name(self) -> str:
        """Id and stratum."""
        return f"{self.id} [{self.stratum}]" if self.stratum else self.id

    @property
    def count(self) -> int:
        """Samples, failures too."""
        return self.success + sum(self.failed.values())

    @property
    def rounds(self) -> list[int]:
        """With any sample."""
        return sorted({round_ for values in self._values.values() for round_ in values} | set(self.failed))

    @property
    def load_rounds(self) -> list[int]:
        """Whose throughput is this stratum's."""
        return [round_ for round_ in sorted(self.load.spans) if (round_ in self.load.throttled) == (self.stratum == THROTTLED)]

    @property
    def metrics(self) -> list[str]:
        """That the cell has; when nothing succeeded, end to end all the same."""
        found = [name for name in METRICS if self._values.get(name)]
        return found or (["e2e"] if self.failed else [])

    def samples(self, metric: str) -> Rounds:
        """Round -> samples in the order of their ends, failures as +inf at the end of their round."""
        values = self._values.get(metric, {})
        return {
            round_: np.array([*values.get(round_, ()), *[math.inf] * self.failed[round_]], np.float64)
            for round_ in self.rounds
            if values.get(round_) or self.failed[round_]
        }

    def values(self, metric: str) -> Floats:
        """All samples of all rounds."""
        parts = self.samples(metric)
        return np.concatenate([parts[key] for key in sorted(parts)]) if parts else np.empty(0)

    def spans(self, round_: int) -> Spans:
        """A round's requests in time."""
        start, end, first, last, tokens = np.array(self.load.spans[round_]).reshape(-1, 5).T
        return Spans(start, end, first, last, tokens)

    def steady(self, round_: int) -> Steady | None:
        """A round's steady window; None: it had none."""
        return steady(self.spans(round_), self.concurrency) if self.load.spans.get(round_) else None

    def tokens_per_s(self) -> dict[int, float]:
        """Output tokens per second of each round's steady window: the run's own count per chunk, else from the requests."""
        found: dict[int, float] = {}
        for round_ in self.load_rounds:
            if round_ in self.load.counted:
                found[round_] = self.load.counted[round_]
            elif (window := self.steady(round_)) is not None and window.tokens > 0:
                found[round_] = window.tokens_per_s
        return found

    def slices(self) -> Floats:
        """Tokens per second in equal parts of all rounds' windows, by time: the series behind throughput's uncertainty."""
        windows = ((round_, self.steady(round_)) for round_ in self.load_rounds)
        parts = [slices(self.spans(round_), window) for round_, window in windows if window is not None and window.tokens > 0]
        return np.concatenate(parts) if parts else np.empty(0)

    def add(self, record: RequestRecord) -> None:
        """Take one request that counts."""
        round_ = record.case.round
        if not record.ok:
            self.failed[round_] += 1
            self.errors[record.result.error_code or f"http_{record.result.http_status}"] += 1
            return
        self.success += 1
        for name, value in metric_values(record).items():
            self._values[name][round_].append(value)
        if record.chunks is not None and ((record.chunks.first or 0) > 1 or record.chunks.coalesced):
            self.coalesced += 1


def metric_values(record: RequestRecord) -> dict[str, float]:
    """What the request tells, without nulls."""
    durations, loop = record.durations_ms, record.open_loop
    found = {
        "ttfh": durations.ttfh, "ttfe": durations.ttfe, "ttft": durations.ttft, "tpot": durations.tpot, "e2e": durations.e2e,
        "scheduled_ttft": loop.ttft_ms if loop else None, "scheduled_e2e": loop.e2e_ms if loop else None,
        "queue": record.server_ms.queue,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


class Cells:
    """Feed requests with `add` and executed cases with `add_case`."""

    def __init__(self) -> None:
        self.by_name: dict[str, Cell] = {}
        self._loads: dict[str, CaseLoad] = defaultdict(CaseLoad)
        self.excluded: Counter[str] = Counter()
        self.excluded_requests: list[tuple[str, str, str]] = []
        """(request id, case, reason) of what was left out, warm-ups apart: those are only counted."""
        self.count = 0

    def add(self, record: RequestRecord) -> bool:
        """Take one; False: it was left out."""
        self.count += 1
        if (reason := exclusion(record)) is not None:
            self.excluded[reason] += 1
            if reason != "warmup":
                self.excluded_requests.append((record.request_id, record.case.id, reason))
            return False
        stratum = THROTTLED if record.quality.throttled else ""
        key = f"{record.case.id} [{stratum}]" if stratum else record.case.id
        cell = self.by_name.get(key)
        if cell is None:
            work = record.workload
            cell = self.by_name[key] = Cell(
                record.case.id, stratum, record.case.arrival, work.prompt_tokens, work.requested_output_tokens, work.concurrency,
                work.stream, self._loads[record.case.id], record.case.active_lanes,
            )  # fmt: skip
        cell.add(record)
        cell.load.add(record)
        return True

    def add_case(self, case: CaseRecord) -> None:
        """Take what the run says of an executed case, after its requests."""
        if case.tokens_per_s is not None:
            self._loads[case.case].counted[case.round] = case.tokens_per_s
        cell = self.by_name.get(case.case)
        if cell is None:
            return
        cell.fill_ratios += [] if case.fill_ratio is None else [case.fill_ratio]
        cell.lane_wastes += [] if case.lane_waste is None else [case.lane_waste]
        if case.invalid:
            cell.invalid.append(f"round {case.round}: {case.invalid}")

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.by_name.values())
