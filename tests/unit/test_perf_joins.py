"""Joining client, server and device records."""

from __future__ import annotations

import pytest
from builders_perf import MS, S, a_request, a_step

from calculet_perf.device_series import DeviceSeries
from calculet_perf.joins import StepJoin
from calculet_perf.records import Batch, Chip, DeviceJobs, DeviceRecord, Resources, Vendor


def joined(*steps: object) -> StepJoin:
    join = StepJoin()
    for step in steps:
        join.add(step)  # type: ignore[arg-type]
    return join


def whole_answer(request: str = "r1", tokens: int = 11) -> list[object]:
    return [a_step(request, job=100 + index, step=index) for index in range(tokens)]


def test_parts_and_rest_are_the_whole() -> None:
    record = a_request(ttft_ms=60, tpot_ms=10, tokens=11)
    found = joined(*whole_answer()).decompose(record)
    assert found is not None and found.complete and not found.join_error
    assert found.queue == 5 and found.device_wait == pytest.approx(40 + 10 * 9) and found.h2d == pytest.approx(11 * 0.2)
    parts = [found.queue, found.prepare, found.h2d, found.device_wait, found.d2h, found.bf16, found.sampling, found.unattributed]
    assert sum(part for part in parts if part is not None) == pytest.approx(record.durations_ms.e2e)
    assert found.unattributed == pytest.approx(160.001 - (5 + 130 + 11 * 0.8), abs=1e-3)


def test_joined_record_has_the_sections_of_the_specification() -> None:
    record = joined(*whole_answer()).apply(a_request(ttft_ms=60))
    assert record.quality.server_trace_joined and record.runtime_ms.infer_prefill == 40 and record.runtime_ms.infer_decode == 90
    assert (
        record.server_ms.queue == 5
        and record.server_ms.sampling == pytest.approx(1.1)
        and record.server_ms.postprocess == pytest.approx(2.2)
    )
    assert record.unattributed_ms == pytest.approx(16.2, abs=0.01) and record.durations_ms.ttft == pytest.approx(60)


def test_the_servers_id_joins_where_the_label_does_not() -> None:
    record = a_request("label")
    record.server_request_id = "r1"
    assert joined(*whole_answer()).decompose(record) is not None
    record.server_request_id = "chatcmpl-r1"
    assert joined(*whole_answer()).decompose(record) is not None
    record.server_request_id = None
    assert joined(*whole_answer()).decompose(record) is None


def test_without_steps_nothing_is_invented() -> None:
    record = StepJoin().apply(a_request())
    assert record.unattributed_ms is None and record.server_ms.queue is None and not record.quality.server_trace_joined


def test_null_parts_stay_null() -> None:
    found = joined(*(a_step(job=index, step=index, bf16_ms=None) for index in range(11))).decompose(a_request(ttft_ms=60))
    assert found is not None and found.bf16 is None and found.sampling is not None


def test_more_parts_than_whole_is_a_join_error_and_not_joined() -> None:
    join = joined(*whole_answer(), *whole_answer())
    found = join.decompose(a_request(ttft_ms=60))
    assert found is not None and found.join_error and found.unattributed is not None and found.unattributed < 0
    assert not join.apply(a_request(ttft_ms=60)).quality.server_trace_joined


def test_a_missing_step_is_not_complete() -> None:
    found = joined(*whole_answer()[:-1]).decompose(a_request(ttft_ms=60))
    assert found is not None and not found.complete


def test_shared_device_time_counts_once_for_the_board() -> None:
    batch = Batch(compiled=8, active=2)
    join = joined(a_step("r1", 7, 1, batch=batch), a_step("r2", 7, 1, batch=batch), a_step("r1", 8, 2, batch=batch))
    device = join.device()
    assert (device.jobs, device.busy_ms, device.fill_ratio) == (2, 18.0, 0.25)
    other_generation = joined(a_step("r1", 7, 1), a_step("r1", 7, 1, generation=2)).device()
    assert other_generation.jobs == 2


def test_every_non_success_is_kept_even_when_the_request_succeeded() -> None:
    join = joined(*whole_answer(), a_step("r1", 99, 3, output_status="ccu_exception"))
    assert [(bad.request_id, bad.job_id, bad.status) for bad in join.bad] == [("r1", 99, "ccu_exception")]


def test_a_sequence_that_went_on_after_a_bad_output_is_told_from_one_that_began_again() -> None:
    bad = a_step(job=3, step=3, output_status="ccu_exception")
    went_on = joined(a_step(job=1, step=0), bad, a_step(job=4, step=4))
    assert went_on.went_on(went_on.bad[0])
    again = joined(a_step(job=1, step=0), bad, *(a_step(job=9 + step, step=step, generation=2) for step in range(6)))
    assert not again.went_on(again.bad[0])


def test_steps_of_nobody_are_counted() -> None:
    join = joined(*whole_answer(), *whole_answer("golden", 4))
    join.apply(a_request())
    assert join.unmatched() == 4


def test_vendor_fields_are_noticed() -> None:
    assert joined(a_step()).vendor_steps == 0
    assert joined(a_step(vendor=Vendor(cycles=5))).vendor_steps == 1


def sample(at_s: float, throttled: bool | None, temperature: float | None = 60.0) -> DeviceRecord:
    return DeviceRecord(
        run_id="run", utc="2026-01-01T00:00:00.000000Z", monotonic_ns=int(at_s * S), board="b0", phase="measure",
        chips=[Chip(chip=0, temperature_c=temperature, throttled=throttled), Chip(chip=1, temperature_c=50.0, throttled=None)],
        jobs=DeviceJobs(), resources=Resources(),
    )  # fmt: skip


def test_throttling_is_found_by_time() -> None:
    timeline = DeviceSeries([sample(1, False), sample(2, False), sample(3, True, 80.0), sample(4, False)]).timeline()
    assert timeline.was_throttled(1 * S, 2 * S) is False
    assert timeline.was_throttled(int(2.5 * S), 3 * S + MS) is True
    assert timeline.was_throttled(int(3.5 * S), int(3.6 * S)) is True, "the last sample before the span still holds"
    assert timeline.hottest_c(0, 9 * S) == 80.0
    assert DeviceSeries([sample(1, None, None)]).timeline().was_throttled(0, 9 * S) is None
    assert DeviceSeries().timeline().hottest_c(0, 1) is None
