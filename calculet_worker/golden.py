"""Proof before traffic: golden cases, then a warm-up of every profile, run as ordinary requests (scheduling §11 step 9).

They go through the same queues, lanes, jobs and checks as a client's request. A case passes when its greedy tokens are the recorded
ones, compared only up to the first narrow margin; a warm-up fills the larger profiles with beginnings of the same cases, so it also
proves that a batch changes no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calculet_core.artifact import GoldenCase
from calculet_core.batches import BatchProfile
from calculet_core.ids import WireKey
from calculet_core.requests import InferenceRequest, Prompt, SamplingParams, SequenceState, StopRules
from calculet_worker.records import INTERNAL

WARM_UP_CASES = 2
"""Beginnings of so many different cases fill a profile; the shortest, for a board serves again only when this is over."""
NO_DEADLINE_NS = 1 << 62
INTERNAL_TENANT = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """Cases to run together over `profiles`, each for so many tokens."""

    label: str
    profiles: tuple[BatchProfile, ...]
    cases: tuple[tuple[GoldenCase, int], ...]
    alone: bool = False
    """One job at a time, whatever is configured: how long steps take alone."""
    shrinking: bool = False
    """Every step takes the smallest profile that holds what is ready, without waiting whether it stays so."""


def golden_stage(cases: Sequence[GoldenCase], profiles: tuple[BatchProfile, ...]) -> Stage:
    """Every case, as far as it may be compared."""
    return Stage("golden", profiles, tuple((case, len(case.gated())) for case in cases), alone=True)


def stages_of(cases: Sequence[GoldenCase], profiles: tuple[BatchProfile, ...]) -> list[Stage]:
    """Golden over the smallest profile, then every other profile full, in one stage where the cases' margins allow it.

    The largest profile is filled once. As many of its requests as the next smaller one has no room for end after their first step,
    and so on: each profile decodes at least one full step, and a board prefills no more than one prompt a lane.
    """
    stages, others = [golden_stage(cases, profiles[:1])], profiles[1:]
    if not others:
        return stages
    steps = len(others) + 1  # the first token is of the prompt
    chosen = sorted(cases, key=lambda case: len(case.prompt_token_ids))
    long_enough = [case for case in chosen if len(case.gated()) >= steps][:WARM_UP_CASES]
    if long_enough:
        tokens = [2 + sum(place < smaller.compiled_batch for smaller in others[:-1]) for place in range(others[-1].compiled_batch)]
        return [*stages, Stage("warm-up", others, _filled(long_enough, tokens), shrinking=True)]
    for profile in others:
        stages.append(Stage(f"warm-up {profile.name}", (profile,), _filled(chosen[:WARM_UP_CASES], [2] * profile.compiled_batch)))
    return stages


def _filled(cases: Sequence[GoldenCase], tokens: Sequence[int]) -> tuple[tuple[GoldenCase, int], ...]:
    """The cases by turns, each for so many tokens."""
    chosen = [(cases[place % len(cases)], count) for place, count in enumerate(tokens)]
    return tuple((case, min(count, len(case.gated()))) for case, count in chosen)


class Trial:
    """Runs stages one after the other. `failure` says what was wrong; `done` that nothing is left to run."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages
        self._index = -1
        self._expected: dict[int, tuple[GoldenCase, int]] = {}
        self.failure: str | None = None

    @property
    def label(self) -> str:
        """The running stage, as a report shows it."""
        return f"{self._stages[max(0, self._index)].label} ({max(0, self._index) + 1} of {len(self._stages)})"

    @property
    def stage_over(self) -> bool:
        """Nothing of the stage runs any more."""
        return not self._expected

    @property
    def done(self) -> bool:
        """No stage is left, or one failed."""
        return self.stage_over and (self.failure is not None or self._index + 1 >= len(self._stages))

    def next_stage(self) -> Stage:
        """Begin the next stage."""
        self._index += 1
        return self._stages[self._index]

    def started(self, seq: SequenceState, case: GoldenCase, tokens: int) -> None:
        """A case of the stage is in the queue."""
        self._expected[seq.seq_id] = (case, tokens)

    def finished(self, seq: SequenceState) -> None:
        """A case came to its end: compare."""
        case, tokens = self._expected.pop(seq.seq_id)
        expected, got = case.expected_token_ids[:tokens], seq.output_token_ids
        if expected != got and self.failure is None:
            place = next(place for place, token in enumerate(expected) if got[place : place + 1] != [token])
            what = f"token {place} is {got[place : place + 1]}, not {expected[place]}"
            self.failure = f"{self.label}: case {case.name!r}: {what}"

    def failed(self, seq: SequenceState, reason: str) -> None:
        """A case could not be run."""
        case, _ = self._expected.pop(seq.seq_id)
        if self.failure is None:
            self.failure = f"{self.label}: case {case.name!r}: {reason}"


def internal_request(number: int, epoch: int, case: GoldenCase, tokens: int, now_ns: int) -> InferenceRequest:
    """A case as a request; its key is one that no router can mint."""
    return InferenceRequest(
        WireKey(-number, 0, epoch), INTERNAL, "", INTERNAL_TENANT, 1.0, Prompt(), tokens,
        SamplingParams(temperature=0.0), StopRules(ignore_eos=True), NO_DEADLINE_NS, False, now_ns,
    )  # fmt: skip


def prompt_of(case: GoldenCase) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """int32 [prompt_tokens]."""
    return np.array(case.prompt_token_ids, np.int32)
