"""From how many ready sequences on a profile pays, worked out from measured steps of active lanes (scheduling §8).

With `ready` sequences and a profile of B rows every sequence has its next token after `ready / B` steps, or after one where all
fit. The profile that needs least device time for that is the one to use; a larger one must be better by more than the noise.
Thresholds are then from where on that is so for good, and a profile that is never best is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NOISE = 0.03
"""A larger profile must need less device time by more than this share."""

StepTimes = Mapping[int, Mapping[int, float]]
"""Compiled batch -> active lanes -> nanoseconds of device time of a step; for every profile 1 to as many as it holds."""


@dataclass(frozen=True, slots=True)
class Derived:
    """`batch.profiles` and `batch.thresholds` of a scheduler file."""

    profiles: tuple[int, ...]
    thresholds: dict[int, int]
    """Of every profile but the smallest."""
    best: tuple[int, ...]
    """The best profile for 1, 2, ... ready sequences."""


def turn_ns(steps: Mapping[int, float], batch: int, ready: int) -> float:
    """Device time until each of `ready` sequences has had a token, in steps of up to `batch` rows."""
    return steps[ready] if ready <= batch else steps[batch] * ready / batch


def derive(times: StepTimes) -> Derived:
    """What the measured steps say.

    Raises:
        ValueError: a profile's steps were not measured for each number of active lanes.
    """
    sizes = sorted(times)
    for size in sizes:
        if sorted(times[size]) != list(range(1, size + 1)):
            raise ValueError(f"B{size}: measured with {sorted(times[size])} active lanes, 1 to {size} are needed")
    best = []
    for ready in range(1, sizes[-1] + 1):
        chosen = sizes[0]
        for size in sizes[1:]:
            if turn_ns(times[size], size, ready) < (1 - NOISE) * turn_ns(times[chosen], chosen, ready):
                chosen = size
        best.append(chosen)
    starts = {size: start for size in sizes if (start := _from_where_on(best, size)) is not None}
    profiles = [size for size in starts if not any(other > size and starts[other] <= starts[size] for other in starts)]
    return Derived(tuple(profiles), {size: starts[size] for size in profiles[1:]}, tuple(best))


def _from_where_on(best: list[int], size: int) -> int | None:
    """The number of ready sequences from which on no smaller profile is best; None where that is more than the profile holds."""
    last_smaller = max((ready for ready, chosen in enumerate(best, 1) if chosen < size), default=0)
    return last_smaller + 1 if last_smaller < size else None
