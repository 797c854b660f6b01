"""A prompt's own log probabilities: fed token by token, told like an answer's, counted as the prompt's."""

from __future__ import annotations

import math
from typing import Any

import pytest
from builders_engine import EOS, VOCABULARY, Driver, Told, reference, text_of

from calculet_core import wire
from calculet_core.requests import SamplingParams, StopRules

SCORED = SamplingParams(temperature=0.0, logprobs=2)


def entries(told: Told) -> list[wire.TokenLogprob]:
    return [one for piece in told.pieces for one in piece.logprobs or []]


def score(prompt: list[int], asked: int | None, driver: Driver | None = None, **fields: Any) -> Told:
    driver = driver or Driver().ready()
    told = driver.submit(1, prompt, asked, **{"echo": True, "sampling": SCORED, **fields})
    driver.until(lambda: told.ended)
    return told


def usage(told: Told) -> tuple[int, int]:
    assert told.last.usage is not None
    return told.last.usage.prompt_tokens, told.last.usage.completion_tokens


def test_a_scored_prompt_says_of_each_token_what_drawing_it_would_have_said() -> None:
    prompt, drawn = [1, 2, 3], reference([1, 2, 3], 6)
    driver = Driver().ready()
    plain = driver.submit(9, prompt, 6, sampling=SCORED)
    driver.until(lambda: plain.ended)
    scored = score(prompt + drawn[:4], 2)
    found = entries(scored)
    assert [one.token_id for one in found] == prompt + drawn
    assert math.isnan(found[0].logprob) and not found[0].top, "nothing came before the first"
    assert all(one.logprob <= 0 and len(one.top) == 2 for one in found[1:])
    assert found[3:] == entries(plain), "given or drawn: the same logits, the same words about them"
    assert (usage(scored), scored.last.finish) == ((7, 2), "length")
    assert sum(piece.tokens for piece in scored.pieces) == 2, "given tokens are not counted as generated"


@pytest.mark.parametrize("prompt", [[1], [1, 2], [5, 4, 3, 2, 1]])
@pytest.mark.parametrize("asked", [0, 1, 3])
def test_output_may_be_none_or_some_whatever_the_prompts_length(prompt: list[int], asked: int) -> None:
    told = score(prompt, asked)
    whole = prompt + reference(prompt, asked)
    assert [one.token_id for one in entries(told)] == whole and usage(told) == (len(prompt), asked)
    assert told.text == b"".join(VOCABULARY[token] for token in whole).decode() and told.last.finish == "length"
    assert (told.last.usage is not None and told.last.usage.token_hash is None) == (asked == 0)


def test_nothing_in_the_prompt_stops_the_answer_and_what_is_drawn_does() -> None:
    prompt, drawn = [1, EOS, 2, 3], reference([1, EOS, 2, 3], 4)
    stop = StopRules(strings=(text_of(prompt, 4)[2:3], "2"), token_ids=(2,))
    assert 2 not in drawn and len(set(drawn)) == 4
    told = score(prompt, 4, stop=stop)
    assert [one.token_id for one in entries(told)] == prompt + drawn[:2], "the stop string's own token has none"
    assert told.last.finish == "stop" and usage(told) == (4, 3)
    only = score(prompt, 0, stop=stop, sampling=SamplingParams(temperature=0.0, logprobs=0, logit_bias={EOS: 100.0}))
    assert (only.last.finish, usage(only)) == ("length", (4, 0)), "and what is not drawn cannot end it"


def test_min_tokens_and_penalties_count_from_the_end_of_the_prompt() -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=0, logit_bias={EOS: 100.0})
    told = score([1, 2, 3], 5, sampling=sampling, stop=StopRules(min_tokens=3))
    assert usage(told) == (3, 4) and told.last.finish == "stop", "three, then EOS"
    assert [one.token_id for one in entries(told)] == [1, 2, 3, *reference([1, 2, 3], 3), EOS], "an entry for each token that is counted"
    penalised = SamplingParams(temperature=0.0, logprobs=0, repetition_penalty=50.0)
    driver = Driver().ready()
    plain = driver.submit(9, [1, 2, 3, 4], 4, sampling=penalised)
    driver.until(lambda: plain.ended)
    assert entries(score([1, 2, 3, 4], 4, sampling=penalised))[4:] == entries(plain)


def test_scored_and_plain_requests_share_batches_and_everything_comes_back() -> None:
    driver = Driver().ready()
    scored = [driver.submit(number, [number, 2, 3, 4, 5], 2, echo=True, sampling=SCORED) for number in range(1, 4)]
    plain = [driver.submit(number, [number, 2, 3], 6) for number in range(4, 9)]
    driver.until(lambda: all(told.ended for told in (*scored, *plain)))
    for number, told in enumerate(scored, 1):
        prompt = [number, 2, 3, 4, 5]
        assert [one.token_id for one in entries(told)] == prompt + reference(prompt, 2)
    for number, told in enumerate(plain, 4):
        assert told.text == text_of([number, 2, 3], 6)
    driver.until(lambda: driver.engine.serving is not None and driver.engine.serving.kv.busy_lanes == 0)
    assert driver.engine.attempts.registry.cost == 0


def test_a_prompt_that_leaves_no_room_is_refused_like_any_other() -> None:
    driver = Driver().ready()
    assert driver.engine.serving is not None
    limit = driver.engine.serving.admission.limit
    told = driver.submit(1, [1] * limit, 1, echo=True, sampling=SCORED)
    driver.until(lambda: told.ended)
    assert told.error == "context_length_exceeded"
