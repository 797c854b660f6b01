"""Decode steps: eligible -> select -> bind lanes -> `DecodeBatch` (scheduling §7).

What is wrong is stopped before the device sees it: a position is always the lane's committed length. Active rows come first; idle
rows exist only where the profile's policy asks for them and are marked invalid, never filled with token 0. Among sequences
with equal deadlines the least virtual finish goes first, and each step moves a sequence's finish on by one token over its
weight, so that more sequences than rows take turns by weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from calculet_core.batches import BatchProfile, DecodeBatch
from calculet_core.clock import MS, US
from calculet_core.config import BatchConfig
from calculet_core.requests import SequenceState
from calculet_core.states.request import RequestState
from calculet_worker.jobs.buffers import InputArrays
from calculet_worker.kv import KvManager
from calculet_worker.scheduling.profiles import ProfileChooser, rows_of
from calculet_worker.scheduling.selection import Policy

NO_TOKEN = -1
_READY = RequestState.DECODE_READY


StepTime = Callable[[int], int | None]
"""Compiled batch -> what a step of it should take, in nanoseconds; None before the first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Who takes part in the next step."""

    profile: BatchProfile
    sequences: list[SequenceState]
    waited_ns: int = 0
    """How long the one that was ready first has been so."""


class DecodeQueue:
    """Sequences that are DECODE_READY, in the order in which they became so."""

    __slots__ = (
        "_chooser", "_generation", "_hysteresis", "_max_rows", "_policy", "_ready", "_share", "_sla_ns", "_step_ns", "_thresholds",
        "_window_ns", "virtual_time",
    )  # fmt: skip

    def __init__(
        self, generation: int, profiles: tuple[BatchProfile, ...], config: BatchConfig, policy: Policy, step_ns: StepTime
    ) -> None:
        self._generation, self._policy, self._step_ns = generation, policy, step_ns
        self._share, self._window_ns = config.tenant_lane_share, config.batching_window_us * US
        self._sla_ns = None if config.token_sla_ms is None else config.token_sla_ms * MS
        self._thresholds, self._hysteresis = config.thresholds, config.hysteresis_steps
        self._ready: dict[int, SequenceState] = {}
        self._chooser = ProfileChooser(profiles, config)
        self._max_rows = profiles[-1].compiled_batch
        self.virtual_time = 0.0
        """Where a sequence starts that joins now."""

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def profiles(self) -> tuple[BatchProfile, ...]:
        """What steps choose from, smallest first."""
        return self._chooser.profiles

    def use(self, profiles: tuple[BatchProfile, ...], tightly: bool = False) -> None:
        """The profiles to choose from, smallest first; `tightly`: the smallest that holds what is ready, whatever is configured."""
        self._chooser.use(profiles, {} if tightly else self._thresholds, 0 if tightly else self._hysteresis)
        self._max_rows = profiles[-1].compiled_batch

    def push(self, seq: SequenceState) -> None:
        """A sequence is DECODE_READY."""
        self._ready[seq.seq_id] = seq

    def removed(self, seq: SequenceState) -> None:
        """A DECODE_READY sequence ended."""
        del self._ready[seq.seq_id]

    def hold_until_ns(self, now_ns: int) -> int | None:
        """Until when a step that is not full may wait for those who can join it (scheduling §7.2); None: it is due.

        The window runs from the oldest waiter, whoever comes after. It ends so early that the step it leads to, as long as steps
        take, still ends before any ready sequence's deadline and within the time that `token_sla_ms` allows between tokens.
        """
        if not self._window_ns or not self._ready or len(self._ready) >= self._max_rows:
            return None
        ready = self._ready.values()
        oldest = min(seq.ready_since_ns for seq in ready)
        step_ns = self._step_ns(self._max_rows) or 0
        until = min(oldest + self._window_ns, min(seq.deadline_ns for seq in ready) - step_ns)
        if self._sla_ns is not None:
            until = min(until, oldest + self._sla_ns - step_ns)
        return until if until > now_ns else None

    def choose(self, now_ns: int) -> Choice | None:
        """The next step's sequences; they leave the queue. None when nobody is eligible."""
        generation = self._generation
        eligible = [
            seq
            for seq in self._ready.values()
            if seq.state is _READY and not seq.cancelled and seq.deadline_ns > now_ns and seq.generation == generation
        ]
        if not eligible:
            return None
        oldest_ns = now_ns - min([seq.ready_since_ns for seq in eligible])
        profile = self._chooser.choose(len(eligible), oldest_ns, self._step_ns(self._max_rows))
        chosen = self._policy(eligible, profile.compiled_batch, self._share)
        if len(chosen) == len(self._ready):
            self._ready.clear()
        else:
            for seq in chosen:
                del self._ready[seq.seq_id]
        self.virtual_time = max(self.virtual_time, min([seq.virtual_finish_time for seq in chosen]))
        return Choice(profile, chosen, oldest_ns)

    def oldest_ns(self) -> int | None:
        """Since when the longest-waiting sequence is ready."""
        return min((seq.ready_since_ns for seq in self._ready.values()), default=None)


def _lane(seq: SequenceState) -> int:
    return -1 if seq.hardware_lane is None else seq.hardware_lane


def bind(choice: Choice, kv: KvManager, arrays: InputArrays) -> DecodeBatch:
    """Fill a job's own arrays, lanes ascending. Row i belongs to the i-th sequence of the batch, which is also `choice`'s.

    Raises:
        ValueError: a sequence's length is not its lane's, or has no room for one more (a bug, stopped before the device).
    """
    active = choice.sequences
    active.sort(key=_lane)
    rows, count = rows_of(choice.profile, len(active)), len(active)
    lanes, tokens, positions = [], [], []
    for seq in active:
        lane = seq.hardware_lane
        sequence = kv.lanes[lane] if lane is not None else None
        if sequence is None or sequence.seq_id != seq.seq_id or not seq.kv_length == sequence.committed_len < sequence.reserved_len:
            raise ValueError(f"sequence {seq.seq_id} at {seq.kv_length} does not fit lane {lane}: {sequence}")
        lanes.append(lane)
        tokens.append(seq.last_token)
        positions.append(seq.kv_length)
    arrays.lanes[:count], arrays.token_ids[:count], arrays.positions[:count] = lanes, tokens, positions
    arrays.lane_valid[:count] = 1
    if rows > count:
        arrays.lanes[count:rows] = arrays.token_ids[count:rows] = arrays.positions[count:rows] = NO_TOKEN
        arrays.lane_valid[count:rows] = 0
    return DecodeBatch(
        kv.generation, choice.profile, active,
        arrays.lanes[:rows], arrays.token_ids[:rows], arrays.positions[:rows], arrays.lane_valid[:rows],
    )  # fmt: skip
