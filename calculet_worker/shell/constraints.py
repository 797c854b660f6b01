"""Compiling what answers must be: JSON schemas and tools become grammars of the library llguidance.

Everything here but the masks runs on threads of its own, beside the actor. Compiling is bounded by size, by the library's own count
of work ("fuel"), by time and by how many requests may wait for it; what is compiled is kept, and each answer gets a copy. A schema
that cannot be compiled is its request's error and names the parameter. The library is imported with the first constraint, so that
workers that never see one do not pay for it; without it workers say so in their hello.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from calculet_core.config import ConstraintsConfig
from calculet_core.errors import CalculetError, InternalError, InvalidValue, OverCapacity, Unsupported
from calculet_core.requests import Constraint, Prompt
from calculet_worker.output.grammars import call_grammar, schema_text
from calculet_worker.shell.tokenizing import PromptTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

AVAILABLE = importlib.util.find_spec("llguidance") is not None
POOL_THREADS = 2
MAX_PIECE = 32
"""Bytes of the longest token that is tried where a tokenizer cannot encode a text itself."""
TOO_HEAVY = ("TooComplex", "too complex", "too many", "fuel", "limit", "too big")
"""In the library's words about a step that was given up."""
_MASK_OF_BIT = np.array([-np.inf, 0.0], np.float32)
RESULTS = ("compiled", "cached", "refused", "too_slow", "too_many")
_encode = msgspec.msgpack.Encoder().encode

Done = Callable[[Any, Any], None]
"""Gets (ids, matcher), or (error, None)."""


class GrammarMatcher:
    """`output.constraint.Matcher` over the library's; used by one thread at a time."""

    __slots__ = ("_mask", "_matcher", "_size", "_told", "complete", "failure")

    def __init__(self, matcher: LLMatcher, size: int, told: list[int]) -> None:
        self._matcher, self._size, self._told = matcher, size, told
        self._mask: NDArray[np.float32] | None = None
        self.complete, self.failure = False, ""

    def mask(self) -> NDArray[np.float32] | None:
        """What is added to logits, float32 [vocabulary]; None: see `failure`."""
        self.prepare()
        return None if self.failure else self._mask

    def prepare(self) -> None:
        """Work the next mask out unless it is there."""
        if self._mask is not None or self.complete or self.failure:
            return
        start_ns = time.monotonic_ns()
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), count=self._size, bitorder="little")
        self._mask = _MASK_OF_BIT.take(bits)
        self._told[0] += 1
        self._told[1] += time.monotonic_ns() - start_ns
        if self._matcher.is_error():
            self.failure = self._error("nothing can follow")
        elif not bits.any():
            self.failure = "no token of this model's vocabulary can follow"

    def accept(self, token_id: int) -> None:
        """The token that came."""
        self._mask = None
        if not self._matcher.consume_token(token_id):
            self.failure = self._error(f"the grammar does not take token {token_id}")
        elif self._matcher.is_stopped():
            self.complete = True

    def _error(self, what: str) -> str:
        words = _in_short(self._matcher.get_error())
        if any(sign in words for sign in TOO_HEAVY):
            what = "the grammar takes too much work (constraints.step_fuel)"
        return f"{what}: {words}"


