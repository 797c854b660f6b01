"""What a run writes: the specification's fields, null for what cannot be had, and readers that refuse what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders_perf import MANIFEST, a_request, an_info

from calculet_perf.commands.schema import SCHEMAS, schema_bytes
from calculet_perf.manifest import ManifestError, dump_manifest, parse_manifest
from calculet_perf.records import ClientNs, DeviceRecord, RecordError, RequestRecord, StepRecord, durations, to_line
from calculet_perf.runinfo import exclusion
from calculet_perf.shell.run_dir import (
    REQUESTS,
    RunDirError,
    RunReader,
    RunWriter,
    cut_half_line,
    drop_unfinished,
    read_lines,
)

PACKAGE = Path(__file__).resolve().parents[2] / "calculet_perf"
SPECIFIED = {  # Acceptance §3: section -> fields, in their order.
    "software": ("server_commit", "image_digest", "calrt", "driver", "firmware"),
    "hardware": ("board_serial_hash", "chips", "power_mode"),
    "workload": ("prompt_tokens", "requested_output_tokens", "actual_output_tokens", "concurrency", "stream", "seed"),
    "client_ns": ("request_start", "headers_sent", "response_headers", "first_event", "first_token", "last_token", "response_end"),
    "durations_ms": ("ttfh", "ttfe", "ttft", "tpot", "e2e"),
    "server_ms": ("queue", "prefill", "decode_total", "postprocess", "sampling"),
    "runtime_ms": ("h2d_prefill", "infer_prefill", "d2h_prefill", "h2d_decode", "infer_decode", "d2h_decode"),
    "result": ("http_status", "finish_reason", "token_hash", "error_code"),
    "quality": ("clock_complete", "server_trace_joined", "warmup", "throttled"),
}
STEP_FIELDS = (
    "request_id", "job_id", "seq_id", "kind", "step", "queue_ms", "prepare_ms", "h2d_ms", "device_wait_ms", "d2h_ms", "bf16_ms",
    "sampling_ms", "engine", "kv_before", "kv_after", "output_status",
)  # fmt: skip


def test_a_request_has_exactly_the_specified_sections() -> None:
    line = json.loads(to_line(a_request()))
    assert line["schema"] == "calculet-perf-request/v1"
    assert set(line) >= {"run_id", "request_id", "model_alias", "model_generation", "calbin_sha256"}
    for section, fields in SPECIFIED.items():
        assert tuple(line[section]) == fields


def test_a_step_has_the_specified_fields() -> None:
    line = json.loads(to_line(StepRecord(request_id="r", job_id=1, seq_id=2, kind="decode", step=3)))
    assert tuple(line)[1 : 1 + len(STEP_FIELDS)] == STEP_FIELDS
    assert line["device_wait_ms"] is None, "what was not measured is null"


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_shipped_schema_files_are_those_of_the_records(name: str) -> None:
    shipped = (PACKAGE / "schemas" / f"{name}.schema.json").read_bytes()
    assert shipped == schema_bytes(name), "run: calculet-perf schema --write calculet_perf/schemas"


def test_durations_follow_the_formulas() -> None:
    ms = 1_000_000
    clock = ClientNs(
        request_start=5 * ms, headers_sent=6 * ms, response_headers=15 * ms, first_event=16 * ms, first_token=25 * ms,
        last_token=115 * ms, response_end=120 * ms,
    )  # fmt: skip
    got = durations(clock, 10)
    assert (got.ttfh, got.ttfe, got.ttft, got.tpot, got.e2e) == (10, 11, 20, 10, 115)


def test_tokens_per_second_of_a_request_are_those_after_the_first_over_its_decode_time() -> None:
    assert a_request(tokens=11, tpot_ms=20).output_tokens_per_s == pytest.approx(10 / 0.2)
    assert a_request(tokens=1).output_tokens_per_s is None
    assert a_request(tokens=3, tpot_ms=0).output_tokens_per_s is None, "three tokens at once have no rate"


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_tpot_is_null_at_one_token_or_fewer(tokens: int | None) -> None:
    assert durations(ClientNs(request_start=0, first_token=1, last_token=1, response_end=2), tokens).tpot is None


def test_without_a_stream_what_was_not_seen_is_null() -> None:
    got = durations(ClientNs(request_start=0, response_headers=7_000_000, response_end=8_000_000), 12)
    assert (got.ttfh, got.ttfe, got.ttft, got.tpot, got.e2e) == (7, None, None, None, 8)


# ---------------------------------------------------------------- manifest
def a_manifest(**changes: Any) -> bytes:
    fields = json.loads(json.dumps(MANIFEST))
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            fields[section][key] = value
        else:
            fields[section] = value
    return dump_manifest(fields)


def test_a_filled_manifest_is_read() -> None:
    assert parse_manifest(a_manifest(), "m.yaml").hardware.chips == 2


def test_every_field_left_at_required_is_named() -> None:
    data = a_manifest(software__driver="REQUIRED", environment__ambient_c="REQUIRED")
    with pytest.raises(ManifestError, match=r"m\.yaml: \$\.software\.driver, \$\.environment\.ambient_c: left at REQUIRED"):
        parse_manifest(data, "m.yaml")


def test_null_says_that_it_cannot_be_had_and_a_missing_key_is_refused() -> None:
    assert parse_manifest(a_manifest(software__driver=None), "m").software.driver is None
    fields = json.loads(json.dumps(MANIFEST))
    del fields["software"]["driver"]
    with pytest.raises(ManifestError, match=r"\$\.software.*driver"):
        parse_manifest(dump_manifest(fields), "m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model__calbin_sha256": "abc"}, r"\$\.model\.calbin_sha256"),
        ({"server__url": "ftp://x"}, r"\$\.server\.url"),
        ({"surprise": 1}, "surprise"),
        ({"schema": "calculet-perf-run/v2"}, r"\$\.schema"),
    ],
)
def test_a_wrong_manifest_is_refused_by_path(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        parse_manifest(a_manifest(**change), "m.yaml")


def test_broken_yaml_names_the_line() -> None:
    with pytest.raises(ManifestError, match=r"(?s)m\.yaml: not valid YAML.*line 2"):
        parse_manifest(b"schema: [\n", "m.yaml")


# ---------------------------------------------------------------- files
def test_a_run_is_written_and_read_back(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.put_info(an_info())
    records = [a_request(f"r{n}") for n in range(3)]
    for record in records:
        writer.append(REQUESTS, record)
    writer.close()
    reader = RunReader(tmp_path / "run")
    assert list(reader.requests()) == records
    assert list(reader.steps()) == []


def test_half_a_line_is_refused_with_file_and_line(tmp_path: Path) -> None:
    whole = to_line(a_request())
    (tmp_path / REQUESTS).write_bytes(whole + whole[:40])
    with pytest.raises(RecordError, match=r"requests\.jsonl:2: the line is not complete"):
        list(read_lines(tmp_path / REQUESTS, RequestRecord))


def test_a_wrong_type_is_refused_with_file_line_and_path(tmp_path: Path) -> None:
    line = json.loads(to_line(a_request()))
    line["client_ns"]["first_token"] = "soon"
    (tmp_path / REQUESTS).write_bytes(to_line(a_request()) + json.dumps(line).encode() + b"\n")
    with pytest.raises(RecordError, match=r"requests\.jsonl:2: \$\.client_ns\.first_token: Expected"):
        list(read_lines(tmp_path / REQUESTS, RequestRecord))


def test_only_a_resuming_writer_cuts_half_a_line(tmp_path: Path) -> None:
    whole = to_line(a_request())
    (tmp_path / REQUESTS).write_bytes(whole * 2 + whole[:40])
    assert cut_half_line(tmp_path / REQUESTS) == 40
    assert len(list(read_lines(tmp_path / REQUESTS, RequestRecord))) == 2
    (tmp_path / REQUESTS).write_bytes(whole[:40])
    assert cut_half_line(tmp_path / REQUESTS) == 40
    assert (tmp_path / REQUESTS).read_bytes() == b""


def test_resume_drops_requests_of_cells_that_did_not_finish(tmp_path: Path) -> None:
    records = [a_request(case="a"), a_request(case="b"), a_request(case="b", warmup=True)]
    (tmp_path / REQUESTS).write_bytes(b"".join(map(to_line, records)))
    assert drop_unfinished(tmp_path, {("a", 0)}) == 1
    assert list(read_lines(tmp_path / REQUESTS, RequestRecord)) == [records[0], records[2]]


def test_two_writers_cannot_have_one_folder(tmp_path: Path) -> None:
    first = RunWriter(tmp_path)
    with pytest.raises(RunDirError, match="held by another process"):
        RunWriter(tmp_path, resume=True)
    first.close()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.put_info(an_info())
    writer.close()
    with pytest.raises(RunDirError, match="already holds a run"):
        RunWriter(tmp_path)
    RunWriter(tmp_path, resume=True).close()


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="is not a run's folder"):
        RunReader(tmp_path)


def test_only_preregistered_reasons_take_a_sample_out() -> None:
    assert exclusion(a_request()) is None
    assert exclusion(a_request(e2e_ms=1e9)) is None, "an outlier stays"
    assert exclusion(a_request(error="over_capacity")) is None, "a failure counts"
    assert exclusion(a_request(warmup=True)) == "warmup"
    assert exclusion(a_request(clock_complete=False)) == "clock_incomplete"
    assert exclusion(a_request(error="client_interrupted")) == "client_interrupted"


def test_a_device_sample_has_units_in_its_names_and_null_for_the_unknown() -> None:
    sample = json.loads(
        '{"run_id":"r","utc":"2026-08-02T00:00:00Z","monotonic_ns":1,"board":"b","phase":"idle","chips":[{"chip":0}],"jobs":{},"resources":{}}'
    )
    record = msgspec.convert(sample, DeviceRecord)
    assert record.chips[0].temperature_c is None
    assert record.jobs.pending is None
    assert record.schema == "calculet-perf-device/v1"
