"""What a client asked (`InferenceRequest`) and what the worker keeps about it while it runs (`SequenceState`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from calculet_core.ids import WireKey
from calculet_core.states.request import REQUEST, RequestState

MAX_LOOKUP_TOKENS = 1 << 20
"""Most tokens that one question of `/tokenize` or `/detokenize` may be about."""


class FinishReason(StrEnum):
    """The standard values that clients know; a failure is an error and never one of these."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """How a token is drawn from logits. `temperature` 0 is greedy; None means off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """How many alternatives to report with each token; 0 reports only the drawn one."""

    @property
    def greedy(self) -> bool:
        """Whether the draw is a plain argmax that nothing changes."""
        return (
            self.temperature == 0.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.logprobs is None
        )


class StopRules(msgspec.Struct, array_like=True, frozen=True):
    """When a sequence ends before its budget."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


class Prompt(msgspec.Struct, array_like=True, frozen=True):
    """Exactly one of the three is set; text and messages are tokenized by the worker."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: list[dict[str, Any]] | None = None
    """OpenAI chat messages; the artifact's chat template renders them."""
    tools: list[str] | None = None
    """With messages: the functions that the model is told of, as OpenAI writes them, each as JSON."""
    options: str | None = None
    """With messages: variables for the chat template, an object as JSON."""


class ToolRule(msgspec.Struct, array_like=True, frozen=True):
    """A function that an answer may call."""

    name: str
    parameters: str
    """JSON schema of its arguments, an object. As JSON: MessagePack cannot carry every number that a schema may have."""
    param: str
    """Where the client wrote the schema, for errors."""


class Constraint(msgspec.Struct, array_like=True, frozen=True):
    """What an answer must be, whatever the model would rather say; one of `schema` and `tools` is there, or both."""

    schema: str | None = None
    """JSON schema of the whole answer, as JSON; with `tools` the answer may call instead, unless `required`."""
    param: str = "response_format"
    """Where the client wrote the schema, for errors."""
    tools: tuple[ToolRule, ...] = ()
    """Functions that may be called."""
    required: bool = False
    """At least one must be called."""
    parallel: bool = True
    """More than one may be called."""


class InferenceRequest(msgspec.Struct, frozen=True):
    """A validated request as the worker's engine gets it."""

    key: WireKey
    router: int
    """Incarnation of the router that sent it."""
    alias: str
    tenant: str
    weight: float
    prompt: Prompt
    max_new_tokens: int | None
    """None: as many as the context leaves."""
    sampling: SamplingParams
    stop: StopRules
    deadline_ns: int
    """CLOCK_MONOTONIC of the host."""
    deadline_asked: bool
    """False: the configured default; such deadlines compare equal (scheduling §7.2)."""
    accepted_ns: int
    """When the router had parsed it."""
    want_token_ids: bool = False
    echo: bool = False
    constraint: Constraint | None = None


@dataclass(slots=True, eq=False)
class SequenceState:
    """Scheduling §2's record of a running request; its `.state` is a `RequestState`.

    Written only by `calculet_worker.registry`; everybody else reads.
    """

    request: InferenceRequest
    seq_id: int
    generation: int
    prompt_token_ids: Any
    """int32, shape [prompt_tokens]."""
    prompt_tokens: int
    max_new_tokens: int
    deadline_ns: int
    state: RequestState = REQUEST.initial
    generated_tokens: int = 0
    kv_length: int = 0
    """Committed positions on the lane."""
    hardware_lane: int | None = None
    virtual_finish_time: float = 0.0
    last_token: int = -1
    """Sampled but not yet in KV; the next decode writes it at position `kv_length`."""
    cancelled: bool = False
    """Set while a job runs; the job drains and its result is dropped."""
    cancel_reason: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    matcher: Any = None
    """Its constraint's state, a `calculet_worker.output.constraint.Matcher`; None: any token may come."""
    echo: str = ""
    """What the answer begins with before its first token."""
    given: tuple[int, ...] | None = None
    """The prompt's tokens behind the first, where each has a step of its own for its log probability; None: none has."""
    waiting_since_ns: int = 0
    ready_since_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    device_ns: int = 0
    """Device time of the jobs it took part in; shared time of a batch is not divided."""

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.request.tenant

    @property
    def told_prompt_tokens(self) -> int:
        """The prompt's tokens as its client counts them."""
        return self.prompt_tokens + (0 if self.given is None else len(self.given))

    @property
    def told_tokens(self) -> int:
        """Tokens that were generated, as its client counts them: given ones are the prompt's."""
        if self.given is None:
            return self.generated_tokens
        return max(0, self.generated_tokens - len(self.given)) if self.request.max_new_tokens != 0 else 0

    @property
    def terminal(self) -> bool:
        """Completed, cancelled or failed."""
        return self.state in REQUEST.terminal
