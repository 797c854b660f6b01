"""Which compiled batch a step uses: only what the manifest proves and the configuration allows (scheduling §8)."""

from __future__ import annotations

from collections.abc import Mapping

from calculet_core.artifact import Manifest
from calculet_core.batches import BatchProfile, InactiveMode
from calculet_core.config import BatchConfig


def usable_profiles(manifest: Manifest, wanted: tuple[int, ...]) -> tuple[BatchProfile, ...]:
    """The wanted profiles, smallest first.

    Raises:
        KeyError: one of them is not in the manifest.
    """
    return tuple(manifest.profile(size) for size in sorted(wanted))


class ProfileChooser:
    """The compiled batch of each step, by how many sequences are ready and how long the oldest has been (scheduling §8).

    A profile is used from its threshold on: the configured one, else one more than the next smaller profile holds. A threshold
    below that trades a partly empty step for a shorter queue, one above it leaves sequences to the next step. Going down takes
    `hysteresis_steps` steps in a row that ask for it, for a change of profile may cost a board more than idle rows do.
    """

    __slots__ = ("_asked_down", "_from", "_hysteresis", "_last", "_max_wait_steps", "profiles")

    def __init__(self, profiles: tuple[BatchProfile, ...], config: BatchConfig) -> None:
        self._max_wait_steps = config.max_ready_wait_steps
        self._last = self._asked_down = 0
        self.use(profiles, config.thresholds, config.hysteresis_steps)

    def use(self, profiles: tuple[BatchProfile, ...], thresholds: Mapping[int, int], hysteresis_steps: int) -> None:
        """Choose among these from now on, smallest first."""
        self.profiles, self._hysteresis = profiles, hysteresis_steps
        held = (0, *(profile.compiled_batch for profile in profiles[:-1]))
        self._from = [thresholds.get(profile.compiled_batch, below + 1) for profile, below in zip(profiles, held, strict=True)]
        self._last = self._asked_down = 0

    def choose(self, ready: int, oldest_wait_ns: int, step_ns: int | None) -> BatchProfile:
        """For `ready` sequences, at least 1. `step_ns` is what a step of the last profile should take; None: not measured."""
        profiles, starts = self.profiles, self._from
        last = len(profiles) - 1
        index = 0
        while index < last and ready >= starts[index + 1]:
            index += 1
        if step_ns is not None and oldest_wait_ns > self._max_wait_steps * step_ns:
            while index < last and profiles[index].compiled_batch < ready:
                index += 1
        if index >= self._last:
            self._last, self._asked_down = index, 0
        else:
            self._asked_down += 1
            if self._asked_down > self._hysteresis:
                self._last, self._asked_down = index, 0
        return profiles[self._last]


ROWS_ARE_COMPILED = {
    InactiveMode.MASK_TENSOR: True,
    InactiveMode.CSR: True,
    InactiveMode.COMPACT: False,
}
"""Whether a job has a row for every compiled lane, the idle ones marked invalid, or for active sequences alone."""


def rows_of(profile: BatchProfile, active: int) -> int:
    """How many rows a job with so many sequences has; a B1 profile has no idle row."""
    policy = profile.inactive_policy
    return profile.compiled_batch if policy is not None and ROWS_ARE_COMPILED[policy.mode] else active
