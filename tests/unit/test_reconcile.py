"""Desired against observed: what the supervisor does about every difference, under a fake clock."""

from __future__ import annotations

import pytest
from builders_supervisor import ALIAS, DIGEST, PLACEMENT, Bench, a_config

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.config import SupervisionConfig
from calculet_supervisor import world
from calculet_supervisor.shell.status import why
from calculet_supervisor.world import BoardSeen


# ---------------------------------------------------------------- a worker's life
def test_a_wanted_board_is_spawned_once_and_loaded_once_after_its_first_report() -> None:
    bench = Bench()
    for _ in range(5):
        bench.step(ms=100)
    assert bench.spawns() == 1
    assert bench.of(world.Load) == []
    bench.report()
    for _ in range(5):
        bench.step(ms=100)
    assert bench.of(world.Load) == [world.Load("board0", 1, PLACEMENT)]
    assert bench.state() == "UP"


def test_a_ready_board_is_left_alone() -> None:
    bench = Bench()
    bench.serve()
    before = len(bench.done)
    for _ in range(100):
        bench.report(steps=1)
        bench.step(ms=500)
    assert bench.done[before:] == []


def test_a_load_command_that_was_lost_is_sent_again_with_a_higher_seq() -> None:
    bench = Bench()
    bench.step()
    for _ in range(12):
        bench.report()
        bench.step(ms=500)
    assert [load.seq for load in bench.of(world.Load)] == [1, 2]


def test_commands_of_an_adopted_worker_continue_above_its_last_seq() -> None:
    bench = Bench()
    bench.seen["board0"] = BoardSeen(pid=55)
    bench.step()
    bench.report(command_seq=41)
    bench.step()
    assert bench.of(world.Load)[0].seq == 42


def test_a_killed_worker_leaves_the_view_in_the_same_decision_and_is_back_soon() -> None:
    bench = Bench()
    bench.serve()
    assert [board.state for board in bench.view().boards] == ["READY"]
    bench.exit(signal=9)
    actions = bench.step()
    assert bench.view().boards == ()
    exited = next(action for action in actions if isinstance(action, world.Note) and action.event == history.FLEET_WORKER_EXITED)
    assert (exited.data["signal"], exited.data["commanded"]) == (9, False)
    bench.step(ms=100)
    assert bench.spawns() == 2
    bench.serve()
    assert [board.epoch for board in bench.view().boards] == [2]
    started = [note for note in bench.of(world.Note) if note.event == history.FLEET_WORKER_STARTED]
    assert [(note.epoch, note.data["automatic"]) for note in started] == [(1, False), (2, True)]


def test_the_wakeup_is_when_the_restart_is_due() -> None:
    bench = Bench()
    bench.serve()
    assert bench.reconciler.next_wakeup_ns() is None
    bench.exit()
    bench.step()
    due_ns = bench.reconciler.next_wakeup_ns()
    assert due_ns is not None
    bench.clock.advance_to(due_ns)
    bench.step()
    assert bench.spawns() == 2
    assert bench.reconciler.next_wakeup_ns() is None


def test_a_crash_loop_spends_the_budget_then_is_tried_once_in_a_long_while() -> None:
    bench = Bench(config=a_config(max_restarts=5, window_s=600, half_open_after_s=700, backoff_max_ms=1_000))
    assert bench.crash_until_quarantined() == 5
    bench.step(ms=699_000)
    assert bench.spawns() == 6
    bench.step(ms=1_001)
    assert bench.spawns() == 7
    bench.exit()
    bench.step()
    assert bench.state() == "QUARANTINED"


def test_a_configuration_error_is_not_restarted_until_an_operator_says_so() -> None:
    bench = Bench()
    bench.step()
    bench.exit(code=78, reason="fleet.yaml: wrong")
    bench.step(ms=10_000_000)
    assert (bench.state(), bench.spawns()) == ("QUARANTINED", 1)
    assert bench.reconciler.lives["board0"].why == "exit 78: fleet.yaml: wrong"
    bench.wish(min_epoch=1)
    bench.step()
    assert bench.spawns() == 2


