"""What routers are told: tokens drawn from logits, their text, and one terminal for each attempt.

The next job must leave before the last tokens are written out, so a token's text is made only when the outbox is flushed. Except
where a stop string may end the answer: there text decides whether the sequence takes part in the next job, and is made at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import sha256 as _sha256
from typing import Any

from calculet_core import wire
from calculet_core.errors import CalculetError, ConstraintFailed
from calculet_core.ids import WireKey
from calculet_core.requests import FinishReason, SequenceState
from calculet_worker.actions import Action, ToRouter
from calculet_worker.output.aligned import Aligned
from calculet_worker.output.sampling import Sampler
from calculet_worker.output.scoring import GivenSampler, GivenText, first_logprob
from calculet_worker.output.text import TextStream
from calculet_worker.output.tools import CallingText
from calculet_worker.records import INTERNAL

_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1


class Answer:
    """One attempt's output: what was drawn and not sent yet."""

    __slots__ = (
        "aligned", "calls", "count", "error", "finish", "key", "logprobs", "matcher", "queued", "router", "sampler", "shown",
        "text", "token_ids", "unshown", "usage", "watches",
    )  # fmt: skip

    def __init__(self, seq: SequenceState, sampler: Sampler, text: TextStream | CallingText) -> None:
        request = seq.request
        self.router, self.key = request.router, request.key
        self.sampler, self.text = sampler, text
        self.matcher = sampler.matcher
        self.calls = text if isinstance(text, CallingText) else None
        self.aligned = Aligned() if request.sampling.logprobs is not None else None
        self.watches = bool(request.stop.strings) or self.matcher is not None or self.aligned is not None
        """Text is made as tokens are drawn: a stop string or its constraint may end it, or log probabilities keep step with it."""
        self.count, self.shown = 0, seq.echo
        self.unshown: list[int] = []
        self.token_ids: list[int] | None = [] if request.want_token_ids else None
        self.logprobs: list[wire.TokenLogprob] | None = None if request.sampling.logprobs is None else []
        self.finish: str | None = None
        self.error: wire.ErrorInfo | None = None
        self.usage: wire.Usage | None = None
        self.queued = False

    def piece(self) -> wire.Piece:
        """Everything since the last one."""
        push = self.text.push
        text = self.shown
        for token in self.unshown:
            text += push(token)
        if self.finish is not None:
            text += self.text.flush()
            if self.aligned is not None and self.logprobs is not None:
                self.logprobs += self.aligned.rest()
        elif self.matcher is not None and self.error is None:
            self.matcher.prepare()
        parts = None
        if self.calls is not None:
            parts = self.calls.take()
            if self.calls.called and self.finish == FinishReason.STOP:
                self.finish = FinishReason.TOOL_CALLS.value
        piece = wire.Piece(
            self.key.request_id, self.key.attempt, self.count, text, self.finish, self.error, self.usage,
            self.token_ids or None, self.logprobs or None, parts or None,
        )  # fmt: skip
        self.count, self.shown, self.unshown = 0, "", []
        if self.token_ids is not None:
            self.token_ids = []
        if self.logprobs is not None:
            self.logprobs = []
        return piece


class ScoredAnswer(Answer):
    """One that begins with its prompt's tokens, each with its log probability; they count as the prompt's. Whoever scores cuts by
    place, so the token that ends it has an entry, too: there are as many as usage counts tokens, but for a stop string's."""

    __slots__ = ("_seq", "_told")

    def __init__(
        self, seq: SequenceState, given: tuple[int, ...], vocabulary: Sequence[bytes], eos_token_ids: tuple[int, ...], seed: int
    ) -> None:
        request, drawn = seq.request, seq.request.max_new_tokens != 0
        sampler = GivenSampler(request, eos_token_ids, seq.prompt_token_ids, given, seed)
        super().__init__(seq, sampler, GivenText(vocabulary, request.stop.strings, seq.told_prompt_tokens, drawn))
        self._seq, self._told = seq, 0
        assert self.aligned is not None and self.logprobs is not None, "it is scored for its log probabilities"
        first = int(seq.prompt_token_ids[0])
        self.shown, self.aligned.drawn = self.text.push(first), first_logprob(first, vocabulary)
        self.logprobs += self.aligned.take(len(self.shown), 0, False)

    def piece(self) -> wire.Piece:
        """See `Answer`."""
        told, aligned = self._seq.told_tokens, self.aligned
        self.count, self._told = told - self._told, told
        if self.finish is not None and aligned is not None and aligned.drawn is not None and self.logprobs is not None:
            self.logprobs += [*aligned.rest(), aligned.drawn]  # EOS or a stop id: no text, but one of the tokens that were counted
        return super().piece()


