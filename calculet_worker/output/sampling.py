"""From a row of logits to one token, the same token whatever the batch.

Each sequence has a sampler with a generator of its own, seeded by the client or by the engine, and one draw takes exactly one
number from it: so a seed gives the same tokens alone or among sixteen. A row is never written to; it belongs to the device.
Order of a draw: bias, penalties, constraint, bans (EOS and stop ids that may not come yet), temperature, min-p, top-k, top-p. A
constraint goes before bans: where it says that the answer is whole, the answer ends. Candidates are found by partial sorts, ties go
to the lower id, and everything is relative to the row's maximum, so no temperature overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calculet_core import wire
from calculet_core.requests import SamplingParams, StopRules
from calculet_worker.output.constraint import Matcher

NO_TOKEN = -1
"""Drawn where a constraint allows no token at all: the answer must end."""
Floats = NDArray[np.float32]
_NUCLEUS_FLOORS = (1e-2, 1e-4, 1e-8, 0.0)
"""Top-p looks only at weights above the first of these under which they hold enough; it seldom sorts the whole row."""
_BLOCK = 512
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token and, when it was asked for, its log probability with alternatives."""

    token_id: int
    logprob: wire.TokenLogprob | None


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a greedy answer and the check for sound numbers need of logits [rows, vocabulary]."""

    best: NDArray[np.int64]
    """The best id of each row, the least of equal ones, int64 [rows]."""
    finite: NDArray[np.bool_]
    """Which rows are free of NaN and Inf, bool [rows]."""


def row_facts(logits: Floats) -> RowFacts:
    """Of float32 [rows, vocabulary]: two passes, which let other threads have the interpreter.

    A NaN in a row is its argmax and its minimum, +Inf the value at its argmax, -Inf its minimum: so a row is finite when both are.
    """
    best = logits.argmax(axis=1)
    ends = np.empty((2, len(logits)), np.float32)
    logits.min(axis=1, out=ends[0])
    ends[1] = logits[np.arange(len(logits)), best]
    return RowFacts(best, np.asarray(np.isfinite(ends).all(axis=0)))


class Sampler:
    """Draws one sequence's tokens and remembers what penalties and bans need to know about them."""

    __slots__ = (
        "_bias", "_early", "_eos", "_generated", "_greedy", "_params", "_penalties", "_rng", "_stop", "_stop_ids", "matcher",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        stop: StopRules,
        eos_token_ids: tuple[int, ...],
        prompt_token_ids: NDArray[np.int32],
        fallback_seed: int,
        matcher: Matcher | None = None,
    ) -> None:
        self._params, self._stop, self.matcher = params, stop, matcher
        self._eos = frozenset(eos_token_ids)
        self._stop_ids = frozenset(stop.token_ids)
        self._early = self._eos | self._stop_ids
        self._generated = 0
        self._greedy = params.greedy and matcher is None
        seed = params.seed if params.seed is not None else fallback_seed
        self._rng = None if params.temperature == 0.0 else np.random.default_rng(seed & _SEED_MASK)
        self._penalties = _Penalties(params, prompt_token_ids) if _penalised(params) else None
        self._bias = tuple(params.logit_bias.items())

    @property
    def greedy(self) -> bool:
        """Whether the next token is the row's plain argmax unless that is banned; `takes` decides."""
        return self._greedy

    def takes(self, token_id: int) -> bool:
        """Take the row's argmax as the next token of a greedy sequence; False: it is banned, and must be drawn."""
        if token_id in self._banned():
            return False
        self.note(token_id)
        return True

    def draw(self, row: Floats, vocabulary: Sequence[bytes]) -> Drawn:
        """The next token from the finite float32 [vocabulary] `row`; `vocabulary` maps ids to bytes for the alternatives.

        `NO_TOKEN` where the constraint allows none.
        """
        token_id = self._choose(row) if self.matcher is None else self._choose_allowed(row, self.matcher)
        if token_id == NO_TOKEN:
            return Drawn(token_id, None)
        self.note(token_id)
        top = self._params.logprobs
        return Drawn(token_id, None if top is None else token_logprob(row, token_id, top, vocabulary))

    def note(self, token_id: int) -> None:
        """A token that was chosen without `draw`."""
        self._generated += 1
        if self._penalties is not None:
            self._penalties.count(token_id)

    def stops(self, token_id: int, generated_tokens: int) -> bool:
        """Whether this token, one of `generated_tokens`, ends the sequence and is no part of its text."""
        if self.matcher is not None and token_id in self._eos and self.matcher.complete:
            return True
        if generated_tokens < self._stop.min_tokens:
            return False
        return token_id in self._stop_ids or (token_id in self._eos and not self._stop.ignore_eos)

    def _banned(self) -> frozenset[int]:
        if self._generated < self._stop.min_tokens:
            return self._early
        return self._eos if self._stop.ignore_eos else frozenset()

    def _choose(self, row: Floats) -> int:
        banned = self._banned()
        best = int(row.argmax())
        if self._rng is None and not self._bias and self._penalties is None and best not in banned:
            return best
        logits = self._adjusted(row)
        _forbid(logits, banned)
        return best if (chosen := self._pick(logits)) is None else chosen  # nothing left: the model's own choice stands

    def _choose_allowed(self, row: Floats, matcher: Matcher) -> int:
        if (mask := matcher.mask()) is None:
            return NO_TOKEN
        logits = self._adjusted(row)
        logits += mask
        only = int(logits.argmax())
        if not math.isfinite(logits[only]):
            return NO_TOKEN
        _forbid(logits, self._banned())
        chosen = self._pick(logits)
        if chosen is None:
            chosen = only
        matcher.accept(chosen)
        return NO_TOKEN if matcher.failure else chosen

    def _adjusted(self, row: Floats) -> Floats:
        """A copy of the row with bias and penalties."""
        logits = row.copy()
        for token_id, bias in self._bias:
            if 0 <= token_id < len(logits):
                logits[token_id] += bias
        if self._penalties is not None:
            self._penalties.apply(logits)
        return logits

    def _pick(self, logits: Floats) -> int | None:
        """The draw itself; None when no id is possible. Writes to `logits`."""
        top = logits.max()
        if not math.isfinite(top):
            return None
        if self._rng is None:
            return int(logits.argmax())
        with np.errstate(over="ignore"):  # further apart than float32 reaches: -inf, as good as impossible
            logits -= top
        return _sample(logits, self._params, self._rng.random())


