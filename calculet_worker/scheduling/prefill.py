"""Prompts on their way into KV: three queues by a prompt's length (scheduling §6).

A prompt is cut only where the artifact proves incremental prefill, and only at multiples of the proven granularity, counted from
position 0. The last part of a long prompt stays in its queue: among short ones it would go first, for it was there first, and on
their turn. Without that proof a prompt is one job, however long, and only turns and quotas protect the others.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from calculet_core.artifact import Manifest
from calculet_core.config import QueuesConfig
from calculet_core.requests import SequenceState
from calculet_core.states.request import RequestState
from calculet_worker.scheduling.arbiter import Turn

ABILITY = "incremental_prefill"


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Positions `start` to `end` of a prompt, and whether its last is among them."""

    seq: SequenceState
    start: int
    end: int
    last: bool


def proven_cut(manifest: Manifest, max_tokens: int) -> int | None:
    """Most tokens of one prefill job, a multiple of the proven granularity; None: prompts may not be cut."""
    proof = manifest.abilities.get(ABILITY)
    if proof is None or not proof.granularity:
        return None
    return max(proof.granularity, max_tokens - max_tokens % proof.granularity)


class PrefillQueues:
    """Admitted prompts that wait for a device turn, each queue in order of virtual finish."""

    __slots__ = ("_cut", "_heaps", "_medium", "_short", "depths")

    def __init__(self, config: QueuesConfig, cut: int | None) -> None:
        self._short, self._medium, self._cut = config.short_prefill_max_tokens, config.medium_prefill_max_tokens, cut
        self._heaps: dict[Turn, list[tuple[float, int, SequenceState]]] = {Turn.SHORT: [], Turn.MEDIUM: [], Turn.LONG: []}
        self.depths = {Turn.SHORT: 0, Turn.MEDIUM: 0, Turn.LONG: 0}
        """Sequences that are really there; the heaps may still hold ended ones."""

    def turn_of(self, seq: SequenceState) -> Turn:
        """The queue for prompts of its length, however much of it is in KV already."""
        size = seq.prompt_tokens
        return Turn.SHORT if size <= self._short else Turn.MEDIUM if size <= self._medium else Turn.LONG

    def push(self, seq: SequenceState) -> None:
        """A sequence is PREFILL_READY."""
        turn = self.turn_of(seq)
        heapq.heappush(self._heaps[turn], (seq.virtual_finish_time, seq.seq_id, seq))
        self.depths[turn] += 1

    def removed(self, seq: SequenceState) -> None:
        """A PREFILL_READY sequence ended while it waited."""
        self.depths[self.turn_of(seq)] -= 1

    def rest(self, turn: Turn) -> int | None:
        """Tokens that the next prompt of that queue still has to bring into KV, in one job or several; None: the queue is empty."""
        heap = self._heaps[turn]
        while heap and heap[0][2].state is not RequestState.PREFILL_READY:
            heapq.heappop(heap)
        return heap[0][2].prompt_tokens - heap[0][2].kv_length if heap else None

    def take(self, turn: Turn) -> PrefillPart:
        """The next part of that queue.

        Raises:
            IndexError: the queue is empty.
        """
        heap = self._heaps[turn]
        while True:
            seq = heapq.heappop(heap)[2]
            if seq.state is RequestState.PREFILL_READY:
                break
        self.depths[turn] -= 1
        start, end = seq.kv_length, seq.prompt_tokens
        if self._cut is not None:
            end = min(end, start + self._cut)
        return PrefillPart(seq, start, end, end == seq.prompt_tokens)

    def oldest_ns(self, turn: Turn) -> int | None:
        """Since when the longest-waiting sequence of that queue is ready."""
        ready = (seq for _, _, seq in self._heaps[turn] if seq.state is RequestState.PREFILL_READY)
        return min((seq.ready_since_ns for seq in ready), default=None)
