"""Records out of what was seen, boards out of metrics, golden, and what makes a measurement invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders_perf import MANIFEST, a_request

from calculet_perf.assemble import burst_spread_ms, nearest_rank, steady_window, tokens_in
from calculet_perf.exposition import boards_of, device_record, fill_ratio, injector_armed, samples_of, throttled
from calculet_perf.golden import GoldenCase, corpus_name, golden_lines, golden_requests, judge, parse_golden
from calculet_perf.manifest import ManifestError, dump_manifest, parse_manifest
from calculet_perf.records import DeviceRecord, RequestRecord
from calculet_perf.runinfo import CaseRecord
from calculet_perf.validity import (
    case_trouble,
    clock_trouble,
    idle_notes,
    mismatches,
    refused,
    returned,
    round_trip_ms,
    went_away,
)
from calculet_perf.workloads.facts import ServerFacts
from calculet_perf.workloads.matrix import parse_matrix
from calculet_perf.workloads.requests import sender_of

MS = 1_000_000
MAN = parse_manifest(dump_manifest(MANIFEST), "m")
MATRIX = parse_matrix(
    b'{"schema":"calculet-perf-matrix/v1","name":"t","golden":{"prompts":[8,16],"output":4},'
    b'"cells":[{"kind":"single","prompts":[1],"outputs":[1]}]}',
    "matrix",
)
SENDER = sender_of(MAN, MATRIX, foreign=False)


# ---------------------------------------------------------------- steady window and tokens
def test_a_closed_loop_is_steady_while_all_users_are_at_work() -> None:
    # Two users: starts at 0 and 10, then 100 and 120; the last one ends at 220.
    spans = [(0, 100), (10, 110), (100, 100), (120, 100)]
    records = [a_request(start_s=start / 1e3, e2e_ms=length) for start, length in spans]
    assert steady_window(records, 2) == (10 * MS, 120 * MS)


def test_an_open_loop_is_steady_from_the_first_send_to_the_last() -> None:
    records = [a_request(start_s=start / 1e3, e2e_ms=500) for start in (5, 40, 300)]
    assert steady_window(records, None) == (5 * MS, 300 * MS)
    assert steady_window(records[:1], None) is None


def test_tokens_of_a_window_are_spread_between_first_and_last() -> None:
    record = a_request(ttft_ms=10, e2e_ms=110, tokens=11)  # one each 10 ms from 10 to 110
    assert tokens_in([record], 0, 200 * MS) == 11
    assert tokens_in([record], 0, 60 * MS) == 6
    assert tokens_in([record], 60 * MS, 200 * MS) == 5
    assert tokens_in([record], 200 * MS, 300 * MS) == 0


def test_failures_make_no_tokens_and_unknown_counts_make_no_number() -> None:
    failed = a_request(error="worker_lost")
    assert tokens_in([failed], 0, 200 * MS) == 0
    assert tokens_in([a_request(tokens=None)], 0, 200 * MS) is None


def test_a_burst_is_as_wide_as_its_widest_group() -> None:
    starts = [0, 1, 3, 100, 100, 107]
    records = [a_request(start_s=start / 1e3, index=index) for index, start in enumerate(starts)]
    assert burst_spread_ms(records, 3) == 7


def test_nearest_rank() -> None:
    assert [nearest_rank(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert nearest_rank([], 0.5) is None


# ---------------------------------------------------------------- boards
EXPOSITION = """
# HELP calculet_worker_chip_temperature_celsius Temperature
# TYPE calculet_worker_chip_temperature_celsius gauge
calculet_worker_chip_temperature_celsius{board="board0",chip="0"} 41.5
calculet_worker_chip_temperature_celsius{board="board0",chip="1"} 43.0
# TYPE calculet_worker_chip_throttled gauge
calculet_worker_chip_throttled{board="board0",chip="1"} 1.0
# TYPE calculet_worker_device_counters gauge
calculet_worker_device_counters{board="board0",counter="pending"} 2.0
calculet_worker_device_counters{board="board0",counter="resets"} 1.0
# TYPE calculet_worker_kv_sequences gauge
calculet_worker_kv_sequences{board="board0",state="FREE"} 30.0
calculet_worker_kv_sequences{board="board0",state="ACTIVE"} 2.0
# TYPE calculet_worker_kv_tokens gauge
calculet_worker_kv_tokens{board="board0",kind="used"} 77.0
# TYPE calculet_worker_batch_active_total counter
calculet_worker_batch_active_total{board="board0"} 100.0
# TYPE calculet_worker_fault_injection_armed gauge
calculet_worker_fault_injection_armed{board="board0"} 0.0
# TYPE calculet_process_resident_bytes gauge
calculet_process_resident_bytes{process="worker-board0"} 1048576.0
calculet_process_resident_bytes{process="router"} 99.0
# TYPE calculet_router_requests_total counter
calculet_router_requests_total{model="toy"} 5.0
"""


def a_device(*, text: str = EXPOSITION, board: str = "board0", at_ms: float = 0) -> DeviceRecord:
    samples = boards_of(samples_of(text))[board]
    return device_record(board, samples, run_id="r", utc="u", monotonic_ns=round(at_ms * MS), sample_ms=1, phase="idle")


def test_a_board_is_read_from_the_metrics_and_the_rest_is_null() -> None:
    record = a_device()
    assert [(chip.chip, chip.temperature_c, chip.throttled, chip.power_w) for chip in record.chips] == [
        (0, 41.5, None, None), (1, 43.0, True, None),
    ]  # fmt: skip
    assert (record.jobs.pending, record.jobs.finished, record.reset_count) == (2, None, 1)
    assert (record.resources.active_lanes, record.resources.kv_used_tokens, record.resources.rss_bytes) == (2, 77, 1048576)
    assert record.resources.open_fds is None


def test_metrics_of_others_are_no_boards() -> None:
    assert boards_of(samples_of("# TYPE vllm:x gauge\nvllm:x 1\n")) == {}
    assert injector_armed(samples_of("")) is None
    assert injector_armed(samples_of(EXPOSITION)) is False
    assert throttled([]) is None
    assert throttled([a_device()]) is True


def test_fill_ratio_is_of_the_steps_between_two_moments() -> None:
    def counters(active: int, rows: int) -> DeviceRecord:
        record = a_device()
        record.resources.batch_active, record.resources.batch_rows = active, rows
        return record

    assert fill_ratio([counters(100, 200)], [counters(130, 240)]) == 0.75
    assert fill_ratio([counters(100, 200)], [counters(100, 200)]) is None, "no step"
    assert fill_ratio([a_device()], [a_device()]) is None, "rows are not told"


def test_an_idle_phase_that_warms_up_is_noted() -> None:
    samples = [a_device(text=EXPOSITION.replace("41.5", str(30 + n)), at_ms=n) for n in range(20)]
    assert idle_notes(samples) == ["board0 chip 0: idle temperature was not steady (40.0 to 49.0 C)"]
    assert idle_notes([a_device(at_ms=n) for n in range(20)]) == []


def test_resources_come_back_exactly_or_are_named() -> None:
    leaked = a_device(text=EXPOSITION.replace('kind="used"} 77', 'kind="used"} 78'))
    found = {one.resource: one.returned for one in returned([a_device()], [leaked])}
    assert found == {"kv_used_tokens": False, "active_lanes": True}


# ---------------------------------------------------------------- validity
def a_case(**fields: Any) -> CaseRecord:
    given = {
        "run_id": "r", "case": "c", "kind": "poisson", "round": 0, "order": 0, "arrival": "poisson", "stream": True,
        "sampling": "greedy", "start_ns": 0, "end_ns": 1, "requests": 1, "ok": 1, "failed": 0, **fields,
    }  # fmt: skip
    return CaseRecord(**given)


def trouble(case: CaseRecord | None = None, records: list[RequestRecord] | None = None) -> str | None:
    found = case_trouble(case or a_case(), records or [a_request()], MATRIX)
    return None if found is None else found.code


def test_a_rate_that_was_missed_by_more_than_a_hundredth_is_invalid() -> None:
    assert trouble(a_case(offered_qps=2, achieved_qps=1.985)) is None
    assert trouble(a_case(offered_qps=2, achieved_qps=1.97)) == "rate"
    assert trouble(a_case(offered_qps=2, achieved_qps=2.03)) == "rate"


def test_a_wide_burst_is_invalid() -> None:
    assert trouble(a_case(burst_spread_ms=4.9)) is None
    assert trouble(a_case(burst_spread_ms=5.1)) == "burst_spread"


def test_incomplete_clocks_and_a_broken_network_are_infrastructure_and_failures_are_not() -> None:
    assert trouble(records=[a_request(clock_complete=False)]) == "clock"
    assert trouble(records=[a_request(error="network_broken")]) == "network"
    assert trouble(records=[a_request(error="worker_lost", clock_complete=False)]) is None
    assert went_away([a_request(error="connect_refused")])
    assert not went_away([a_request(error="over_capacity")])


def test_a_clock_that_stood_still_is_found_and_a_stepped_wall_clock_is_noted() -> None:
    second = 10**9
    assert clock_trouble(10 * second, 10 * second, 10 * second) == (None, None)
    stopped, _ = clock_trouble(10 * second, 15 * second, 15 * second)
    assert stopped == "the monotonic clock stood still for 5.000 s (a suspended machine?)"
    assert clock_trouble(10 * second, 10 * second, 9 * second) == (None, "the wall clock was stepped by -1.000 s")


def test_a_manifest_that_is_not_what_is_served_is_named() -> None:
    facts = ServerFacts(foreign=False, models=("other",), calbin_sha256="b" * 64, generation=42, driver="9")
    words = mismatches(MAN, facts)
    assert len(words) == 3
    assert words[0].startswith("$.model.calbin_sha256: the manifest says aaa")
    assert "$.software.driver: the manifest says 1.0, the server 9" in words
    assert mismatches(MAN, ServerFacts(foreign=True)) == [], "a server that tells nothing contradicts nothing"


def test_round_trip_and_jitter() -> None:
    assert round_trip_ms([2 * MS] * 18 + [5 * MS] * 2) == (2, 3)
    assert round_trip_ms([]) == (None, None)


# ---------------------------------------------------------------- golden
def golden_record(prompt: int, token_hash: str | None, number: int = 0, **fields: Any) -> RequestRecord:
    record = a_request(case=f"golden/p{prompt}/o4", round=number, tokens=4, **fields)
    record.result.token_hash = token_hash
    return record


def test_answers_that_agree_are_learned_and_then_expected() -> None:
    learned, failures = judge([golden_record(8, "ids:a"), golden_record(8, "ids:a", 1)], {})
    assert (learned, failures) == ({"p8": "ids:a"}, [])
    _, failures = judge([golden_record(8, "ids:b", 2)], learned)
    assert failures == ["p8, pass 2: ids:b, expected ids:a"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (golden_record(8, "text:a"), "another kind of hash"),
        (golden_record(8, None), "the answer is empty"),
        (golden_record(8, None, error="bad_output"), "failed with bad_output"),
    ],
)
def test_every_other_golden_answer_is_a_failure(record: RequestRecord, words: str) -> None:
    _, failures = judge([record], {"p8": "ids:a"})
    assert words in failures[0]


def test_a_recorded_golden_file_is_read_back_for_its_own_corpus_only() -> None:
    records = [golden_record(8, "ids:a"), golden_record(16, "ids:b"), golden_record(8, "ids:a", 1)]
    data = golden_lines(records, {"p8": "ids:a", "p16": "ids:b"}, SENDER)
    assert parse_golden(data, "g.jsonl", SENDER, MATRIX.golden) == {"p8": "ids:a", "p16": "ids:b"}
    with pytest.raises(ManifestError, match=r"g\.jsonl:1: recorded with corpus .*ids/1-123"):
        parse_golden(data.replace(b"33-123", b"1-123"), "g.jsonl", SENDER, MATRIX.golden)
    with pytest.raises(ManifestError, match="no case p16"):
        parse_golden(data.splitlines(keepends=True)[0], "g.jsonl", SENDER, MATRIX.golden)
    with pytest.raises(ManifestError, match=r"g\.jsonl:1:"):
        parse_golden(b"{\n", "g.jsonl", SENDER, MATRIX.golden)
    assert GoldenCase.__struct_fields__[0] == "schema"
    assert "ids/33-123/1234" in corpus_name(SENDER)


def test_golden_prompts_are_the_same_in_every_run_and_pass() -> None:
    first, second = golden_requests(SENDER, MATRIX.golden, 2, "run", "before")
    assert [one.asked.body for one in first] == [one.asked.body for one in second]
    (again,) = golden_requests(sender_of(MAN, MATRIX, foreign=True), MATRIX.golden, 1, "other", "after")
    prompts = [[json.loads(one.asked.body)["prompt"] for one in requests] for requests in (again, first)]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("status", "code", "foreign", "words"),
    [
        (404, "not_found", False, "the server has no /v1/completions (HTTP 404): is $.server.url its root"),
        (404, "http_404", True, "is $.server.url its root"),
        (401, "invalid_api_key", True, "$.server.api_key_env"),
        (400, "invalid_request_error", True, "`corpus: {kind: text}`"),
        (400, "invalid_request_error", False, None),
        (503, "no_ready_worker", False, None),
    ],
)
def test_a_server_that_refuses_all_golden_prompts_is_told_from_one_that_answers_wrongly(
    status: int, code: str, foreign: bool, words: str | None
) -> None:
    records = [a_request(f"g{number}", error=code, status=status) for number in range(4)]
    found = refused(records, "/v1/completions", foreign=foreign, ids=True)
    assert (found is None) if words is None else (found is not None and words in found)
    assert refused([*records, a_request("fine")], "/v1/completions", foreign=foreign, ids=True) is None
