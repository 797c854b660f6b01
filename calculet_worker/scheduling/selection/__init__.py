"""Selection policies: which ready sequences a decode step takes. A new one is a module and a line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

from calculet_core.requests import SequenceState
from calculet_worker.scheduling.selection.edf import select_edf

Policy = Callable[[list[SequenceState], int, float], list[SequenceState]]
"""(ready sequences, rows, tenant's share of the rows) -> at most `rows` of them, none twice."""

POLICIES: dict[str, Policy] = {"edf": select_edf}