def test_an_operators_restart_bypasses_the_budget_and_gives_it_back() -> None:
    bench = Bench(config=a_config(max_restarts=2, window_s=600, backoff_max_ms=1_000))
    bench.crash_until_quarantined()
    bench.wish(min_epoch=10)
    bench.step()
    assert bench.state() == "STARTING"
    assert bench.reconciler.lives["board0"].restarts.left(bench.clock.now_ns()) == 2
    assert not bench.of(world.Spawn)[-1].automatic


def test_an_operators_restart_stops_the_old_life_with_a_drain_and_starts_a_new_one_without_a_failure() -> None:
    bench = Bench()
    bench.serve()
    bench.wish(min_epoch=2)
    bench.step()
    assert len(bench.sent(wire.StopWorker)) == 1
    assert bench.view().boards[0].draining
    bench.exit(code=0)
    bench.step()
    assert bench.spawns() == 2
    assert bench.reconciler.lives["board0"].restarts.failures == 0
    bench.serve()
    assert len(bench.sent(wire.StopWorker)) == 1


@pytest.mark.parametrize(("ready", "failures"), [(True, 0), (False, 1)])
def test_exit_zero_of_a_serving_worker_was_somebodys_command_and_of_one_that_never_served_is_a_failure(ready: bool, failures: int) -> None:
    bench = Bench()
    if ready:
        bench.serve()
    else:
        bench.step()
        bench.report()
        bench.step()
    bench.exit(code=0)
    bench.step()
    assert bench.reconciler.lives["board0"].restarts.failures == failures


def test_a_worker_that_ends_to_be_unloaded_costs_no_restart() -> None:
    bench = Bench(config=a_config(max_restarts=1))
    for _ in range(3):
        bench.serve()
        bench.report(state="FAILED")
        bench.wish(placement=None)
        bench.step(ms=100)
        bench.exit(code=0, reason="unloaded with its process")
        bench.wish(placement=PLACEMENT)
        bench.step()
        assert bench.state() == "STARTING"
    assert bench.reconciler.lives["board0"].restarts.failures == 0


def test_what_an_operator_stopped_stays_stopped_until_it_is_started() -> None:
    bench = Bench()
    bench.serve()
    bench.wish(up=False)
    bench.step()
    assert len(bench.sent(wire.StopWorker)) == 1
    bench.exit(code=0)
    for _ in range(10):
        bench.step(ms=60_000)
    assert (bench.spawns(), bench.state()) == (1, "ABSENT")
    bench.wish(up=True)
    bench.step()
    assert bench.spawns() == 2


def test_a_worker_that_has_not_reported_yet_is_stopped_by_a_signal() -> None:
    bench = Bench()
    bench.step()
    bench.wish(up=False)
    bench.step()
    assert bench.of(world.Terminate) == [world.Terminate("board0")]
    bench.exit(code=0)
    bench.step()
    assert bench.state() == "ABSENT"


def test_a_stopped_board_that_waits_for_its_retry_is_forgotten() -> None:
    bench = Bench()
    bench.serve()
    bench.exit()
    bench.wish(up=False)
    bench.step(ms=60_000)
    bench.step(ms=60_000)
    assert (bench.spawns(), bench.state()) == (1, "ABSENT")


def test_a_worker_of_a_board_that_nobody_wants_any_more_is_stopped() -> None:
    bench = Bench("board0")
    bench.seen["old"] = BoardSeen(pid=7)
    bench.step()
    assert bench.of(world.Terminate) == [world.Terminate("old")]
    assert bench.state("old") == "STOPPING"


