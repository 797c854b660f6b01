"""`Tokenize` actions: short prompts at once, longer ones and all that come with a constraint on threads.

A request whose constraint is not compiled in time is told so here; what its thread finds afterwards is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from calculet_core.clock import S
from calculet_core.config import ConstraintsConfig
from calculet_core.errors import CalculetError, Unsupported
from calculet_core.requests import Constraint
from calculet_worker.actions import Tokenize
from calculet_worker.events import Event, Tokenized, TokenizingFailed
from calculet_worker.shell.constraints import AVAILABLE, Compiling, Constraints
from calculet_worker.shell.tokenizing import PromptTokenizer, TokenizingPool


class Prompts:
    """`tell` takes an event on the loop's thread; `took` hears how many seconds each constraint took."""

    def __init__(self, config: ConstraintsConfig, tell: Callable[[Event], None], took: Callable[[float], None]) -> None:
        self._loop, self._tell, self._took = asyncio.get_running_loop(), tell, took
        self._timeout_s = config.compile_timeout_ms / 1000
        self.pool = TokenizingPool()
        self.constraints = Constraints(config)

    def start(self, action: Tokenize, tokenizer: PromptTokenizer) -> Event | None:
        """The answer where it is there at once; None: `tell` gets it."""
        if action.constraint is not None:
            return self._constrained(action, action.constraint, tokenizer)
        if tokenizer.is_quick(action.prompt, action.size):
            return event_of(action, tokenizer, tokenizer.encode_or_error(action.prompt))

        def done(result: Any) -> None:
            self._loop.call_soon_threadsafe(self._tell, event_of(action, tokenizer, result))

        self.pool.encode(tokenizer, action.prompt, done)
        return None

    def close(self) -> None:
        """Drop what is queued."""
        self.pool.close()
        self.constraints.close()

    def _constrained(self, action: Tokenize, constraint: Constraint, tokenizer: PromptTokenizer) -> Event | None:
        constraints, key, started_ns = self.constraints, action.key, time.monotonic_ns()
        if not AVAILABLE:
            return TokenizingFailed(key, Unsupported("llguidance is not installed on this host", param=constraint.param))
        if error := constraints.refusal():
            return TokenizingFailed(key, error)
        constraints.compiling += 1

        def arrived(result: Any, matcher: Any) -> None:
            if job.given_up:
                return
            timer.cancel()
            constraints.compiling -= 1
            self._took((time.monotonic_ns() - started_ns) / S)
            if isinstance(result, CalculetError):
                constraints.results["refused"] += 1
            self._tell(event_of(action, tokenizer, result, matcher))

        def too_late() -> None:
            constraints.compiling -= 1
            constraints.results["too_slow"] += 1
            self._tell(TokenizingFailed(key, job.give_up()))

        def done(result: Any, matcher: Any) -> None:
            self._loop.call_soon_threadsafe(arrived, result, matcher)

        job: Compiling = constraints.compile(tokenizer, action.prompt, constraint, done)
        timer = self._loop.call_later(self._timeout_s, too_late)
        return None


def event_of(action: Tokenize, tokenizer: PromptTokenizer, result: Any, matcher: Any = None) -> Event:
    """What the engine hears: ids, or an error."""
    if isinstance(result, CalculetError):
        return TokenizingFailed(action.key, result)
    return Tokenized(action.key, result, matcher, tokenizer.text_of(result.tolist()) if action.echo else "")
