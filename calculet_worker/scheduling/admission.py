"""Who may come in (scheduling §5): a decision is one of five values, and nothing expensive happens before it.

Prompt and output are reserved together, since copying, saving and preempting KV are unproven: a running sequence must never run
out. So what can never fit is refused at once, and the refusal names prompt, output and limit. What could fit later waits, bounded
in number and in prompt tokens; the refusal of a full queue names the full budget, and its Retry-After comes from how fast requests
really leave the queue.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from calculet_core.capacity import CapacityBudget
from calculet_core.clock import S
from calculet_core.errors import CalculetError, ContextLengthExceeded, InvalidValue, OverCapacity
from calculet_core.requests import SamplingParams, StopRules

HOPE = 2
"""A request is not queued when even at this many times the measured rate it would get its lane after its deadline."""
MIN_MEASURED = 8
"""Departures before the rate counts as measured."""
MAX_RETRY_AFTER_S = 60.0
UNMEASURED_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Admit:
    """A lane and KV are there; so many tokens may be generated."""

    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Queue:
    """It can be served before its deadline once something ends."""

    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class RejectInvalid:
    """400: it can never be served."""

    error: CalculetError


@dataclass(frozen=True, slots=True)
class RejectCapacity:
    """429: a budget is full."""

    error: CalculetError


@dataclass(frozen=True, slots=True)
class RejectUnavailable:
    """503: no model serves here now."""

    error: CalculetError


Decision = Admit | Queue | RejectInvalid | RejectCapacity | RejectUnavailable


class DrainRate:
    """How fast requests leave the waiting queue for a lane, from the last departures while there was a queue.

    A request that never had to wait says that nobody was waiting: what was measured before it tells nothing about the next queue.
    """

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: deque[int] = deque(maxlen=32)

    def departed(self, now_ns: int, waited: bool = True) -> None:
        """A request got a lane, at once or after it had waited for one."""
        if waited:
            self._times.append(now_ns)
        else:
            self._times.clear()

    def wait_s(self, waiting: int, now_ns: int) -> float | None:
        """Until `waiting` requests will have left at the measured rate; None before it was measured."""
        if len(self._times) < MIN_MEASURED or now_ns <= self._times[0]:
            return None
        return waiting * (now_ns - self._times[0]) / S / len(self._times)

    def retry_after_s(self, waiting: int, now_ns: int) -> float:
        """Whole seconds until `waiting` requests will have left, 1 to 60; 1 before anything was measured."""
        if len(self._times) < 2 or now_ns <= self._times[0]:
            return UNMEASURED_RETRY_AFTER_S
        per_s = len(self._times) * S / (now_ns - self._times[0])
        return float(math.ceil(min(MAX_RETRY_AFTER_S, max(1.0, waiting / per_s))))


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue as a new request finds it."""

    starts_at_once: bool
    """Nobody is before it, and lane, KV and its tenant's limit allow it."""
    waiting: int
    waiting_tokens: int
    take_quota: Callable[[], CalculetError | None]
    """Takes its prompt tokens from what its tenant may let wait; why not, when they are not there."""


