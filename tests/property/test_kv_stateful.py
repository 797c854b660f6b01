"""Any order of reserve, append, cut, release, fault and reset keeps the lanes right (scheduling §17.2).

The reference is a dictionary: which sequence holds what. The manager must agree with it after every step, and must never give away
a lane that is unknown, unconfirmed or taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from calculet_core.kv import KvSequence
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_worker.kv import KvManager

MAX_SEQ = 16


@dataclass
class Held:
    """What the reference knows of a sequence that holds a lane."""

    lane: KvSequence
    reserved: int
    committed: int = 0
    pending: int = 0
    releasing: bool = False


class Lanes(RuleBasedStateMachine):
    """The manager beside its reference."""

    @initialize(lanes=st.integers(1, 5), budget=st.integers(1, 5 * MAX_SEQ), sequences=st.integers(1, 6))
    def begin(self, lanes: int, budget: int, sequences: int) -> None:
        self.generation = 0
        self.shape = (lanes, budget, sequences)
        self.next_seq = 0
        self.new_generation()

    def new_generation(self) -> None:
        lanes, budget, sequences = self.shape
        self.generation += 1
        self.kv = KvManager(self.generation, lanes, MAX_SEQ, budget, sequences)
        self.held: dict[int, Held] = {}
        self.lost: dict[int, int] = {}

    def pick(self, data: st.DataObject, wanted: list[int]) -> Held:
        return self.held[data.draw(st.sampled_from(wanted))]

    def idle(self) -> list[int]:
        return [seq for seq, held in self.held.items() if not held.pending and not held.releasing]

    def updating(self) -> list[int]:
        return [seq for seq, held in self.held.items() if held.pending]

    def releasing(self) -> list[int]:
        return [seq for seq, held in self.held.items() if held.releasing]

    @rule(tokens=st.integers(0, MAX_SEQ + 2))
    def reserve(self, tokens: int) -> None:
        lanes, budget, sequences = self.shape
        taken = len(self.held) + len(self.lost)
        used = sum(held.reserved for held in self.held.values()) + sum(self.lost.values())
        fits = 1 <= tokens <= MAX_SEQ and taken < min(lanes, sequences) and used + tokens <= budget
        self.next_seq += 1
        lane = self.kv.reserve(self.next_seq, tokens)
        assert (lane is not None) == fits
        if lane is not None:
            assert lane.hardware_lane not in self.lost, "a lost lane was given away"
            assert lane.hardware_lane not in {held.lane.hardware_lane for held in self.held.values()}, "a lane was given twice"
            assert (lane.committed_len, lane.reserved_len) == (0, tokens)
            self.held[self.next_seq] = Held(lane, tokens)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), tokens=st.integers(0, MAX_SEQ))
    def submit(self, data: st.DataObject, tokens: int) -> None:
        held = self.pick(data, self.idle())
        fits = 1 <= tokens <= held.reserved - held.committed
        try:
            self.kv.submit(held.lane, tokens)
        except ValueError:
            assert not fits
        else:
            assert fits
            held.pending = held.committed + tokens

    @precondition(lambda self: self.updating())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        held = self.pick(data, self.updating())
        self.kv.commit(held.lane)
        held.committed, held.pending = held.pending, 0

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.pick(data, self.idle())
        self.kv.release(held.lane)
        held.releasing = True

    @precondition(lambda self: self.releasing())
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.releasing()))
        self.kv.confirm_free(self.held.pop(seq).lane)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        held = self.held.pop(seq := data.draw(st.sampled_from(sorted(self.held))))
        assert held.lane.seq_id == seq
        self.kv.lose(held.lane)
        self.lost[held.lane.hardware_lane] = held.reserved

    @precondition(lambda self: self.lost)
    @rule()
    def reset(self) -> None:
        self.new_generation()

    @invariant()
    def agrees_with_the_reference(self) -> None:
        if not hasattr(self, "kv"):
            return
        assert self.kv.invariants() == []
        assert self.kv.reserved_tokens == sum(held.reserved for held in self.held.values())
        assert self.kv.used_tokens == sum(held.committed for held in self.held.values())
        assert self.kv.busy_lanes == len(self.held)
        assert self.kv.count(KvSequenceState.UNKNOWN) == len(self.lost)
        for seq, held in self.held.items():
            assert (held.lane.seq_id, held.lane.committed_len, held.lane.reserved_len) == (seq, held.committed, held.reserved)


Lanes.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)  # 10,000 steps
TestLanes = Lanes.TestCase