# ---------------------------------------------------------------- sick workers
def sick_bench() -> Bench:
    return Bench(config=SupervisionConfig(heartbeat_timeout_ms=1_000, hang_timeout_ms=2_000, startup_timeout_ms=5_000))


def test_a_silent_worker_is_aborted_then_killed_and_counts_as_a_failure() -> None:
    bench = sick_bench()
    bench.serve()
    bench.step(ms=1_001)
    assert len(bench.of(world.Abort)) == 1
    assert bench.view().boards[0].draining
    bench.step(ms=2_900)
    assert bench.of(world.Kill) == []
    bench.step(ms=200)
    assert len(bench.of(world.Kill)) == 1
    bench.exit(signal=9)
    bench.step()
    assert bench.reconciler.lives["board0"].restarts.failures == 1


def test_a_supervisor_that_stood_still_takes_its_own_silence_for_nobodys() -> None:
    bench = Bench()
    bench.serve()
    bench.report(inflight=1, steps=1)
    bench.step()
    bench.clock.advance(60_000 * MS)
    bench.reconciler.overslept(60_000 * MS)
    bench.step()
    assert not bench.of(world.Abort)
    bench.step(ms=4_900)
    assert not bench.of(world.Abort)
    bench.step(ms=200)
    assert [abort.reason for abort in bench.of(world.Abort)] == ["no heartbeat within 5000 ms"]


def test_neither_a_start_nor_a_load_nor_a_stop_is_charged_for_the_supervisors_own_stall() -> None:
    bench = Bench("starts", "loads", "stops")
    bench.serve("stops")
    bench.report("loads", state="CONFIGURING")
    bench.wish("stops", up=False)
    bench.step()
    bench.clock.advance(3_600_000 * MS)
    bench.reconciler.overslept(3_600_000 * MS)
    bench.report("loads")
    bench.step()
    assert not bench.of(world.Abort)


def test_a_hanging_board_is_aborted_once_although_it_reports() -> None:
    bench = sick_bench()
    bench.serve()
    for _ in range(12):
        bench.report(inflight=1, steps=9)
        bench.step(ms=250)
    assert len(bench.of(world.Abort)) == 1
    assert "no step" in bench.of(world.Abort)[0].reason
    notes = [note for note in bench.of(world.Note) if note.event == history.FLEET_WORKER_KILLED]
    assert notes[0].data["signal"] == "SIGABRT"


def test_a_worker_that_never_reports_is_replaced_after_the_startup_budget() -> None:
    bench = sick_bench()
    bench.step()
    bench.step(ms=5_000)
    assert bench.of(world.Abort) == []
    bench.step(ms=1)
    assert len(bench.of(world.Abort)) == 1


def test_a_stop_that_takes_too_long_ends_in_a_kill_and_is_still_no_failure() -> None:
    bench = Bench(config=SupervisionConfig(drain_timeout_ms=1_000))
    bench.serve()
    bench.wish(up=False)
    bench.step()
    for _ in range(30):
        bench.step(ms=500)
    assert bench.of(world.Abort) and bench.of(world.Kill)
    bench.exit(signal=9)
    bench.step()
    assert (bench.state(), bench.reconciler.lives["board0"].restarts.failures) == ("ABSENT", 0)


# ---------------------------------------------------------------- drains
def test_a_drain_is_commanded_once_shown_to_routers_at_once_and_outlives_the_worker() -> None:
    bench = Bench()
    bench.serve()
    bench.wish(draining=True)
    bench.step()
    assert bench.view().boards[0].draining
    command = bench.sent(wire.DrainBoard)[0]
    bench.report(draining=True, command_seq=command.seq)
    bench.step(ms=500)
    assert len(bench.sent(wire.DrainBoard)) == 1
    bench.exit()
    bench.step(ms=100)
    bench.step(ms=100)
    bench.serve()
    assert len(bench.sent(wire.DrainBoard)) == 2
    bench.report(draining=True, command_seq=bench.sent(wire.DrainBoard)[1].seq)
    bench.wish(draining=False)
    bench.step()
    assert len(bench.sent(wire.ResumeBoard)) == 1


