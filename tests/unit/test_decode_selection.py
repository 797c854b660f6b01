"""Decode steps: who takes part, in which rows (scheduling §7, §8, §17.1)."""

from __future__ import annotations

import pytest
from builders_engine import a_manifest, a_profile, a_sequence

from calculet_core.batches import InactiveMode
from calculet_core.clock import MS, US, S
from calculet_core.config import BatchConfig
from calculet_core.requests import SequenceState
from calculet_core.states.request import RequestState
from calculet_worker.jobs.buffers import InputArrays
from calculet_worker.kv import KvManager
from calculet_worker.scheduling.decode import Choice, DecodeQueue, bind
from calculet_worker.scheduling.profiles import ProfileChooser, usable_profiles
from calculet_worker.scheduling.selection import POLICIES, Policy
from calculet_worker.scheduling.selection.edf import select_edf

READY = RequestState.DECODE_READY
FAR = 1_000 * S


def ready(number: int, **fields: object) -> SequenceState:
    return a_sequence(number, state=fields.pop("state", READY), last_token=number, **fields)


def a_queue(
    sizes: tuple[int, ...] = (1, 4), window_us: int = 0, share: float = 0.5, step_ns: int | None = None, sla_ms: int | None = None
) -> DecodeQueue:
    config = BatchConfig(profiles=sizes, batching_window_us=window_us, tenant_lane_share=share, token_sla_ms=sla_ms)
    return DecodeQueue(1, tuple(a_profile(size) for size in sizes), config, select_edf, lambda size: step_ns)


# ------------------------------------------------------------------------------------------------ profiles
@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, 8), (100, 8)])
def test_the_smallest_proven_profile_that_holds_all_is_used(count: int, size: int) -> None:
    assert chooser((1, 4, 8)).choose(count, 0, None).compiled_batch == size


def chooser(sizes: tuple[int, ...] = (1, 4, 8, 16), thresholds: dict[int, int] | None = None, **fields: int) -> ProfileChooser:
    config = BatchConfig(profiles=sizes, thresholds=thresholds or {}, **fields)
    return ProfileChooser(tuple(a_profile(size) for size in sizes), config)


def sizes_of(choose: ProfileChooser, counts: list[int]) -> list[int]:
    return [choose.choose(count, 0, None).compiled_batch for count in counts]


def test_thresholds_decide_from_how_many_on_a_profile_is_used() -> None:
    """The example of scheduling §8."""
    for count, size in [(1, 1), (2, 1), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (40, 16)]:
        assert sizes_of(chooser(thresholds={4: 3, 8: 6, 16: 12}), [count]) == [size]


def test_a_smaller_profile_is_taken_only_when_it_was_asked_for_several_times() -> None:
    assert sizes_of(chooser(hysteresis_steps=2), [5, 1, 1, 1, 1]) == [8, 8, 8, 1, 1]
    assert sizes_of(chooser(hysteresis_steps=2), [5, 1, 1, 5, 1, 1, 1]) == [8, 8, 8, 8, 8, 8, 1], "a full step starts the count again"
    assert sizes_of(chooser(hysteresis_steps=0), [5, 1]) == [8, 1]


def test_a_larger_profile_is_taken_at_once() -> None:
    assert sizes_of(chooser(), [1, 2, 9]) == [1, 4, 16]


def test_who_waited_long_makes_the_step_hold_all() -> None:
    choose = chooser(thresholds={4: 3, 8: 8, 16: 12}, max_ready_wait_steps=2)
    assert choose.choose(5, 20 * MS, 10 * MS).compiled_batch == 4
    assert choose.choose(5, 20 * MS + 1, 10 * MS).compiled_batch == 8
    assert chooser(thresholds={4: 3, 8: 8}, max_ready_wait_steps=2).choose(5, 1 * S, None).compiled_batch == 4, "nothing was measured yet"


def test_a_profile_that_the_manifest_lacks_is_an_error() -> None:
    with pytest.raises(KeyError, match="no profile B8"):
        usable_profiles(a_manifest(profiles=(1, 4)), (1, 8))


def test_the_configuration_can_leave_out_proven_profiles() -> None:
    assert [profile.name for profile in usable_profiles(a_manifest(profiles=(1, 4)), (4,))] == ["B4"]


# ------------------------------------------------------------------------------------------------ eligibility
@pytest.mark.parametrize("count", range(6))
def test_a_step_takes_what_is_ready_up_to_the_compiled_batch(count: int) -> None:
    queue = a_queue()
    for number in range(count):
        queue.push(ready(number))
    choice = queue.choose(0)
    assert (0 if choice is None else len(choice.sequences)) == min(count, 4)
    assert len(queue) == max(0, count - 4)


