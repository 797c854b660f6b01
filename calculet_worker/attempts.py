"""Routers' requests from arrival to terminal: each attempt is answered once, and lets go of all that it held (scheduling §4, §5).

Nothing expensive happens before the cheap checks: epoch, state and generation, then the bounds on what is being tokenized, then the
exact budgets. Whatever ends a request goes through `finish`, `fail` or `drained`, where its tenant's and its waiting budget are
freed; a lane follows when the runtime has confirmed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from calculet_core import history, wire
from calculet_core.errors import CalculetError, DeadlineExceeded, OverCapacity, StaleView
from calculet_core.ids import WireKey
from calculet_core.requests import FinishReason, InferenceRequest, Prompt, SequenceState
from calculet_core.states.request import RequestState
from calculet_worker.actions import Action, Tokenize
from calculet_worker.answers import Outbox
from calculet_worker.events import RequestArrived, Tokenized
from calculet_worker.generation import Lifecycle
from calculet_worker.output.scoring import is_scored, steps_of
from calculet_worker.records import INTERNAL, Recorder
from calculet_worker.registry import Cancelled, RequestRegistry
from calculet_worker.scheduling.admission import Admit, Queue, RejectUnavailable, named_ids
from calculet_worker.scheduling.deadlines import Deadlines
from calculet_worker.serving import Serving

MAX_TOKENIZING_BYTES = 64 << 20
"""Prompts that may be with the tokenizer at once."""
_encode = msgspec.msgpack.Encoder().encode
_min, _max = np.minimum.reduce, np.maximum.reduce
"""What the arrays' own methods come to, after 1 us of Python."""
_WAITING = (RequestState.NEW, RequestState.WAITING_ADMISSION)

InternalEnded = Callable[[SequenceState, str | None], None]
"""A golden or warm-up request has ended; the reason when it failed."""


