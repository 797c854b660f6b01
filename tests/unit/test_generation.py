"""Loading, proving, resetting and unloading a generation (scheduling §10-§12)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from builders_engine import DIGEST, Driver, Fault, a_case, a_manifest, a_package, a_profile, a_scheduler

from calculet_core import history, wire
from calculet_core.artifact import CapacityInfo
from calculet_core.clock import MS, S
from calculet_core.config import RecoveryConfig
from calculet_core.errors import ExitCode
from calculet_core.jobs import Holdings, JobKind, OutputStatus, ReturnCode
from calculet_worker import actions
from calculet_worker.device.base import Inspection
from calculet_worker.inspecting import compare


def states(driver: Driver) -> list[str]:
    return [event.data["state"] for event in driver.events_of(history.BOARD_GENERATION)]


def settled(driver: Driver) -> Driver:
    driver.load()
    driver.until(lambda: driver.state in ("READY", "FAILED", "RECOVERING"))
    return driver


def failed(driver: Driver, words: str) -> None:
    report = settled(driver).engine.report(driver.now)
    assert report.state == "FAILED" and words in (report.command_error or ""), report
    assert not report.wants_reset and report.condemned is None


# ------------------------------------------------------------------------------------------------ load
def test_a_load_goes_through_its_steps_in_order_and_golden_comes_before_ready() -> None:
    driver = Driver().ready()
    assert states(driver) == ["VALIDATING", "CONFIGURING", "WARMING", "READY"]
    names = driver.record_names()
    assert names.index(history.BOARD_GOLDEN) < len(names) - 1 - names[::-1].index(history.BOARD_GENERATION)
    report = driver.engine.report(driver.now)
    assert (report.digest, report.alias, report.generation, report.command_seq, report.load_step) == (DIGEST, "toy", 1, 1, None)


def test_warm_up_runs_every_profile_that_is_configured() -> None:
    driver = Driver(a_manifest(lanes=8, profiles=(1, 4, 8))).ready()
    assert {job.profile.name for job in driver.board.jobs} == {"B1", "B4", "B8"}
    assert max(len(job.lanes) for job in driver.board.jobs if job.profile.name == "B8") == 8


def test_warm_up_fills_each_profile_with_one_prompt_a_lane() -> None:
    package = a_package(a_manifest(lanes=8, profiles=(1, 2, 4, 8)), [a_case([1, 2], count=6), a_case([3, 4, 5], count=6)])
    driver = Driver(package=package, scheduler=a_scheduler(profiles=(1, 2, 4, 8))).ready()
    jobs = driver.board.jobs
    prompts = [job for job in jobs if job.kind is JobKind.PREFILL]
    assert len(prompts) == 2 + 8
    steps = [(job.profile.name, len(job.lanes)) for job in jobs[jobs.index(prompts[-1]) + 1 :]]
    assert steps == [("B8", 8), ("B4", 4), ("B2", 2)]


def test_cases_with_too_narrow_margins_warm_up_one_profile_after_the_other() -> None:
    package = a_package(a_manifest(lanes=8, profiles=(1, 2, 4, 8)), [a_case([1, 2], count=2), a_case([3, 4, 5], count=2)])
    driver = Driver(package=package, scheduler=a_scheduler(profiles=(1, 2, 4, 8))).ready()
    full = [(job.profile.name, len(job.lanes)) for job in driver.board.jobs if len(job.lanes) > 1]
    assert full == [("B2", 2), ("B4", 4), ("B8", 8)]


def test_internal_requests_are_not_counted_as_clients() -> None:
    driver = Driver().ready()
    report = driver.engine.report(driver.now)
    assert (report.completed, report.tokens, driver.engine.load().cost) == (0, 0, 0.0)
    assert not driver.events_of(history.ATTEMPT_DONE)


def test_a_package_that_does_not_verify_changes_nothing() -> None:
    driver = Driver()
    driver.verify_error = "manifest.yaml was changed"
    failed(driver, "manifest.yaml was changed")
    assert not driver.board.lanes


def test_another_digest_than_was_asked_for_is_refused() -> None:
    failed(Driver(package=a_package(digest="e" * 64)), "dddddddddddd was asked for")


def test_a_configured_profile_that_is_not_in_the_manifest_is_refused() -> None:
    failed(Driver(scheduler=a_scheduler(profiles=(1, 8))), "$.batch.profiles[1]: B8 is not in manifest")


def test_an_artifact_that_does_not_fit_the_board_is_refused_with_the_arithmetic() -> None:
    failed(Driver(a_manifest(capacity=CapacityInfo(1, 1, 40 << 30))), "40.000 GiB > 32.000 GiB")


def test_a_wrong_token_in_a_golden_case_means_not_ready() -> None:
    driver = Driver(package=a_package(cases=[a_case([1, 2, 3]), a_case([5], wrong=True)]))
    failed(driver, "golden: ")
    assert [event.data["passed"] for event in driver.events_of(history.BOARD_GOLDEN)] == [False]
    assert "READY" not in states(driver)


def test_a_golden_case_that_does_not_fit_the_budget_fails_the_load_instead_of_waiting_for_ever() -> None:
    failed(Driver(scheduler=a_scheduler(admission={"max_kv_tokens": 5})), "at most 5 fit")


def test_tokens_after_a_narrow_margin_are_not_compared() -> None:
    case = a_case([5], wrong=True)
    gated = msgspec.structs.replace(case, margins=[1.0, 1.0, 1.0, 0.1], min_margin=0.5)
    Driver(package=a_package(cases=[gated])).ready()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lanes": 3}, "lanes 3, not 4"),
        ({"context": 32}, "context 32, not 64"),
        ({"vocab_size": 60}, "vocabulary 60, not 64"),
        ({"profiles": (a_profile(1),)}, "no profile B4"),
        ({"profiles": (a_profile(1), a_profile(4, context=128))}, "B4 max_seq 128, not 64"),
        ({"reserved_bytes": 33 << 30}, "33.000 GiB > 32.000 GiB"),
    ],
)
def test_a_board_that_is_not_what_the_manifest_says_is_not_used(change: dict[str, object], words: str) -> None:
    driver = Driver()
    driver.inspection = replace(driver.board.inspect(), **change)  # type: ignore[arg-type]
    failed(driver, words)


def test_a_board_that_cannot_be_inspected_is_not_used() -> None:
    assert compare(a_manifest(), None, 1 << 40) == ["it could not be inspected"]


def test_more_profiles_on_the_board_than_in_the_manifest_are_nothing_wrong() -> None:
    manifest = a_manifest(profiles=(1,))
    found = Inspection((a_profile(1), a_profile(4)), 4, 64, 64, None)
    assert compare(manifest, found, 1 << 40) == []


def test_a_failed_load_may_be_tried_again() -> None:
    driver = Driver(package=a_package(cases=[a_case([5], wrong=True)]))
    settled(driver)
    driver.package = a_package()
    driver.ready()
    assert driver.engine.report(driver.now).command_error is None


@pytest.mark.parametrize("rc", [ReturnCode.INVALID_SHAPE, ReturnCode.OTHER])
def test_a_configure_that_the_runtime_rejects_fails_the_load(rc: ReturnCode) -> None:
    driver = Driver()
    driver.configure_rc = rc
    failed(driver, f"configuring returned {int(rc)}")


def test_a_board_that_is_gone_at_configure_wants_a_reset() -> None:
    driver = Driver()
    driver.configure_rc = ReturnCode.DEVICE_UNAVAILABLE
    settled(driver)
    assert driver.state == "RECOVERING" and driver.engine.report(driver.now).wants_reset


def test_a_board_that_is_busy_at_configure_is_asked_again_and_then_needs_a_reset() -> None:
    driver = Driver()
    driver.configure_rc = ReturnCode.DEVICE_BUSY
    settled(driver)
    assert driver.state == "RECOVERING" and driver.now > 1 * S + 5 * MS * (2**8 - 1)


def test_a_board_that_was_busy_for_a_moment_loads() -> None:
    driver = Driver()
    driver.configure_rc = ReturnCode.DEVICE_BUSY
    driver.call_at(driver.now + 20 * MS, lambda: setattr(driver, "configure_rc", ReturnCode.OK))
    driver.ready()


def test_a_loaded_board_refuses_another_load() -> None:
    driver = Driver().ready()
    driver.load()
    assert "is READY: unload it first" in (driver.engine.report(driver.now).command_error or "")
    assert driver.state == "READY"


def test_a_generation_is_never_used_twice() -> None:
    driver = Driver().ready()
    driver.command(wire.UnloadModel, generation=1, deadline_ms=1_000)
    driver.until(lambda: driver.state == "UNLOADED")
    driver.load(generation=1)
    assert "not new" in (driver.engine.report(driver.now).command_error or "")


def test_a_repeated_command_changes_nothing() -> None:
    driver = Driver().ready()
    driver.seq -= 1
    driver.command(wire.DrainBoard)
    assert not driver.engine.report(driver.now).draining


# ------------------------------------------------------------------------------------------------ unload
def test_unload_refuses_who_waits_lets_finish_what_runs_and_empties_the_board() -> None:
    driver = Driver(a_manifest(lanes=1, profiles=(1,))).ready()
    running, waiting = driver.submit(1), driver.submit(2)
    driver.command(wire.UnloadModel, generation=1, deadline_ms=10_000)
    assert waiting.error == "model_draining"
    late = driver.submit(3)
    assert late.refused is not None and late.error == "model_draining" and late.refused.retryable
    driver.until(lambda: driver.state == "UNLOADED")
    assert running.finish == "length"
    assert states(driver)[-3:] == ["DRAINING", "UNLOADING", "UNLOADED"]
    assert driver.engine.report(driver.now).generation == 0
    driver.ready()


def test_at_the_drain_deadline_what_runs_is_failed_and_its_job_still_drains() -> None:
    driver = Driver().ready()
    running = driver.submit(1, max_new_tokens=50)
    driver.command(wire.UnloadModel, generation=1, deadline_ms=35)
    driver.until(lambda: running.ended)
    assert running.error == "model_draining"
    assert driver.engine.report(driver.now).inflight == 1
    driver.until(lambda: driver.state == "UNLOADED")
    assert not driver.board.leased


def test_a_job_that_is_lost_after_the_drain_deadline_makes_the_generation_recover() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(lose=ReturnCode.TIMEOUT)])
    driver.submit(1)
    driver.command(wire.UnloadModel, generation=1, deadline_ms=10)
    driver.until(lambda: driver.state == "RECOVERING")
    serving = driver.engine.serving
    assert serving is not None and serving.buffers.quarantined == 1, "its buffers are never freed under it"
    assert not [action for action in driver.actions if isinstance(action, actions.UnconfigureDevice)]
    driver.grant()
    driver.until(lambda: driver.state == "READY")


def test_a_failed_generation_can_be_unloaded() -> None:
    driver = settled(Driver(package=a_package(cases=[a_case([5], wrong=True)])))
    driver.command(wire.UnloadModel, generation=1, deadline_ms=10)
    driver.until(lambda: driver.state == "UNLOADED")


def test_unloading_another_generation_is_refused() -> None:
    driver = Driver().ready()
    driver.command(wire.UnloadModel, generation=9, deadline_ms=10)
    assert driver.state == "READY" and "not 9" in (driver.engine.report(driver.now).command_error or "")


def test_a_board_that_cannot_be_unconfigured_wants_a_reset() -> None:
    driver = Driver().ready()
    driver.unconfigure_rc = ReturnCode.DEVICE_UNAVAILABLE
    driver.command(wire.UnloadModel, generation=1, deadline_ms=10)
    driver.until(lambda: driver.state == "RECOVERING")
    assert driver.engine.report(driver.now).wants_reset


def test_without_a_verified_contract_an_unload_ends_the_process_once_everything_has_drained() -> None:
    driver = Driver(unconfigures=False).ready()
    told = driver.submit(1)
    driver.until(lambda: bool(told.pieces))
    driver.command(wire.UnloadModel, generation=1, deadline_ms=60_000)
    assert driver.exit is None, "what runs may finish"
    driver.until(lambda: driver.exit is not None)
    assert told.finish == "length"
    assert driver.exit is not None and driver.exit.code == ExitCode.OK and "not verified" in driver.exit.reason
    assert not [action for action in driver.actions if isinstance(action, actions.UnconfigureDevice)]


MIB = 1 << 20
EMPTY = Holdings(memory_used_bytes=100 * MIB)


def unloaded(driver: Driver, *after: Holdings) -> wire.WorkerReport:
    """The report once an unload has come to rest, on a board that then shows `after`."""
    driver.held_before, driver.held_after = EMPTY, list(after)
    driver.ready()
    driver.command(wire.UnloadModel, generation=1, deadline_ms=10)
    driver.until(lambda: driver.state in ("UNLOADED", "RECOVERING", "FAILED"))
    return driver.engine.report(driver.now)


@pytest.mark.parametrize("after", [EMPTY, replace(EMPTY, memory_used_bytes=164 * MIB), Holdings(memory_used_bytes=None)])
def test_a_board_whose_counters_are_back_where_they_were_is_unloaded(after: Holdings) -> None:
    report = unloaded(Driver(), after)
    assert (report.state, report.fault, report.wants_reset) == ("UNLOADED", None, False)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (replace(EMPTY, memory_used_bytes=164 * MIB + 1), "64.0 MiB more than when it was empty (recovery.unload_residue_mib)"),
        (replace(EMPTY, pending=1), "1 jobs pending and 0 outputs"),
        (replace(EMPTY, left=2), "0 jobs pending and 2 outputs"),
        (Holdings(error="OSError: gone"), "could not be read: OSError: gone"),
    ],
)
def test_a_board_that_still_holds_something_recovers_with_the_reason_instead_of_being_unloaded(after: Holdings, words: str) -> None:
    driver = Driver()
    report = unloaded(driver, after)
    assert (report.state, report.fault, report.wants_reset) == ("RECOVERING", "residue", True)
    assert words in (report.fault_detail or ""), report.fault_detail
    driver.held_after = [EMPTY]
    driver.grant()
    driver.until(lambda: driver.state == "READY")
    driver.command(wire.UnloadModel, generation=2, deadline_ms=10)
    driver.until(lambda: driver.state == "UNLOADED")


def test_counters_that_lag_behind_are_read_again_before_anything_follows() -> None:
    late = replace(EMPTY, memory_used_bytes=900 * MIB)
    driver = Driver()
    report = unloaded(driver, late, late, EMPTY)
    assert (report.state, report.fault) == ("UNLOADED", None)
    assert driver.events_of(history.BOARD_FAULT) == []


def test_small_leaks_add_up_since_the_board_was_empty_for_the_first_time() -> None:
    driver = Driver()
    for cycle in range(1, 4):
        driver.held_before = replace(EMPTY, memory_used_bytes=(100 + 30 * (cycle - 1)) * MIB)
        driver.held_after = [replace(EMPTY, memory_used_bytes=(100 + 30 * cycle) * MIB)]
        driver.ready()
        driver.command(wire.UnloadModel, generation=cycle, deadline_ms=10)
        driver.until(lambda: driver.state in ("UNLOADED", "RECOVERING"))
        assert driver.state == ("RECOVERING" if cycle == 3 else "UNLOADED")


def test_a_failed_generation_that_leaves_something_behind_wants_a_reset_and_can_be_denied_it() -> None:
    driver = Driver(package=a_package(cases=[a_case([5], wrong=True)]))
    driver.held_before, driver.held_after = EMPTY, [replace(EMPTY, memory_used_bytes=900 * MIB)]
    settled(driver)
    driver.command(wire.UnloadModel, generation=1, deadline_ms=10)
    driver.until(lambda: driver.engine.report(driver.now).wants_reset)
    assert driver.state == "FAILED"
    driver.command(wire.DenyReset, reason="2 resets in 10 minutes")
    report = driver.engine.report(driver.now)
    assert (report.state, report.wants_reset, report.condemned) == ("FAILED", False, "2 resets in 10 minutes")


# ------------------------------------------------------------------------------------------------ resets
def recovering(driver: Driver) -> Driver:
    driver.ready()
    driver.faults = iter([Fault(status=OutputStatus.CCU_EXCEPTION)])
    driver.submit(1)
    driver.until(lambda: driver.state == "RECOVERING")
    return driver


def test_a_granted_reset_brings_a_new_generation_of_the_same_package() -> None:
    driver = recovering(Driver())
    assert driver.engine.report(driver.now).wants_reset
    driver.grant()
    driver.until(lambda: driver.state == "READY")
    report = driver.engine.report(driver.now)
    assert (report.generation, report.digest, report.resets, report.fault, report.wants_reset) == (2, DIGEST, 1, None, False)
    assert states(driver)[-6:] == ["RECOVERING", "UNLOADED", "VALIDATING", "CONFIGURING", "WARMING", "READY"]
    assert driver.events_of(history.BOARD_GOLDEN)[-1].generation == 2
    assert report.lanes["UNKNOWN"] == 0


def test_a_denied_reset_condemns_the_board_until_a_reset_is_granted() -> None:
    driver = recovering(Driver())
    driver.command(wire.DenyReset, reason="2 resets in 10 minutes")
    report = driver.engine.report(driver.now)
    assert (report.state, report.condemned) == ("FAILED", "2 resets in 10 minutes")
    driver.load()
    assert "condemned" in (driver.engine.report(driver.now).command_error or "")
    driver.grant()
    driver.until(lambda: driver.state == "READY")
    assert driver.engine.report(driver.now).condemned is None


def test_a_reset_that_nobody_needs_is_refused() -> None:
    driver = Driver().ready()
    driver.grant()
    assert driver.state == "READY" and "nothing to reset" in (driver.engine.report(driver.now).command_error or "")


def test_after_a_failed_reset_the_worker_exits_for_a_supervised_restart() -> None:
    driver = recovering(Driver())
    driver.reset_rc = ReturnCode.OTHER
    driver.grant()
    driver.until(lambda: driver.exit)
    assert driver.exit is not None and driver.exit.code == ExitCode.BOARD_UNAVAILABLE


def test_after_a_failed_reset_it_stays_failed_where_the_operator_must_act() -> None:
    driver = recovering(Driver(recovery=RecoveryConfig(restart_on_unknown_dma=False)))
    driver.reset_rc = ReturnCode.OTHER
    driver.grant()
    driver.until(lambda: driver.state == "FAILED")
    assert driver.exit is None and "reset failed" in (driver.engine.report(driver.now).condemned or "")


def test_golden_that_fails_after_a_reset_fails_the_board_without_another_reset() -> None:
    driver = recovering(Driver())
    driver.faults = iter([Fault(bad_row=0)])
    driver.grant()
    driver.until(lambda: driver.state == "FAILED")
    assert not driver.engine.report(driver.now).wants_reset


def test_an_empty_board_can_be_reset_to_prove_itself_and_is_loaded_after() -> None:
    driver = Driver()
    driver.generation += 1
    driver.grant()
    driver.until(lambda: driver.engine.report(driver.now).resets == 1)
    report = driver.engine.report(driver.now)
    assert (report.state, report.command_error, report.condemned) == ("UNLOADED", None, None)
    assert settled(driver).state == "READY"
