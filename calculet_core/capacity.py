"""What fits: sequence and token budgets (scheduling §5.1), and a board's DRAM (scheduling §13.1)."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CapacityBudget:
    """Scheduling §5.1. Every limit is a configured or proven number, never a guess."""

    max_sequences: int
    max_kv_tokens: int
    max_waiting_requests: int
    max_waiting_prompt_tokens: int
    max_inflight_jobs: int


@dataclass(frozen=True, slots=True)
class DramPlan:
    """Whether an artifact fits a board's DRAM, with the arithmetic in words. Sizes in bytes."""

    board_bytes: int
    resident_bytes: int
    wanted_bytes: int

    @property
    def fits(self) -> bool:
        """Whether resident and wanted reservations fit together."""
        return self.resident_bytes + self.wanted_bytes <= self.board_bytes

    def arithmetic(self) -> str:
        """For a refusal: `28.150 + 28.150 = 56.300 GiB > 32.000 GiB`."""
        total = self.resident_bytes + self.wanted_bytes
        sign = "<=" if self.fits else ">"
        parts = f"{self.wanted_bytes / GIB:.3f}"
        if self.resident_bytes:
            parts = f"{self.resident_bytes / GIB:.3f} + {parts} = {total / GIB:.3f}"
        return f"{parts} GiB {sign} {self.board_bytes / GIB:.3f} GiB of board DRAM"
