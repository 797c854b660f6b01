"""When two jobs in flight go back to one, and what brings the second back (scheduling §14)."""

from __future__ import annotations

import pytest
from builders_engine import Driver, Fault, a_manifest, a_scheduler

from calculet_core import history, wire
from calculet_core.clock import MS
from calculet_core.config import ExecutorConfig
from calculet_core.jobs import EngineBank, JobTimings, ReturnCode
from calculet_worker import events
from calculet_worker.jobs.inflight import Inflight
from calculet_worker.jobs.pingpong import MIN_ALONE, MIN_TOGETHER, Degraded, PingPong


def a_guard(**fields: float) -> PingPong:
    guard = PingPong()
    guard.serve(ExecutorConfig(max_inflight=2, **fields), "d")  # type: ignore[arg-type]
    return guard


# ------------------------------------------------------------------------------------------------ the guard
def test_refusals_of_a_second_job_count_only_in_a_row() -> None:
    guard = a_guard(degrade_after_busy=3)
    for _ in range(5):
        guard.refused_second()
        guard.refused_second()
        guard.took_second()
    assert guard.reason is None
    for _ in range(3):
        guard.refused_second()
    assert guard.reason is Degraded.BUSY and "3 times" in guard.detail


def steps(guard: PingPong, count: int, took_ns: int, together: bool) -> None:
    for _ in range(count):
        guard.saw_step(4, took_ns, together)


def test_steps_that_gain_nothing_from_a_second_job_end_it() -> None:
    guard = a_guard(degrade_p99_factor=1.8)
    steps(guard, MIN_ALONE, 10 * MS, False)
    steps(guard, 2 * MIN_TOGETHER, 18 * MS, True)
    assert guard.reason is None, "exactly at the factor"
    steps(guard, 2 * MIN_TOGETHER, 19 * MS, True)
    assert guard.reason is Degraded.P99 and "B4" in guard.detail


def test_without_steps_alone_there_is_nothing_to_compare_with() -> None:
    guard = a_guard()
    steps(guard, MIN_ALONE - 1, 1 * MS, False)
    steps(guard, 4 * MIN_TOGETHER, 99 * MS, True)
    assert guard.reason is None


def test_more_pending_jobs_than_were_sent_cannot_be() -> None:
    guard = a_guard()
    guard.counted(2, 2)
    assert guard.reason is None
    guard.counted(3, 2)
    assert guard.reason is Degraded.COUNTERS


def test_the_first_reason_stays() -> None:
    guard = a_guard()
    guard.other_engine("job 1")
    guard.faulted(True, "later")
    assert guard.reason is Degraded.CROSSTALK


def test_only_an_operator_or_another_artifact_brings_the_second_job_back() -> None:
    guard = a_guard()
    guard.faulted(True, "job 7")
    guard.serve(ExecutorConfig(max_inflight=2), "d")
    assert guard.reason is Degraded.TIMEOUT, "the same artifact after a reset"
    guard.set(True)
    assert guard.reason is None
    guard.set(False)
    assert guard.reason is Degraded.OPERATOR
    guard.serve(ExecutorConfig(max_inflight=2), "e")
    assert guard.reason is None


def test_a_board_that_takes_one_job_anyway_is_never_degraded() -> None:
    guard = PingPong()
    guard.serve(ExecutorConfig(), "d")
    guard.faulted(False, "a fault")
    assert guard.reason is None and guard.changed() is None


def test_each_change_is_told_once() -> None:
    guard = a_guard()
    assert guard.changed() is None
    guard.faulted(False, "why")
    assert guard.changed() == (Degraded.RECOVERY, "why")
    assert guard.changed() is None
    guard.set(True)
    assert guard.changed() == (None, "")


# ------------------------------------------------------------------------------------------------ overlap
def test_overlap_is_what_the_devices_trace_shows() -> None:
    inflight = Inflight(ExecutorConfig(max_inflight=2), 2, 2, PingPong())
    spans = [(0, 10), (6, 10), (16, 4), (30, 5)]
    assert [inflight.overlap_ns(JobTimings(wait_ns=took, started_ns=start)) for start, took in spans] == [0, 4, 0, 0]
    assert inflight.overlap_ns(JobTimings(wait_ns=5)) == 0, "a device that shows no trace proves nothing"