# ---------------------------------------------------------------- faults, failed loads and resets
def recovering(bench: Bench, generation: int = 1, fault: str = "wait_timeout") -> None:
    bench.report(state="RECOVERING", generation=generation, fault=fault, wants_reset=True)


def test_a_wanted_reset_is_granted_once_per_generation() -> None:
    bench = Bench()
    bench.serve()
    for _ in range(3):
        recovering(bench)
        bench.step(ms=100)
    assert bench.of(world.Grant) == [world.Grant("board0", 2, spend=True)]
    assert bench.reconciler.attribution.by_board["board0"] == 1
    assert bench.reconciler.attribution.by_artifact[DIGEST] == 1


def test_a_grant_that_got_lost_is_sent_again_without_a_second_spend() -> None:
    bench = Bench(resets=1)
    bench.serve()
    recovering(bench)
    for _ in range(12):
        bench.report()
        bench.step(ms=500)
    assert [grant.spend for grant in bench.of(world.Grant)] == [True, False]
    assert bench.sent(wire.DenyReset) == []


def test_a_third_reset_in_ten_minutes_is_denied_and_granted_when_the_window_allows_it() -> None:
    bench = Bench(config=SupervisionConfig(heartbeat_timeout_ms=1_000_000))
    bench.serve()
    for generation in (1, 2, 3):
        recovering(bench, generation)
        bench.step(ms=1_000)
        bench.report(command_seq=bench.reconciler.lives["board0"].seq, wants_reset=False)
        bench.step(ms=10_000)
    assert len(bench.of(world.Grant)) == 2
    denial = bench.sent(wire.DenyReset)[0]
    assert "2 resets in ten minutes" in denial.reason
    bench.report(state="FAILED", wants_reset=False, condemned=denial.reason, command_seq=denial.seq)
    bench.step(ms=400_000)
    assert len(bench.of(world.Grant)) == 2
    bench.step(ms=200_000)
    assert [grant.spend for grant in bench.of(world.Grant)] == [True, True, True]
    assert len(bench.sent(wire.DenyReset)) == 1


def test_a_failed_load_is_tried_again_after_a_long_while_and_not_before() -> None:
    bench = Bench(config=a_config(half_open_after_s=100))
    bench.step()
    bench.report()
    bench.step()
    for _ in range(199):
        bench.report(state="FAILED", generation=1, command_seq=1, command_error="golden.jsonl was changed")
        bench.step(ms=500)
    assert len(bench.of(world.Load)) == 1
    bench.report()
    bench.step(ms=1_000)
    assert len(bench.of(world.Load)) == 2


def test_a_load_that_was_refused_is_not_repeated_at_once() -> None:
    bench = Bench()
    bench.step()
    bench.report()
    bench.step()
    for _ in range(100):
        bench.report(command_seq=bench.reconciler.lives["board0"].seq, command_error="does not fit")
        bench.step(ms=500)
    assert len(bench.of(world.Load)) == 1


@pytest.mark.parametrize("fields", [{"condemned": "rc 99", "fault": "wait_timeout"}, {"fault": "other"}])
def test_a_condemned_board_and_an_unknown_fault_are_left_to_an_operator(fields: dict[str, str]) -> None:
    bench = Bench()
    bench.serve()
    before = len(bench.of(world.Load, world.Grant, world.Send))
    for _ in range(1_000):
        bench.report(state="FAILED", **fields)
        bench.step(ms=2_000)
    assert len(bench.of(world.Load, world.Grant, world.Send)) == before


