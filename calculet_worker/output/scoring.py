"""A prompt's own log probabilities (`echo` with `logprobs`), on every device.

Devices return the logits of a prompt's last position only. So the first token alone is prefilled, and the others are given as
decode steps: what a step's logits say of the token that is given next is that token's log probability. Only then is anything
drawn. It costs a step for each token of the prompt, beside other sequences in the same batches, and needs nothing of the device
([decision](docs/decisions/0029-log-probabilities-of-prompts.md)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calculet_core import wire
from calculet_core.requests import InferenceRequest
from calculet_worker.output.sampling import Drawn, Floats, Sampler, token_logprob
from calculet_worker.output.text import TextStream


def is_scored(request: InferenceRequest) -> bool:
    """Whether the answer begins with the prompt's tokens and their log probabilities."""
    return request.echo and request.sampling.logprobs is not None


def steps_of(given: int, asked: int | None, room: int) -> int:
    """Tokens that come from steps: those given, then those drawn, at most `room`; at least one step is made."""
    return given + (0 if asked == 0 and given else room)


def first_logprob(token_id: int, vocabulary: Sequence[bytes]) -> wire.TokenLogprob:
    """Of the prompt's first token: nothing came before it, so it has none."""
    return wire.TokenLogprob(token_id, vocabulary[token_id], math.nan, [])


class GivenSampler(Sampler):
    """Gives the prompt's tokens in their order, then draws. With `drawn` False it never does: what it chooses is not told."""

    __slots__ = ("_at", "_drawn", "_given", "_top")

    def __init__(
        self, request: InferenceRequest, eos_token_ids: tuple[int, ...], first: NDArray[np.int32], given: tuple[int, ...], seed: int
    ) -> None:
        prompt = np.concatenate((first, np.array(given, np.int32)))
        super().__init__(request.sampling, request.stop, eos_token_ids, prompt, seed)
        self._given, self._at, self._drawn = given, 0, request.max_new_tokens != 0
        self._top = request.sampling.logprobs or 0

    def draw(self, row: Floats, vocabulary: Sequence[bytes]) -> Drawn:
        """See `Sampler`; a given token has the log probability of a drawn one: before temperature, penalties and bans."""
        if self._at < len(self._given):
            token_id = self._given[self._at]
            self._at += 1
            return Drawn(token_id, token_logprob(row, token_id, self._top, vocabulary))
        drawn = super().draw(row, vocabulary)
        return drawn if self._drawn else Drawn(drawn.token_id, None)

    def stops(self, token_id: int, generated_tokens: int) -> bool:
        """A given token ends nothing."""
        drawn = generated_tokens - len(self._given)
        return drawn > 0 and self._drawn and super().stops(token_id, drawn)


class GivenText(TextStream):
    """Text in which stop strings are looked for only behind the prompt's tokens."""

    __slots__ = ("_drawn", "_left")

    def __init__(self, vocabulary: Sequence[bytes], stop_strings: tuple[str, ...], prompt_tokens: int, drawn: bool) -> None:
        super().__init__(vocabulary, stop_strings)
        self._left, self._drawn = prompt_tokens, drawn

    def push(self, token_id: int) -> str:
        """See `TextStream`."""
        if self._left:
            self._left -= 1
            return self._decode(self._vocabulary[token_id])
        return super().push(token_id) if self._drawn else ""