class Attempts:
    """Owns registry and deadlines; `serving` is the present generation's."""

    def __init__(
        self, epoch: int, life: Lifecycle, recorder: Recorder, outbox: Outbox, internal_ended: InternalEnded
    ) -> None:
        self.registry = RequestRegistry()
        self.deadlines = Deadlines()
        self.serving: Serving | None = None
        self.completed = self.failed = self.cancelled = self.tokens = 0
        self._epoch, self._life, self._recorder, self._outbox = epoch, life, recorder, outbox
        self._internal_ended = internal_ended
        self._tokenizing: dict[WireKey, int] = {}
        """Bytes of each prompt that the tokenizer has, its request alive or not."""
        self._tokenizing_bytes = 0

    @property
    def tokenizing(self) -> int:
        """Prompts that the tokenizer has."""
        return len(self._tokenizing)

    # ---------------------------------------------------------------- in
    def arrived(self, event: RequestArrived, refusal: RejectUnavailable | None, now_ns: int, out: list[Action]) -> None:
        """A submission. A key that is here already is ignored: its first arrival is being served."""
        message = event.message
        key = WireKey(message.request_id, message.attempt, message.epoch)
        if self.registry.find(key) is not None or key in self._tokenizing:
            return
        size = prompt_bytes(message.prompt)
        error = self._stale(message) or (refusal.error if refusal else self._no_room(message, size, now_ns))
        if error is not None:
            self._refuse(event.router, key, error, now_ns, out)
            return
        seq = self.registry.create(_request(event.router, key, message), self._life.generation, now_ns)
        assert seq is not None
        self.deadlines.add(seq)
        self._tokenizing[key] = size
        self._tokenizing_bytes += size
        out.append(Tokenize(key, message.prompt, size, message.constraint, message.echo))

    def _stale(self, message: wire.Submit) -> CalculetError | None:
        """What the router's view says must be what is here (architecture: identity)."""
        if message.epoch != self._epoch:
            return StaleView(f"this is life {self._epoch} of the worker, not {message.epoch}")
        record = self._life.record
        if record is None:
            return None
        if (message.generation, message.digest, message.alias) != (record.id, record.artifact_digest, record.alias):
            return StaleView(f"generation {record.id} of {record.alias} is here, not {message.generation} of {message.alias}")
        return None

    def _no_room(self, message: wire.Submit, size: int, now_ns: int) -> CalculetError | None:
        serving = self.serving
        assert serving is not None, "a state that admits has a generation"
        if message.deadline_ns <= now_ns:
            return serving.admission.expired(len(serving.fair), now_ns)
        if self._tokenizing_bytes + size > MAX_TOKENIZING_BYTES:
            return OverCapacity(f"{self._tokenizing_bytes} bytes of prompts are being tokenized and {MAX_TOKENIZING_BYTES} may")
        full = serving.admission.arrival(len(self._tokenizing), len(serving.fair), serving.kv.free_lanes, now_ns)
        return full.error if full else None

    def tokenized(self, event: Tokenized, now_ns: int, out: list[Action]) -> None:
        """The prompt's ids are there: decide (scheduling §5.2)."""
        seq = self._from_tokenizer(event.key)
        serving = self.serving
        if seq is None or serving is None:
            return
        ids = event.token_ids
        count = len(ids)
        id_range = (int(_min(ids)), int(_max(ids))) if count else (0, 0)
        asked, scored = seq.request.max_new_tokens, is_scored(seq.request)
        prefilled = 1 if scored else count
        decision = serving.admission.decide(
            count,
            1 if scored and asked == 0 else asked,
            id_range,
            lambda size: serving.queue_state(seq, prefilled, count - prefilled + size),
            seq.deadline_ns,
            now_ns,
            "prompt" if seq.request.prompt.messages is None else "messages",
            named_ids(seq.request.sampling, seq.request.stop),
        )
        if isinstance(decision, Admit | Queue):
            size = decision.max_new_tokens
            if scored:
                self.registry.prepare(seq, None, "", tuple(ids[1:].tolist()))
                ids, size = ids[:1], steps_of(count - 1, asked, size)
            elif event.matcher is not None or event.echo:
                self.registry.prepare(seq, event.matcher, event.echo)
            serving.wait(seq, ids, size, queued=isinstance(decision, Queue))
            self._outbox.accept(seq)
        else:
            self.fail(seq, decision.error, now_ns, out)

    def tokenizing_failed(self, key: WireKey, error: CalculetError, now_ns: int, out: list[Action]) -> None:
        """Only this request fails."""
        seq = self._from_tokenizer(key)
        if seq is not None:
            self.fail(seq, error, now_ns, out)

    def _from_tokenizer(self, key: WireKey) -> SequenceState | None:
        """The request whose prompt came back; None when it has ended meanwhile."""
        self._tokenizing_bytes -= self._tokenizing.pop(key, 0)
        seq = self.registry.find(key)
        return seq if seq is not None and seq.state is RequestState.NEW else None

    def _refuse(self, router: int, key: WireKey, error: CalculetError, now_ns: int, out: list[Action]) -> None:
        self._outbox.refuse(router, key, error)
        self._recorder.refused(now_ns, self._life.generation, key, error.code)

    # ---------------------------------------------------------------- cancels and deadlines
    def cancel(self, key: WireKey, reason: str, now_ns: int, out: list[Action]) -> None:
        """Idempotent; a key that is not here is ignored."""
        seq = self.registry.find(key)
        if seq is not None:
            self._cancel(seq, reason, now_ns, out)

    def router_lost(self, router: int, reason: str, now_ns: int, out: list[Action]) -> None:
        """Nobody listens to its requests any more."""
        for seq in self.registry.live():
            if seq.request.router == router:
                self._cancel(seq, reason, now_ns, out)

    def _cancel(self, seq: SequenceState, reason: str, now_ns: int, out: list[Action]) -> None:
        state, serving = seq.state, self.serving
        outcome = self.registry.cancel(seq, reason)
        if outcome is Cancelled.ALREADY:
            return
        if serving is not None:
            serving.answers.drop(seq)
            serving.cancel_came(seq, now_ns)
        if outcome is Cancelled.NOW:
            self._was_cancelled(seq, now_ns, out)
            self._let_go(seq, state, True, now_ns, out)

    def drained(self, seq: SequenceState, now_ns: int, out: list[Action], release: bool = True) -> None:
        """The job of a sequence that was cancelled, or had failed, while it ran came home. `release` False: its lane is lost."""
        assert self.serving is not None
        if not seq.terminal:
            self.registry.drained(seq)
            self._was_cancelled(seq, now_ns, out)
            self.serving.fair.ended(seq)
        if release:
            self.serving.release(seq, now_ns, out)

    def _was_cancelled(self, seq: SequenceState, now_ns: int, out: list[Action]) -> None:
        self.cancelled += 1
        self._record_end(seq, {"outcome": "cancelled", "reason": seq.cancel_reason}, now_ns, out)

    def expire(self, now_ns: int, out: list[Action]) -> None:
        """Waiting in vain is 429, an answer that came too late 504."""
        for seq in self.deadlines.expired(now_ns):
            serving = self.serving
            if seq.cancelled:
                continue
            if seq.state in _WAITING and serving is not None:
                self.fail(seq, serving.admission.expired(len(serving.fair), now_ns), now_ns, out, timed_out=True)
            else:
                message = f"the deadline passed after {seq.generated_tokens} of at most {seq.max_new_tokens} tokens"
                self.fail(seq, DeadlineExceeded(message), now_ns, out)

    # ---------------------------------------------------------------- ends
    def finish(self, seq: SequenceState, reason: FinishReason, now_ns: int, out: list[Action]) -> None:
        """Stop or length: the client's terminal, once; the lane is being freed."""
        serving = self.serving
        assert serving is not None
        self.registry.finish(seq)
        serving.fair.ended(seq)
        serving.release(seq, now_ns, out)
        if seq.request.router == INTERNAL:
            self._internal_ended(seq, None)
            return
        serving.answers.finish(seq, reason, now_ns)
        self.completed += 1
        self._record_end(seq, {"outcome": "completed", "finish": reason.value}, now_ns, out)

    def fail(
        self,
        seq: SequenceState,
        error: CalculetError,
        now_ns: int,
        out: list[Action],
        release: bool = True,
        timed_out: bool = False,
    ) -> None:
        """The client's terminal is an error. `release` False: its lane is lost, not free. `timed_out`: it never had one."""
        state, serving = seq.state, self.serving
        self.registry.fail(seq)
        if seq.request.router == INTERNAL:
            self._internal_ended(seq, f"{error.code}: {error.message}")
        else:
            self.failed += 1
            if state is RequestState.NEW or serving is None:
                self._outbox.refuse(seq.request.router, seq.request.key, error)
            else:
                serving.answers.fail(seq, error, now_ns)
            outcome = "refused" if state is RequestState.NEW else "failed"
            data = {"outcome": outcome, "code": error.code} | ({"timed_out": True} if timed_out else {})
            self._record_end(seq, data, now_ns, out)
        self._let_go(seq, state, release, now_ns, out)

    def fail_all(self, sequences: Iterable[SequenceState], error: CalculetError, now_ns: int, out: list[Action]) -> None:
        """The same error for many."""
        for seq in sequences:
            self.fail(seq, error, now_ns, out)

    def clients_waiting(self) -> list[SequenceState]:
        """Routers' requests that have no lane yet."""
        return [seq for seq in self.registry.live() if seq.state in _WAITING and seq.request.router != INTERNAL]

    def nothing_runs(self) -> bool:
        """No request lives, no job is in flight, no lane is waiting for the runtime's confirmation."""
        serving = self.serving
        return not len(self.registry) and (serving is None or (not len(serving.inflight) and not serving.kv.busy_lanes))

    def _let_go(self, seq: SequenceState, state: RequestState, release: bool, now_ns: int, out: list[Action]) -> None:
        serving = self.serving
        if serving is None:
            return
        if seq.hardware_lane is not None:
            serving.fair.ended(seq)
        if serving.leave(seq, state) and release:
            serving.release(seq, now_ns, out)

    def _record_end(self, seq: SequenceState, data: dict[str, Any], now_ns: int, out: list[Action]) -> None:
        self.tokens += seq.told_tokens
        if seq.generated_tokens > 1:
            self._recorder.of_attempt(history.ATTEMPT_TOKENS, now_ns, seq, {"n": seq.generated_tokens - 1})
        fields = {"tenant": seq.tenant, "prompt_tokens": seq.told_prompt_tokens, "tokens": seq.told_tokens, **data}
        self._recorder.of_attempt(history.ATTEMPT_DONE, now_ns, seq, fields)


def prompt_bytes(prompt: Prompt) -> int:
    """About how much memory a prompt takes, without walking into it deeply."""
    if prompt.text is not None:
        return len(prompt.text)
    if prompt.token_ids is not None:
        return 4 * len(prompt.token_ids)
    messages = prompt.messages or ()
    size = sum(len(part) for message in messages for part in _texts(message.get("content")))
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    if calls or prompt.tools is not None:
        size += len(_encode((calls, prompt.tools)))
    return size + len(prompt.options or "")


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _request(router: int, key: WireKey, message: wire.Submit) -> InferenceRequest:
    return InferenceRequest(
        key, router, message.alias, message.tenant, message.weight if message.weight > 0 else 1.0, message.prompt,
        message.max_new_tokens, message.sampling, message.stop, message.deadline_ns, message.deadline_asked, message.accepted_ns,
        message.want_token_ids, message.echo, message.constraint,
    )  # fmt: skip
