"""When requests expire: a heap; entries of ended requests are dropped as they surface, or swept when they outnumber the rest."""

from __future__ import annotations

import heapq

from calculet_core.requests import SequenceState
from calculet_core.states.request import RequestState

SWEEP_AT_LEAST = 64


class Deadlines:
    """Deadlines of live requests; finding the next one costs nothing while none has passed."""

    __slots__ = ("_heap", "_live_at_sweep")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, SequenceState]] = []
        self._live_at_sweep = 0

    def add(self, seq: SequenceState) -> None:
        """Watch a request."""
        heapq.heappush(self._heap, (seq.deadline_ns, seq.seq_id, seq))
        if len(self._heap) > 2 * self._live_at_sweep + SWEEP_AT_LEAST:
            self._heap = [entry for entry in self._heap if not _ended(entry[2])]
            heapq.heapify(self._heap)
            self._live_at_sweep = len(self._heap)

    def expired(self, now_ns: int) -> list[SequenceState]:
        """Live requests whose deadline has passed; each is named once."""
        if not self._heap or self._heap[0][0] > now_ns:
            return []
        found = []
        while self._heap and self._heap[0][0] <= now_ns:
            seq = heapq.heappop(self._heap)[2]
            if not _ended(seq):
                found.append(seq)
        return found

    def next_ns(self) -> int | None:
        """The next deadline of a live request."""
        while self._heap and _ended(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


def _ended(seq: SequenceState) -> bool:
    return seq.state >= RequestState.FINISHING
