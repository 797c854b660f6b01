"""From what a client process saw to the run's records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from calculet_perf.client.observation import Seen
from calculet_perf.manifest import Manifest
from calculet_perf.plan import Item
from calculet_perf.records import (
    Hardware,
    OpenLoop,
    Quality,
    RequestRecord,
    Result,
    RuntimeMs,
    Software,
    Workload,
    durations,
)
from calculet_perf.runinfo import CaseRecord
from calculet_perf.workloads.facts import ServerFacts
from calculet_perf.workloads.requests import Planned


class Assembler:
    """Makes records of one run."""

    def __init__(self, manifest: Manifest, facts: ServerFacts, *, exact_prompts: bool) -> None:
        part = manifest.software
        self._manifest, self._facts, self._exact = manifest, facts, exact_prompts
        self._software = Software(
            server_commit=part.server_commit, image_digest=part.image_digest, calrt=part.calrt, driver=part.driver,
            firmware=part.firmware,
        )  # fmt: skip
        board = manifest.hardware
        self._hardware = Hardware(board_serial_hash=board.board, chips=board.chips, power_mode=board.power_mode)

    def request(
        self, planned: Planned, seen: Seen, *, concurrency: int | None, warmup: bool = False, throttled: bool | None = None
    ) -> RequestRecord:
        """One request's record."""
        clock, case, shape, manifest = seen.client, planned.case, planned.shape, self._manifest
        prompt = seen.prompt_tokens
        if prompt is None and self._exact:
            prompt = shape.prompt
        # A token of text may be several of the model: without the server's count the number of output tokens is not known.
        workload = Workload(
            prompt_tokens=prompt, requested_output_tokens=shape.output, actual_output_tokens=seen.output_tokens,
            concurrency=concurrency, stream=planned.asked.stream, seed=manifest.seed + planned.asked.index,
        )  # fmt: skip
        open_loop = None
        if seen.scheduled_ns is not None and case.arrival == "poisson" and clock.request_start is not None:
            open_loop = OpenLoop(
                scheduled_start_ns=seen.scheduled_ns, send_delay_ms=(clock.request_start - seen.scheduled_ns) / 1e6,
                ttft_ms=_since(clock.first_token, seen.scheduled_ns), e2e_ms=_since(clock.response_end, seen.scheduled_ns),
            )  # fmt: skip
        result = Result(
            http_status=seen.http_status, finish_reason=seen.finish_reason, token_hash=seen.token_hash, error_code=seen.error_code
        )
        return RequestRecord(
            run_id=manifest.run_id, request_id=seen.request_id, server_request_id=seen.server_request_id,
            model_alias=manifest.model.alias, model_generation=self._generation(seen), calbin_sha256=manifest.model.calbin_sha256,
            software=self._software, hardware=self._hardware, workload=workload, client_ns=clock,
            durations_ms=durations(clock, seen.output_tokens), server_ms=seen.server_ms, runtime_ms=RuntimeMs(), result=result,
            quality=Quality(clock_complete=seen.clock_complete, warmup=warmup, throttled=throttled), case=case, open_loop=open_loop,
            chunks=seen.chunks,
        )  # fmt: skip

    def _generation(self, seen: Seen) -> int | None:
        return self._facts.generation if seen.generation is None else seen.generation


