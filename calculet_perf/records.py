"""What a run writes down, one JSON object a line (acceptance §3, §4).

The sections and fields that the specification names keep their names and places; everything this project adds sits in sections of
its own (`case`, `open_loop`, `chunks`, `resources`, `batch`, `vendor`), so that a reader of the specification finds exactly what it
promises. What cannot be had is null, never 0; nothing here holds a prompt or an answer, only sample ids and hashes. `_ns` fields
are the client's CLOCK_MONOTONIC in nanoseconds; wall clocks appear only as `utc` and only to correlate hosts (acceptance §2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

Natural = Annotated[int, Meta(ge=0)]
T = TypeVar("T")


class RecordError(Exception):
    """A line is not what its file promises: names the file, the line and what is wrong. Exit code 2."""


class Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base: unknown fields are errors; every field is written, null where there is no value."""


# ---------------------------------------------------------------- requests.jsonl (acceptance §3)
class Software(Record, kw_only=True):
    """What ran; from the manifest."""

    server_commit: str | None = None
    image_digest: str | None = None
    calrt: str | None = None
    driver: str | None = None
    firmware: str | None = None


class Hardware(Record, kw_only=True):
    """On what; from the manifest."""

    board_serial_hash: str | None = None
    chips: Natural | None = None
    power_mode: str | None = None


class Workload(Record, kw_only=True):
    """What was asked. `prompt_tokens` is the server's own count where it tells one, else null."""

    prompt_tokens: Natural | None = None
    requested_output_tokens: Natural | None = None
    actual_output_tokens: Natural | None = None
    concurrency: Natural | None = None
    """Closed loop and burst: how many at a time. Open loop: null, there is no such number."""
    stream: bool
    seed: int | None = None


class ClientNs(Record, kw_only=True):
    """t0..t6 of acceptance §2.1, CLOCK_MONOTONIC nanoseconds; null: it did not happen, or cannot be seen without a stream."""

    request_start: int | None = None
    headers_sent: int | None = None
    response_headers: int | None = None
    first_event: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    response_end: int | None = None


class DurationsMs(Record, kw_only=True):
    """Acceptance §2.2; all from the real send (t0). `tpot` is null at one output token or fewer."""

    ttfh: float | None = None
    ttfe: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


class ServerMs(Record, kw_only=True):
    """The server's own times; null where it tells none."""

    queue: float | None = None
    prefill: float | None = None
    decode_total: float | None = None
    postprocess: float | None = None
    sampling: float | None = None


class RuntimeMs(Record, kw_only=True):
    """The runtime's times, joined by request and job id; null where there is no trace."""

    h2d_prefill: float | None = None
    infer_prefill: float | None = None
    d2h_prefill: float | None = None
    h2d_decode: float | None = None
    infer_decode: float | None = None
    d2h_decode: float | None = None


class Result(Record, kw_only=True):
    """How it ended. `error_code`: the server's own code, or one of `calculet_perf.client.outcomes.ERRORS`; null means success."""

    http_status: int | None = None
    finish_reason: str | None = None
    token_hash: str | None = None
    """`ids:` + sha256 of the token ids, or `text:` + sha256 of the answer where no ids are told; compare within one kind."""
    error_code: str | None = None


class Quality(Record, kw_only=True):
    """May this sample be used, and in which stratum (acceptance §3, §8.7, §9)."""

    clock_complete: bool
    """Every t that this kind of request can have is there, in order."""
    server_trace_joined: bool = False
    warmup: bool = False
    throttled: bool | None = None
    """A chip was throttled while the request ran; null: the server does not tell."""


class Case(Record, kw_only=True):
    """An addition: which cell of the matrix, and which of its samples."""

    id: str
    """The cell, as `single/p128/o32/greedy/stream`."""
    round: Natural
    index: Natural
    """Ordinal in the cell and round."""
    sample_id: str
    """Which text of which corpus; the text itself is never stored."""
    arrival: Literal["single", "closed", "poisson", "burst", "golden"]
    sampling: Literal["greedy", "sampled"]
    class_name: str | None = None
    """Mixed traffic: short, medium, long, or what the cell names."""
    active_lanes: Natural | None = None
    """Batch cells: how many lanes the cell meant to keep active (acceptance §7)."""
    expect_refusal: bool = False
    """A boundary cell: a 400 that names the context is the success, anything else a failure (acceptance §6.1)."""