class Outbox:
    """What is to be sent, router by router; `flush` makes the texts and the messages."""

    __slots__ = ("_answers", "_messages")

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._messages: dict[int, ToRouter] = {}

    def add(self, answer: Answer) -> None:
        """The answer has something new."""
        if not answer.queued:
            answer.queued = True
            self._answers.append(answer)

    def accept(self, seq: SequenceState) -> None:
        """Admission said Admit or Queue."""
        key = seq.request.key
        if seq.request.router != INTERNAL:
            told = seq.told_prompt_tokens
            most = seq.prompt_tokens + seq.max_new_tokens - told
            acceptance = wire.Acceptance(key.request_id, key.attempt, told, most)
            self._message(seq.request.router).accepted.append(acceptance)

    def refuse(self, router: int, key: WireKey, error: CalculetError) -> None:
        """Admission said no."""
        refusal = wire.Refusal(key.request_id, key.attempt, error_info(error), error.retryable)
        self._message(router).refused.append(refusal)

    def fail_unanswered(self, seq: SequenceState, error: CalculetError, usage: wire.Usage) -> None:
        """The terminal of an accepted request that never had a lane."""
        key = seq.request.key
        piece = wire.Piece(key.request_id, key.attempt, 0, "", None, error_info(error), usage)
        self._message(seq.request.router).pieces.append(piece)

    def forget(self, answer: Answer) -> None:
        """Its client is gone."""
        self._answers.remove(answer)

    def flush(self, out: list[Action]) -> None:
        """Append one `ToRouter` for each router that something is there for."""
        for answer in self._answers:
            answer.queued = False
            self._message(answer.router).pieces.append(answer.piece())
        self._answers.clear()
        if self._messages:
            out.extend(self._messages.values())
            self._messages = {}

    def _message(self, router: int) -> ToRouter:
        if (message := self._messages.get(router)) is None:
            message = self._messages[router] = ToRouter(router)
        return message


