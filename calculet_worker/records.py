"""What the engine says for journals, history and counters: `Record` actions with the names of `calculet_core.history`.

Records are collected while an event is handled and leave together, after the next job: writing journals must not keep the device
waiting.
"""

from __future__ import annotations

from typing import Any

from calculet_core import history
from calculet_core.history import Event
from calculet_core.ids import WireKey
from calculet_core.requests import SequenceState
from calculet_worker.actions import Action, Record

INTERNAL = -1
"""The router of golden and warm-up requests: nobody is answered, and their attempts are not recorded."""


class Recorder:
    """Fills in board and epoch."""

    __slots__ = ("_board", "_epoch", "_records")

    def __init__(self, board: str, epoch: int) -> None:
        self._board, self._epoch = board, epoch
        self._records: list[Action] = []

    def of_board(self, name: str, now_ns: int, generation: int, data: dict[str, Any], job: int | None = None) -> None:
        """Something happened to the board."""
        self._add(name, now_ns, None, generation, data, job)

    def of_lane(self, name: str, now_ns: int, seq: SequenceState, lane: int, data: dict[str, Any] | None = None) -> None:
        """Something happened to a lane; internal requests have no id."""
        key = None if seq.request.router == INTERNAL else seq.request.key
        self._add(name, now_ns, key, seq.generation, {"lane": lane, **(data or {})})

    def of_attempt(self, name: str, now_ns: int, seq: SequenceState, data: dict[str, Any]) -> None:
        """Something happened to a router's attempt."""
        if seq.request.router != INTERNAL:
            self._add(name, now_ns, seq.request.key, seq.generation, data)

    def refused(self, now_ns: int, generation: int, key: WireKey, code: str) -> None:
        """An attempt that admission did not let in."""
        self._add(history.ATTEMPT_DONE, now_ns, key, generation, {"outcome": "refused", "code": code})

    def flush(self, out: list[Action]) -> None:
        """Everything recorded since the last time, in order."""
        if self._records:
            out += self._records
            self._records.clear()

    def _add(
        self, name: str, now_ns: int, key: WireKey | None, generation: int, data: dict[str, Any], job: int | None = None
    ) -> None:
        request, attempt = (key.request_id, key.attempt) if key is not None else (None, None)
        self._records.append(Record(Event(name, now_ns, request, attempt, self._board, self._epoch, generation, job, data)))