class OpenLoop(Record, kw_only=True):
    """An addition: open loop reports from the scheduled start too, which closed loops hide (acceptance §6.2)."""

    scheduled_start_ns: int
    send_delay_ms: float
    """t0 - scheduled start: the client's own lateness, published."""
    ttft_ms: float | None = None
    """First token - scheduled start."""
    e2e_ms: float | None = None
    """Response end - scheduled start."""


class Chunks(Record, kw_only=True):
    """An addition: how the tokens came. Events are not tokens (acceptance §2.2)."""

    events: Natural
    """Events that carried generated text or tokens."""
    tokens: Natural | None = None
    """Sum of the counts per chunk; null when the server tells no counts per chunk."""
    first: Natural | None = None
    """Tokens of the first chunk; above 1 TPOT is an average over fewer intervals than tokens."""
    largest: Natural | None = None
    coalesced: Natural = 0
    """Events that came out of the same socket read as the one before: their spacing is not the server's."""
    mismatch: bool | None = None
    """The counts per chunk disagree with the final usage, which is believed; null when one of both is missing."""


class RequestRecord(Record, kw_only=True):
    """One request (acceptance §3)."""

    schema: Literal["calculet-perf-request/v1"] = "calculet-perf-request/v1"
    run_id: str
    request_id: str
    """The `x-request-id` that was sent; a server that takes no label still gets one in our file."""
    server_request_id: str | None = None
    """An addition: the server's own id, for its journals and traces; null when the answer has none."""
    model_alias: str
    model_generation: int | None = None
    calbin_sha256: str | None = None
    software: Software
    hardware: Hardware
    workload: Workload
    client_ns: ClientNs
    durations_ms: DurationsMs
    server_ms: ServerMs
    runtime_ms: RuntimeMs
    unattributed_ms: float | None = None
    """An addition: E2E less what server and runtime account for; null before the join. Never part of TTFT (acceptance §1)."""
    result: Result
    quality: Quality
    case: Case
    open_loop: OpenLoop | None = None
    chunks: Chunks | None = None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Acceptance §2.2, of this request alone; null where TPOT is, or when all tokens came at once."""
        return 1e3 / self.durations_ms.tpot if self.durations_ms.tpot else None

    @property
    def ok(self) -> bool:
        """Ended as it should: an answer, or the refusal that the cell is about."""
        if self.case.expect_refusal:
            return self.result.http_status == 400 and self.result.error_code == "context_length_exceeded"
        return self.result.error_code is None


# ---------------------------------------------------------------- steps.jsonl (acceptance §4)
class Batch(Record, kw_only=True):
    """An addition: the job that the step was a lane of; device time is shared by its lanes and must not be summed over them."""

    compiled: Natural
    active: Natural


class Vendor(Record, kw_only=True):
    """Acceptance §17: what only the vendor's trace can tell. Absent: conclusions stay at graph level."""

    cycles: Natural | None = None
    d2d_bytes: Natural | None = None
    ddr_bytes: Natural | None = None
    pcie_bytes: Natural | None = None


class StepRecord(Record, kw_only=True):
    """One sequence's part of one device job (acceptance §4)."""

    schema: Literal["calculet-perf-step/v1"] = "calculet-perf-step/v1"
    request_id: str
    job_id: int
    seq_id: int
    kind: Literal["prefill", "decode"]
    step: Natural
    queue_ms: float | None = None
    prepare_ms: float | None = None
    h2d_ms: float | None = None
    device_wait_ms: float | None = None
    d2h_ms: float | None = None
    bf16_ms: float | None = None
    sampling_ms: float | None = None
    engine: str | None = None
    kv_before: Natural | None = None
    kv_after: Natural | None = None
    output_status: str | None = None
    board: str | None = None
    generation: int | None = None
    batch: Batch | None = None
    vendor: Vendor | None = None


# ---------------------------------------------------------------- device.jsonl (acceptance §4)
class Chip(Record, kw_only=True):
    """One chip's sensors."""

    chip: int
    temperature_c: float | None = None
    power_w: float | None = None
    frequency_mhz: float | None = None
    memory_used_bytes: float | None = None
    throttled: bool | None = None


class DeviceJobs(Record, kw_only=True):
    """The device's own queue counters."""

    pending: float | None = None
    finished: float | None = None
    left: float | None = None


