"""Which worker gets a request: the one with the least outstanding cost per weight; ties rotate.

Outstanding cost is the worker's last snapshot plus what this router has put in flight since. A snapshot alone would herd a whole
burst onto one worker. A cost is a number of tokens, prompt and output together.
"""

from __future__ import annotations

from collections.abc import Collection

from calculet_core.requests import Prompt
from calculet_router.fleet import Worker

CHARACTERS_PER_TOKEN = 4
"""A guess that stands until the worker's acceptance tells the prompt's length."""
TOKENS_PER_TOOL = 100
"""Likewise."""
UNKNOWN_OUTPUT_TOKENS = 256
"""What an answer without a limit is taken for."""


class Balance:
    """Remembers only whose turn it is among equals."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, eligible: list[Worker], excluded: Collection[tuple[str, int]] = ()) -> Worker | None:
        """The least loaded of `eligible` whose (board, epoch) is not excluded; None when there is none."""
        size = len(eligible)
        if size == 0:
            return None
        self._turn = turn = (self._turn + 1) % size
        best, least = None, 0.0
        for worker in eligible[turn:] + eligible[:turn] if turn else eligible:
            if excluded and worker.key in excluded:
                continue
            cost = (worker.settled + worker.unanswered) / worker.weight
            if best is None or cost < least:
                best, least = worker, cost
        return best


def estimate_cost(prompt: Prompt, max_new_tokens: int | None) -> float:
    """Tokens that a request will probably cost a board."""
    if prompt.token_ids is not None:
        tokens: float = len(prompt.token_ids)
    elif prompt.text is not None:
        tokens = len(prompt.text) / CHARACTERS_PER_TOKEN
    else:
        tokens = sum(len(message["content"]) for message in prompt.messages or ()) / CHARACTERS_PER_TOKEN
        if prompt.tools is not None:
            tokens += TOKENS_PER_TOOL * len(prompt.tools)
    return tokens + (UNKNOWN_OUTPUT_TOKENS if max_new_tokens is None else max_new_tokens)
