"""Batch profiles and decode batches (scheduling §2, §7).

`compiled_batch` comes from a verified artifact and is never configured. A profile above B1 that does not state what an
inactive lane means is not usable (scheduling §7.3): token 0 is never assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from calculet_core.requests import SequenceState


class InactiveMode(StrEnum):
    """How the runtime is told that a row carries no sequence."""

    MASK_TENSOR = "mask_tensor"
    """A valid-mask input; the row's token and position are ignored."""
    CSR = "csr"
    """Row pointers leave the row empty."""
    COMPACT = "compact"
    """Inactive rows are not submitted at all; the job carries only active rows."""


class InactiveLanePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheduling §7.3: what the vendor must state before a profile above B1 may become Ready."""

    mode: InactiveMode
    kv_mode: str
    """Name of the KV manager's mode for such a row, as the runtime spells it."""
    logits_returned: bool
    writes_kv: bool


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV is laid out per lane."""

    kind: str
    """For example `per_lane_contiguous`."""
    dtype: str
    bytes_per_token: int


class BatchProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled batch size of an artifact (scheduling §2)."""

    exact_submodel: str
    compiled_batch: int
    max_seq: int
    """Positions per lane, prompt and output together."""
    token_dtype: str
    logit_dtype: str
    """`float32` or `bfloat16`: how logits leave the device."""
    kv_layout: KvLayout
    inactive_policy: InactiveLanePolicy | None = None

    @property
    def name(self) -> str:
        """`B1`, `B4`, ..."""
        return f"B{self.compiled_batch}"


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """One decode step over lanes of one generation (scheduling §2). Arrays have `rows` entries.

    With a `COMPACT` profile `rows` is the number of active sequences, else `profile.compiled_batch`.
    """

    generation: int
    profile: BatchProfile
    active: list[SequenceState]
    lanes: Any
    """int32 [rows], hardware lane of each row."""
    token_ids: Any
    """int32 [rows]."""
    positions: Any
    """int32 [rows]."""
    lane_valid: Any
    """uint8 [rows], 1 where a sequence sits."""
