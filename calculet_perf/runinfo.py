"""What a run says about itself: `run.json`, and `cases.jsonl` with one line for every executed cell of every round.

`run.json` is rewritten whole after each step of the order of acceptance §8, so that an interrupted run says how far it came; a cell
with its line in `cases.jsonl` is done and is not measured again on resume.
"""

from __future__ import annotations

from typing import Literal

from calculet_perf.records import Natural, Record, RequestRecord

Status = Literal["running", "interrupted", "golden_failed", "infrastructure_invalid", "configuration_invalid", "complete"]


InvalidCode = Literal[
    "unreachable", "network", "clock", "rate", "selftest", "interrupted", "crash", "burst_spread",
]  # fmt: skip


class Shortened(Record, kw_only=True):
    """A duration or count that was cut below what the specification asks for: labelled wherever the run appears."""

    what: str
    """As `idle sampling`, `samples of single/p128/o32/greedy/stream`."""
    asked: float
    done: float
    unit: str
    clause: str


class NotApplicable(Record, kw_only=True):
    """A cell that this artifact cannot have, listed and never silently dropped."""

    case: str
    reason: str


class GoldenOutcome(Record, kw_only=True):
    """Golden before or after (acceptance §8.3, §8.8)."""

    moment: Literal["before", "after"]
    passed: bool
    cases: Natural
    source: str
    """Where the expectations come from: a file, or `self` (two runs of the same server must agree; for servers without any)."""
    failures: list[str]


class Invalid(Record, kw_only=True):
    """Why the infrastructure makes the run invalid: exit 3, neither pass nor fail (acceptance §15)."""

    code: InvalidCode
    message: str


class Phase(Record, kw_only=True):
    """A step of the order of acceptance §8."""

    name: str
    start_ns: int
    end_ns: int | None = None


class SelfTest(Record, kw_only=True):
    """The client against a null server: what it costs and adds."""

    rate_qps: float
    """Twice the planned rate."""
    requests: Natural
    tokens: Natural
    cpu_us_per_request: float | None
    cpu_us_per_token: float | None
    send_delay_p99_ms: float | None
    added_p99_ms: float | None
    """Client's TTFT less the null server's own, at P99."""
    passed: bool


class Returned(Record, kw_only=True):
    """One resource after the run against its baseline (acceptance §8.8)."""

    resource: str
    board: str
    before: float
    after: float
    returned: bool


class RunInfo(Record, kw_only=True):
    """`run.json`, `calculet-perf-info/v1`."""

    schema: Literal["calculet-perf-info/v1"] = "calculet-perf-info/v1"
    run_id: str
    perf_version: str
    manifest_sha256: str
    matrix_sha256: str
    matrix_name: str
    status: Status = "running"
    started_utc: str
    ended_utc: str | None = None
    boot_id: str | None = None
    """CLOCK_MONOTONIC counts from this boot: times of another boot are not comparable."""
    ntp_offset_ms: float | None = None
    """This host's wall clock against its time source at the begin; null: not synchronised, or not known."""
    sessions: Natural = 1
    """1, and one more for each resume."""
    processes: Natural = 1
    target: str
    foreign: bool
    """The server tells nothing of Calculet's: server and runtime times are null, conclusions stay at end to end."""
    context_tokens: int | None = None
    backend: str | None = None
    """Of the served artifact, as the server names it: an engine on the host's CPU is judged otherwise than a board."""
    injector_armed: bool | None = None
    """A fault injector was armed while the run went: no performance verdict may pass."""
    selftest: SelfTest | None = None
    golden: list[GoldenOutcome] = []
    phases: list[Phase] = []
    planned: list[str] = []
    """`case#round`, in the order of execution."""
    not_applicable: list[NotApplicable] = []
    shortened: list[Shortened] = []
    returned: list[Returned] = []
    invalid: list[Invalid] = []
    notes: list[str] = []
    """What a reader should know and no rule judges: an unsteady idle phase, a stepped wall clock, samples without a device."""
    exclusions: list[str] = []
    """The pre-registered reasons for which a sample may be left out (acceptance §9)."""


class CaseRecord(Record, kw_only=True):
    """One cell in one round, `calculet-perf-case/v1`."""

    schema: Literal["calculet-perf-case/v1"] = "calculet-perf-case/v1"
    run_id: str
    case: str
    kind: str
    round: Natural
    order: Natural
    """Its place in the execution order."""
    arrival: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    stream: bool
    sampling: str
    concurrency: int | None = None
    active_lanes: int | None = None
    offered_qps: float | None = None
    achieved_qps: float | None = None
    """Requests sent over the time that the schedule gave them."""
    start_ns: int
    end_ns: int
    steady_start_ns: int | None = None
    """Throughput is computed over the steady window (acceptance §9): ramp up and drain left out."""
    steady_end_ns: int | None = None
    requests: Natural
    ok: Natural
    failed: Natural
    generated_tokens: int | None = None
    """In the steady window, by the counts per chunk (without them: of requests that ended in it)."""
    tokens_per_s: float | None = None
    """`generated_tokens` over the steady window."""
    send_delay_p99_ms: float | None = None
    burst_spread_ms: float | None = None
    """Burst: last t0 less first t0."""
    gap_s: float | None = None
    """Idle time before the cell."""
    temperature_c: float | None = None
    """Hottest chip at its begin."""
    throttled: bool | None = None
    fill_ratio: float | None = None
    """Active over compiled lanes of the decode steps, from the server's counters (acceptance §7)."""
    lane_waste: float | None = None
    invalid: str | None = None
    """Set when the cell's own execution was not what was planned (rate, spread): it cannot carry a verdict."""


EXCLUSIONS = ("clock_incomplete", "warmup", "network_broken", "client_interrupted")
"""Pre-registered (acceptance §9): nothing else may take a sample out."""


def exclusion(record: RequestRecord) -> str | None:
    """The pre-registered reason that takes the sample out; None: it counts, whatever its value."""
    if record.quality.warmup:
        return "warmup"
    if record.result.error_code in ("client_interrupted", "network_broken"):
        return record.result.error_code
    if record.result.error_code is None and not record.quality.clock_complete:
        return "clock_incomplete"
    return None
