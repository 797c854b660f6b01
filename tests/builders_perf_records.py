"""Records and manifests of runs for tests of `calculet_perf`."""

from __future__ import annotations

from typing import Any

from calculet_perf.records import (
    Case,
    ClientNs,
    Hardware,
    Quality,
    RequestRecord,
    Result,
    RuntimeMs,
    ServerMs,
    Software,
    Workload,
    durations,
)
from calculet_perf.runinfo import RunInfo

MANIFEST: dict[str, Any] = {
    "schema": "calculet-perf-run/v1", "run_id": "test-001", "purpose": "baseline",
    "model": {"alias": "toy", "generation": 42, "calbin_sha256": "a" * 64},
    "software": {"server_commit": "abc", "image_digest": "sha256:1", "calrt": "0.7.6", "driver": "1.0", "firmware": "2.0"},
    "hardware": {"board": "b0", "chips": 2, "power_mode": "normal"},
    "environment": {"ambient_c": 24.0, "vpn_in_path": False}, "client": {"host": "here", "transport": "http-sse"},
    "server": {"url": "http://127.0.0.1:1"}, "matrix": "matrix.yaml", "warmup_requests": 10, "measured_requests": 100,
    "timeout_s": 900,
}  # fmt: skip
MS = 1_000_000


def a_request_record(
    *,
    request_id: str = "r0",
    case: str = "single/p16/o8/greedy/stream",
    round: int = 0,
    index: int = 0,
    start_ms: float = 0,
    ttft_ms: float | None = 20,
    e2e_ms: float | None = 100,
    tokens: int | None = 9,
    error_code: str | None = None,
    http_status: int | None = 200,
    warmup: bool = False,
    throttled: bool | None = None,
    clock_complete: bool = True,
    **fields: Any,
) -> RequestRecord:
    """A streamed request that began at `start_ms`; TPOT follows from the rest (last token at the end)."""
    start = round_ns(start_ms)
    first = None if ttft_ms is None else start + round_ns(ttft_ms)
    last = None if e2e_ms is None else start + round_ns(e2e_ms)
    clock = ClientNs(
        request_start=start, headers_sent=start, response_headers=first, first_event=first, first_token=first, last_token=last,
        response_end=last,
    )  # fmt: skip
    return RequestRecord(
        run_id="test-001", request_id=request_id, model_alias="toy", software=Software(), hardware=Hardware(),
        workload=Workload(prompt_tokens=16, requested_output_tokens=tokens, actual_output_tokens=tokens, concurrency=1, stream=True),
        client_ns=clock, durations_ms=durations(clock, tokens), server_ms=ServerMs(), runtime_ms=RuntimeMs(),
        result=Result(http_status=http_status, finish_reason=None if error_code else "length", error_code=error_code),
        quality=Quality(clock_complete=clock_complete, warmup=warmup, throttled=throttled),
        case=Case(id=case, round=round, index=index, sample_id="fixed/16/0", arrival="single", sampling="greedy"), **fields,
    )  # fmt: skip


def round_ns(ms: float) -> int:
    return round(ms * MS)


def a_run_info(**fields: Any) -> RunInfo:
    given = {
        "run_id": "test-001", "perf_version": "0", "manifest_sha256": "0" * 64, "matrix_sha256": "0" * 64, "matrix_name": "test",
        "started_utc": "2026-08-02T00:00:00Z", "target": "http://127.0.0.1:1", "foreign": False, **fields,
    }  # fmt: skip
    return RunInfo(**given)
