"""The simulated board in virtual time: every dishonesty shows, times are the profile's, and a hot chip is slow."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from builders_device import ints
from builders_sim import a_sim_manifest, a_sim_package

from calculet_core.artifact import Package
from calculet_core.capacity import GIB
from calculet_core.clock import MS, US, S
from calculet_core.config import BoardConfig
from calculet_core.errors import ConfigError
from calculet_core.jobs import Completion, DeviceVersions, EngineBank, Job, JobHandle, JobKind, OutputStatus, ReturnCode
from calculet_worker.device.sim import open_sim
from calculet_worker.device.sim_board import EMPTY, SimBoard, reference_tokens
from calculet_worker.device.sim_chip import THROTTLE_C, THROTTLED_MHZ
from calculet_worker.device.sim_rule import BYTES, MARGIN_MAX, MARGIN_MIN, TokenRule, profile_of

PROMPT = [72, 101, 108, 108, 111]


class Bench:
    """A configured board and the time on its wall."""

    def __init__(self, package: Package | None = None, power_mode: str = "balanced", dram_gib: float = 32.0, **board: Any) -> None:
        self.package = package or a_sim_package(jitter=0.0)
        versions = DeviceVersions("sim", "S1", "0.7.6-sim", "1", "1", 2, power_mode)
        self.board = SimBoard(versions, int(dram_gib * GIB), **board)
        self.now_ns, self.jobs = 1 * S, 0
        assert self.board.configure(self.package, 1) is ReturnCode.OK

    def submit(self, kind: JobKind, lanes: list[int], tokens: list[int], positions: list[int], engine: EngineBank = EngineBank.AUTO, **more: Any) -> Job:
        self.jobs += 1
        profile = self.package.manifest.profile(1 if kind is JobKind.PREFILL else len(lanes))
        job = Job(self.jobs, 1, kind, profile, ints(*lanes), ints(*tokens), ints(*positions), **more)
        answer = self.board.submit(job, engine, self.now_ns)
        assert isinstance(answer, JobHandle), answer
        return job

    def collect(self) -> list[Completion]:
        """Let the time pass until something is done."""
        due_ns = self.board.next_done_ns()
        assert due_ns is not None
        self.now_ns = max(self.now_ns, due_ns)
        return self.board.collect(self.now_ns)

    def run(self, kind: JobKind, lanes: list[int], tokens: list[int], positions: list[int]) -> list[int]:
        self.submit(kind, lanes, tokens, positions)
        (done,) = self.collect()
        assert done.status is OutputStatus.DONE
        best = [int(token) for token in done.logits.argmax(axis=1)]
        self.board.give_back(done)
        return best

    def prefill(self, lane: int, tokens: list[int], start: int = 0, positions: list[int] | None = None) -> int:
        return self.run(JobKind.PREFILL, [lane], tokens, positions or list(range(start, start + len(tokens))))[0]

    def decode(self, lanes: list[int], tokens: list[int], positions: list[int]) -> list[int]:
        return self.run(JobKind.DECODE, lanes, tokens, positions)

    def step_ns(self) -> int:
        """How long a B1 step takes."""
        started = self.now_ns
        self.decode([0], [65], [0])
        self.board.release(0)
        return self.now_ns - started


def answers(bench: Bench, lane: int, token: int, length: int, count: int = 8) -> list[int]:
    """What the lane says from here on: one token could agree by chance, eight do not."""
    found = [token]
    while len(found) < count:
        found.append(bench.decode([lane], found[-1:], [length + len(found) - 1])[0])
    return found


# ------------------------------------------------------------------------------------------------ honesty
def test_an_honest_run_is_the_reference() -> None:
    bench = Bench()
    assert answers(bench, 3, bench.prefill(3, PROMPT), 5) == reference_tokens(bench.package.manifest, PROMPT, 8)
    assert bench.board.content(3)[:5] == PROMPT


def test_long_prompts_and_single_steps_follow_one_rule() -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(BYTES) for _ in range(300)]
    whole, steps = Bench(), Bench()
    expected = whole.prefill(0, prompt)
    for position, token in enumerate(prompt):
        found = steps.decode([0], [token], [position])
    assert found == [expected]


def honest(bench: Bench) -> list[int]:
    return answers(bench, 0, bench.decode([0], [bench.prefill(0, PROMPT)], [5])[0], 6)


def swapped(bench: Bench) -> list[int]:
    bench.prefill(0, PROMPT)
    other = bench.prefill(1, [1, 2, 3, 4, 5])
    return answers(bench, 0, bench.decode([0], [other], [5])[0], 6)


def repeated(bench: Bench) -> list[int]:
    token = bench.prefill(0, PROMPT)
    bench.decode([0], [token], [5])
    return answers(bench, 0, bench.decode([0], [token], [6])[0], 7)


def repeated_in_place(bench: Bench) -> list[int]:
    token = bench.prefill(0, PROMPT)
    bench.decode([0], [token], [5])
    return answers(bench, 0, bench.decode([0], [token], [5])[0], 6)


def lost(bench: Bench) -> list[int]:
    return answers(bench, 0, bench.decode([0], [bench.prefill(0, PROMPT[:4])], [4])[0], 5)


def a_hole(bench: Bench) -> list[int]:
    return answers(bench, 0, bench.decode([0], [bench.prefill(0, PROMPT)], [6])[0], 7)


def misplaced(bench: Bench) -> list[int]:
    token = bench.prefill(0, PROMPT, positions=[0, 1, 2, 4, 3])
    return answers(bench, 0, bench.decode([0], [token], [5])[0], 6)


def reused_before_release(bench: Bench) -> list[int]:
    bench.prefill(0, [9, 9, 9])
    return answers(bench, 0, bench.decode([0], [bench.prefill(0, PROMPT)], [5])[0], 6)


def reused_for_the_same_prompt(bench: Bench) -> list[int]:
    bench.prefill(0, PROMPT)
    return answers(bench, 0, bench.decode([0], [bench.prefill(0, PROMPT)], [5])[0], 6)


@pytest.mark.parametrize(
    "dishonest", [swapped, repeated, repeated_in_place, lost, a_hole, misplaced, reused_before_release, reused_for_the_same_prompt]
)
def test_dishonest_content_gives_other_tokens(dishonest: Any) -> None:
    assert dishonest(Bench()) != honest(Bench())
    assert honest(Bench()) == reference_tokens(Bench().package.manifest, PROMPT, 9)[1:]


def test_a_hole_is_kept_as_a_hole() -> None:
    bench = Bench()
    bench.prefill(0, PROMPT)
    bench.decode([0], [65], [6])
    assert bench.board.content(0) == [*PROMPT, EMPTY, 65]


def test_another_image_says_other_tokens() -> None:
    manifests = [a_sim_package(image_sha256=digit * 64).manifest for digit in "12"]
    assert reference_tokens(manifests[0], PROMPT, 16) != reference_tokens(manifests[1], PROMPT, 16)


def test_inactive_rows_write_nothing_and_may_hold_anything() -> None:
    bench = Bench()
    bench.prefill(2, PROMPT)
    lanes, valid = [2, -1, 0, 99], np.array([1, 0, 0, 0], np.uint8)
    bench.submit(JobKind.DECODE, lanes, [65, -1, 66, 9999], [5, -1, 0, 9999], lane_valid=valid)
    (done,) = bench.collect()
    assert int(done.logits[0].argmax()) == reference_tokens(bench.package.manifest, [*PROMPT, 65], 1)[0]
    assert [bench.board.content(lane) for lane in (0, 1, 2)] == [[], [], [*PROMPT, 65]]


def test_input_that_changes_while_its_job_is_in_flight_is_a_ccu_exception() -> None:
    bench = Bench()
    job = bench.submit(JobKind.PREFILL, [0], PROMPT, [0, 1, 2, 3, 4])
    job.token_ids[2] = 7
    (done,) = bench.collect()
    assert (done.status, done.logits) == (OutputStatus.CCU_EXCEPTION, None)
    bench.board.give_back(done)


def test_a_late_reader_of_a_buffer_sees_other_numbers() -> None:
    bench = Bench()
    bench.submit(JobKind.PREFILL, [0], PROMPT, [0, 1, 2, 3, 4])
    (done,) = bench.collect()
    before = np.array(done.logits)
    bench.board.give_back(done)
    assert not np.array_equal(done.logits, before)


# ------------------------------------------------------------------------------------------------ the rule
def test_the_derived_token_leads_by_the_rules_margin() -> None:
    bench = Bench()
    bench.submit(JobKind.PREFILL, [0], PROMPT, [0, 1, 2, 3, 4])
    (done,) = bench.collect()
    second, best = np.partition(done.logits[0], -2)[-2:]
    rule = TokenRule(bench.package.manifest, profile_of(bench.package.manifest))
    token, margin = rule.next_token(rule.traces(ints(*PROMPT), 0), PROMPT[-1])
    assert MARGIN_MIN <= margin <= MARGIN_MAX
    assert (int(done.logits[0].argmax()), float(best - second)) == (token, pytest.approx(margin, abs=1e-5))


def test_answers_are_readable() -> None:
    text = bytes(reference_tokens(a_sim_package().manifest, list(b"Why is the sky blue?"), 400)).decode()
    assert text.isascii() and all(letter.isalpha() or letter in " ,." for letter in text)
    assert 4 < len(text) / len(text.split()) < 20


def test_eos_comes_as_often_as_the_profile_says() -> None:
    tokens = reference_tokens(a_sim_package(eos_per_token=0.05).manifest, PROMPT, 4000)
    assert 0.035 < tokens.count(257) / len(tokens) < 0.065
    assert 257 not in reference_tokens(a_sim_package().manifest, PROMPT, 4000)


# ------------------------------------------------------------------------------------------------ time
def test_a_step_takes_what_the_profile_says() -> None:
    package = a_sim_package(
        decode_ns={"1": 15 * MS, "8": 18 * MS}, decode_context_ns=1000.0, prefill_base_ns=2 * MS, prefill_token_ns=400 * US,
        h2d_ns=60 * US, d2h_ns=90 * US, jitter=0.0,
    )  # fmt: skip
    bench = Bench(package)
    started = bench.now_ns
    bench.prefill(0, [65] * 10)
    assert bench.now_ns - started == 150 * US + 2 * MS + 4 * MS
    started = bench.now_ns
    bench.submit(JobKind.DECODE, [0], [65], [10])
    (done,) = bench.collect()
    assert bench.now_ns - started == 150 * US + 15 * MS + 10 * US
    assert (done.timings.h2d_ns, done.timings.wait_ns, done.timings.d2h_ns) == (60 * US, 15 * MS + 10 * US, 90 * US)
    started = bench.now_ns
    bench.submit(JobKind.DECODE, [0, 1, 2, 3], [65] * 4, [11, 0, 0, 0], lane_valid=np.ones(4, np.uint8))
    bench.collect()
    assert bench.now_ns - started == 150 * US + 18 * MS + 11 * US, "B4 is not stated: it takes B8's"


def test_a_step_of_no_time_is_done_at_once() -> None:
    bench = Bench(a_sim_package(decode_ns={"8": 0}, prefill_token_ns=0, jitter=0.0))
    started = bench.now_ns
    assert [bench.prefill(0, PROMPT)] == reference_tokens(bench.package.manifest, PROMPT, 1)
    assert bench.now_ns == started


def test_jitter_stays_in_its_share_and_repeats_with_the_seed() -> None:
    package = a_sim_package(decode_ns={"8": 10 * MS}, jitter=0.1)

    def steps(seed: int) -> list[int]:
        bench = Bench(package, seed=seed)
        return [bench.step_ns() for _ in range(200)]

    found = steps(1)
    assert 9 * MS <= min(found) < 9.3 * MS and 10.7 * MS < max(found) <= 11 * MS
    assert steps(1) == found != steps(2)


@pytest.mark.parametrize(("overlap", "together_ms"), [(0.0, 20), (0.5, 15), (1.0, 10)])
def test_two_engines_overlap_as_much_as_the_profile_says(overlap: float, together_ms: int) -> None:
    bench = Bench(a_sim_package(decode_ns={"8": 10 * MS}, jitter=0.0, overlap=overlap))
    started = bench.now_ns
    bench.submit(JobKind.DECODE, [0], [65], [0], EngineBank.PING)
    bench.submit(JobKind.DECODE, [1], [66], [0], EngineBank.PONG)
    done: list[Completion] = []
    while len(done) < 2:
        done += bench.collect()
    assert bench.now_ns - started == together_ms * MS
    assert bench.board.limits().overlap == (overlap > 0)


def test_two_jobs_of_one_engine_never_overlap() -> None:
    bench = Bench(a_sim_package(decode_ns={"8": 10 * MS}, jitter=0.0, overlap=1.0))
    started = bench.now_ns
    for lane in (0, 1):
        bench.submit(JobKind.DECODE, [lane], [65], [0], EngineBank.PING)
    assert len(bench.collect()) == 1
    bench.collect()
    assert bench.now_ns - started == 20 * MS


def test_auto_takes_the_engine_that_is_free_first() -> None:
    bench = Bench(a_sim_package(jitter=0.0))
    for lane in (0, 1):
        bench.submit(JobKind.DECODE, [lane], [65], [0])
    engines = [done.engine for done in (*bench.collect(), *bench.collect())]
    assert sorted(engines) == [EngineBank.PING, EngineBank.PONG]


# ------------------------------------------------------------------------------------------------ warmth
def work(bench: Bench, seconds: float) -> None:
    end_ns = bench.now_ns + int(seconds * S)
    while bench.now_ns < end_ns:
        bench.step_ns()


def test_an_idle_board_is_cool_and_a_busy_one_warms_up() -> None:
    bench = Bench(a_sim_package(decode_ns={"8": 100 * MS}, jitter=0.0))
    idle = bench.board.telemetry(bench.now_ns)
    work(bench, 300)
    busy = bench.board.telemetry(bench.now_ns)
    for before, after in zip(idle, busy, strict=True):
        assert after.temperature_c > before.temperature_c + 20 and after.power_w > before.power_w + 15  # type: ignore[operator]
        assert not after.throttled
    assert busy[1].temperature_c > busy[0].temperature_c, "the second chip gets warmer air"  # type: ignore[operator]
    bench.now_ns += 600 * S
    cool = bench.board.telemetry(bench.now_ns)
    assert cool[0].temperature_c == pytest.approx(idle[0].temperature_c, abs=1)


def test_a_hot_chip_throttles_and_steps_take_longer_until_it_has_cooled() -> None:
    bench = Bench(a_sim_package(decode_ns={"8": 100 * MS}, jitter=0.0), ambient_c=60.0)
    assert bench.step_ns() == 100 * MS
    while not bench.board.telemetry(bench.now_ns)[1].throttled:
        bench.step_ns()
        assert bench.now_ns < 1000 * S
    hot = bench.board.telemetry(bench.now_ns)[1]
    assert hot.temperature_c >= THROTTLE_C and hot.frequency_mhz == THROTTLED_MHZ  # type: ignore[operator]
    assert bench.step_ns() == pytest.approx(100 * MS * 1000 / THROTTLED_MHZ, abs=1)
    bench.now_ns += 300 * S
    bench.board.telemetry(bench.now_ns)
    assert bench.step_ns() == 100 * MS


def test_eco_mode_is_slower_and_performance_mode_faster() -> None:
    package = a_sim_package(decode_ns={"8": 12 * MS}, jitter=0.0)
    assert [Bench(package, mode).step_ns() for mode in ("eco", "balanced", "performance")] == [15 * MS, 12 * MS, 10 * MS]


# ------------------------------------------------------------------------------------------------ what fits
def test_an_artifact_that_does_not_fit_the_dram_is_refused() -> None:
    board = SimBoard(DeviceVersions("sim", chips=2), 1 << 19)
    assert board.configure(a_sim_package(), 1) is ReturnCode.OTHER


def test_memory_is_the_reservation_shared_by_the_chips() -> None:
    bench = Bench()
    reserved = bench.package.manifest.capacity.reserved_bytes
    assert [chip.memory_used_bytes for chip in bench.board.telemetry(bench.now_ns)] == [reserved // 2] * 2
    assert sum(chip.memory_total_bytes or 0 for chip in bench.board.telemetry(bench.now_ns)) == 32 * GIB
    bench.board.reset()
    assert bench.board.telemetry(bench.now_ns)[0].memory_used_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_ns": {"4": 1}}, "backend_options.decode_ns: no step time for B8"),
        ({"speed": 3}, "backend_options: Object contains unknown field `speed`"),
        ({"overlap": 1.5}, "backend_options.overlap: Expected `float` <= 1.0"),
        ({"decode_ns": {"8": -1}}, r"backend_options.decode_ns\[...\]: Expected `int` >= 0"),
    ],
)
def test_a_wrong_timing_profile_names_its_path(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_of(a_sim_manifest(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "red"}, r"board b: \$\.options: Object contains unknown field `colour`"),
        ({"power_mode": "warp"}, r"board b: \$\.options\.power_mode: Invalid enum value 'warp'"),
        ({"chips": 0}, r"board b: \$\.options\.chips: Expected `int` >= 1"),
    ],
)
def test_wrong_board_options_name_their_path(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sim(BoardConfig(name="b", device="sim", options=options))