# ------------------------------------------------------------------------------------------------ in the engine
def a_pair() -> Driver:
    return Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=a_scheduler((1,), executor={"max_inflight": 2})).ready()


def test_golden_runs_alone_so_that_a_baseline_is_there() -> None:
    driver = a_pair()
    assert all(not event.data.get("overlap_ns") for event in driver.events_of(history.BOARD_JOB))
    assert driver.engine.report(driver.now).max_inflight == 2


def test_a_time_out_leaves_one_in_flight_after_the_recovery_until_an_operator_says_otherwise() -> None:
    driver = a_pair()
    driver.faults = iter([Fault(lose=ReturnCode.TIMEOUT)])
    driver.submit(1)
    driver.until(lambda: driver.state == "RECOVERING")
    driver.grant()
    driver.until(lambda: driver.state == "READY")
    report = driver.engine.report(driver.now)
    assert report.max_inflight == 1 and report.pingpong_off is not None and report.pingpong_off.startswith("timeout")
    assert [event.data["reason"] for event in driver.events_of(history.BOARD_PINGPONG)] == ["timeout"]
    driver.command(wire.SetPingPong, allowed=True)
    assert driver.engine.report(driver.now).max_inflight == 2
    assert driver.events_of(history.BOARD_PINGPONG)[-1].data == {"limit": 2, "reason": None, "detail": ""}


def test_degrading_touches_new_jobs_only() -> None:
    driver = a_pair()
    told = [driver.submit(number, max_new_tokens=10) for number in (1, 2)]
    driver.until(lambda: driver.engine.report(driver.now).inflight == 2)
    driver.command(wire.SetPingPong, allowed=False)
    assert driver.engine.report(driver.now).inflight == 2, "what was submitted drains"
    driver.until(lambda: driver.engine.report(driver.now).inflight < 2)
    assert not any(one.ended for one in told), "not only because there is nothing more to send"
    while not all(one.ended for one in told):
        assert driver.step() and driver.engine.report(driver.now).inflight <= 1, "new jobs go one at a time"
    assert [one.finish for one in told] == ["length", "length"]
    assert max(event.data["rows"] for event in driver.events_of(history.BOARD_JOB)) == 1


def test_an_output_of_another_engine_ends_it() -> None:
    driver = a_pair()
    driver.board.completes_on = EngineBank.PONG  # every job is taken by PING
    driver.submit(1, max_new_tokens=10)
    driver.until(lambda: driver.events_of(history.BOARD_PINGPONG))
    assert driver.events_of(history.BOARD_PINGPONG)[0].data["reason"] == "crosstalk"


def test_without_two_configured_the_operator_is_told_so() -> None:
    driver = Driver().ready()
    driver.command(wire.SetPingPong, allowed=True)
    assert "max_inflight is 1" in (driver.engine.report(driver.now).command_error or "")


# ------------------------------------------------------------------------------------------------ the runtime's hint
def test_a_lane_that_the_device_denies_is_not_given_away() -> None:
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=a_scheduler((1,))).ready()
    first = driver.submit(1, max_new_tokens=30)
    driver.until(lambda: first.pieces)
    driver.feed(events.CountersRead(pending=1, full=True))
    second = driver.submit(2, max_new_tokens=2)
    driver.run(50 * MS)
    assert driver.engine.gauges(driver.now).queue_depth["waiting"] == 1 and driver.engine.gauges(driver.now).device_full
    driver.feed(events.CountersRead(pending=1, full=False))
    driver.until(lambda: second.ended)
    assert not first.ended and second.finish == "length"


def test_a_hint_never_stops_an_empty_board() -> None:
    driver = Driver().ready()
    driver.feed(events.CountersRead(pending=0, full=True))
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    assert told.finish == "length"


@pytest.mark.parametrize("kind", list(Degraded))
def test_reasons_are_a_closed_set_of_labels(kind: Degraded) -> None:
    assert kind.value.isidentifier()
