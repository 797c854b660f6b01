"""The CPU board on the real library: the same bits whatever runs beside, honest lanes, and refusals before the library sees them."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from builders_smollm2 import Driver, needs_engine, smollm2_package

from calculet_core.config import BoardConfig
from calculet_core.errors import ConfigError
from calculet_core.jobs import JobKind, ReturnCode
from calculet_worker.commands.recipe_smollm2 import MICRO_BATCH
from calculet_worker.device.libllama import ThreadPool, bridged
from calculet_worker.device.llamacpp import open_llamacpp

pytestmark = [pytest.mark.engine, needs_engine]
LANES = 8


@pytest.fixture(scope="module")
def board() -> Iterator[Driver]:
    driver = Driver(smollm2_package(LANES, 1024))
    yield driver
    driver.device.close()


@pytest.fixture(autouse=True)
def _every_lane_is_free(request: pytest.FixtureRequest) -> None:
    if "board" in request.fixturenames:
        request.getfixturevalue("board").release(*range(LANES))


def a_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40_000, length).tolist()


def logits_of(board: Driver, prompts: dict[int, list[int]], steps: int = 3) -> dict[int, np.ndarray]:
    """Prefill the lanes in the order given and decode them together; lane -> float32 [steps + 1, vocabulary]."""
    rows = {lane: [board.prefill(lane, prompt)] for lane, prompt in prompts.items()}
    for _ in range(steps):
        for lane, row in board.decode({lane: int(rows[lane][-1].argmax()) for lane in prompts}).items():
            rows[lane].append(row)
    board.release(*prompts)
    return {lane: np.array(found) for lane, found in rows.items()}


@pytest.mark.parametrize("length", [40, 70])
def test_logits_are_the_same_in_every_batch_lane_and_order(board: Driver, length: int) -> None:
    prompt = a_prompt(length)
    alone = logits_of(board, {0: prompt})[0]
    neighbours = {lane: a_prompt(10 + 9 * lane, seed=lane) for lane in range(LANES)}
    for lanes in ([4, 3], [0, 2, 7], list(range(LANES))):
        mine = lanes[len(lanes) // 2]
        together = logits_of(board, {lane: prompt if lane == mine else neighbours[lane] for lane in lanes})
        assert np.array_equal(together[mine], alone), f"lanes {lanes}, mine {mine}"


def test_a_lane_of_more_than_512_tokens_gives_the_same_logits_alone_and_beside_another(board: Driver) -> None:
    """The library as it comes has another flash attention for one long sequence; `engine_options.cmake` takes it out."""
    prompt = a_prompt(515)
    alone = logits_of(board, {5: prompt}, steps=2)[5]
    assert np.array_equal(logits_of(board, {6: a_prompt(10), 5: prompt}, steps=2)[5], alone)


@pytest.mark.parametrize("length", [65, 100, 200])
def test_a_prompt_cut_at_multiples_of_the_micro_batch_is_the_whole_prompt(board: Driver, length: int) -> None:
    prompt = a_prompt(length)
    whole = board.prefill(1, prompt)
    for cuts in ((MICRO_BATCH,), tuple(range(MICRO_BATCH, length, MICRO_BATCH)), ((length - 1) // MICRO_BATCH * MICRO_BATCH,)):
        board.release(1)
        assert np.array_equal(board.prefill(1, prompt, cuts), whole), f"cut at {cuts}"


def test_a_bridging_lane_keeps_its_own_content(board: Driver) -> None:
    alone = logits_of(board, {1: a_prompt(50, seed=1)})[1]
    first = {1: board.prefill(1, a_prompt(50, seed=1))}
    for lane in (0, 2):
        board.prefill(lane, a_prompt(20, seed=lane))
    assert bridged([0, 2], [True] * LANES) == [0, 1, 2]
    for token in (11, 12, 13):
        board.decode({0: token, 2: token})
    rows = [first[1]]
    for _ in range(3):
        rows.append(board.decode({1: int(rows[-1].argmax())})[1])
    assert np.array_equal(np.array(rows), alone)


def test_a_released_lane_shows_nothing_of_what_it_held(board: Driver) -> None:
    fresh = board.prefill(3, a_prompt(40))
    board.release(3)
    board.prefill(3, a_prompt(90, seed=9))
    board.decode({3: 5})
    board.release(3)
    assert np.array_equal(board.prefill(3, a_prompt(40)), fresh)


def test_release_while_another_lane_computes_waits_for_nobody_and_mixes_nothing(board: Driver) -> None:
    fresh = board.prefill(2, a_prompt(40))
    board.prefill(1, a_prompt(70, seed=3))
    job = board.job(JobKind.PREFILL, [4], a_prompt(200, seed=4), list(range(200)))
    assert not isinstance(board.device.submit(job), ReturnCode)
    done: list[object] = []
    device_thread = threading.Thread(target=lambda: done.append(board.device.wait_any(60_000_000_000)))
    device_thread.start()
    assert board.device.release(4) is ReturnCode.DEVICE_BUSY
    board.release(1, 2)
    device_thread.join()
    board.device.give_back(done[0])  # type: ignore[arg-type]
    assert np.array_equal(board.prefill(1, a_prompt(40)), fresh)


def test_a_job_that_does_not_continue_its_lane_is_refused(board: Driver) -> None:
    board.prefill(0, a_prompt(10))
    prompt = a_prompt(5)
    wrong = {
        "a gap": board.job(JobKind.DECODE, [0], [7], [11]),
        "an overwrite": board.job(JobKind.DECODE, [0], [7], [9]),
        "a prefill over content": board.job(JobKind.PREFILL, [0], prompt, list(range(5))),
        "a prefill that begins late": board.job(JobKind.PREFILL, [1], prompt, list(range(1, 6))),
        "beyond the context": board.job(JobKind.PREFILL, [1], a_prompt(1025), list(range(1025))),
        "a lane twice": board.job(JobKind.DECODE, [0, 0], [7, 7], [10, 10]),
        "no such lane": board.job(JobKind.DECODE, [LANES], [7], [0]),
        "a token outside the vocabulary": board.job(JobKind.DECODE, [0], [49_152], [10]),
        "an idle row": board.job(JobKind.DECODE, [0], [7], [10], lane_valid=np.zeros(1, np.uint8)),
        "another generation": msgspec.structs.replace(board.job(JobKind.DECODE, [0], [7], [10]), generation=2),
    }
    for reason, job in wrong.items():
        assert board.device.submit(job) is ReturnCode.INVALID_SHAPE, reason
    job = board.job(JobKind.DECODE, [0], [7], [10], token_ids=np.array([7], np.int64))
    assert board.device.submit(job) is ReturnCode.INVALID_DTYPE
    assert board.device.counters().pending == 0


def test_logits_are_a_view_and_nothing_is_computed_over_them_while_they_are_leased(board: Driver) -> None:
    done = board.run(board.job(JobKind.PREFILL, [0], a_prompt(10), list(range(10))))
    before = done.logits.copy()
    assert not done.logits.flags.owndata and not done.logits.flags.writeable
    assert board.device.submit(board.job(JobKind.PREFILL, [1], a_prompt(10), list(range(10)))) is ReturnCode.DEVICE_BUSY
    assert np.array_equal(done.logits, before)
    board.device.give_back(done)
    with pytest.raises(ValueError, match="given back before"):
        board.device.give_back(done)


def test_inspection_is_what_the_manifest_says(board: Driver) -> None:
    found, manifest = board.device.inspect(), board.package.manifest
    assert (found.profiles, found.lanes, found.context) == (manifest.profiles, manifest.lanes, manifest.context)
    assert found.vocab_size == manifest.tokenizer.vocab_size


def test_after_a_reset_the_board_starts_again_and_a_reader_keeps_its_logits() -> None:
    board = Driver(smollm2_package(LANES, 1024))
    first = board.prefill(0, a_prompt(20))
    leased = board.run(board.job(JobKind.DECODE, [0], [5], [20]))
    seen = leased.logits.copy()
    assert board.device.reset_configuration() is ReturnCode.DEVICE_BUSY
    assert board.device.reset() is ReturnCode.OK
    assert board.device.submit(board.job(JobKind.DECODE, [0], [5], [21])) is ReturnCode.DEVICE_UNAVAILABLE
    assert board.device.configure(board.package, generation=1) is ReturnCode.OK
    assert board.device.configure(board.package, generation=1) is ReturnCode.DEVICE_BUSY
    assert np.array_equal(board.prefill(0, a_prompt(20)), first)
    assert np.array_equal(leased.logits, seen)
    board.device.give_back(leased)
    assert board.device.counters().resets == 1
    board.device.close()
    board.device.close()


def test_waiting_without_a_job_times_out(board: Driver) -> None:
    assert board.device.wait_any(1_000_000) is ReturnCode.TIMEOUT


def test_an_image_that_is_none_is_refused_and_the_device_stays_usable() -> None:
    package = smollm2_package(LANES, 1024)
    broken = dataclasses.replace(package, manifest=msgspec.structs.replace(package.manifest, image="tokenizer.json"))
    device = open_llamacpp(BoardConfig(name="cpu0", device="llamacpp"))
    assert device.configure(broken, generation=1) is ReturnCode.INVALID_SHAPE
    assert device.configure(package, generation=1) is ReturnCode.OK
    device.close()


@pytest.mark.parametrize(("options", "path"), [({"thread": 2}, "$.options"), ({"threads": 0}, "$.options.threads")])
def test_wrong_options_name_their_path(options: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_llamacpp(BoardConfig(name="cpu0", device="llamacpp", options=options))
    assert "board cpu0" in str(caught.value) and path in str(caught.value)


def thread_ids() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_the_threads_that_compute_live_from_one_job_to_the_next_and_end_with_the_configuration() -> None:
    before = thread_ids()
    board = Driver(smollm2_package(LANES, 1024), threads=2)
    board.prefill(0, a_prompt(10))
    computing = thread_ids() - before
    board.decode({0: 7})
    assert computing & thread_ids(), "each job started threads of its own"
    assert board.device.reset_configuration() is ReturnCode.OK
    deadline = time.monotonic() + 60
    while computing & thread_ids():
        assert time.monotonic() < deadline, "a thread of a configuration that is gone lives on"
        time.sleep(0.01)
    board.device.close()


def test_a_thread_pool_that_is_not_as_it_was_known_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadPool, "POLL_AT", 528)
    board = Driver(smollm2_package(LANES, 1024), threads=2)
    assert "not as it was known" in caplog.text
    assert len(board.prefill(0, a_prompt(10))) == board.device.inspect().vocab_size
    board.device.close()