class _Penalties:
    """How often each id was generated; the prompt's ids stand at 0, for the repetition penalty alone."""

    __slots__ = ("_counts", "_frequency", "_ids", "_places", "_presence", "_repetition")

    def __init__(self, params: SamplingParams, prompt_token_ids: NDArray[np.int32]) -> None:
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._repetition = params.repetition_penalty
        prompt = np.unique(prompt_token_ids) if self._repetition != 1.0 else np.empty(0, np.int32)
        self._places = {token_id: place for place, token_id in enumerate(prompt.tolist())}
        self._ids = np.zeros(len(prompt) + 64, np.int32)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(prompt) + 64, np.float32)

    def count(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1

    def apply(self, logits: Floats) -> None:
        ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
        values = logits[ids]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        logits[ids] = values - self._frequency * counts - self._presence * (counts > 0)


def _forbid(logits: Floats, banned: frozenset[int]) -> None:
    for token_id in banned:
        if 0 <= token_id < len(logits):
            logits[token_id] = -np.inf


def _penalised(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def _sample(scaled: Floats, params: SamplingParams, uniform: float) -> int:
    """The id that `uniform` in [0, 1) falls on; `scaled` logits are relative to their maximum."""
    with np.errstate(over="ignore"):  # a tiny temperature drives the others to -inf: probability 0
        scaled /= np.float32(max(params.temperature, 1e-30))
    ids: NDArray[np.int64] | None = None
    if params.min_p > 0.0:
        ids = np.flatnonzero(scaled >= math.log(min(params.min_p, 1.0)))
    if 0 < params.top_k < len(scaled if ids is None else ids):
        ids = _best(scaled, ids, params.top_k)
    weights = np.exp(scaled if ids is None else scaled[ids])
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    place = _fall(weights, uniform)
    return place if ids is None else int(ids[place])


def _fall(weights: Floats, uniform: float) -> int:
    """Where `uniform` of the whole weight lies: first the block, then the place in it, since a running sum is slow."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
    wanted = uniform * blocks[-1]
    index = int(np.searchsorted(blocks, wanted, side="right"))
    inside = weights[index * _BLOCK : (index + 1) * _BLOCK]
    rest = wanted - (blocks[index - 1] if index else 0.0)
    place = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), rest, side="right"))
    if place == len(inside):  # by rounding
        place = int(np.flatnonzero(inside)[-1])
    return index * _BLOCK + place


def _best(values: NDArray[Any], ids: NDArray[np.int64] | None, count: int) -> NDArray[np.int64]:
    """The `count` ids with the greatest values, best first, equal ones by id; `values` are indexed by id."""
    pool = values if ids is None else values[ids]
    if count < len(pool):
        threshold = np.partition(pool, len(pool) - count)[len(pool) - count]
        kept = np.flatnonzero(pool >= threshold)
    else:
        kept = np.arange(len(pool))
    kept = kept[np.argsort(-pool[kept], kind="stable")[:count]]
    return kept if ids is None else ids[kept]


def _nucleus(weights: Floats, top_p: float) -> NDArray[np.int64]:
    """Places of the fewest best weights that hold `top_p` of the sum (at least one), best first; the greatest weight is 1."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for floor in _NUCLEUS_FLOORS:
        places = np.flatnonzero(weights >= floor)
        if float(weights[places].sum(dtype=np.float64)) >= wanted:
            break
    places = places[np.argsort(-weights[places], kind="stable")]
    mass = np.cumsum(weights[places], dtype=np.float64)
    return places[: int(np.searchsorted(mass, wanted, side="left")) + 1]


def token_logprob(row: Floats, token_id: int, top: int, vocabulary: Sequence[bytes]) -> wire.TokenLogprob:
    """Log-softmax of the model's own logits, as clients know it: before temperature, penalties and bans."""
    with np.errstate(over="ignore"):
        shifted = row - row.max()
    log_total = math.log(float(np.exp(shifted).sum(dtype=np.float64)))
    best = _best(row, None, min(top, len(row))).tolist() if top > 0 else []
    alternatives = [(other, vocabulary[other], float(shifted[other]) - log_total) for other in best]
    return wire.TokenLogprob(token_id, vocabulary[token_id], float(shifted[token_id]) - log_total, alternatives)
