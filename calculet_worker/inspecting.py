"""What a board really holds: after a load what the manifest says, after an unload nothing (scheduling §11 step 8, §12)."""

from __future__ import annotations

from typing import Any

from calculet_core.artifact import Manifest
from calculet_core.capacity import DramPlan
from calculet_core.jobs import Holdings
from calculet_worker.device.base import Inspection


def residue(after: Holdings | None, empty_bytes: int | None, tolerance_bytes: int) -> str | None:
    """What an unloaded board still holds or shows, in words; None: it is as it was before anything was loaded (scheduling §12)."""
    if after is None:
        return None
    if after.error is not None:
        return f"the board's counters could not be read: {after.error}"
    if after.pending or after.left:
        return f"the board has {after.pending} jobs pending and {after.left} outputs that nobody gave back"
    used = after.memory_used_bytes
    if used is not None and empty_bytes is not None and used > empty_bytes + tolerance_bytes:
        over = (used - empty_bytes) / (1 << 20)
        return f"{used} bytes of its memory are in use, {over:.1f} MiB more than when it was empty (recovery.unload_residue_mib)"
    return None


def compare(manifest: Manifest, found: Inspection | None, dram_bytes: int) -> list[str]:
    """How the configured graph differs from the manifest (scheduling §11 step 8); empty when it does not."""
    if found is None:
        return ["it could not be inspected"]
    wrong: list[str] = []
    pairs: list[tuple[str, Any, Any]] = [
        ("lanes", manifest.lanes, found.lanes),
        ("context", manifest.context, found.context),
        ("vocabulary", manifest.tokenizer.vocab_size, found.vocab_size),
    ]
    wrong += [f"{name} {real}, not {said}" for name, said, real in pairs if said != real]
    real_profiles = {profile.compiled_batch: profile for profile in found.profiles}
    for profile in manifest.profiles:
        real = real_profiles.get(profile.compiled_batch)
        if real is None:
            wrong.append(f"no profile {profile.name}")
        elif real != profile:
            fields = [name for name in profile.__struct_fields__ if getattr(profile, name) != getattr(real, name)]
            wrong += [f"{profile.name} {name} {getattr(real, name)!r}, not {getattr(profile, name)!r}" for name in fields]
    if found.reserved_bytes is not None and not (plan := DramPlan(dram_bytes, 0, found.reserved_bytes)).fits:
        wrong.append(plan.arithmetic())
    return wrong