class Resources(Record, kw_only=True):
    """An addition: what must come back to its baseline when nothing runs (acceptance §8.8, §10.3, §13)."""

    rss_bytes: float | None = None
    cpu_s: float | None = None
    threads: float | None = None
    open_fds: float | None = None
    leased_buffers: float | None = None
    quarantined_buffers: float | None = None
    kv_used_tokens: float | None = None
    kv_reserved_tokens: float | None = None
    active_lanes: float | None = None
    waiting_requests: float | None = None
    inflight_jobs: float | None = None
    batch_active: float | None = None
    """Counter: active lanes summed over decode steps. With `batch_rows`: fill ratio and lane waste of a window (acceptance §7)."""
    batch_rows: float | None = None
    """Counter: compiled lanes summed over decode steps."""
    device_busy_s: float | None = None
    """Counter: time with at least one job in flight. Its growth over time is the board's utilisation (acceptance §14.3)."""


class DeviceRecord(Record, kw_only=True):
    """One board at one moment (acceptance §4)."""

    schema: Literal["calculet-perf-device/v1"] = "calculet-perf-device/v1"
    run_id: str
    utc: str
    """Wall clock, ISO 8601 with microseconds; to correlate hosts only."""
    monotonic_ns: int
    """The client's clock when the sample was asked for, the clock of `client_ns`."""
    sample_ms: float | None = None
    """How long the server took to answer: the sample lies within that span."""
    board: str
    phase: str
    """What the run was doing: idle, golden, warmup, measure, gap, after; swap while a model is swapped."""
    chips: list[Chip]
    jobs: DeviceJobs
    reset_count: float | None = None
    resources: Resources


class ProcessRecord(Record, kw_only=True):
    """An addition: a process of the server that is no board's, as a router or the supervisor, at one moment (scheduling §19 M0)."""

    schema: Literal["calculet-perf-process/v1"] = "calculet-perf-process/v1"
    run_id: str
    utc: str
    monotonic_ns: int
    phase: str
    """As of `DeviceRecord`."""
    process: str
    start_s: float | None = None
    """When it began, UTC: routers that share an address are told apart by it, and so is one that was born again."""
    cpu_s: float | None = None
    rss_bytes: float | None = None
    threads: float | None = None
    open_fds: float | None = None


# ---------------------------------------------------------------- lines
_encode = msgspec.json.Encoder().encode


def to_line(record: msgspec.Struct) -> bytes:
    """One JSON line with its end."""
    return _encode(record) + b"\n"


def decoder(cls: type[T]) -> msgspec.json.Decoder[T]:
    """A decoder of one line; make it once per file."""
    return msgspec.json.Decoder(cls)


def from_line(decode: msgspec.json.Decoder[T], line: bytes, source: str, number: int) -> T:
    """One record.

    Args:
        source: the file's name, for the error.
        number: the line's, from 1.

    Raises:
        RecordError: half a line, not JSON, or not this record; names file, line and path in the line.
    """
    if not line.endswith(b"\n"):
        raise RecordError(f"{source}:{number}: the line is not complete (no newline at its end): the writer was cut off")
    try:
        return decode.decode(line)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise RecordError(f"{source}:{number}: {path.rstrip('`') or '$'}: {message}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{source}:{number}: not valid JSON: {error}") from None


RECORDS: Mapping[str, type[msgspec.Struct]] = {
    "requests": RequestRecord, "steps": StepRecord, "device": DeviceRecord,
    "processes": ProcessRecord,
}  # fmt: skip
"""File stem -> the record of its lines."""


def durations(client: ClientNs, output_tokens: int | None) -> DurationsMs:
    """Acceptance §2.2, with its null rules: TPOT only for more than one token, with a first and a last one seen."""

    def since_start(end: int | None) -> float | None:
        return None if end is None or client.request_start is None else (end - client.request_start) / 1e6

    tpot = None
    if output_tokens is not None and output_tokens > 1 and client.first_token is not None and client.last_token is not None:
        tpot = (client.last_token - client.first_token) / 1e6 / (output_tokens - 1)
    return DurationsMs(
        ttfh=since_start(client.response_headers), ttfe=since_start(client.first_event), ttft=since_start(client.first_token),
        tpot=tpot, e2e=since_start(client.response_end),
    )  # fmt: skip


def json_schema(cls: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of a record, from its struct."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **msgspec.json.schema(cls)}
