"""Small vocabularies with grammars over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calculet_core.config import ConstraintsConfig
from calculet_core.requests import Constraint, ToolRule
from calculet_worker.shell.constraints import GrammarMatcher, compile_constraint, grammar_tokenizer

BYTES = [bytes([byte]) for byte in range(256)] + [b"", b""]
"""Ids 256 and 257 are control tokens; 257 ends an answer."""
BYTES_EOS = 257


class Letters:
    """What the compiler needs of a tokenizer whose tokens are single bytes."""

    def __init__(self, vocabulary: Sequence[bytes] = BYTES, eos_token_ids: tuple[int, ...] = (BYTES_EOS,)) -> None:
        self.vocabulary, self.eos_token_ids = vocabulary, eos_token_ids
        self._ids = {data: token_id for token_id, data in enumerate(vocabulary) if data}

    def encode_plain(self, text: str) -> Any:
        ids = [self._ids[bytes([byte])] for byte in text.encode() if bytes([byte]) in self._ids]
        return np.array(ids, np.int32)


def a_matcher(constraint: Constraint, letters: Letters | None = None, **config: int) -> GrammarMatcher:
    letters = letters or Letters()
    compiled = compile_constraint(constraint, grammar_tokenizer(letters), ConstraintsConfig(**config))  # type: ignore[arg-type]
    return GrammarMatcher(compiled, len(letters.vocabulary), [0, 0])


def a_tool(name: str, **properties: Any) -> ToolRule:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return ToolRule(name, schema, f"tools[{name}].function.parameters")


def takes(matcher: GrammarMatcher, text: str) -> bool:
    """Whether the text is allowed, byte by byte, from where the matcher is."""
    for byte in text.encode():
        mask = matcher.mask()
        if mask is None or mask[byte] != 0:
            return False
        matcher.accept(byte)
    return True


def may_end(matcher: GrammarMatcher) -> bool:
    if matcher.complete:
        return True
    mask = matcher.mask()
    return mask is not None and bool(mask[BYTES_EOS] == 0)
