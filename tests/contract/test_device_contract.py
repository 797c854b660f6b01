"""What every board does (calculet_worker/device/base.py), over every backend. A backend that is missing here is skipped by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from builders_device import BACKENDS, LIMIT_NS, Backend, Board, a_prompt, ints

from calculet_core.clock import MS
from calculet_core.jobs import Completion, EngineBank, Job, JobHandle, ReturnCode


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture
def bare(backend: Backend) -> Iterator[Board]:
    """Opened, not configured."""
    board = Board(backend.open(), backend.package())
    yield board
    board.device.close()


@pytest.fixture
def board(bare: Board) -> Board:
    return bare.configure()


# ------------------------------------------------------------------------------------------------ configuration
def test_a_board_without_configuration_takes_no_job_and_has_no_lane(bare: Board) -> None:
    assert bare.device.submit(bare.prefill_job(0, [65])) == ReturnCode.DEVICE_UNAVAILABLE
    assert bare.device.release(0) != ReturnCode.OK
    assert not bare.device.can_allocate(1)


def test_the_inspection_is_what_the_manifest_says(board: Board) -> None:
    found, manifest = board.device.inspect(), board.package.manifest
    assert found.profiles == manifest.profiles
    assert (found.lanes, found.context, found.vocab_size) == (manifest.lanes, manifest.context, manifest.tokenizer.vocab_size)
    assert found.reserved_bytes in (None, manifest.capacity.reserved_bytes)


def test_a_second_configuration_is_refused_until_the_first_is_undone(board: Board) -> None:
    assert board.device.configure(board.package, 2) != ReturnCode.OK
    assert board.device.reset_configuration() == ReturnCode.OK
    board.generation = 2
    board.configure().prefill(0, [65, 66])


def test_a_configuration_stays_while_a_job_is_in_flight(board: Board) -> None:
    board.submit(board.prefill_job(0, a_prompt(100)))
    assert board.device.reset_configuration() == ReturnCode.DEVICE_BUSY
    board.device.give_back(board.wait())
    assert board.device.reset_configuration() == ReturnCode.OK


def test_the_limits_allow_at_least_one_job_and_its_output(board: Board) -> None:
    limits = board.device.limits()
    assert limits.output_buffers >= limits.max_inflight >= 1
    assert limits.max_inflight > 1 or not limits.overlap


# ------------------------------------------------------------------------------------------------ content
def test_a_prompt_and_its_steps_give_the_reference_tokens(backend: Backend, board: Board) -> None:
    for lane, length in ((0, 1), (3, 15), (1, 16), (2, 17), (7, 130)):
        prompt = a_prompt(length, seed=length)
        answer = board.generate(lane, prompt, 6)
        board.release(lane)
        expected = backend.reference(prompt, 6) if backend.reference else board.generate(4, prompt, 6)
        assert answer == expected
        board.device.release(4)


def test_sequences_of_mixed_lengths_do_not_disturb_each_other(board: Board) -> None:
    prompts = {lane: a_prompt(3 + 7 * lane, seed=lane) for lane in range(7)}
    alone = {}
    for lane, prompt in prompts.items():
        alone[lane] = board.generate(lane, prompt, 4)
        board.release(lane)
    answers = {lane: [board.prefill(lane, prompt)] for lane, prompt in prompts.items()}
    for step in range(3):
        order = list(prompts) if step % 2 else list(reversed(prompts))
        for lane, token in board.decode({lane: answers[lane][-1] for lane in order}).items():
            answers[lane].append(token)
    assert answers == alone


def test_rows_without_a_sequence_write_nothing(board: Board) -> None:
    alone = board.generate(0, a_prompt(20), 6)
    board.release(0)
    first = board.prefill(0, a_prompt(20))
    busy = board.prefill(5, a_prompt(9, seed=5))
    for _ in range(3):
        busy = board.decode({5: busy}, batch=8)[5]
    answer = [first]
    while len(answer) < 6:
        answer.append(board.decode({0: answer[-1]}, batch=8)[0])
    assert answer == alone


def test_a_prompt_in_pieces_is_the_whole_prompt(board: Board) -> None:
    proof = board.package.manifest.abilities.get("incremental_prefill")
    cut = proof.granularity if proof and proof.granularity else 50
    whole = board.prefill(0, a_prompt(2 * cut + 5))
    board.release(0)
    assert board.prefill(0, a_prompt(2 * cut + 5), (cut, 2 * cut)) == whole


def test_a_released_lane_is_as_good_as_new(board: Board) -> None:
    fresh = board.generate(2, a_prompt(30), 4)
    board.release(2)
    board.generate(2, a_prompt(60, seed=9), 3)
    board.release(2)
    assert board.generate(2, a_prompt(30), 4) == fresh


# ------------------------------------------------------------------------------------------------ lanes
def test_can_allocate_counts_empty_lanes(board: Board) -> None:
    lanes = board.package.manifest.lanes
    assert board.device.can_allocate(lanes) and not board.device.can_allocate(lanes + 1)
    board.prefill(3, [65])
    assert board.device.can_allocate(lanes - 1) and not board.device.can_allocate(lanes)
    board.release(3)
    assert board.device.can_allocate(lanes)


def test_a_lane_of_a_job_in_flight_is_not_released(board: Board) -> None:
    board.submit(board.prefill_job(6, a_prompt(100)))
    assert board.device.release(6) == ReturnCode.DEVICE_BUSY
    board.release(5)
    board.device.give_back(board.wait())
    board.release(6)


@pytest.mark.parametrize("lane", [-1, 8])
def test_a_lane_that_is_not_there_is_not_released(board: Board, lane: int) -> None:
    assert board.device.release(lane) not in (ReturnCode.OK, ReturnCode.DEVICE_BUSY)


# ------------------------------------------------------------------------------------------------ refusals
def wrong_jobs(board: Board) -> dict[str, tuple[Job, ReturnCode]]:
    lanes, context = board.package.manifest.lanes, board.package.manifest.context
    prompt, shape, dtype = [65, 66, 67], ReturnCode.INVALID_SHAPE, ReturnCode.INVALID_DTYPE
    vocabulary = board.package.manifest.tokenizer.vocab_size
    other = msgspec.structs.replace
    unknown = type(board.package.manifest.profile(1))(
        **{name: getattr(board.package.manifest.profile(1), name) for name in board.package.manifest.profile(1).__struct_fields__}
        | {"compiled_batch": 3}
    )
    return {
        "no such lane": (board.prefill_job(lanes, prompt), shape),
        "a negative lane": (board.prefill_job(-1, prompt), shape),
        "a token outside the vocabulary": (board.prefill_job(0, [vocabulary]), shape),
        "a negative token": (board.prefill_job(0, [-1]), shape),
        "a position beyond the context": (board.prefill_job(0, a_prompt(context + 1)), shape),
        "no token": (board.prefill_job(0, []), shape),
        "two lanes in a prefill": (board.prefill_job(0, prompt, lanes=ints(0, 1)), shape),
        "fewer positions than tokens": (board.prefill_job(0, prompt, positions=ints(0, 1)), shape),
        "a lane twice": (board.decode_job({0: 65, 1: 66}, lanes=np.resize(ints(0), len(board.decode_job({0: 65, 1: 66}).lanes))), shape),
        "fewer lanes than tokens": (board.decode_job({0: 65, 1: 66}, lanes=ints(0)), shape),
        "a profile that is not there": (other(board.decode_job({0: 65}), profile=unknown), shape),
        "int64 tokens": (board.prefill_job(0, prompt, token_ids=np.array(prompt, np.int64)), dtype),
        "int64 lanes": (board.prefill_job(0, prompt, lanes=np.array([0], np.int64)), dtype),
        "float positions": (board.prefill_job(0, prompt, positions=np.arange(3, dtype=np.float32)), dtype),
        "a list instead of an array": (board.prefill_job(0, prompt, token_ids=prompt), dtype),
    }


def test_jobs_that_do_not_fit_are_refused_and_leave_no_trace(board: Board) -> None:
    before = board.device.counters()
    for what, (job, code) in wrong_jobs(board).items():
        assert board.device.submit(job) == code, what
    assert board.device.counters() == before
    assert board.device.can_allocate(board.package.manifest.lanes)


def test_a_job_of_another_generation_is_refused(board: Board) -> None:
    for generation in (0, 2):
        job = msgspec.structs.replace(board.prefill_job(0, [65]), generation=generation)
        answer = board.device.submit(job)
        assert isinstance(answer, ReturnCode) and answer not in (ReturnCode.OK, ReturnCode.DEVICE_BUSY)
    assert board.device.counters().pending == 0


def test_a_full_board_is_busy_and_then_takes_the_job(board: Board) -> None:
    limit = board.device.limits().max_inflight
    for lane in range(limit):
        board.submit(board.prefill_job(lane, a_prompt(150)))
    job = board.prefill_job(limit, [65])
    assert board.device.submit(job) == ReturnCode.DEVICE_BUSY
    assert board.device.counters().pending == limit
    for _ in range(limit):
        board.device.give_back(board.wait())
    board.run(job)


def test_a_board_without_a_free_output_buffer_is_busy(board: Board) -> None:
    leased = []
    for lane in range(board.device.limits().output_buffers):
        board.submit(board.prefill_job(lane, [65 + lane]))
        leased.append(board.wait())
    assert len({done.buffer_id for done in leased}) == len(leased)
    assert board.device.counters().left == len(leased)
    job = board.prefill_job(len(leased), [65])
    assert board.device.submit(job) == ReturnCode.DEVICE_BUSY
    board.device.give_back(leased.pop())
    board.run(job)
    for done in leased:
        board.device.give_back(done)


# ------------------------------------------------------------------------------------------------ completions
def test_logits_are_finite_and_cannot_be_written(board: Board) -> None:
    board.prefill(0, [65])
    board.submit(board.decode_job({0: 66}))
    done = board.wait()
    assert done.logits.dtype == np.float32 and done.logits.shape[1] == board.package.manifest.tokenizer.vocab_size
    assert np.isfinite(done.logits).all()
    with pytest.raises(ValueError, match="read-only"):
        done.logits[0, 0] = 0.0
    board.device.give_back(done)


def test_an_output_is_given_back_once(board: Board) -> None:
    board.submit(board.prefill_job(0, [65]))
    done = board.wait()
    board.device.give_back(done)
    with pytest.raises(ValueError, match="given back before"):
        board.device.give_back(done)


def test_a_leased_output_keeps_its_numbers_while_others_run(board: Board) -> None:
    if board.device.limits().output_buffers == 1:
        pytest.skip("one output buffer: nothing runs while it is leased")
    board.submit(board.prefill_job(0, a_prompt(10)))
    kept = board.wait()
    numbers = np.array(kept.logits)
    for lane in range(1, 5):
        board.prefill(lane, a_prompt(10, seed=lane))
    assert np.array_equal(kept.logits, numbers)
    board.device.give_back(kept)


def test_completions_out_of_order_carry_their_own_job(board: Board) -> None:
    if not board.device.limits().overlap:
        pytest.skip("this board computes one job after the other")
    token = board.prefill(0, a_prompt(20))
    expected = board.decode({0: token})[0]
    board.release(0)
    slow_alone = board.prefill(1, a_prompt(400, seed=1))
    board.release(1)
    board.prefill(0, a_prompt(20))
    slow, quick = board.prefill_job(1, a_prompt(400, seed=1)), board.decode_job({0: token})
    board.submit(slow, EngineBank.PING)
    board.submit(quick, EngineBank.PONG)
    first, second = board.wait(), board.wait()
    assert (first.job_id, first.engine) == (quick.job_id, EngineBank.PONG)
    assert (second.job_id, second.engine) == (slow.job_id, EngineBank.PING)
    assert (int(first.logits[0].argmax()), int(second.logits[0].argmax())) == (expected, slow_alone)
    for done in (second, first):
        board.device.give_back(done)


def test_waiting_for_nothing_takes_its_time_and_ends(board: Board) -> None:
    started = time.monotonic_ns()
    assert board.device.wait_any(5 * MS) == ReturnCode.TIMEOUT
    assert time.monotonic_ns() - started >= 5 * MS


def test_a_waiting_thread_sees_a_job_that_comes_later(board: Board) -> None:
    found: list[Completion | ReturnCode] = []
    thread = threading.Thread(target=lambda: found.append(board.device.wait_any(LIMIT_NS)))
    thread.start()
    job = board.prefill_job(0, [65, 66])
    assert isinstance(board.device.submit(job), JobHandle)
    thread.join()
    assert isinstance(found[0], Completion) and found[0].job_id == job.job_id
    board.device.give_back(found[0])


# ------------------------------------------------------------------------------------------------ reset, counters, telemetry
def test_a_reset_loses_jobs_lanes_and_configuration(board: Board) -> None:
    fresh = board.generate(0, a_prompt(12), 3)
    board.submit(board.prefill_job(1, a_prompt(100)))
    resets = board.device.counters().resets
    assert board.device.reset() == ReturnCode.OK
    assert board.device.wait_any(0) == ReturnCode.TIMEOUT
    assert board.device.submit(board.prefill_job(2, [65])) == ReturnCode.DEVICE_UNAVAILABLE
    assert board.device.counters().resets == resets + 1
    assert board.device.counters().pending == 0
    board.generation, board.length = 2, {}
    board.configure()
    assert board.device.can_allocate(board.package.manifest.lanes)
    assert board.generate(0, a_prompt(12), 3) == fresh


def test_a_lease_outlives_a_reset(board: Board) -> None:
    board.submit(board.prefill_job(0, a_prompt(30)))
    kept = board.wait()
    numbers = np.array(kept.logits)
    assert board.device.reset() == ReturnCode.OK
    board.generation = 2
    board.configure().generate(0, a_prompt(40, seed=4), 3)
    assert np.array_equal(kept.logits, numbers)
    board.device.give_back(kept)
    with pytest.raises(ValueError, match="given back before"):
        board.device.give_back(kept)


def test_counters_return_to_their_baseline(board: Board) -> None:
    before = board.device.counters()
    assert (before.pending, before.left) == (0, 0)
    board.generate(0, a_prompt(5), 4)
    after = board.device.counters()
    assert (after.pending, after.finished, after.left, after.resets) == (0, before.finished + 4, 0, before.resets)


def test_telemetry_tells_a_number_or_nothing(board: Board) -> None:
    chips = board.device.telemetry()
    assert chips
    for chip in chips:
        for name in ("temperature_c", "power_w", "frequency_mhz", "memory_used_bytes", "memory_total_bytes"):
            value = getattr(chip, name)
            assert value is None or (value > 0 and np.isfinite(value)), name
        assert chip.throttled in (None, True, False)


def test_a_board_says_what_it_is(backend: Backend, bare: Board) -> None:
    versions = bare.device.versions()
    assert versions.device == backend.package().manifest.backend
    assert all(value is None or value for value in (versions.serial, versions.runtime, versions.driver, versions.firmware))


def test_closing_twice_is_fine(board: Board) -> None:
    board.submit(board.prefill_job(0, a_prompt(50)))
    board.device.close()
    board.device.close()
    assert board.device.submit(board.prefill_job(1, [65])) == ReturnCode.DEVICE_UNAVAILABLE
