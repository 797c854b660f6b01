"""Earliest deadline first, then virtual finish, within each tenant's share of the lanes (scheduling §7.2).

Deadlines that were only defaulted compare equal and after asked ones; asked ones are quantised. So a short deadline buys order
among what is ready, never share: a tenant takes more than its share only where no other tenant has a candidate.
"""

from __future__ import annotations

import math

from calculet_core.clock import MS
from calculet_core.requests import SequenceState

DEADLINE_QUANTUM_NS = 100 * MS


def _order(seq: SequenceState) -> tuple[float, float, int]:
    asked = seq.request.deadline_asked
    deadline = seq.deadline_ns // DEADLINE_QUANTUM_NS if asked else math.inf
    return deadline, seq.virtual_finish_time, seq.seq_id


def select_edf(ready: list[SequenceState], rows: int, tenant_share: float) -> list[SequenceState]:
    """At most `rows` of the ready sequences."""
    if len(ready) <= rows:
        return ready
    limit = max(1, math.floor(rows * tenant_share))
    chosen: list[SequenceState] = []
    beyond: list[SequenceState] = []
    taken: dict[str, int] = {}
    for seq in sorted(ready, key=_order):
        if taken.get(seq.tenant, 0) < limit:
            taken[seq.tenant] = taken.get(seq.tenant, 0) + 1
            chosen.append(seq)
        else:
            beyond.append(seq)
    return (chosen + beyond)[:rows]