def case_record(
    run_id: str, item: Item, order: int, records: Sequence[RequestRecord], start_ns: int, end_ns: int, offsets_ns: Sequence[int]
) -> CaseRecord:
    """The line of a finished cell; temperatures, fill ratio and gap are the runner's to add.

    Args:
        offsets_ns: open loop: the schedule's offsets.
    """
    cell = item.cell
    starts = sorted(record.client_ns.request_start or start_ns for record in records)
    delays = sorted(record.open_loop.send_delay_ms for record in records if record.open_loop is not None)
    window = None
    if cell.arrival != "burst" and not cell.expect_refusal:  # a burst is never steady, a refusal has no tokens
        window = steady_window(records, cell.concurrency)
    tokens = None if window is None else tokens_in(records, *window)
    seconds = None if window is None else (window[1] - window[0]) / 1e9
    shape = cell.shapes[0] if len(cell.shapes) == 1 else None
    achieved = None
    if cell.qps is not None and len(starts) > 1:
        planned_ns = max(offsets_ns) - min(offsets_ns)
        achieved = cell.qps * planned_ns / max(1, starts[-1] - starts[0])
    ok = sum(record.ok for record in records)
    return CaseRecord(
        run_id=run_id, case=cell.id, kind=cell.kind, round=item.round, order=order, arrival=cell.arrival,
        prompt_tokens=shape.prompt if shape else None, output_tokens=shape.output if shape else None, stream=cell.stream,
        sampling=cell.sampling, concurrency=cell.concurrency, active_lanes=cell.active_lanes, offered_qps=cell.qps,
        achieved_qps=achieved, start_ns=start_ns, end_ns=end_ns, steady_start_ns=window[0] if window else None,
        steady_end_ns=window[1] if window else None, requests=len(records), ok=ok, failed=len(records) - ok,
        generated_tokens=None if tokens is None else round(tokens),
        tokens_per_s=tokens / seconds if tokens is not None and seconds else None,
        send_delay_p99_ms=nearest_rank(delays, 0.99),
        burst_spread_ms=burst_spread_ms(records, cell.group) if cell.arrival == "burst" and len(cell.shapes) == 1 else None,
    )  # fmt: skip


def steady_window(records: Sequence[RequestRecord], concurrency: int | None) -> tuple[int, int] | None:
    """When the load was what the cell says (acceptance §9), (start, end) in nanoseconds; None: never.

    Closed loop: from the moment that all users have a request under way until the first of them has nothing more to send. Open
    loop (no `concurrency`): from the first send to the last one, while requests keep coming.
    """
    spans = sorted(
        (record.client_ns.request_start, record.client_ns.response_end)
        for record in records
        if record.client_ns.request_start is not None and record.client_ns.response_end is not None
    )
    if len(spans) < 2:
        return None
    starts = [start for start, _ in spans]
    if concurrency is None:
        window = starts[0], starts[-1]
    else:
        after = [end for _, end in spans if end >= starts[-1]]
        window = starts[min(concurrency, len(starts)) - 1], min(after)
    return window if window[1] > window[0] else None


def tokens_in(records: Sequence[RequestRecord], start_ns: int, end_ns: int) -> float | None:
    """Tokens generated within a window. A streamed answer's tokens are spread evenly from its first to its last one; one without
    token times counts whole where it ended. None: the server does not tell how many there were."""
    total = 0.0
    for record in records:
        tokens, clock = record.workload.actual_output_tokens, record.client_ns
        if not record.ok or record.case.expect_refusal:
            continue
        if tokens is None:
            return None
        first, last = clock.first_token, clock.last_token
        if first is None or last is None or tokens == 1 or last == first:
            at = first if first is not None else clock.response_end
            total += tokens if at is not None and start_ns <= at <= end_ns else 0
            continue
        total += start_ns <= first <= end_ns
        overlap = min(last, end_ns) - max(first, start_ns)
        total += (tokens - 1) * max(0, overlap) / (last - first)
    return total


def burst_spread_ms(records: Sequence[RequestRecord], group: int) -> float | None:
    """The widest burst: its last t0 less its first."""
    widest = None
    groups: dict[int, list[int]] = {}
    for record in records:
        if record.client_ns.request_start is not None:
            groups.setdefault(record.case.index // group, []).append(record.client_ns.request_start)
    for starts in groups.values():
        spread = (max(starts) - min(starts)) / 1e6
        widest = spread if widest is None else max(widest, spread)
    return widest


def nearest_rank(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank quantile of an ascending sequence; None when it is empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _since(end: int | None, start: int) -> float | None:
    return None if end is None else (end - start) / 1e6
