"""Draws: what each parameter allows, and the same tokens for the same seed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from builders_engine import a_sequence
from numpy.typing import NDArray

from calculet_core.requests import SamplingParams, StopRules
from calculet_worker.answers import Answers, Outbox
from calculet_worker.output.sampling import Sampler, row_facts

VOCABULARY = [bytes([65 + token_id]) for token_id in range(8)]
EOS = 7


def a_row(*logits: float) -> NDArray[np.float32]:
    return np.array(logits, np.float32)


def a_sampler(stop: StopRules = StopRules(), prompt: tuple[int, ...] = (), fallback_seed: int = 1, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), stop, (EOS,), np.array(prompt, np.int32), fallback_seed)  # type: ignore[arg-type]


def draws(sampler: Sampler, row: NDArray[np.float32], count: int) -> list[int]:
    vocabulary = [b"x"] * len(row)
    return [sampler.draw(row, vocabulary).token_id for _ in range(count)]


EVEN = a_row(0, 0, 0, 0, 0, 0, 0, 0)
SLOPE = a_row(*(math.log(p) for p in (0.4, 0.3, 0.15, 0.1, 0.03, 0.01, 0.007, 0.003)))


def test_greedy_takes_the_best_of_each_row_and_the_first_of_equals() -> None:
    logits = np.array([[1, 3, 2], [5, 5, 0]], np.float32)
    assert row_facts(logits).best.tolist() == [1, 0]
    assert draws(a_sampler(temperature=0.0), a_row(1, 3, 3), 3) == [1, 1, 1]


def test_rows_with_nan_or_inf_are_found_and_huge_finite_ones_are_not() -> None:
    logits = np.zeros((6, 1000), np.float32)
    logits[1, 7], logits[2, 999], logits[3, 0] = np.nan, np.inf, -np.inf
    logits[4] = 3e38
    logits[5, 3], logits[5, 4], logits[5, 5] = np.inf, np.nan, -np.inf
    assert row_facts(logits).finite.tolist() == [True, False, False, False, True, False]


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_bad_number_is_found_wherever_it_is(odd: float) -> None:
    logits = np.random.default_rng(3).standard_normal((130, 129)).astype(np.float32)
    logits[np.arange(129), np.arange(129)] = odd
    assert row_facts(logits).finite.tolist() == [False] * 129 + [True]


def test_a_greedy_sampler_says_so_and_takes_the_best_unless_it_is_banned() -> None:
    assert a_sampler(temperature=0.0).greedy
    assert not a_sampler(temperature=0.0, logprobs=0).greedy
    assert not a_sampler(temperature=0.0, frequency_penalty=1.0).greedy
    assert not a_sampler(temperature=1.0).greedy
    sampler = a_sampler(StopRules(min_tokens=2), temperature=0.0)
    assert not sampler.takes(EOS) and sampler.takes(3) and not sampler.takes(EOS) and sampler.takes(4)
    assert sampler.takes(EOS), "two tokens came before it"
    assert not a_sampler(StopRules(ignore_eos=True), temperature=0.0).takes(EOS)


@pytest.mark.parametrize("kinds", ["gggg", "gsgb", "ssss", "bbbb", "sgsg"])
def test_a_batch_of_every_kind_draws_what_each_would_alone(kinds: str) -> None:
    """g: greedy; b: greedy, and its best is banned; s: stochastic."""

    def params(kind: str) -> dict[str, Any]:
        return {"sampling": SamplingParams(temperature=1.0 if kind == "s" else 0.0, seed=5), "stop": StopRules(ignore_eos=kind == "b")}

    logits = np.random.default_rng(2).random((len(kinds), 8), np.float32)
    for row, kind in enumerate(kinds):
        logits[row, EOS] = 2.0 if kind == "b" else -1.0
    sequences = [a_sequence(number) for number in range(len(kinds))]
    answers = Answers(Outbox(), VOCABULARY, (EOS,), 1)
    for seq, kind in zip(sequences, kinds, strict=True):
        seq.request = msgspec.structs.replace(seq.request, **params(kind))
        answers.open(seq)
    for _ in range(5):
        drawn = answers.draw(sequences, logits, row_facts(logits).best)
        assert EOS not in drawn
        for row, kind in enumerate(kinds):
            if kind != "s":
                assert drawn[row] == int(logits[row, :EOS].argmax())
    alone = a_sampler(temperature=1.0, seed=5)
    together = Answers(Outbox(), VOCABULARY, (EOS,), 1)
    for seq in sequences:
        together.open(seq)
    if "s" in kinds:
        row = kinds.index("s")
        expected = draws(alone, logits[row], 5)
        assert [together.draw(sequences, logits, row_facts(logits).best)[row] for _ in range(5)] == expected


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_drawn_between() -> None:
    alone = draws(a_sampler(seed=42), SLOPE, 50)
    mine, other = a_sampler(seed=42), a_sampler(seed=43)
    among = []
    for _ in range(50):
        draws(other, EVEN, 1)
        among += draws(mine, SLOPE, 1)
    assert among == alone
    assert draws(a_sampler(seed=43), SLOPE, 50) != alone


def test_without_a_seed_the_fallback_decides_and_any_integer_is_a_seed() -> None:
    assert draws(a_sampler(fallback_seed=5), EVEN, 30) == draws(a_sampler(seed=5, fallback_seed=6), EVEN, 30)
    assert len(draws(a_sampler(seed=-1), EVEN, 3) + draws(a_sampler(seed=2**70), EVEN, 3)) == 6


def test_the_row_is_never_written_to() -> None:
    row = SLOPE.copy()
    row.setflags(write=False)
    sampler = a_sampler(temperature=0.5, top_p=0.9, top_k=3, min_p=0.01, presence_penalty=1.0, logit_bias={1: 5.0}, logprobs=2)
    draws(sampler, row, 5)
    assert (row == SLOPE).all()


def test_draws_follow_the_probabilities() -> None:
    counts = Counter(draws(a_sampler(), SLOPE, 20_000))
    for token_id, probability in enumerate((0.4, 0.3, 0.15, 0.1)):
        assert counts[token_id] / 20_000 == pytest.approx(probability, abs=0.015)


def test_draws_from_a_large_vocabulary_follow_the_probabilities_and_never_take_an_impossible_id() -> None:
    row = np.full(5_000, -np.inf, np.float32)
    row[[3, 700, 4_999]] = np.log([0.5, 0.3, 0.2])
    counts = Counter(draws(a_sampler(), row, 5_000))
    assert set(counts) == {3, 700, 4_999}
    assert counts[700] / 5_000 == pytest.approx(0.3, abs=0.03)


def test_temperature_sharpens_and_never_overflows() -> None:
    assert Counter(draws(a_sampler(temperature=0.5), SLOPE, 5_000))[0] / 5_000 == pytest.approx(0.16 / 0.2838, abs=0.03)
    assert set(draws(a_sampler(temperature=1e-40), a_row(3e38, -3e38, 0), 20)) == {0}
    assert set(draws(a_sampler(temperature=1e30), EVEN, 500)) == set(range(8))


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 100}, set(range(8))),
        ({"top_p": 0.0}, {0}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.84}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"min_p": 0.2, "top_p": 0.99, "top_k": 3}, {0, 1, 2}),
    ],
)
def test_filters_keep_exactly_the_candidates_they_name(params: dict[str, float], allowed: set[int]) -> None:
    drawn = Counter(draws(a_sampler(**params), SLOPE, 3_000))
    rare = {4, 5, 6, 7} & allowed
    assert set(drawn) <= allowed
    assert allowed - rare <= set(drawn)


def test_equal_candidates_at_the_edge_of_top_k_go_to_the_lower_ids() -> None:
    assert set(draws(a_sampler(top_k=3), EVEN, 300)) == {0, 1, 2}


def test_top_p_finds_a_nucleus_wider_than_its_first_look() -> None:
    row = np.zeros(20_000, np.float32)
    drawn = draws(a_sampler(top_p=0.5), row, 400)
    assert max(drawn) < 10_001
    assert max(drawn) > 5_000


def test_penalties_count_what_was_generated_and_only_repetition_sees_the_prompt() -> None:
    row = a_row(2.0, 1.5, 0, 0, 0, 0, 0, 0)
    assert draws(a_sampler(temperature=0.0, presence_penalty=0.6), row, 3) == [0, 1, 0]
    assert draws(a_sampler(temperature=0.0, frequency_penalty=0.3), row, 5) == [0, 0, 1, 0, 1]
    assert draws(a_sampler(temperature=0.0, repetition_penalty=2.0, prompt=(0, 0)), row, 1) == [1]
    assert draws(a_sampler(temperature=0.0, presence_penalty=2.0, prompt=(0, 0)), row, 1) == [0]


def test_a_repetition_penalty_lowers_negative_logits_too() -> None:
    row = a_row(-1.0, -1.5, -9, -9, -9, -9, -9, -9)
    assert draws(a_sampler(temperature=0.0, repetition_penalty=2.0), row, 2) == [0, 1]


def test_penalties_remember_more_ids_than_they_had_room_for() -> None:
    row = np.linspace(1, 0, 500).astype(np.float32)
    assert draws(a_sampler(temperature=0.0, presence_penalty=2.0), row, 500) == [*range(500)]


def test_a_bias_moves_an_id_and_one_outside_the_vocabulary_is_no_error() -> None:
    assert draws(a_sampler(temperature=0.0, logit_bias={3: 100.0, 900: 100.0, -1: 100.0}), SLOPE, 1) == [3]
    assert 0 not in draws(a_sampler(logit_bias={0: -100.0}), SLOPE, 300)


def test_a_note_counts_like_a_draw() -> None:
    sampler = a_sampler(temperature=0.0, presence_penalty=0.6)
    sampler.note(0)
    assert draws(sampler, a_row(2.0, 1.5, 0, 0), 1) == [1]


LIKES_EOS = a_row(0, 1, 2, 0, 0, 0, 0, 9)


def test_eos_and_stop_ids_are_banned_before_min_tokens_and_end_the_sequence_after() -> None:
    sampler = a_sampler(StopRules(min_tokens=2, token_ids=(2,)), temperature=0.0)
    assert not sampler.takes(EOS)
    assert draws(sampler, LIKES_EOS, 3) == [1, 1, EOS]
    assert sampler.takes(EOS)
    assert sampler.stops(EOS, 3)
    assert sampler.stops(2, 3)
    assert not sampler.stops(1, 3)


def test_an_ignored_eos_is_never_drawn_and_never_stops() -> None:
    sampler = a_sampler(StopRules(ignore_eos=True), temperature=0.0)
    assert draws(sampler, LIKES_EOS, 3) == [2, 2, 2]
    assert not sampler.stops(EOS, 3)


def test_when_every_id_is_banned_the_model_s_choice_stands() -> None:
    assert draws(a_sampler(StopRules(ignore_eos=True, min_tokens=9, token_ids=(0,))), np.zeros(1, np.float32), 1) == [0]


def test_log_probabilities_are_the_model_s_own_whatever_changed_the_draw() -> None:
    drawn = a_sampler(temperature=0.0, logit_bias={4: 100.0}, logprobs=2).draw(SLOPE * 1, VOCABULARY)
    assert drawn.logprob is not None
    assert (drawn.token_id, drawn.logprob.token_id, drawn.logprob.token_bytes) == (4, 4, b"E")
    assert drawn.logprob.logprob == pytest.approx(math.log(0.03), abs=1e-5)
    assert [(token_id, data) for token_id, data, _ in drawn.logprob.top] == [(0, b"A"), (1, b"B")]
    assert [value for _, _, value in drawn.logprob.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-5)


def test_zero_alternatives_report_only_the_drawn_token_and_none_reports_nothing() -> None:
    zero = a_sampler(logprobs=0).draw(SLOPE, VOCABULARY).logprob
    assert zero is not None
    assert zero.top == []
    assert a_sampler().draw(SLOPE, VOCABULARY).logprob is None


def test_log_probabilities_of_huge_logits_are_finite_and_no_more_alternatives_are_given_than_exist() -> None:
    drawn = a_sampler(logprobs=20).draw(a_row(3e38, -3e38, 3e38, 0, 0, 0, 0, 0), VOCABULARY).logprob
    assert drawn is not None
    assert len(drawn.top) == 8
    assert drawn.logprob == pytest.approx(math.log(0.5))
