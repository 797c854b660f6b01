"""Which compiled batch a step uses: only what the manifest proves and the configuration allows (scheduling §8)."""

from __future__ import annotations

from calculet_core.artifact import Manifest
from calculet_core.batches import BatchProfile, InactiveMode


def usable_profiles(manifest: Manifest, wanted: tuple[int, ...]) -> tuple[BatchProfile, ...]:
    """The wanted profiles, smallest first.

    Raises:
        KeyError: one of them is not in the manifest.
    """
    return tuple(manifest.profile(size) for size in sorted(wanted))


def pick_profile(profiles: tuple[BatchProfile, ...], ready: int) -> BatchProfile:
    """The smallest that holds all ready sequences, else the largest."""
    for profile in profiles:
        if profile.compiled_batch >= ready:
            return profile
    return profiles[-1]


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
