"""A worker is well as long as it makes progress; each phase has a budget of its own."""

from __future__ import annotations

import pytest
from builders_supervisor import a_report

from calculet_core.clock import MS
from calculet_core.config import SupervisionConfig
from calculet_supervisor.health import Health

CONFIG = SupervisionConfig(
    heartbeat_timeout_ms=1_000, hang_timeout_ms=3_000, startup_timeout_ms=5_000, load_timeout_ms=60_000
)


def hear(health: Health, ms: int, **fields: object) -> None:
    health.hear(a_report(**fields), ms * MS, ms * MS)  # type: ignore[arg-type]


def test_a_silent_start_has_the_startup_budget_not_the_heartbeats() -> None:
    health = Health(CONFIG, 0)
    assert health.complaint(5_000 * MS) is None
    assert "no first report" in (health.complaint(5_001 * MS) or "")


def test_silence_after_a_report_is_a_complaint() -> None:
    health = Health(CONFIG, 0)
    hear(health, 100)
    assert health.complaint(1_100 * MS) is None
    assert "no heartbeat" in (health.complaint(1_101 * MS) or "")


def test_heartbeats_without_steps_while_jobs_are_in_flight_are_a_hang() -> None:
    health = Health(CONFIG, 0)
    for ms in range(0, 3_501, 500):
        hear(health, ms, state="READY", steps=7, inflight=1)
    assert "no step" in (health.complaint(3_501 * MS) or "")


@pytest.mark.parametrize(("step_every_ms", "inflight"), [(2_500, 1), (10**9, 0)])
def test_slow_steps_and_idle_boards_are_no_hang(step_every_ms: int, inflight: int) -> None:
    health = Health(CONFIG, 0)
    for ms in range(0, 20_000, 500):
        hear(health, ms, state="READY", steps=ms // step_every_ms, inflight=inflight)
        assert health.complaint(ms * MS) is None


def test_a_job_that_starts_after_a_long_idle_time_is_no_hang() -> None:
    health = Health(CONFIG, 0)
    for ms in range(0, 10_000, 500):
        hear(health, ms, state="READY", steps=7, inflight=0)
    hear(health, 10_000, state="READY", steps=7, inflight=1)
    assert health.complaint(10_000 * MS) is None


@pytest.mark.parametrize("state", ["VALIDATING", "CONFIGURING", "WARMING"])
def test_a_load_has_its_own_budget(state: str) -> None:
    health = Health(CONFIG, 0)
    for ms in range(0, 60_001, 500):
        hear(health, ms, state=state)
        assert health.complaint(ms * MS) is None
    hear(health, 60_500, state=state)
    assert "load" in (health.complaint(60_500 * MS) or "")


def test_the_load_budget_starts_anew_with_each_load() -> None:
    health = Health(CONFIG, 0)
    hear(health, 0, state="WARMING")
    hear(health, 59_000, state="READY")
    hear(health, 60_000, state="CONFIGURING")
    hear(health, 61_000, state="CONFIGURING")
    assert health.complaint(61_000 * MS) is None


def test_serving_is_timed_from_ready_and_forgotten_on_recovery() -> None:
    health = Health(CONFIG, 0)
    hear(health, 100, state="WARMING")
    assert health.serving_ns is None
    hear(health, 200, state="READY")
    hear(health, 900, state="DRAINING")
    assert health.serving_ns == 200 * MS
    hear(health, 1_000, state="RECOVERING")
    assert health.serving_ns is None
