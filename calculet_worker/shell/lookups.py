"""Routers' questions about tokens (`/tokenize`, `/detokenize`): answered beside the engine, which never hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from calculet_core import wire
from calculet_core.errors import CalculetError, InvalidValue, StaleView
from calculet_core.requests import MAX_LOOKUP_TOKENS
from calculet_worker.answers import error_info
from calculet_worker.shell.tokenizing import PromptTokenizer, TokenizingPool


class Lookups:
    """`send` takes the frames of an answer for a router's identity; the pool is the one that requests use."""

    def __init__(self, epoch: int, pool: TokenizingPool, send: Callable[[list[bytes]], object]) -> None:
        self._epoch, self._pool, self._send = epoch, pool, send
        self._loop = asyncio.get_running_loop()

    def ask(self, identity: bytes, message: wire.Lookup, tokenizer: PromptTokenizer | None, digest: str) -> None:
        """Answer in time; at once when there is nothing to work out. `digest` is the artifact that is here."""
        if message.epoch != self._epoch or tokenizer is None or message.digest != digest:
            self._answer(identity, message, StaleView("another artifact is on this board now"))
        elif message.prompt is not None:

            def done(result: Any) -> None:
                self._loop.call_soon_threadsafe(self._encoded, identity, message, tokenizer, result)

            self._pool.encode(tokenizer, message.prompt, done)
        else:
            future = self._loop.run_in_executor(None, _decode, tokenizer, message.token_ids)
            future.add_done_callback(lambda done: self._answer(identity, message, done.result()))

    def _encoded(self, identity: bytes, message: wire.Lookup, tokenizer: PromptTokenizer, result: Any) -> None:
        if isinstance(result, CalculetError):
            self._answer(identity, message, result)
        elif len(result) > MAX_LOOKUP_TOKENS:
            text = f"the prompt is {len(result)} tokens; at most {MAX_LOOKUP_TOKENS} can be told"
            self._answer(identity, message, InvalidValue(text, param="prompt"))
        else:
            ids = result.tolist()
            pieces = [tokenizer.piece(token_id) for token_id in ids] if message.want_pieces else None
            self._answer(identity, message, wire.LookupAnswer(message.request_id, self._epoch, ids, pieces))

    def _answer(self, identity: bytes, message: wire.Lookup, found: CalculetError | str | wire.LookupAnswer) -> None:
        if isinstance(found, CalculetError):
            found = wire.LookupAnswer(message.request_id, self._epoch, error=error_info(found))
        elif isinstance(found, str):
            found = wire.LookupAnswer(message.request_id, self._epoch, text=found)
        self._send([identity, *wire.encode(found)])


def _decode(tokenizer: PromptTokenizer, token_ids: Sequence[int]) -> CalculetError | str:
    """The ids' text, or which of them there is not."""
    size = len(tokenizer.vocabulary)
    for place, token_id in enumerate(token_ids):
        if token_id >= size:
            return InvalidValue(f"tokens[{place}]: {token_id} is not in the vocabulary (0 to {size - 1})", param="tokens")
    return tokenizer.text_of(token_ids)
