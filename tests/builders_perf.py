"""Builders of a run's records, without a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calculet_core.artifact import sha256_hex
from calculet_perf import rules as rules_package
from calculet_perf.comparison import compare_runs
from calculet_perf.evidence import Evidence, gather
from calculet_perf.manifest import dump_manifest
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
    StepRecord,
    Workload,
    durations,
    to_line,
)
from calculet_perf.rules import RULES_FILE, Claim, Rules, parse_rules
from calculet_perf.runinfo import GoldenOutcome, Returned, RunInfo
from calculet_perf.verdict import Verdict, judge

S, MS = 1_000_000_000, 1_000_000
MANIFEST: dict[str, Any] = {
    "schema": "calculet-perf-run/v1", "run_id": "test-001", "purpose": "baseline",
    "model": {"alias": "toy", "generation": 42, "calbin_sha256": "a" * 64},
    "software": {"server_commit": "abc", "image_digest": "sha256:1", "calrt": "0.7.6", "driver": "1.0", "firmware": "2.0"},
    "hardware": {"board": "b0", "chips": 2, "power_mode": "balanced"},
    "environment": {"ambient_c": 24.0, "vpn_in_path": False}, "client": {"host": "here", "transport": "http-sse"},
    "server": {"url": "http://127.0.0.1:1"}, "matrix": "matrix.yaml", "warmup_requests": 10, "measured_requests": 100,
    "timeout_s": 900,
}  # fmt: skip


def a_request(
    name: str = "r1", *, start_s: float = 0.0, ttft_ms: float = 50.0, tpot_ms: float = 10.0, tokens: int | None = 11,
    e2e_ms: float | None = None, case: str = "single/p16/o11", round: int = 0, index: int = 0, concurrency: int | None = 1,
    error: str | None = None, status: int | None = None, token_hash: str | None = "ids:aa", sample: str = "s0", **quality: Any,
) -> RequestRecord:  # fmt: skip
    """A streamed request whose times follow from what is given: its last token is out `e2e_ms` after its start, or as `tpot_ms` says.

    Args:
        tokens: None: the server told no count.
        error: then there was no token at all, only an end at `ttft_ms`.
        quality: fields of `Quality`.
    """
    t0 = int(start_s * S)
    first = t0 + int(ttft_ms * MS)
    last = first + int(tpot_ms * MS * ((tokens or 1) - 1)) if e2e_ms is None else t0 + int(e2e_ms * MS)
    client = ClientNs(
        request_start=t0, headers_sent=t0 + 1000, response_headers=t0 + 2000, first_event=first, first_token=first, last_token=last,
        response_end=last + (1000 if e2e_ms is None else 0),
    )  # fmt: skip
    if error:
        client = ClientNs(request_start=t0, response_end=t0 + int(ttft_ms * MS))
    flags = {"clock_complete": error is None, "warmup": False, "throttled": False, **quality}
    return RequestRecord(
        run_id="run", request_id=name, server_request_id=None, model_alias="toy", software=Software(), hardware=Hardware(),
        workload=Workload(prompt_tokens=16, requested_output_tokens=tokens, actual_output_tokens=0 if error else tokens,
                          concurrency=concurrency, stream=True, seed=1),
        client_ns=client, durations_ms=durations(client, None if error else tokens), server_ms=ServerMs(), runtime_ms=RuntimeMs(),
        result=Result(http_status=status or (503 if error else 200), finish_reason=None if error else "length",
                      token_hash=None if error else token_hash, error_code=error),
        quality=Quality(**flags),
        case=Case(id=case, round=round, index=index, sample_id=sample, arrival="single" if concurrency == 1 else "closed", sampling="greedy"),
    )  # fmt: skip


def a_step(request: str = "r1", job: int = 1, step: int = 0, **changes: Any) -> StepRecord:
    """A decode step of 10 ms all in all; the first step is the prefill of 40 ms."""
    prefill = step == 0
    fields: dict[str, Any] = {
        "request_id": request, "job_id": job, "seq_id": 0, "kind": "prefill" if prefill else "decode", "step": step,
        "queue_ms": 5.0 if prefill else 0.0, "prepare_ms": 0.1, "h2d_ms": 0.2, "device_wait_ms": 40.0 if prefill else 9.0, "d2h_ms": 0.3,
        "bf16_ms": 0.1, "sampling_ms": 0.1, "engine": "ping", "output_status": "done", "board": "b0", "generation": 1,
    }  # fmt: skip
    return msgspec.structs.replace(StepRecord(**fields), **changes)


def some_requests(
    count: int = 300, *, seed: int = 1, rounds: int = 10, ttft_ms: float = 50.0, tpot_ms: float = 10.0, noise: float = 0.03, slower: float = 1.0,
    case: str = "single/p16/o11", **fields: Any,
) -> list[RequestRecord]:  # fmt: skip
    """One cell, one after the other, with lognormal noise; `slower` multiplies all times."""
    generator, now, made = np.random.default_rng(seed), 0.0, []
    for index in range(count):
        ttft, tpot = (slower * base * float(generator.lognormal(0, noise)) for base in (ttft_ms, tpot_ms))
        made.append(
            a_request(
                f"{case}#{index}",
                start_s=now,
                ttft_ms=ttft,
                tpot_ms=tpot,
                case=case,
                round=index * rounds // count,
                index=index,
                **fields,
            )
        )
        now += (ttft + tpot * 10 + 1) / 1e3
    return made


def an_info(run_id: str = "run", **changes: Any) -> RunInfo:
    """A complete run whose golden passed and whose resources came back."""
    golden = [GoldenOutcome(moment=moment, passed=True, cases=3, source="self", failures=[]) for moment in ("before", "after")]
    fields: dict[str, Any] = {
        "run_id": run_id, "perf_version": "0", "manifest_sha256": "0" * 64, "matrix_sha256": "0" * 64, "matrix_name": "toy",
        "status": "complete", "started_utc": "2026-01-01T00:00:00Z", "target": "http://127.0.0.1:1", "foreign": False, "golden": golden,
        "returned": [Returned(resource="leased_buffers", board="b0", before=0, after=0, returned=True)], "injector_armed": False,
    }  # fmt: skip
    return RunInfo(**{**fields, **changes})


def the_rules() -> Rules:
    """As shipped."""
    path = Path(rules_package.__file__).with_name(RULES_FILE)
    return parse_rules(path.read_bytes(), path.name)


def evidence(requests: Iterable[RequestRecord], info: RunInfo | None = None, **more: Any) -> Evidence:
    """Of a run that consists of these requests; `steps`, `device`, `golden`, `cases`, `faults`, `stage` where a test has them."""
    lists = {name: more.pop(name, ()) for name in ("golden", "steps", "device", "cases")}
    return gather(info or an_info(), None, the_rules(), requests, **lists, **more)


def verdict_on(found: Evidence, claim: str = "baseline", **more: Any) -> Verdict:
    """The verdict on one run."""
    return judge(found, the_rules(), "f" * 64, Claim(claim=claim, **more))


def verdict_between(
    base: Evidence, candidate: Evidence, claim: Claim | None = None, seed: int = 1, soak: Evidence | None = None
) -> Verdict:
    """The verdict on a candidate."""
    rules, claim = the_rules(), claim or Claim(claim="rebuild")
    comparison = compare_runs(base.cells, candidate.cells, rules.claims[claim.claim], claim, seed)
    return judge(candidate, rules, "f" * 64, claim, base, comparison, soak)


def a_run_folder(folder: Path, requests: Iterable[RequestRecord], *, steps: Iterable[StepRecord] = (), **info: Any) -> Path:
    """As `run` leaves one."""
    folder.mkdir(parents=True)
    manifest, matrix = dump_manifest({**MANIFEST, "run_id": folder.name}), b"name: toy\n"
    (folder / "manifest.yaml").write_bytes(manifest)
    (folder / "matrix.yaml").write_bytes(matrix)
    found = an_info(folder.name, **{"manifest_sha256": sha256_hex(manifest), "matrix_sha256": sha256_hex(matrix), **info})
    (folder / "run.json").write_bytes(to_line(found))
    for name, records in (("requests.jsonl", requests), ("steps.jsonl", steps)):
        (folder / name).write_bytes(b"".join(to_line(record) for record in records))
    return folder
