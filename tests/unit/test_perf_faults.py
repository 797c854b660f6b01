"""Fault scenarios as data: every row of the specification has one, and an outcome is judged by what was seen."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, get_args

import msgspec
import pytest

from calculet_core.config import SchedulerConfig
from calculet_core.errors import ERROR_TYPES
from calculet_core.faults import FaultKind
from calculet_core.history import ATTEMPT_DONE, BOARD_LANE_BOUND, Event
from calculet_perf.client.outcomes import ERRORS
from calculet_perf.faults import Catalogue, Load, Scenario, Seen, judge, parse_catalogue, verdict
from calculet_perf.manifest import ManifestError
from calculet_perf.shell.fault_run import attempts_without_end
from calculet_worker.device.faults import AnyFault

SOURCE = (files("calculet_perf") / "scenarios" / "faults.yaml").read_bytes()
CATALOGUE = parse_catalogue(SOURCE, "faults.yaml")
ROWS = {
    "12.1": {"impossible_lengths", "kv_full", "buffers_held", "cancel_waiting", "cancel_submitted"},
    "12.2": {
        "submit_busy", "submit_unavailable", "wait_timeout", "ccu_exception", "invalid_shape", "invalid_dtype", "stale_completion",
        "nan_output", "inf_output", "unknown_code", "release_refused",
    },
    "12.3": {"shutdown_with_queue", "configure_failure", "reset_failure", "repeated_fault", "load_while_ready"},
}  # fmt: skip


def test_every_row_of_the_specification_has_a_scenario_or_a_reason() -> None:
    for clause, names in ROWS.items():
        assert {one.id for one in CATALOGUE.scenarios if one.clause == clause} == names
    assert {one.id for one in CATALOGUE.not_run} == {"hardware_maintenance"}


def test_every_fault_that_can_be_injected_is_in_a_scenario() -> None:
    used = {fault["fault"] for scenario in CATALOGUE.scenarios for fault in scenario.inject}
    assert used == {cls.__struct_config__.tag for cls in get_args(AnyFault)}


@pytest.mark.parametrize("scenario", CATALOGUE.scenarios, ids=lambda scenario: scenario.id)
def test_a_scenario_speaks_the_products_words(scenario: Scenario) -> None:
    msgspec.convert(list(scenario.inject), list[AnyFault])
    msgspec.convert({"schema": "calculet-scheduler/v1", "model_alias": "m", **scenario.scheduler}, SchedulerConfig)
    assert set(scenario.expect.codes) <= {*ERROR_TYPES, *ERRORS}
    assert set(scenario.expect.faults_seen) <= set(FaultKind)
    assert scenario.expect.resets_max <= 2, "more than the budget"
    assert all("rate" not in fault for fault in scenario.inject), "a share cannot be planned"


def a_scenario(**fields: Any) -> Scenario:
    given = {"id": "x", "clause": "12.2", "injects": "i", "expected": "e", "inject": [{"fault": "busy", "at": [1, 2]}], **fields}
    return msgspec.convert(given, Scenario)


def test_what_is_as_expected_is_valid_and_right() -> None:
    outcome = judge(a_scenario(expect={"ok_min": 8}), Seen(fired=2, ok=8, state="READY", golden_after=True))
    assert (outcome.valid, outcome.as_expected, outcome.reasons, outcome.planned) == (True, True, [], 2)


def test_a_fault_that_did_not_fire_shows_nothing() -> None:
    outcome = judge(a_scenario(), Seen(fired=1, state="READY", golden_after=True))
    assert (outcome.valid, outcome.as_expected) == (False, False)
    assert outcome.reasons == ["2 firings were planned, 1 fired: nothing is shown"]


@pytest.mark.parametrize(
    ("expect", "seen", "reason"),
    [
        ({"ok_min": 3}, {"ok": 2}, "2 requests ended well, at least 3 should"),
        ({"codes": ["worker_lost"]}, {"codes": {"worker_lost": 1}}, "1 requests failed, at most 0 may"),
        ({"failed_max": None, "codes": ["bad_output"]}, {"codes": {"worker_lost": 1}}, "failures with worker_lost"),
        ({"resets_min": 1, "resets_max": 1}, {}, "0 resets, 1 to 1 expected"),
        ({}, {"resets": 1}, "1 resets, 0 to 0 expected"),
        ({}, {"state": "FAILED"}, "board0 is FAILED, not READY"),
        ({"faults_seen": ["wait_timeout"]}, {}, "nobody saw wait_timeout"),
        ({"new_generation": True}, {"generation_before": 1, "generation_after": 1}, "the generation did not change"),
        ({"new_generation": False}, {"generation_before": 1, "generation_after": 2}, "the generation changed"),
        ({"device_jobs": False}, {"device_jobs": 4}, "4 jobs reached the device"),
        ({"stale_min": 1}, {}, "0 stale completions were dropped, at least 1 should"),
        ({}, {"golden_after": False}, "golden failed afterwards, or nothing answered"),
        ({}, {"golden_after": None}, "golden failed afterwards, or nothing answered"),
        ({"swaps": 2}, {"swaps": 1}, "1 swaps ended as asked, 2 should"),
        ({"cancelled_min": 1}, {"cancelled": 0}, "0 waiting requests were cancelled, at least 1 should"),
        ({"drained": True}, {"undrained": 1}, "1 requests that had begun on the device did not end well"),
        ({}, {"mixed": 3}, "3 answers are neither artifact's"),
        ({"cpu_max": 0.8}, {"cpu_share": 0.97}, "board0's worker used 97% of a core, at most 80% may be"),
        ({"cpu_max": 0.8}, {}, "board0's worker used an unknown share of a core, at most 80% may be"),
        ({"exit_code": 0}, {"exit_code": 1}, "the keeper ended with 1, not 0"),
        ({}, {"violations": ["one_terminal: ended twice"]}, "broken promises: one_terminal: ended twice"),
    ],
)
def test_everything_else_is_wrong_and_says_why(expect: dict[str, Any], seen: dict[str, Any], reason: str) -> None:
    outcome = judge(a_scenario(expect=expect), Seen(**{"fired": 2, "state": "READY", "golden_after": True, **seen}))
    assert outcome.valid
    assert not outcome.as_expected
    assert outcome.reasons == [reason]


def test_outcomes_are_counted_apart() -> None:
    right = judge(a_scenario(), Seen(fired=2, state="READY", golden_after=True))
    wrong = judge(a_scenario(), Seen(fired=2, state="FAILED", golden_after=True))
    invalid = judge(a_scenario(), Seen(state="READY", golden_after=True))
    assert verdict([right, wrong, wrong, invalid]) == {"as_expected": 1, "wrong": 2, "invalid": 1}


def test_a_wrong_catalogue_is_refused_by_path() -> None:
    with pytest.raises(ManifestError, match=r"faults\.yaml: \$\.scenarios\[0\]"):
        parse_catalogue(SOURCE.replace(b"kind: lengths", b"kind: width"), "faults.yaml")
    with pytest.raises(ManifestError, match="scenario 'kv_full' is there twice"):
        parse_catalogue(SOURCE.replace(b"id: buffers_held", b"id: kv_full"), "faults.yaml")
    assert isinstance(CATALOGUE, Catalogue)
    assert Load().kind == "requests"


def test_what_waits_at_a_stop_is_told_from_what_ran_by_the_lanes() -> None:
    def event(name: str, request: int, **data: Any) -> Event:
        return Event(event=name, t=0, request=request, attempt=0, board="board0", data=data)

    journal = [
        event(BOARD_LANE_BOUND, 1), event(BOARD_LANE_BOUND, 2),
        event(ATTEMPT_DONE, 3, outcome="failed", code="shutting_down"), event(ATTEMPT_DONE, 4, outcome="refused"),
        event(ATTEMPT_DONE, 1, outcome="completed"), event(ATTEMPT_DONE, 2, outcome="failed", code="shutting_down"),
    ]  # fmt: skip
    assert attempts_without_end(journal) == (1, 1)
