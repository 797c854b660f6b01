"""What schemas and tools cost: preparing a vocabulary of the size of Qwen 3's, compiling, a mask, a draw under one; and that a
decode tick without them is what it was (`engine_tick` has its figure). CPU time, on one thread.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from builders_constraints import Letters, a_constraint, a_tool

from calculet_core.config import ConstraintsConfig
from calculet_core.requests import SamplingParams, StopRules
from calculet_worker.output.sampling import Sampler
from calculet_worker.shell.constraints import GrammarMatcher, compile_constraint, grammar_tokenizer

VOCABULARY, SPECIALS = 151_936, 293
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
JSON_TEXT = b'{"name": "Hello there, how are you doing", "age": 123'
FREE_TEXT = b"Hello there, how are you doing in this fine weather? "


def a_large_vocabulary() -> Letters:
    """Single bytes and random pieces; the last id ends an answer."""
    source, letters = random.Random(1), b"etaoinshrdlucmfwypvbgkjqxz     ETAOIN0123456789_-.,(){}\""
    pieces = {bytes([byte]) for byte in range(256)}
    while len(pieces) < VOCABULARY - SPECIALS:
        pieces.add(bytes(source.choice(letters) for _ in range(source.randint(2, 9))))
    return Letters([*sorted(pieces), *[b""] * SPECIALS], (VOCABULARY - 1,))


def cpu_ms(act: Callable[[], Any]) -> float:
    start = time.process_time()
    act()
    return (time.process_time() - start) * 1e3


def walk(compiled: Any, text: bytes, ids: dict[bytes, int], row: Any) -> tuple[list[float], list[float]]:
    """CPU of each mask, and of each draw that finds its mask ready, in ms."""
    masks, draws = [], []
    matcher = GrammarMatcher(compiled.deep_copy(), VOCABULARY, [0, 0])
    sampler = Sampler(SamplingParams(temperature=0.0), StopRules(), (), np.array([], np.int32), 1, matcher)
    for byte in text:
        masks.append(cpu_ms(matcher.prepare))
        wanted = ids[bytes([byte])]
        row[wanted] += 100
        drawn: list[int] = []
        draws.append(cpu_ms(lambda drawn=drawn: drawn.append(sampler.draw(row, ()).token_id)))  # type: ignore[misc]
        row[wanted] -= 100
        assert drawn == [wanted], "the text keeps to the schema"
    return masks, draws


def main() -> None:
    letters = a_large_vocabulary()
    ids = {data: token_id for token_id, data in enumerate(letters.vocabulary) if data}
    row = np.random.default_rng(1).normal(0, 3, VOCABULARY).astype(np.float32)
    before, config, made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, ConstraintsConfig(), list[Any]()
    build = cpu_ms(lambda: made.append(grammar_tokenizer(letters)))  # type: ignore[arg-type]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"vocabulary of {VOCABULARY}: {build:.0f} ms, {grown:.0f} MB, once, with the first schema")
    for name, constraint, text in (
        ("a schema", a_constraint(PERSON), JSON_TEXT),
        ("tools, in free text", a_constraint(tools=(a_tool("get", city={"type": "string"}), a_tool("now"))), FREE_TEXT),
    ):
        compiled = compile_constraint(constraint, made[0], config)
        times = [cpu_ms(partial(compile_constraint, constraint, made[0], config)) for _ in range(5)]
        walks = [walk(compiled, text, ids, row) for _ in range(3)]
        masks = [ms for mask, _ in walks for ms in mask]
        draws = [ms for _, draw in walks for ms in draw]
        print(
            f"{name}: compiled in {min(times):.2f} ms; a mask {statistics.mean(masks):.2f} ms (most {max(masks):.1f}), beside the device; "
            f"a draw {statistics.median(draws) * 1e3:.0f} us"
        )
    plain = Sampler(SamplingParams(temperature=0.0, logprobs=None, frequency_penalty=1e-9), StopRules(), (), np.array([], np.int32), 1)
    draws = [cpu_ms(lambda: plain.draw(row, ())) for _ in range(100)]
    print(f"a draw with penalties and no schema: {statistics.median(draws) * 1e3:.0f} us")


if __name__ == "__main__":
    main()