class Answers:
    """The answers of one generation, by sequence id. Internal sequences have none: their tokens are plain argmaxes."""

    def __init__(
        self,
        outbox: Outbox,
        vocabulary: Sequence[bytes],
        eos_token_ids: tuple[int, ...],
        seed: int,
        stopwatch: Callable[[], int] | None = None,
    ) -> None:
        self._outbox, self._vocabulary, self._eos, self._seed = outbox, vocabulary, eos_token_ids, seed
        self._stopwatch = stopwatch
        self.sampling_ns: int | None = None
        """How long the last job's drawing took; measured only with a stopwatch."""
        self._by_seq: dict[int, Answer] = {}

    def open(self, seq: SequenceState) -> None:
        """The sequence was admitted."""
        request = seq.request
        if request.router == INTERNAL:
            return
        seed = (self._seed + request.key.request_id * _SEED_STRIDE) & _SEED_MASK
        if seq.given is not None:
            self._by_seq[seq.seq_id] = ScoredAnswer(seq, seq.given, self._vocabulary, self._eos, seed)
            return
        sampler = Sampler(request.sampling, request.stop, self._eos, seq.prompt_token_ids, seed, seq.matcher)
        constraint, strings = request.constraint, request.stop.strings
        if constraint is not None and constraint.tools:
            self._by_seq[seq.seq_id] = Answer(seq, sampler, CallingText(self._vocabulary, strings, constraint.required))
        else:
            self._by_seq[seq.seq_id] = Answer(seq, sampler, TextStream(self._vocabulary, strings))

    def draw(self, sequences: list[SequenceState], logits: Any, best: Any) -> list[int]:
        """The next token of each row; those of sequences that are ending anyway mean nothing. `NO_TOKEN`: see `dead_end`.

        `best` is each row's best id, int64 [rows].
        """
        if self._stopwatch is None:
            return self._draw(sequences, logits, best)
        start_ns = self._stopwatch()
        tokens = self._draw(sequences, logits, best)
        self.sampling_ns = self._stopwatch() - start_ns
        return tokens

    def _draw(self, sequences: list[SequenceState], logits: Any, best: Any) -> list[int]:
        get = self._by_seq.get
        tokens: list[int] = best.tolist()
        for row, seq in enumerate(sequences):
            answer = get(seq.seq_id)
            if answer is not None and not (answer.sampler.greedy and answer.sampler.takes(tokens[row])):
                tokens[row] = self._draw_row(answer, logits[row])
        return tokens

    def _draw_row(self, answer: Answer, row: Any) -> int:
        drawn = answer.sampler.draw(row, self._vocabulary)
        if answer.aligned is not None:
            answer.aligned.drawn = drawn.logprob
        return drawn.token_id

    def take(self, seq: SequenceState, token: int) -> FinishReason | None:
        """A drawn token joins its answer, already counted in `seq`; tells whether and why the answer ends with it."""
        answer, generated = self._by_seq.get(seq.seq_id), seq.generated_tokens
        if answer is None:
            return FinishReason.LENGTH if generated >= seq.max_new_tokens else None
        answer.count += 1
        if answer.token_ids is not None:
            answer.token_ids.append(token)
        if not answer.queued:
            self._outbox.add(answer)
        if answer.sampler.stops(token, generated):
            return FinishReason.STOP
        if answer.watches:
            text = answer.text.push(token)
            answer.shown += text
            if answer.aligned is not None and answer.logprobs is not None:
                answer.logprobs += answer.aligned.take(len(text), answer.text.held, answer.text.stopped)
            if answer.text.stopped or (answer.matcher is not None and answer.matcher.complete):
                return FinishReason.STOP
        else:
            answer.unshown.append(token)
        return FinishReason.LENGTH if generated >= seq.max_new_tokens else None

    def dead_end(self, seq: SequenceState) -> CalculetError:
        """Why `draw` found no token for the sequence."""
        answer = self._by_seq[seq.seq_id]
        assert answer.matcher is not None, "only a constraint can leave no token"
        constraint = seq.request.constraint
        param = constraint.param if constraint is not None and constraint.schema is not None else "tools"
        return ConstraintFailed(f"{param}: after {seq.generated_tokens} tokens {answer.matcher.failure}", param=param)

    def finish(self, seq: SequenceState, reason: FinishReason, now_ns: int) -> None:
        """The client's terminal: a standard finish reason, and the usage."""
        answer = self._by_seq.pop(seq.seq_id, None)
        if answer is not None:
            answer.finish, answer.usage = reason.value, usage_of(seq, now_ns)
            self._outbox.add(answer)

    def fail(self, seq: SequenceState, error: CalculetError, now_ns: int) -> None:
        """The client's terminal: an error; text that was not sent is still sent."""
        answer = self._by_seq.pop(seq.seq_id, None)
        if answer is not None:
            answer.error, answer.usage = error_info(error), usage_of(seq, now_ns)
            self._outbox.add(answer)
        elif seq.request.router != INTERNAL:
            self._outbox.fail_unanswered(seq, error, usage_of(seq, now_ns))

    def drop(self, seq: SequenceState) -> None:
        """Cancelled: nobody listens any more."""
        answer = self._by_seq.pop(seq.seq_id, None)
        if answer is not None and answer.queued:
            self._outbox.forget(answer)


def usage_of(seq: SequenceState, now_ns: int) -> wire.Usage:
    """The server's count; a time is None where its phase was not reached."""
    admitted, first = seq.admitted_ns, seq.first_token_ns
    return wire.Usage(
        seq.told_prompt_tokens,
        seq.told_tokens,
        queue_ns=admitted - seq.waiting_since_ns if admitted else None,
        prefill_ns=first - admitted if first else None,
        decode_ns=now_ns - first if first else None,
        device_ns=seq.device_ns if admitted else None,
        token_hash=token_hash(seq.output_token_ids[len(seq.given or ()) :][: seq.told_tokens]) if seq.told_tokens else None,
    )


def token_hash(token_ids: Sequence[int]) -> str:
    """sha256 over the ids as int32, little-endian; its first 16 hexadecimal digits."""
    return _sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()[:16]


def error_info(error: CalculetError) -> wire.ErrorInfo:
    """An error as the wire carries it."""
    return wire.ErrorInfo(error.code, error.message, error.param, error.retry_after_s)