# ---------------------------------------------------------------- adoption, and the view
def test_a_living_worker_is_adopted_not_spawned_again() -> None:
    bench = Bench()
    bench.seen["board0"] = BoardSeen(pid=55)
    bench.step()
    assert bench.spawns() == 0
    bench.report(state="READY", generation=4, digest=DIGEST, alias="toy")
    bench.step()
    assert (bench.spawns(), bench.state()) == (0, "UP")
    assert [note.event for note in bench.of(world.Note)] == [history.FLEET_WORKER_ADOPTED]
    bench.exit()
    bench.step(ms=100)
    bench.step(ms=100)
    assert bench.spawns() == 1


def test_a_new_supervisor_keeps_the_view_of_workers_that_live_and_have_not_reported_yet() -> None:
    first = Bench("board0", "board1")
    first.serve("board0")
    first.report("board1", state="READY", generation=2, digest=DIGEST, alias="toy")
    first.step()
    last = first.view()
    second = Bench("board0", "board1", view=wire.FleetView(9, list(last.boards), list(last.aliases)))
    second.seen = {board: BoardSeen(pid=seen.pid) for board, seen in first.seen.items()}
    second.step()
    assert second.of(world.Publish) == []
    second.seen = dict(first.seen)
    second.step()
    assert second.of(world.Publish) == []


def test_a_worker_that_died_with_the_old_supervisor_leaves_the_view_at_once() -> None:
    first = Bench()
    first.serve()
    second = Bench(view=wire.FleetView(9, list(first.view().boards), list(first.view().aliases)))
    second.step()
    assert second.view().boards == ()
    assert second.spawns() == 1


def test_spends_of_the_old_supervisor_count_for_the_new_one() -> None:
    bench = Bench(restart_spends={"board0": [1, 2, 3, 4, 5]})
    bench.step()
    bench.exit()
    bench.step()
    assert bench.state() == "QUARANTINED"


def test_the_view_is_published_only_when_it_changes() -> None:
    bench = Bench()
    bench.serve()
    count = len(bench.of(world.Publish))
    for steps in range(20):
        bench.report(steps=steps, active=steps, tokens=steps)
        bench.step(ms=100)
    assert len(bench.of(world.Publish)) == count


def test_an_alias_keeps_its_old_artifact_while_more_ready_boards_serve_that() -> None:
    old = wire.AliasView("toy", "0" * 64, 4096, 1)
    bench = Bench("board0", "board1", "board2", view=wire.FleetView(3, [], [old]))
    for board in bench.wishes:
        bench.seen[board] = BoardSeen(pid=1)
        bench.report(board, state="READY", generation=1, digest=old.digest, alias="toy")
    bench.step()
    assert bench.view().aliases == (old,)
    bench.report("board0", digest=DIGEST)
    bench.step()
    assert bench.view().aliases == (old,)
    bench.report("board1", digest=DIGEST)
    bench.step()
    assert bench.view().aliases == (ALIAS,)


# ---------------------------------------------------------------- over a long time
def test_a_whole_history_of_crashes_keeps_the_restart_budget() -> None:
    bench = Bench(config=a_config(max_restarts=3, window_s=60, half_open_after_s=120, backoff_max_ms=5_000))
    checker = history.Checker(history.Budgets(restarts=3, restart_window_ns=60 * S))
    seen = 0
    for _ in range(2_000):
        bench.step(ms=1_000)
        if bench.seen["board0"].pid is not None:
            bench.report()
            bench.step()
            bench.exit()
        for note in bench.of(world.Note)[seen:]:
            checker.see(history.Event(note.event, bench.clock.now_ns(), board=note.board, epoch=note.epoch, data=dict(note.data)))
        seen = len(bench.of(world.Note))
    assert checker.finish() == []
    assert checker.counts[history.FLEET_WORKER_STARTED] > 8


# ---------------------------------------------------------------- another artifact, or none
GREEN = world.Placement("toy", "/packages/green", "9" * 64)