class Constraints:
    """Compiles for one worker. `masks` and `mask_ns` count what drawing under constraints took."""

    def __init__(self, config: ConstraintsConfig) -> None:
        self._config = config
        self._pool = ThreadPoolExecutor(POOL_THREADS, "compiling")
        self._lock = threading.Lock()
        self._tokenizer: PromptTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._grammar_tokenizer: LLTokenizer | None = None
        self._told = [0, 0]
        self.results = dict.fromkeys(RESULTS, 0)
        self.compiling = 0
        """Requests that wait for their constraint; counted by the actor."""

    @property
    def limits(self) -> dict[str, int]:
        """The configured ones by key."""
        return {name: getattr(self._config, name) for name in self._config.__struct_fields__}

    @property
    def masks(self) -> int:
        """Tokens that masks were worked out for."""
        return self._told[0]

    @property
    def mask_ns(self) -> int:
        """Time that this took."""
        return self._told[1]

    @property
    def cached(self) -> int:
        """Compiled constraints that are kept."""
        return len(self._compiled)

    def refusal(self) -> CalculetError | None:
        """Why no more may be compiled now."""
        if self.compiling < self._config.max_compiling:
            return None
        self.results["too_many"] += 1
        return OverCapacity(f"{self.compiling} requests wait for their schema to be compiled (constraints.max_compiling)")

    def compile(self, tokenizer: PromptTokenizer, prompt: Prompt, constraint: Constraint, done: Done) -> Compiling:
        """Encode the prompt and compile its constraint, on a thread; `done` is called there, once, unless it was given up."""
        job = Compiling(self._config.compile_timeout_ms, param_of(constraint))
        self._pool.submit(self._compile, job, tokenizer, prompt, constraint, done)
        return job

    def close(self) -> None:
        """Drop what is queued; what is being compiled ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(
        self, job: Compiling, tokenizer: PromptTokenizer, prompt: Prompt, constraint: Constraint, done: Done
    ) -> None:
        job.started = True
        if job.given_up:
            return
        try:
            matcher = self._matcher_for(tokenizer, constraint)
            if matcher.mask() is None:
                param = param_of(constraint)
                raise InvalidValue(f"{param}: nothing satisfies it: {matcher.failure}", param=param)
            found: Any = tokenizer.encode_or_error(prompt)
        except CalculetError as error:
            found, matcher = error, None
        except Exception as error:  # whatever the library does with a schema is this request's error alone
            found, matcher = InternalError(f"the schema could not be compiled: {type(error).__name__}"), None
        done(found, matcher)

    def _matcher_for(self, tokenizer: PromptTokenizer, constraint: Constraint) -> Any:
        key = _encode(constraint)
        with self._lock:
            if self._tokenizer is not tokenizer:
                self._tokenizer, self._grammar_tokenizer = tokenizer, None
                self._compiled.clear()
            if (kept := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                self.results["cached"] += 1
                return GrammarMatcher(kept.deep_copy(), len(tokenizer.vocabulary), self._told)
            if self._grammar_tokenizer is None:
                self._grammar_tokenizer = grammar_tokenizer(tokenizer)
            grammar_tokens = self._grammar_tokenizer
        compiled = compile_constraint(constraint, grammar_tokens, self._config)
        with self._lock:
            self.results["compiled"] += 1
            if self._tokenizer is tokenizer:
                self._compiled[key] = compiled
                while len(self._compiled) > self._config.cache_entries:
                    self._compiled.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy(), len(tokenizer.vocabulary), self._told)


class Compiling:
    """A request's turn at the compiler, for the actor to give up on."""

    __slots__ = ("_param", "_timeout_ms", "given_up", "started")

    def __init__(self, timeout_ms: int, param: str) -> None:
        self._timeout_ms, self._param = timeout_ms, param
        self.started = self.given_up = False

    def give_up(self) -> CalculetError:
        """It took too long: its own fault once it was begun, else that of those before it."""
        self.given_up = True
        if self.started:
            message = f"compiling the schema takes longer than {self._timeout_ms} ms (constraints.compile_timeout_ms)"
            return Unsupported(message, param=self._param)
        return OverCapacity(f"others' schemas were compiled for {self._timeout_ms} ms (constraints.compile_timeout_ms)")


# ------------------------------------------------------------------------------------------------ grammars
def param_of(constraint: Constraint) -> str:
    """The parameter that errors of the whole are about."""
    return "tools" if constraint.schema is None else constraint.param