@pytest.mark.parametrize(
    "odd", [{"cancelled": True}, {"deadline_ns": 5}, {"generation": 2}, {"state": RequestState.FAILED}], ids=lambda odd: next(iter(odd))
)
def test_cancelled_expired_foreign_and_ended_sequences_are_left_out(odd: dict[str, object]) -> None:
    queue = a_queue()
    good = ready(1)
    queue.push(good)
    queue.push(ready(2, **odd))
    choice = queue.choose(5)
    assert choice is not None and choice.sequences == [good]


def test_sequences_of_equal_rank_take_turns_on_one_row() -> None:
    queue, order = a_queue(sizes=(1,)), []
    queue.push(ready(1)), queue.push(ready(2))
    for _ in range(6):
        choice = queue.choose(0)
        assert choice is not None
        seq = choice.sequences[0]
        order.append(seq.seq_id)
        seq.virtual_finish_time += 1.0
        queue.push(seq)
    assert order == [1, 2, 1, 2, 1, 2]


# ------------------------------------------------------------------------------------------------ the batching window
def test_a_step_that_is_not_full_waits_but_not_beyond_its_window() -> None:
    queue = a_queue(window_us=500)
    queue.push(ready(1, ready_since_ns=1_000 * US))
    assert queue.hold_until_ns(now_ns=1_100 * US) == 1_500 * US
    assert queue.hold_until_ns(now_ns=1_500 * US) is None, "the window is over: it goes, full or not"


def test_without_a_window_no_step_waits() -> None:
    queue = a_queue()
    queue.push(ready(1))
    assert queue.hold_until_ns(now_ns=0) is None


def test_a_full_step_does_not_wait() -> None:
    queue = a_queue(window_us=500)
    for number in range(4):
        queue.push(ready(number))
    assert queue.hold_until_ns(now_ns=0) is None


def test_the_window_ends_at_the_earliest_deadline() -> None:
    queue = a_queue(window_us=500)
    queue.push(ready(1, deadline_ns=200 * US))
    assert queue.hold_until_ns(now_ns=0) == 200 * US


def test_the_window_leaves_time_for_the_step_before_the_deadline() -> None:
    queue = a_queue(window_us=500, step_ns=150 * US)
    queue.push(ready(1, deadline_ns=400 * US))
    assert queue.hold_until_ns(now_ns=0) == 250 * US


def test_the_window_keeps_to_the_longest_time_between_tokens() -> None:
    queue = a_queue(window_us=5_000, step_ns=700 * US, sla_ms=1)
    queue.push(ready(1, ready_since_ns=0))
    assert queue.hold_until_ns(now_ns=0) == 300 * US


def test_arrivals_do_not_extend_the_window() -> None:
    queue = a_queue(window_us=500)
    queue.push(ready(1, ready_since_ns=0))
    queue.push(ready(2, ready_since_ns=400 * US))
    assert queue.hold_until_ns(now_ns=450 * US) == 500 * US


# ------------------------------------------------------------------------------------------------ selection
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_takes_everyone_when_there_is_room(policy: Policy) -> None:
    candidates = [ready(number) for number in range(4)]
    assert sorted(seq.seq_id for seq in policy(candidates, 4, 0.5)) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("mine", range(1, 9))
def test_under_every_policy_a_tenant_keeps_to_its_share_while_others_wait(policy: Policy, mine: int) -> None:
    candidates = [ready(number, tenant="greedy", deadline_ns=1 * S, asked=True) for number in range(8)]
    candidates += [ready(10 + number, tenant="other") for number in range(mine)]
    chosen = policy(candidates, 4, 0.5)
    assert len(chosen) == 4 and len({seq.seq_id for seq in chosen}) == 4
    assert sum(seq.tenant == "other" for seq in chosen) == min(mine, 2)


def test_an_asked_deadline_goes_before_defaulted_ones_and_earlier_before_later() -> None:
    later, default, sooner = ready(1, deadline_ns=9 * S, asked=True), ready(2, deadline_ns=1 * S), ready(3, deadline_ns=3 * S, asked=True)
    assert select_edf([later, default, sooner], 2, 1.0) == [sooner, later]