def test_a_board_that_shall_hold_another_artifact_leaves_the_view_drains_unloads_and_loads() -> None:
    bench = Bench()
    bench.serve()
    bench.wish(placement=GREEN, swap=True, drain_ms=7_000)
    for _ in range(5):
        bench.step(ms=100)
    (unload,) = bench.sent(wire.UnloadModel)
    assert (unload.generation, unload.deadline_ms) == (1, 7_000)
    assert bench.view().boards[0].draining, "routers hear of it before the worker refuses them"
    bench.report(state="DRAINING", command_seq=unload.seq)
    for _ in range(100):
        bench.step(ms=100)
        bench.report()
    assert len(bench.sent(wire.UnloadModel)) == 1
    bench.report(state="UNLOADED", generation=0, digest="", alias="")
    bench.step()
    assert bench.of(world.Load)[-1].placement == GREEN
    bench.report(state="READY", generation=2, digest=GREEN.digest, alias="toy", command_seq=bench.of(world.Load)[-1].seq)
    bench.step()
    assert not bench.view().boards[0].draining


def test_an_artifact_that_nobody_moved_stays_where_it_serves() -> None:
    bench = Bench()
    bench.serve()
    bench.wish(placement=GREEN)
    for _ in range(5):
        bench.step(ms=1_000)
    assert bench.sent(wire.UnloadModel) == [] and len(bench.of(world.Load)) == 1


@pytest.mark.parametrize("fields", [{"state": "FAILED", "generation": 2, "digest": GREEN.digest, "fault": "other"}, {"command_error": "does not fit"}])
def test_a_board_that_could_not_load_green_gets_blue_back_at_once(fields: dict[str, str]) -> None:
    bench = Bench()
    bench.wish(placement=GREEN, swap=True)
    bench.step()
    bench.report()
    bench.step()
    bench.report(command_seq=bench.of(world.Load)[-1].seq, **fields)
    bench.step(ms=100)
    assert len(bench.of(world.Load)) == 1
    bench.wish(placement=PLACEMENT)
    bench.step(ms=100)
    assert [load.placement for load in bench.of(world.Load)] == [GREEN, PLACEMENT]


@pytest.mark.parametrize("state", ["READY", "FAILED"])
def test_a_board_that_shall_hold_nothing_is_unloaded_and_stays_empty(state: str) -> None:
    bench = Bench()
    bench.serve()
    bench.report(state=state)
    bench.wish(placement=None)
    bench.step()
    assert len(bench.sent(wire.UnloadModel)) == 1
    bench.report(state="UNLOADED", generation=0, digest="", command_seq=bench.sent(wire.UnloadModel)[0].seq)
    for _ in range(10):
        bench.step(ms=10_000)
        bench.report()
    assert len(bench.of(world.Load)) == 1


def test_an_alias_that_an_operator_moved_is_not_put_to_the_vote() -> None:
    old = wire.AliasView("toy", "0" * 64, 4096, 1)
    bench = Bench("board0", "board1", view=wire.FleetView(3, [], [old]))
    bench.decided = frozenset({"toy"})
    for board in bench.wishes:
        bench.seen[board] = BoardSeen(pid=1)
        bench.report(board, state="READY", generation=1, digest=old.digest, alias="toy")
    bench.step()
    assert bench.view().aliases == (ALIAS,)


# ---------------------------------------------------------------- operators and resets
def test_an_operators_reset_needs_no_budget_and_is_done_once() -> None:
    bench = Bench(resets=0)
    bench.serve()
    bench.report(state="FAILED", condemned="resets are turned off")
    bench.wish(reset_generation=1)
    for _ in range(3):
        bench.step(ms=100)
    (grant,) = bench.of(world.Grant)
    assert grant.spend
    for _ in range(20):
        bench.report(command_seq=grant.seq, load_step="reset")
        bench.step(ms=1_000)
    assert len(bench.of(world.Grant)) == 1, "a reset that takes long is not ordered again"
    bench.report(load_step=None)
    bench.report(state="READY", generation=2, condemned=None, command_seq=grant.seq)
    bench.report(state="FAILED", condemned="again")
    for _ in range(30):
        bench.step(ms=1_000)
    assert len(bench.of(world.Grant)) == 1, "the order was for generation 1"


