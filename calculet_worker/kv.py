"""Hardware lanes and their KV, as transactions (scheduling §9).

One `KvSequence` per hardware lane, and one manager per generation: lanes that were lost end with it and are never given to
another request. A lane is reserved for prompt and output together, so no running sequence can run out; its length grows only when
device and output have both succeeded; it is free again only when the runtime has said so. Every change goes through the
`KV_SEQUENCE` table. The lowest free lane goes first, so that used lanes
stay together: some runtimes compute neighbours at once. Nothing here scans lanes except `invariants`.
"""

from __future__ import annotations

from heapq import heappop, heappush

from calculet_core.kv import KvSequence
from calculet_core.states.kv_sequence import KV_SEQUENCE, KvEvent, KvSequenceState

NO_SEQUENCE = -1
_next = KV_SEQUENCE.next
_SUBMIT, _COMMIT = KvEvent.SUBMIT, KvEvent.COMMIT


class KvManager:
    """The lanes of one generation; the only writer of `KvSequence`.

    `max_tokens` bounds all reservations together, `max_sequences` the lanes in use, `max_seq` one lane. A lane that was lost still
    occupies its share of the first two.
    """

    __slots__ = (
        "_free",
        "_lost_tokens",
        "_reserved_tokens",
        "_state_counts",
        "_used_tokens",
        "generation",
        "lanes",
        "max_seq",
        "max_sequences",
        "max_tokens",
    )  # fmt: skip

    def __init__(self, generation: int, lanes: int, max_seq: int, max_tokens: int, max_sequences: int) -> None:
        self.generation, self.max_seq = generation, max_seq
        self.max_tokens, self.max_sequences = max_tokens, min(max_sequences, lanes)
        self.lanes = tuple(KvSequence(NO_SEQUENCE, lane, generation) for lane in range(lanes))
        self._free = list(range(lanes))
        self._state_counts = [0] * len(KvSequenceState)
        self._state_counts[KvSequenceState.FREE] = lanes
        self._reserved_tokens = self._used_tokens = self._lost_tokens = 0

    # ---------------------------------------------------------------- what there is
    @property
    def reserved_tokens(self) -> int:
        """Reserved for sequences; those of lost lanes apart."""
        return self._reserved_tokens

    @property
    def used_tokens(self) -> int:
        """Committed by sequences that hold a lane."""
        return self._used_tokens

    @property
    def busy_lanes(self) -> int:
        """Neither free nor lost."""
        return len(self.lanes) - self.count(KvSequenceState.FREE) - self.count(KvSequenceState.UNKNOWN)

    @property
    def free_lanes(self) -> int:
        """Lanes that `reserve` may still give."""
        return max(0, min(len(self._free), self.max_sequences - (len(self.lanes) - len(self._free))))

    def count(self, state: KvSequenceState) -> int:
        """Lanes in that state."""
        return self._state_counts[state]

    def states(self) -> dict[str, int]:
        """Lanes by name of their state, all six."""
        return {state.name: self._state_counts[state] for state in KvSequenceState}

    def can_reserve(self, tokens: int) -> bool:
        """Whether a sequence of that many positions could be given a lane now."""
        return (
            self.free_lanes > 0
            and tokens <= self.max_seq
            and self._reserved_tokens + self._lost_tokens + tokens <= self.max_tokens
        )

    def could_reserve(self, tokens: int) -> bool:
        """Whether a sequence of that many positions could be given a lane once all that are held are free; lost ones never are."""
        lost = self.count(KvSequenceState.UNKNOWN)
        return lost < self.max_sequences and tokens <= self.max_seq and self._lost_tokens + tokens <= self.max_tokens

    # ---------------------------------------------------------------- transactions
    def reserve(self, seq_id: int, tokens: int) -> KvSequence | None:
        """A lane with room for `tokens` positions (prompt and output together), or None when there is none."""
        if tokens < 1 or not self.can_reserve(tokens):
            return None
        kv = self.lanes[heappop(self._free)]
        self._move(kv, KvEvent.RESERVE)
        kv.seq_id, kv.reserved_len = seq_id, tokens
        self._reserved_tokens += tokens
        return kv

    def submit(self, kv: KvSequence, tokens: int) -> None:
        """The device took a job that writes `tokens` positions after the committed ones.

        Raises:
            ValueError: they would pass what is reserved.
        """
        pending = kv.committed_len + tokens
        if tokens < 1 or pending > kv.reserved_len:
            raise ValueError(f"lane {kv.hardware_lane}: {tokens} tokens after {kv.committed_len}, {kv.reserved_len} reserved")
        self._move(kv, _SUBMIT)
        kv.pending_len = pending

    def commit(self, kv: KvSequence) -> None:
        """Device and output both succeeded: the committed length grows (scheduling §9.2)."""
        self._move(kv, _COMMIT)
        pending = kv.pending_len
        self._used_tokens += pending - kv.committed_len
        kv.committed_len = pending

    def lose(self, kv: KvSequence) -> None:
        """Nobody knows what the lane holds; it ends with the generation."""
        self._move(kv, KvEvent.LOSE)
        self._reserved_tokens -= kv.reserved_len
        self._lost_tokens += kv.reserved_len
        self._used_tokens -= kv.committed_len

    def release(self, kv: KvSequence) -> None:
        """The runtime is being asked to free the lane."""
        self._move(kv, KvEvent.RELEASE)

    def confirm_free(self, kv: KvSequence) -> None:
        """The runtime has freed the lane: now it may be given to another sequence."""
        self._move(kv, KvEvent.CONFIRM_FREE)
        self._reserved_tokens -= kv.reserved_len
        self._used_tokens -= kv.committed_len
        kv.seq_id, kv.committed_len, kv.reserved_len, kv.pending_len = NO_SEQUENCE, 0, 0, 0
        heappush(self._free, kv.hardware_lane)

    def _move(self, kv: KvSequence, event: KvEvent) -> None:
        before, counts = kv.state, self._state_counts
        after = kv.state = _next(before, event)
        counts[before] -= 1
        counts[after] += 1

    # ---------------------------------------------------------------- proof
    def invariants(self) -> list[str]:
        """What of scheduling §9.2 does not hold, in words; empty when all does. For tests, metrics and the simulation."""
        broken = [problem for kv in self.lanes for problem in self._lane_problems(kv)]
        held = [kv.seq_id for kv in self.lanes if kv.state is not KvSequenceState.FREE]
        if len(set(held)) != len(held):
            broken.append(f"a sequence sits on two lanes: {sorted(held)}")
        if sorted(self._free) != [kv.hardware_lane for kv in self.lanes if kv.state is KvSequenceState.FREE]:
            broken.append(f"the free list {sorted(self._free)} is not the lanes that are free")
        live = [kv for kv in self.lanes if kv.state not in (KvSequenceState.FREE, KvSequenceState.UNKNOWN)]
        lost = sum(kv.reserved_len for kv in self.lanes if kv.state is KvSequenceState.UNKNOWN)
        counted = (self._reserved_tokens, self._used_tokens, self._lost_tokens)
        real = (sum(kv.reserved_len for kv in live), sum(kv.committed_len for kv in live), lost)
        if counted != real:
            broken.append(f"(reserved, used, lost) tokens are counted as {counted} and are {real}")
        if self._reserved_tokens + self._lost_tokens > self.max_tokens:
            broken.append(f"{self._reserved_tokens} + {self._lost_tokens} tokens reserved, {self.max_tokens} allowed")
        if (states := [sum(kv.state is state for kv in self.lanes) for state in KvSequenceState]) != self._state_counts:
            broken.append(f"states are counted as {self._state_counts} and are {states}")
        return broken

    def _lane_problems(self, kv: KvSequence) -> list[str]:
        name, problems = f"lane {kv.hardware_lane}", []
        if kv.generation != self.generation:
            problems.append(f"{name}: of generation {kv.generation}, not {self.generation}")
        if not 0 <= kv.committed_len <= kv.reserved_len <= self.max_seq:
            problems.append(f"{name}: committed {kv.committed_len}, reserved {kv.reserved_len}, at most {self.max_seq}")
        if kv.state is KvSequenceState.UPDATING and not kv.committed_len < kv.pending_len <= kv.reserved_len:
            problems.append(f"{name}: {kv.pending_len} pending after {kv.committed_len}, {kv.reserved_len} reserved")
        if kv.state is KvSequenceState.FREE and (kv.seq_id != NO_SEQUENCE or kv.reserved_len or kv.committed_len):
            problems.append(f"{name}: free, yet it holds sequence {kv.seq_id}")
        if kv.state is not KvSequenceState.FREE and kv.seq_id == NO_SEQUENCE:
            problems.append(f"{name}: {kv.state.name} without a sequence")
        return problems
