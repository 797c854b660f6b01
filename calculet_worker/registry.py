"""Every request of this worker (scheduling §4): the only writer of `SequenceState`.

A request is found by its wire key until its client's terminal, which happens once; a message that comes later finds nothing. A
cancel is a transition where no job holds the sequence; while one does it sets a flag, and the drained job ends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

from calculet_core.ids import WireKey
from calculet_core.requests import InferenceRequest, SequenceState
from calculet_core.states.request import REQUEST, RequestEvent, RequestState

_next = REQUEST.next
_S, _E = RequestState, RequestEvent
_START_DECODE, _DECODE_DONE = _E.START_DECODE, _E.DECODE_DONE


class Cancelled(Enum):
    """What a cancel came to."""

    NOW = auto()
    """The request has ended; a lane that it held can be released."""
    WHEN_DRAINED = auto()
    """A job holds it; its completion ends it."""
    ALREADY = auto()
    """Its terminal, or an earlier cancel, came first."""


class RequestRegistry:
    """Creates, moves and ends sequences. `cost` is the tokens, prompt and output, that admitted and waiting requests still owe."""

    __slots__ = ("_by_key", "_last_seq_id", "cost")

    def __init__(self) -> None:
        self._by_key: dict[WireKey, SequenceState] = {}
        self._last_seq_id = 0
        self.cost = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: WireKey) -> SequenceState | None:
        """The live request of that key."""
        return self._by_key.get(key)

    def live(self) -> list[SequenceState]:
        """All requests whose client still waits, oldest first."""
        return list(self._by_key.values())

    # ---------------------------------------------------------------- from New to a lane
    def create(self, request: InferenceRequest, generation: int, now_ns: int) -> SequenceState | None:
        """A New sequence, its generation fixed for good (scheduling §10); None when the key is there already."""
        if request.key in self._by_key:
            return None
        self._last_seq_id += 1
        seq = SequenceState(request, self._last_seq_id, generation, None, 0, 0, request.deadline_ns, waiting_since_ns=now_ns)
        self._by_key[request.key] = seq
        return seq

    def prepare(self, seq: SequenceState, matcher: Any, echo: str, given: tuple[int, ...] | None = None) -> None:
        """What came with its ids: its constraint's state, what its answer begins with, and which of its tokens are given singly."""
        seq.matcher, seq.echo, seq.given = matcher, echo, given

    def queue(self, seq: SequenceState, token_ids: Any, max_new_tokens: int, virtual_finish: float) -> None:
        """Validated and tokenized; `token_ids` is int32 [prompt_tokens]."""
        seq.state = _next(seq.state, _E.QUEUE)
        seq.prompt_token_ids, seq.prompt_tokens = token_ids, len(token_ids)
        seq.max_new_tokens, seq.virtual_finish_time = max_new_tokens, virtual_finish
        self.cost += seq.prompt_tokens + max_new_tokens

    def admit(self, seq: SequenceState, lane: int, now_ns: int) -> None:
        """Lane and KV are reserved."""
        seq.state = _next(seq.state, _E.ADMIT)
        seq.hardware_lane = lane
        seq.admitted_ns = seq.ready_since_ns = now_ns

    # ---------------------------------------------------------------- jobs
    def start_prefill(self, seq: SequenceState) -> None:
        """A job with a part or all of its prompt is being submitted."""
        seq.state = _next(seq.state, _E.START_PREFILL)

    def start_decode(self, sequences: Iterable[SequenceState]) -> None:
        """A decode job with these sequences is being submitted."""
        for seq in sequences:
            seq.state = _next(seq.state, _START_DECODE)

    def requeue(self, seq: SequenceState, now_ns: int) -> None:
        """The device refused the job; nothing of it ran."""
        seq.state = _next(seq.state, _E.REQUEUE)
        seq.ready_since_ns = now_ns

    def on_prefill_part(self, seq: SequenceState, kv_length: int, device_ns: int, now_ns: int) -> None:
        """A proven cut of the prompt is in KV; more follows."""
        seq.state = _next(seq.state, _E.PREFILL_PART)
        self._grow(seq, kv_length, device_ns)
        seq.ready_since_ns = now_ns

    def on_prefill_complete(
        self, seq: SequenceState, kv_length: int, token: int, virtual_finish: float, device_ns: int, now_ns: int
    ) -> None:
        """The prompt is in KV and the first token drawn; from here `virtual_finish` orders decode steps."""
        seq.state = _next(seq.state, _E.PREFILL_DONE)
        self._grow(seq, kv_length, device_ns)
        seq.virtual_finish_time = virtual_finish
        seq.last_token = token
        seq.output_token_ids.append(token)
        seq.generated_tokens = 1
        seq.first_token_ns = seq.ready_since_ns = now_ns
        self.cost -= 1

    def on_decode_complete(
        self, seq: SequenceState, kv_length: int, token: int, virtual_finish: float, device_ns: int, now_ns: int
    ) -> None:
        """One more token is in KV and the next one drawn."""
        seq.state = _next(seq.state, _DECODE_DONE)
        seq.kv_length = kv_length
        seq.device_ns += device_ns
        seq.virtual_finish_time = virtual_finish
        seq.last_token = token
        seq.output_token_ids.append(token)
        seq.generated_tokens += 1
        seq.ready_since_ns = now_ns
        self.cost -= 1

    def _grow(self, seq: SequenceState, kv_length: int, device_ns: int) -> None:
        self.cost -= kv_length - seq.kv_length
        seq.kv_length = kv_length
        seq.device_ns += device_ns

    # ---------------------------------------------------------------- ends
    def finish(self, seq: SequenceState) -> None:
        """Stop or length: the client's terminal is emitted now, once."""
        seq.state = _next(seq.state, _E.FINISH)
        self._forget(seq)

    def released(self, seq: SequenceState) -> None:
        """The runtime confirmed that the lane is free; only a finished request still has a step to make."""
        seq.hardware_lane = None
        if seq.state is _S.FINISHING:
            seq.state = _next(seq.state, _E.RELEASED)

    def cancel(self, seq: SequenceState, reason: str) -> Cancelled:
        """Idempotent in every state (scheduling §4)."""
        if seq.cancelled or not (REQUEST.can(seq.state, _E.CANCEL) or REQUEST.can(seq.state, _E.DRAINED_CANCELLED)):
            return Cancelled.ALREADY
        seq.cancelled, seq.cancel_reason = True, reason
        if not REQUEST.can(seq.state, _E.CANCEL):
            return Cancelled.WHEN_DRAINED
        seq.state = _next(seq.state, _E.CANCEL)
        self._forget(seq)
        return Cancelled.NOW

    def drained(self, seq: SequenceState) -> None:
        """The running job of a cancelled request came home; its result was dropped."""
        seq.state = _next(seq.state, _E.DRAINED_CANCELLED)
        self._forget(seq)

    def fail(self, seq: SequenceState) -> None:
        """The client's terminal is an error. A job that holds the sequence still drains."""
        seq.state = _next(seq.state, _E.FAIL)
        self._forget(seq)

    def _forget(self, seq: SequenceState) -> None:
        del self._by_key[seq.request.key]
        self.cost -= seq.prompt_tokens - min(seq.kv_length, seq.prompt_tokens) + seq.max_new_tokens - seq.generated_tokens