def test_a_board_that_comes_back_is_reset_before_anything_is_loaded() -> None:
    bench = Bench()
    bench.wish(prove=True, weight=0.1)
    bench.step()
    bench.report()
    bench.step()
    assert len(bench.of(world.Grant)) == 1 and bench.of(world.Load) == []
    bench.report(resets=1, command_seq=bench.of(world.Grant)[0].seq)
    bench.step()
    assert len(bench.of(world.Load)) == 1
    bench.report(state="READY", generation=2, digest=DIGEST, alias="toy", command_seq=bench.of(world.Load)[0].seq)
    bench.step()
    assert bench.view().boards[0].weight == 0.1


def test_while_the_breaker_is_open_boards_that_failed_wait() -> None:
    bench = Bench("board0", "board1")
    bench.serve("board0")
    bench.frozen = "2 of 2 boards went bad within 300 s"
    recovering(bench, 1)
    for _ in range(100):
        bench.step(ms=1_000)
        for board in bench.seen:
            bench.report(board)
    assert bench.of(world.Grant) == [] and bench.sent(wire.DenyReset) == []
    bench.frozen = None
    bench.step()
    assert len(bench.of(world.Grant)) == 1


def test_every_life_on_probation_has_its_reset_out_of_the_budget_and_waits_when_that_is_spent() -> None:
    bench = Bench(resets=2)
    bench.wish(prove=True, probation=True, weight=0.1)
    for life in range(2):
        bench.step(ms=11_000)
        bench.report()
        bench.step()
        assert len(bench.of(world.Grant)) == life + 1
        bench.exit(signal=9)  # before its reset was done
        bench.step()
    bench.step(ms=11_000)
    for _ in range(20):
        bench.report()
        bench.step(ms=1_000)
    assert len(bench.of(world.Grant)) == 2 and bench.of(world.Load) == [], "the third one waits"
    denied = [note for note in bench.of(world.Note) if note.event == history.FLEET_RESET_DENIED]
    assert len(denied) == 1 and bench.sent(wire.DenyReset) == []
    waiting = bench.seen["board0"]
    assert "waits for a reset" in (why(bench.reconciler.lives["board0"], waiting) or "")
    bench.clock.advance(600 * S)
    bench.report()
    bench.step()
    assert len(bench.of(world.Grant)) == 3
    bench.report(resets=1, command_seq=bench.of(world.Grant)[-1].seq)
    bench.step()
    assert len(bench.of(world.Load)) == 1


def test_a_life_that_follows_the_reset_of_its_probation_needs_none() -> None:
    bench = Bench()
    bench.wish(prove=False, probation=True, weight=0.1)
    bench.step()
    bench.report()
    bench.step()
    assert bench.of(world.Grant) == [] and len(bench.of(world.Load)) == 1


def test_where_resets_are_turned_off_a_board_proves_itself_without_one() -> None:
    bench = Bench(resets=0)
    bench.wish(prove=True, probation=True, weight=0.1)
    bench.step()
    bench.report()
    bench.step()
    assert bench.of(world.Grant) == [] and len(bench.of(world.Load)) == 1


def test_a_proof_whose_reset_failed_is_left_to_an_operator() -> None:
    bench = Bench()
    bench.wish(prove=True, probation=True)
    bench.step()
    bench.report()
    bench.step()
    for _ in range(30):
        bench.report(condemned="the reset failed (rc 18)", command_seq=bench.of(world.Grant)[0].seq)
        bench.step(ms=1_000)
    assert len(bench.of(world.Grant)) == 1 and bench.of(world.Load) == []


