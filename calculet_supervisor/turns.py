"""Whose turn it is on a board that several models share in time (scheduling §13.1). Pure.

A switch costs a drain, a load and golden cases, so a model stays for a configured while once it serves. After that it leaves as
soon as it has nothing to do while somebody waits for another one; or when the longest wait has reached the configured bound,
however much it has to do. The next one is always the one that was waited for longest, so no model starves, whatever the others get.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from calculet_core.clock import S
from calculet_core.config import TimeSharedConfig
from calculet_core.wire import ModelWait


@dataclass(frozen=True, slots=True)
class Resident:
    """The model whose turn it is, as it is seen."""

    alias: str
    serving_ns: int | None
    """Since when it serves; None: it is on its way in or out."""
    busy: bool
    """It has requests, or had some a moment ago."""
    failed: bool = False
    """It could not be loaded."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Another model's turn has come."""

    alias: str
    reason: str


def next_turn(
    config: TimeSharedConfig, resident: Resident, able: Collection[str], waits: Mapping[str, ModelWait], forced: str | None,
    now_ns: int,
) -> Switch | None:  # fmt: skip
    """Who comes after `resident`; None: it stays. `able` are the board's aliases that can be loaded, in the configuration's order,
    `forced` one that a rollout needs there."""
    if forced is not None:
        return Switch(forced, f"a rollout of {forced} is under way") if forced != resident.alias else None
    wanted = [alias for alias in able if alias != resident.alias and alias in waits]
    longest = min(wanted, key=lambda alias: waits[alias].oldest_ns, default=None)
    if resident.alias not in able:
        following = longest or next(iter(able), None)
        why = "could not be loaded" if resident.failed else "is unloaded"
        return Switch(following, f"{resident.alias} {why}") if following is not None else None
    if longest is None or resident.serving_ns is None or now_ns - resident.serving_ns < config.min_residence_s * S:
        return None
    wait, waited_s = waits[longest], (now_ns - waits[longest].oldest_ns) / S
    who = f"{wait.count} request{'s' * (wait.count != 1)} for {longest}, the first for {waited_s:.1f} s"
    if not resident.busy:
        return Switch(longest, f"{resident.alias} has nothing to do; waiting: {who}")
    if waited_s >= config.max_wait_s:
        return Switch(longest, f"time_shared.max_wait_s is over; waiting: {who}")
    return None