def test_deadlines_closer_than_the_quantum_are_equal_and_virtual_finish_decides() -> None:
    hasty = ready(1, deadline_ns=1 * S + 1 * MS, asked=True, virtual_finish_time=9.0)
    fair = ready(2, deadline_ns=1 * S + 90 * MS, asked=True, virtual_finish_time=2.0)
    assert select_edf([hasty, fair], 1, 1.0) == [fair]


def test_defaulted_deadlines_are_equal_whenever_they_end() -> None:
    first = ready(1, deadline_ns=1 * S, virtual_finish_time=5.0)
    second = ready(2, deadline_ns=500 * S, virtual_finish_time=4.0)
    assert select_edf([first, second], 1, 1.0) == [second]


def test_a_share_below_one_lane_is_one_lane() -> None:
    assert len(select_edf([ready(number) for number in range(3)], 1, 0.1)) == 1


# ------------------------------------------------------------------------------------------------ rows
def bound(count: int, mode: InactiveMode) -> tuple[object, list[SequenceState]]:
    kv, sequences = KvManager(1, 8, 64, 512, 8), []
    for number in range(count):
        lane = kv.reserve(number, 20)
        assert lane is not None
        kv.submit(lane, 4)
        kv.commit(lane)
        sequences.append(ready(number, hardware_lane=lane.hardware_lane, kv_length=4))
    return bind(Choice(a_profile(4, mode=mode), sequences), kv, InputArrays(4)), sequences


@pytest.mark.parametrize("mode", [InactiveMode.MASK_TENSOR, InactiveMode.CSR])
def test_idle_rows_are_marked_invalid_and_never_token_zero(mode: InactiveMode) -> None:
    batch, sequences = bound(2, mode)
    assert batch.lane_valid.tolist() == [1, 1, 0, 0]
    assert batch.token_ids.tolist()[2:] == [-1, -1] and batch.lanes.tolist()[2:] == [-1, -1]
    assert batch.lanes.tolist()[:2] == [seq.hardware_lane for seq in sequences]
    assert batch.positions.tolist()[:2] == [4, 4]


def test_a_compact_profile_has_rows_for_active_sequences_alone() -> None:
    batch, sequences = bound(3, InactiveMode.COMPACT)
    assert batch.token_ids.tolist() == [seq.last_token for seq in sequences]
    assert batch.lane_valid.tolist() == [1, 1, 1] and batch.token_ids.dtype == "int32" and batch.lane_valid.dtype == "uint8"


@pytest.mark.parametrize("wrong", [{"kv_length": 3}, {"kv_length": 5}, {"seq_id": 99}])
def test_a_sequence_that_is_not_what_its_lane_holds_never_reaches_the_device(wrong: dict[str, int]) -> None:
    kv = KvManager(1, 1, 64, 64, 1)
    lane = kv.reserve(7, 5)
    assert lane is not None
    kv.submit(lane, 4)
    kv.commit(lane)
    seq = ready(7, hardware_lane=0, kv_length=4)
    for name, value in wrong.items():
        setattr(seq, name, value)
    with pytest.raises(ValueError, match="does not fit lane 0"):
        bind(Choice(a_profile(1), [seq]), kv, InputArrays(1))


def test_a_full_lane_takes_no_further_step() -> None:
    kv = KvManager(1, 1, 64, 64, 1)
    lane = kv.reserve(7, 4)
    assert lane is not None
    kv.submit(lane, 4)
    kv.commit(lane)
    with pytest.raises(ValueError):
        bind(Choice(a_profile(1), [ready(7, hardware_lane=0, kv_length=4)]), kv, InputArrays(1))


@pytest.mark.parametrize(("rows", "share", "most"), [(4, 0.3, 1), (16, 0.5, 8), (8, 0.4, 3), (8, 1.0, 8), (3, 0.5, 1)])
def test_a_share_of_lanes_is_rounded_down(rows: int, share: float, most: int) -> None:
    ready = [a_sequence(number, tenant="a" if number < 20 else f"other{number}") for number in range(40)]
    for policy in POLICIES.values():
        chosen = policy(ready, rows, share)
        assert len(chosen) == rows and sum(seq.tenant == "a" for seq in chosen) == most


def test_a_tenant_whose_requests_all_ask_for_short_deadlines_gains_no_lane() -> None:
    hurried = [a_sequence(number, tenant="hurried", asked=True, deadline_ns=5 * S) for number in range(16)]
    patient = [a_sequence(100 + number, tenant="patient") for number in range(16)]
    for policy in POLICIES.values():
        assert sum(seq.tenant == "hurried" for seq in policy(hurried + patient, 16, 0.5)) == 8