# ---------------------------------------------------------------- quarantine outlives the supervisor
def successor(bench: Bench, **fields: object) -> Bench:
    """A new supervisor that knows what the old one wrote down, on the same boards."""
    written = {action.board: action.aside for action in bench.of(world.SetAside)}
    asides = {board: aside for board, aside in written.items() if aside is not None}
    after = Bench(config=bench.config, asides=asides, **fields)  # type: ignore[arg-type]
    after.clock.advance_to(bench.clock.now_ns())
    after.seen = dict(bench.seen)
    return after


def test_a_new_supervisor_leaves_a_quarantined_worker_alone_until_its_time_has_come() -> None:
    config = a_config(max_restarts=2, window_s=60, half_open_after_s=700, backoff_max_ms=1_000)
    bench = Bench(config=config)
    bench.crash_until_quarantined()
    bench.step(ms=300_000)
    after = successor(bench)
    after.step()
    assert (after.state(), after.spawns()) == ("QUARANTINED", 0)
    assert after.reconciler.lives["board0"].why == bench.reconciler.lives["board0"].why
    after.step(ms=399_000)
    assert after.spawns() == 0
    after.step(ms=1_001)
    assert after.spawns() == 1
    again = successor(after)  # which finds it dead
    again.exit()
    again.step()
    again.step(ms=600_000)
    assert (again.state(), again.spawns()) == ("QUARANTINED", 0), "its one try was spent by the supervisor before"
    again.step(ms=101_000)
    assert again.spawns() == 1


def test_a_half_open_life_that_is_adopted_costs_the_long_time_again_when_it_dies_and_is_forgiven_when_it_is_stable() -> None:
    config = a_config(max_restarts=2, window_s=60, half_open_after_s=700, backoff_max_ms=1_000, stable_after_s=30)
    bench = Bench(config=config)
    bench.crash_until_quarantined()
    bench.step(ms=701_000)
    assert bench.spawns() == 4
    after = successor(bench)
    after.step()
    assert after.state() == "STARTING" and after.spawns() == 0
    dies = successor(bench)
    dies.step()
    dies.exit()
    dies.step()
    assert dies.state() == "QUARANTINED", "no budget of its own for a life that was tried once"
    after.report()
    after.step()
    seq = after.of(world.Load)[-1].seq
    after.report(state="READY", generation=1, digest=DIGEST, alias="toy", command_seq=seq)
    after.step()
    assert after.of(world.SetAside) == []
    after.report(steps=1)
    after.step(ms=31_000)
    after.report(steps=2)
    after.step()
    assert after.of(world.SetAside)[-1].aside is None


@pytest.mark.parametrize("code", [78, 70])
def test_a_worker_in_quarantine_is_tried_again_by_a_new_supervisor_when_the_configuration_was_changed(code: int) -> None:
    bench = Bench(fingerprint="old", config=a_config(max_restarts=1, half_open_after_s=20_000, backoff_max_ms=1_000))
    for _ in range(1 if code == 78 else 2):
        bench.step(ms=1_001)
        bench.exit(code=code, reason="it cannot start")
        bench.step()
    assert bench.state() == "QUARANTINED"
    same = successor(bench, fingerprint="old")
    same.step(ms=10_000_000)
    assert (same.state(), same.spawns()) == ("QUARANTINED", 0)
    changed = successor(bench, fingerprint="new")
    changed.step()
    assert (changed.state(), changed.spawns()) == ("STARTING", 1)
    assert changed.of(world.SetAside)[-1].aside is None


def test_a_stopped_worker_in_quarantine_is_forgotten_by_a_new_supervisor() -> None:
    bench = Bench(config=a_config(max_restarts=2, window_s=60, backoff_max_ms=1_000))
    bench.crash_until_quarantined()
    after = successor(bench)
    after.wish(up=False)
    after.step()
    assert after.state() == "ABSENT" and after.of(world.SetAside)[-1].aside is None