def grammar_tokenizer(tokenizer: PromptTokenizer) -> LLTokenizer:
    """The artifact's vocabulary as the library needs it: control tokens can be part of no grammar, and EOS ends one.

    Raises:
        Unsupported: the artifact has no end-of-sequence token.
    """
    import llguidance

    class Vocabulary:
        eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
        bos_token_id = None
        tokens = [data or b"\xff<|%d|>" % token_id for token_id, data in enumerate(tokenizer.vocabulary)]
        special_token_ids = [token_id for token_id, data in enumerate(tokenizer.vocabulary) if not data]

        def __call__(self, text: str) -> list[int]:
            ids = [int(token_id) for token_id in tokenizer.encode_plain(text)]
            if b"".join([tokenizer.vocabulary[token_id] for token_id in ids]) == text.encode():
                return ids
            return _spelled(text.encode(), longest)  # of a tokenizer that drops or replaces what it does not know

    longest = {data: token_id for token_id, data in enumerate(tokenizer.vocabulary) if data}
    if not tokenizer.eos_token_ids:
        raise Unsupported("this model has no end-of-sequence token, so no schema can be kept to", param="response_format")
    wrapper = llguidance.TokenizerWrapper(Vocabulary())
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokenizer.vocabulary), eos_token=list(tokenizer.eos_token_ids))


def _spelled(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """The text by the longest tokens that begin it, as far as they go."""
    found: list[int] = []
    while text:
        size = next((size for size in range(min(len(text), MAX_PIECE), 0, -1) if text[:size] in ids), 0)
        if not size:
            break
        found.append(ids[text[:size]])
        text = text[size:]
    return found


def compile_constraint(constraint: Constraint, tokenizer: LLTokenizer, config: ConstraintsConfig) -> LLMatcher:
    """A matcher at its start.

    Raises:
        InvalidValue: a schema is none, or is too large; `param` says which.
        Unsupported: a schema uses what cannot be kept to, or needs too much work.
    """
    import llguidance

    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=config.compile_fuel, step_lexer_fuel=config.step_fuel, verbose_errors=False
    )
    _check_sizes(constraint, config)
    if constraint.tools:
        _check_each(constraint, tokenizer, limits)
        grammar = llguidance.LLMatcher.grammar_from_lark(call_grammar(constraint))
    else:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema_text(constraint.schema or {}))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refused(param_of(constraint), matcher.get_error())
    return matcher


def _check_sizes(constraint: Constraint, config: ConstraintsConfig) -> None:
    param = param_of(constraint)
    if len(constraint.tools) > config.max_tools:
        message = f"tools: {len(constraint.tools)}, and at most {config.max_tools} may be given (constraints.max_tools)"
        raise InvalidValue(message, param="tools")
    size = sum(len(msgspec.json.encode(schema)) for schema in _schemas(constraint))
    if size > config.max_schema_bytes:
        limit = f"{config.max_schema_bytes} (constraints.max_schema_bytes)"
        message = f"{param}: {size} bytes of schemas, and at most {limit} are compiled"
        raise InvalidValue(message, param=param)


def _schemas(constraint: Constraint) -> list[Any]:
    return [tool.parameters for tool in constraint.tools] + ([] if constraint.schema is None else [constraint.schema])


def _check_each(constraint: Constraint, tokenizer: LLTokenizer, limits: LLParserLimits) -> None:
    """Find the schema that is wrong while it is still alone: a grammar's error tells only a line."""
    import llguidance

    places = [(tool.parameters, tool.param) for tool in constraint.tools]
    if constraint.schema is not None:
        places.append((constraint.schema, constraint.param))
    for schema, param in places:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema_text(schema))
        if error := llguidance.LLMatcher.validate_grammar(grammar, tokenizer, limits=limits):
            raise _refused(param, error)


def _refused(param: str, error: str) -> CalculetError:
    message = _in_short(error)
    if "too big" in message:
        return Unsupported(f"{param}: it takes too much work to compile (constraints.compile_fuel): {message}", param=param)
    if "Unimplemented" in message:
        return Unsupported(f"{param}: {message}", param=param)
    return InvalidValue(f"{param}: {message}", param=param)


def _in_short(error: str) -> str:
    return " ".join(error.partition("<state>")[0].split())[:300]
