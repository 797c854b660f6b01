"""What a router, a worker and a supervisor count."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders_engine import Driver, a_manifest
from prometheus_client.parser import text_string_to_metric_families

from calculet_core import history
from calculet_core.clock import MS, S
from calculet_core.config import FleetConfig, RouterConfig
from calculet_core.jobs import DeviceVersions
from calculet_core.shell.telemetry import Collectors
from calculet_router.actions import Ended
from calculet_router.shell.telemetry import RouterTelemetry
from calculet_supervisor.shell.telemetry import Telemetry
from calculet_supervisor.world import Note
from calculet_worker.device.sim import SimDevice
from calculet_worker.device.sim_board import SimBoard
from calculet_worker.shell.telemetry import Telemetry as WorkerTelemetry

ENDED = Ended("toy", "completed", None, 10, 11, 0, 1 * S, 1 * S + 200 * MS, "default", choices=1)


def samples(telemetry: RouterTelemetry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Everything that a scrape shows."""
    families = text_string_to_metric_families(telemetry.collectors.exposition().decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def tpot_of(*calls: Ended) -> tuple[float, float]:
    """(count, sum) of the histogram."""
    telemetry = RouterTelemetry(RouterConfig())
    for call in calls:
        telemetry.ended(call, "toy")
    telemetry.settle()
    classes = {"model": "toy", "prompt": "1-512", "output": "1-64", "concurrency": "1"}
    found = samples(telemetry)
    return tuple(found.get((f"calculet_router_tpot_seconds_{kind}", frozenset(classes.items())), 0.0) for kind in ("count", "sum"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("prompt", "output", "concurrency", "labels"),
    [
        (1, 2, 1, ("1-512", "1-64", "1")), (512, 64, 2, ("1-512", "1-64", "2-4")), (513, 65, 4, ("513-4096", "65-512", "2-4")),
        (4096, 512, 16, ("513-4096", "65-512", "5-16")), (40_000, 513, 17, ("4097+", "513+", "17+")),
    ],
)  # fmt: skip
def test_times_are_told_by_classes_of_prompt_output_and_concurrency(prompt: int, output: int, concurrency: int, labels: tuple[str, ...]) -> None:
    telemetry = RouterTelemetry(RouterConfig())
    telemetry.ended(msgspec.structs.replace(ENDED, prompt_tokens=prompt, generated_tokens=output), "toy", concurrency)
    classes = dict(zip(("model", "prompt", "output", "concurrency"), ("toy", *labels), strict=True))
    for name in ("ttft", "tpot", "e2e"):
        found = samples(telemetry)
        assert found[f"calculet_router_{name}_seconds_count", frozenset(classes.items())] == 1, name
    assert sum(telemetry.first_counts()) == 1


def test_time_per_token_is_of_the_tokens_after_the_first() -> None:
    count, total = tpot_of(ENDED)
    assert count == 1
    assert abs(total - 0.020) < 1e-9


def test_a_single_token_and_several_choices_have_no_time_per_token() -> None:
    replace = msgspec.structs.replace
    assert tpot_of(replace(ENDED, generated_tokens=1), replace(ENDED, choices=2), replace(ENDED, outcome="cancelled")) == (0, 0)


def test_the_buckets_of_a_scrape_add_up() -> None:
    telemetry = RouterTelemetry(RouterConfig(), "router-2")
    for first_ms in (0.5, 30, 30, 700_000):
        telemetry.ended(msgspec.structs.replace(ENDED, first_ns=int(first_ms * MS), ended_ns=int(first_ms * MS) + 1), "toy")
    found = {
        dict(labels)["le"]: value for (name, labels), value in samples(telemetry).items() if name == "calculet_router_ttft_seconds_bucket" and ("router", "router-2") in labels
    }  # fmt: skip
    assert [found[le] for le in ("0.001", "0.025", "0.05", "120.0", "+Inf")] == [1, 1, 3, 3, 4] and list(found.values()) == sorted(found.values())
    sums = [value for (name, _), value in samples(telemetry).items() if name == "calculet_router_ttft_seconds_sum"]
    assert sums == pytest.approx([700.0605])


def a_supervisors() -> Telemetry:
    document = {"schema": "calculet-fleet/v1", "boards": [{"name": "b0", "device": "sim"}], "models": [{"alias": "toy", "package": "p"}]}
    nobody: Any = None
    return Telemetry(nobody, nobody, nobody, msgspec.convert(document, FleetConfig))


def test_every_restart_that_is_decided_counts_also_of_a_worker_that_dies_before_it_speaks() -> None:
    telemetry = a_supervisors()
    for commanded, quarantined in ((False, False), (False, False), (True, False), (False, True)):
        telemetry.note(Note(history.FLEET_WORKER_EXITED, "b0", 1, data={"commanded": commanded, "quarantined": quarantined}))
    assert telemetry._collectors.registry.get_sample_value("calculet_supervisor_restarts_total", {"board": "b0"}) == 2


def test_the_supervisors_budgets_are_limits_that_alerts_can_compare_with() -> None:
    value = a_supervisors()._collectors.registry.get_sample_value
    limits = {name: value("calculet_supervisor_limit", {"limit": name}) for name in ("recovery.max_resets_per_10min", "supervision.restart.max_restarts")}
    assert limits == {"recovery.max_resets_per_10min": 2, "supervision.restart.max_restarts": 5}


def test_what_is_gone_is_not_told_any_more_and_may_come_back() -> None:
    collectors = Collectors("worker", board="b0")
    for tenant in ("a", "b"):
        collectors("calculet_worker_tenant_active", tenant=tenant).set(1)
    collectors.forget("calculet_worker_tenant_active", tenant="a")
    collectors.forget("calculet_worker_tenant_active", tenant="never")
    told = collectors.exposition()
    assert b'tenant_active{board="b0",tenant="b"} 1.0' in told and b'tenant="a"' not in told
    collectors("calculet_worker_tenant_active", tenant="a").set(2)
    assert b'tenant_active{board="b0",tenant="a"} 2.0' in collectors.exposition()


def test_a_worker_counts_what_its_engine_records_and_tells_it_at_the_scrape() -> None:
    driver = Driver(a_manifest())
    telemetry = WorkerTelemetry("board0", driver.engine, SimDevice(SimBoard(DeviceVersions("sim", chips=2), 1 << 30)), ["default"], False)
    told = [driver.ready().submit(number, max_new_tokens=5, tenant=tenant) for number, tenant in ((1, "default"), (2, "stranger"))]
    driver.until(lambda: all(one.ended for one in told))
    for event in driver.records:
        telemetry.count(event)
    found = {
        (sample.name, *sorted(set(sample.labels.values()) - {"board0"})): sample.value
        for _ in range(2)  # the second scrape tells the same: nothing is carried over twice
        for family in text_string_to_metric_families(telemetry.exposition(driver.now, 0).decode())
        for sample in family.samples
    }
    assert found["calculet_worker_requests_total", "completed"] == 2
    assert found["calculet_worker_admissions_total", "admit"] == 2
    assert found["calculet_worker_tokens_total", "generated"] == 10
    assert found["calculet_worker_tenant_tokens_total", "other"] == found["calculet_worker_tenant_tokens_total", "default"] > 5
    assert found["calculet_worker_sequence_tokens_count", "total"] == found["calculet_worker_admission_wait_seconds_count",] == 2
    jobs = [event for event in driver.records if event.event == history.BOARD_JOB]
    for kind in ("prefill", "decode"):
        count = sum(event.data["kind"] == kind for event in jobs)
        assert found["calculet_worker_step_seconds_count", kind] == found["calculet_worker_jobs_total", *sorted((kind, "ok"))] == count > 0
    assert found["calculet_worker_batch_compiled",] == jobs[-1].data["compiled"]
