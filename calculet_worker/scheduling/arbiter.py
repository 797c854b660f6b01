"""Whose device turn it is: decode, short, medium or long prefill (scheduling §6).

Deficit round robin, charged by device time: a class with credit may submit, what its job takes is charged, and when no ready class
has credit all are paid `weight` quanta as often as it takes. So a ready class always gets a turn (work conserving), and over time
each gets its weight's share of the device, whatever a single job costs: neither a stream of long prompts nor of decode steps
can starve the other, and no weights bring a ready class under `min_share`. Credit is never saved up while idle, and debt is never
more than one job. A class that becomes ready without debt is paid once at that moment, as in any deficit round robin: so a short
prompt beside a stream of long ones waits for the job that runs and the turns before its own, not for the others' credit to end.

A decode step costs about the same with few rows as with many. So where `short_prefill_fills_lanes` says so, decode is paid only for
the part of a step that is full while short prompts wait: lanes fill first, and the more sequences run, the more a step counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from calculet_core.clock import MS
from calculet_core.config import QueuesConfig


class Turn(IntEnum):
    """The four queues."""

    DECODE = 0
    SHORT = 1
    MEDIUM = 2
    LONG = 3

    @property
    def label(self) -> str:
        """As metrics and reports name it."""
        return _LABELS[self]


TURNS = tuple(Turn)
_LABELS = tuple(turn.name.lower() for turn in TURNS)
QUANTUM_NS = 1 * MS
"""Device time per unit of weight and round."""


class Arbiter:
    """Credits in nanoseconds of device time; `take` charges what a job is expected to cost, `settle` corrects it."""

    __slots__ = ("_credit", "_fills", "_last", "_min_share", "_pay", "_were_ready")

    def __init__(self, config: QueuesConfig) -> None:
        weights = (
            config.decode_weight, config.short_prefill_weight, config.medium_prefill_weight, config.long_prefill_weight,
        )  # fmt: skip
        self._pay = [weight * QUANTUM_NS for weight in weights]
        self._min_share, self._fills = config.min_share, config.short_prefill_fills_lanes
        self._credit = [0] * len(TURNS)
        self._last = Turn.LONG
        self._were_ready: list[Turn] = []
        """The classes that had something to submit at the last choice."""

    def choose(self, ready: Sequence[int]) -> Turn | None:
        """The class whose turn it is among those with `ready[turn]` above 0; the one that had the last turn comes last."""
        if not any(ready):
            self._were_ready = []
            return None
        credit = self._credit
        turns = [turn for turn in TURNS if ready[turn]]
        were_ready, self._were_ready = self._were_ready, turns
        if turns != were_ready and len(turns) > 1:
            pay = self._pay_of(turns, ready)
            for turn in turns:
                if turn not in were_ready and credit[turn] == 0:
                    credit[turn] = pay[turn]
        if not any(credit[turn] > 0 for turn in turns):
            self._pay_all(turns, self._pay_of(turns, ready))
        after = self._last + 1
        return min((turn for turn in turns if credit[turn] > 0), key=lambda turn: (turn - after) % len(TURNS))

    def take(self, turn: Turn, expected_ns: int) -> None:
        """The class submits a job that is expected to take so long."""
        self._credit[turn] -= expected_ns
        self._last = turn

    def settle(self, turn: Turn, expected_ns: int, spent_ns: int) -> None:
        """The job took `spent_ns` instead; debt is at most this one job."""
        self._credit[turn] = max(self._credit[turn] + expected_ns - spent_ns, -spent_ns)

    def _pay_of(self, turns: Sequence[Turn], ready: Sequence[int]) -> list[int]:
        """What a round pays each class: its weight, decode's by how full its steps can be, and nobody less than the least share."""
        pay = self._pay.copy()
        if self._fills and ready[Turn.DECODE]:
            pay[Turn.DECODE] = pay[Turn.DECODE] * ready[Turn.DECODE] // (ready[Turn.DECODE] + ready[Turn.SHORT])
        least = int(self._min_share * sum(pay[turn] for turn in turns))
        return [max(1, least, each) for each in pay]

    def _pay_all(self, turns: Sequence[Turn], pay: Sequence[int]) -> None:
        """As many rounds as bring the first ready class above zero, in one step. Who has nothing to submit only pays off debt."""
        credit = self._credit
        rounds = min(-credit[turn] // pay[turn] + 1 for turn in turns)
        for turn in TURNS:
            paid = credit[turn] + rounds * pay[turn]
            credit[turn] = paid if turn in turns else min(0, paid)