class AdmissionController:
    """The budgets of one generation. `context` is positions per sequence, `vocab_size` bounds token ids."""

    def __init__(self, budget: CapacityBudget, context: int, vocab_size: int, drain: DrainRate) -> None:
        self.budget, self._vocab_size, self._drain = budget, vocab_size, drain
        self.limit = min(context, budget.max_kv_tokens)

    def arrival(self, tokenizing: int, waiting: int, free_lanes: int, now_ns: int) -> RejectCapacity | None:
        """Before tokenizing: what is already on its way may fill the free lanes and the queue, and no more."""
        if tokenizing + waiting < self.budget.max_waiting_requests + free_lanes:
            return None
        return self._full_count(waiting + tokenizing, now_ns)

    def size(self, prompt_tokens: int, asked: int | None, param: str = "prompt") -> int | RejectInvalid:
        """How many tokens may be generated, or why the request can never be served.

        Absent `asked` is what fits. `prompt + output <= limit` (scheduling §5.1). `param` is where the prompt came in, to be named
        where it does not even fit alone.
        """
        if prompt_tokens < 1:
            return RejectInvalid(InvalidValue(f"{param}: it has no tokens", param=param))
        if asked is not None and asked < 1:
            return RejectInvalid(InvalidValue(f"max_tokens: must be at least 1, got {asked}", param="max_tokens"))
        room = self.limit - prompt_tokens
        if room < (asked or 1):
            wanted = "at least 1 token of output" if asked is None else f"{asked} tokens of output"
            message = (
                f"the prompt has {prompt_tokens} tokens and {wanted} were asked for; together at most {self.limit} fit "
                f"(this model's maximum context length is {self.limit} tokens)"
            )
            return RejectInvalid(ContextLengthExceeded(message, param=param if room < 1 else "max_tokens"))
        return room if asked is None else asked

    def decide(
        self,
        prompt_tokens: int,
        asked: int | None,
        id_range: tuple[int, int],
        look: Callable[[int], QueueState],
        deadline_ns: int,
        now_ns: int,
        param: str = "prompt",
        named: Iterable[tuple[str, int]] = (),
    ) -> Decision:
        """After tokenizing. `id_range` is the lowest and the highest of the prompt's token ids; `look` shows the queue as a
        request with so many tokens of output would find it. `param` is where the prompt came in, `named` has the other ids that
        the client named, with their parameters."""
        size = self.size(prompt_tokens, asked, param)
        if isinstance(size, RejectInvalid):
            return size
        if id_range[0] < 0 or id_range[1] >= self._vocab_size:
            wrong = id_range[0] if id_range[0] < 0 else id_range[1]
            message = f"{param}: token id {wrong} is not in the vocabulary of {self._vocab_size}"
            return RejectInvalid(InvalidValue(message, param=param))
        for name, token_id in named:
            if token_id >= self._vocab_size:
                message = f"{name}: token id {token_id} is not in the vocabulary (0 to {self._vocab_size - 1})"
                return RejectInvalid(InvalidValue(message, param=name))
        now = look(size)
        if now.starts_at_once:
            return Admit(size)
        if now.waiting >= self.budget.max_waiting_requests:
            return self._full_count(now.waiting, now_ns)
        limit = self.budget.max_waiting_prompt_tokens
        if now.waiting_tokens + prompt_tokens > limit:
            message = (
                f"{now.waiting_tokens} prompt tokens wait; {prompt_tokens} more would pass {limit} "
                "(admission.max_waiting_prompt_tokens)"
            )
            return RejectCapacity(OverCapacity(message, retry_after_s=self._drain.retry_after_s(now.waiting, now_ns)))
        if (hopeless := self._hopeless(now.waiting, deadline_ns, now_ns)) is not None:
            return hopeless
        over_quota = now.take_quota()
        return Queue(size) if over_quota is None else RejectCapacity(over_quota)

    def _hopeless(self, waiting: int, deadline_ns: int, now_ns: int) -> RejectCapacity | None:
        """Whoever cannot get a lane before the deadline is told now, not then (scheduling §5.2)."""
        wait_s, left_s = self._drain.wait_s(waiting, now_ns), (deadline_ns - now_ns) / S
        if wait_s is None or wait_s <= left_s * HOPE:
            return None
        message = f"{waiting} requests wait; a lane is {wait_s:.1f} s away at the present rate and the deadline {left_s:.1f} s"
        return RejectCapacity(OverCapacity(message, retry_after_s=self._drain.retry_after_s(waiting, now_ns)))

    def expired(self, waiting: int, now_ns: int) -> OverCapacity:
        """What a request that waited in vain is told: it met a full board, not a slow answer (acceptance §12.1)."""
        retry_after_s = self._drain.retry_after_s(waiting, now_ns)
        return OverCapacity("the request waited for a lane until its deadline", retry_after_s=retry_after_s)

    def _full_count(self, waiting: int, now_ns: int) -> RejectCapacity:
        limit = self.budget.max_waiting_requests
        message = f"{waiting} requests wait for a lane and {limit} may (admission.max_waiting_requests)"
        return RejectCapacity(OverCapacity(message, retry_after_s=self._drain.retry_after_s(waiting, now_ns)))


def named_ids(sampling: SamplingParams, stop: StopRules) -> list[tuple[str, int]]:
    """The token ids that a request names beside its prompt's, each with its parameter."""
    biased = [("logit_bias", token_id) for token_id in sampling.logit_bias]
    return biased + [("stop_token_ids", token_id) for token_id in stop.token_ids]
