"""The bodies of `/v1/chat/completions` and `/v1/completions`, parsed once and strictly.

One msgspec pass checks every type and range; what it refuses becomes a 400 that names the parameter. null means absent, unknown
fields are ignored, and what would change the answer but is not built is refused by name rather than ignored. A body becomes a
`Call`: its prompts in order, each answered `n` times; choice `prompt * n + k` is the k-th answer to that prompt.
"""

from __future__ import annotations

import codecs
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from calculet_core.errors import CalculetError, InvalidJson, InvalidValue, Unsupported
from calculet_core.kv import ContextOp, refuse
from calculet_core.requests import Constraint, Prompt, SamplingParams, StopRules
from calculet_router.tools import NO_WISH, ResponseFormat, Tool, ToolCall, ToolChoice, Wish, earlier_calls, object_text, wish_of

MAX_CHOICES = 128
"""Most choices of one call, over all its prompts."""
MAX_LOGPROBS = {"chat": 20, "text": 5}
"""Most alternatives per token that the public interface knows."""

BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_INT64 = 1 << 63
_Int = Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Model = Annotated[str, Meta(min_length=1, max_length=256)]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Text = Annotated[str, Meta(min_length=1)]


class Kind(StrEnum):
    """Which of the two interfaces was called."""

    CHAT = "chat"
    TEXT = "text"


class Call(msgspec.Struct, frozen=True):
    """A validated body."""

    kind: Kind
    model: str
    prompts: list[Prompt]
    n: int
    max_new_tokens: int | None
    sampling: SamplingParams
    stop: StopRules
    stream: bool
    include_usage: bool
    echo: bool
    """Text completions: the answer starts with the prompt; of token ids it is the worker that knows the text."""
    choices: int
    """How many answers the client gets: prompts x n."""
    unsaid: tuple[str, ...] = ()
    """Of temperature and top_p, what the client left to the model's defaults."""
    timing: bool = False
    """The answer carries the extension `calculet`: tokens per chunk, the hash of all tokens, times."""
    constraint: Constraint | None = None
    """What every answer must keep to."""


class ContentPart(msgspec.Struct):
    """A part of a message; only texts are supported, and of the assistant its refusals."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct):
    """A message of a chat."""

    role: Annotated[str, Meta(max_length=32)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Of the assistant: calls that it made."""
    tool_call_id: str | None = None
    """Of a tool: which call it answers."""
    function_call: Any = None
    refusal: str | None = None
    """Of the assistant: what it said instead of `content`."""


class Extension(msgspec.Struct):
    """Ours, off for ordinary clients."""

    timing: bool | None = None


class StreamOptions(msgspec.Struct):
    """Needs `stream`."""

    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """What both interfaces share."""

    model: Model
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: _Int | None = None
    stop: _Text | Annotated[list[_Text], Meta(max_length=4)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    best_of: _Count | None = None
    calculet: Extension | None = None
    # Refused by name when they ask for anything: see UNSUPPORTED.
    use_beam_search: Any = None
    n_keep: Any = None
    context_shift: Any = None
    id_slot: Any = None
    functions: Any = None
    function_call: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    prompt_logprobs: Any = None
    suffix: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    truncate_prompt_tokens: Any = None
    length_penalty: Any = None
    typical_p: Any = None
    grammar: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None


class ChatRequest(_Body, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    chat_template_kwargs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """An object: variables for the model's chat template, such as `enable_thinking`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS["chat"])] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_Body, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS["text"])] | None = None
    echo: bool | None = None
    # Of chats only: see UNSUPPORTED_IN_TEXTS.
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None
    chat_template_kwargs: Any = None


_decode_chat = msgspec.json.Decoder(ChatRequest).decode
_decode_text = msgspec.json.Decoder(CompletionRequest).decode

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "n_keep": (0,),
    "context_shift": (False,),
    "id_slot": (-1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (0, False),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"], []),
    "web_search_options": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "length_penalty": (1,),
    "typical_p": (1,),
    "grammar": ("",),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
"""Parameter -> the values besides null that ask for nothing. Any other value would change the answer and is refused."""
UNSUPPORTED_IN_TEXTS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "chat_template_kwargs": ({},),
}
"""The same for `/v1/completions` alone."""
CONTEXT_PARAMETERS = {
    "use_beam_search": ContextOp.COPY, "best_of": ContextOp.COPY, "n_keep": ContextOp.KEEP_ONE,
    "context_shift": ContextOp.SHIFT, "id_slot": ContextOp.SAVE_LOAD,
}  # fmt: skip
"""Parameter -> the operation on a sequence's context that it would need (scheduling §9.3)."""
_asked_for = attrgetter(*UNSUPPORTED)
_NOTHING = (None,) * len(UNSUPPORTED)
_stops = attrgetter("stop", "stop_token_ids", "ignore_eos", "min_tokens")

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role a client may send -> role that chat templates know."""


def parse_chat(body: bytes) -> Call:
    """A chat completion's body.

    Raises:
        CalculetError: InvalidJson, or InvalidValue or Unsupported with `param` set.
    """
    asked = decode_body(_decode_chat, body)
    messages = plain_messages(asked.messages)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidValue("top_logprobs needs logprobs to be true", param="top_logprobs")
    options = object_text(asked.chat_template_kwargs, "chat_template_kwargs") if asked.chat_template_kwargs else None
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    constrained = asked.response_format is not None or asked.tools is not None or asked.tool_choice is not None
    wish = wish_of(asked) if constrained else NO_WISH
    return _call(Kind.CHAT, asked, [Prompt(messages=messages, tools=wish.tools, options=options)], logprobs, False, wish)


def parse_text(body: bytes) -> Call:
    """A text completion's body.

    Raises:
        CalculetError: InvalidJson, or InvalidValue or Unsupported with `param` set.
    """
    asked = decode_body(_decode_text, body)
    for name, harmless in UNSUPPORTED_IN_TEXTS.items():
        if (value := getattr(asked, name)) is not None and value not in harmless:
            raise Unsupported(f"{name} is not supported here, only in /v1/chat/completions", param=name)
    prompts = _prompts(asked.prompt)
    echo = bool(asked.echo)
    if echo and asked.logprobs is not None:
        message = "echo together with logprobs is not supported: devices return the logits of a prompt's last position only"
        raise Unsupported(message, param="echo")
    return _call(Kind.TEXT, asked, prompts, asked.logprobs, echo)


def parse_timeout_ms(value: bytes) -> int:
    """The `X-Request-Timeout-Ms` header.

    Raises:
        InvalidValue: not a positive decimal number.
    """
    if not value.isdigit() or len(value) > 12 or int(value) == 0:
        raise InvalidValue("X-Request-Timeout-Ms must be a positive number of milliseconds", param="X-Request-Timeout-Ms")
    return int(value)


def parse_switch(value: bytes, name: str) -> bool:
    """A header that is 1 or 0.

    Raises:
        InvalidValue: it is something else.
    """
    if value not in (b"0", b"1"):
        raise InvalidValue(f"{name} must be 0 or 1", param=name)
    return value == b"1"


def decode_body(decode: Any, body: bytes) -> Any:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise InvalidJson("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if body.startswith(BYTE_ORDER_MARKS):
            raise InvalidJson("the body begins with a byte order mark: JSON is sent as UTF-8 without one") from None
        raise InvalidJson(f"the body is not valid JSON: {error}") from None


def _invalid(text: str) -> InvalidValue:
    """msgspec's words, with the parameter they are about: "Expected `int` >= 1 - at `$.n`"."""
    message, _, path = text.partition(" - at `")
    param = path.rstrip("`").removeprefix("$").lstrip(".").replace("[...]", "")
    if message.startswith("Object missing required field `"):
        field = message.split("`")[1]
        param = f"{param}.{field}" if param else field
        return InvalidValue(f"{param} is required", param=param)
    return InvalidValue(f"{param or 'body'}: {message[:1].lower()}{message[1:]}", param=param or None)


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them.

    Raises:
        CalculetError: InvalidValue or Unsupported with `param` set.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = ROLES.get(message.role)
    if role is None:
        if message.role == "function":
            raise Unsupported("messages of role 'function' are not supported: use 'tool'", param=f"{where}.role")
        raise InvalidValue(f"{where}.role: must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if message.function_call:
        raise Unsupported("function_call in messages is not supported: use tool_calls", param=f"{where}.function_call")
    if message.tool_calls and role != "assistant":
        raise InvalidValue(f"{where}.tool_calls: only messages of the assistant have them", param=f"{where}.tool_calls")
    content = message.content
    if content is None and role == "assistant":
        content = "" if message.tool_calls else message.refusal
    if content is None:
        raise InvalidValue(f"{where}.content is required", param=f"{where}.content")
    if not isinstance(content, str):
        content = "".join(_part(f"{where}.content[{place}]", part, role) for place, part in enumerate(content))
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = earlier_calls(f"{where}.tool_calls", message.tool_calls)
    if message.tool_call_id is not None and role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _part(where: str, part: ContentPart, role: str) -> str:
    if part.type == "refusal" and role == "assistant":
        if part.refusal is None:
            raise InvalidValue(f"{where}.refusal is required", param=f"{where}.refusal")
        return part.refusal
    if part.type != "text":
        raise Unsupported(f"{where}.type: only text parts are supported", param=f"{where}.type")
    if part.text is None:
        raise InvalidValue(f"{where}.text is required", param=f"{where}.text")
    return part.text


def _prompts(prompt: Any) -> list[Prompt]:
    """A string, strings, one list of token ids, or several; never a mixture."""
    if isinstance(prompt, str) and prompt:
        return [Prompt(text=prompt)]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidValue("prompt: strings, token ids and lists of token ids cannot be mixed", param="prompt")
    if kinds == {int}:
        return [Prompt(token_ids=tuple(prompt))]
    if not prompt or not all(prompt):
        raise InvalidValue("prompt must not be empty", param="prompt")
    if kinds == {str}:
        return [Prompt(text=text) for text in prompt]
    return [Prompt(token_ids=tuple(ids)) for ids in prompt]


def _call(
    kind: Kind, asked: Any, prompts: list[Prompt], logprobs: int | None, echo: bool, wish: Wish = NO_WISH
) -> Call:
    n = asked.n or 1
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    if error := _refusal(asked, n, limit, len(prompts)):
        raise error
    include_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
    return Call(
        kind, asked.model, prompts, n, limit, _sampling(asked, logprobs), _stop_rules(*_stops(asked)), bool(asked.stream),
        include_usage, echo, len(prompts) * n, tuple(name for name in ("temperature", "top_p") if getattr(asked, name) is None),
        asked.calculet is not None and bool(asked.calculet.timing), wish.constraint,
    )  # fmt: skip


def _stop_rules(stop: Any, token_ids: list[int] | None, ignore_eos: bool | None, min_tokens: int | None) -> StopRules:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    return StopRules(strings, tuple(token_ids or ()), bool(ignore_eos), min_tokens or 0)


def _refusal(asked: Any, n: int, limit: int | None, prompts: int) -> CalculetError | None:
    """What types and ranges cannot tell."""
    unsupported = _asked_for(asked)
    if unsupported != _NOTHING:
        for (name, harmless), value in zip(UNSUPPORTED.items(), unsupported, strict=True):
            if value is not None and value not in harmless:
                needed = CONTEXT_PARAMETERS.get(name)
                return (refuse(needed, name) if needed else None) or Unsupported(f"{name} is not supported", param=name)
    if asked.best_of is not None and asked.best_of != n:
        if asked.best_of < n:
            return InvalidValue(f"best_of must be at least n ({n})", param="best_of")
        return refuse(ContextOp.COPY, "best_of") or Unsupported("best_of above n is not supported", param="best_of")
    if asked.stream_options is not None and not asked.stream:
        return InvalidValue("stream_options needs stream to be true", param="stream_options")
    if limit is not None and asked.min_tokens is not None and asked.min_tokens > limit:
        return InvalidValue(f"min_tokens must not be above the output limit ({limit})", param="min_tokens")
    if prompts * n > MAX_CHOICES:
        return InvalidValue(f"{prompts} prompts x n = {n} are more than {MAX_CHOICES} choices", param="n")
    return None


def _sampling(asked: Any, logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        1.0 if asked.temperature is None else asked.temperature,
        1.0 if asked.top_p is None else asked.top_p,
        0 if asked.top_k is None or asked.top_k < 0 else asked.top_k,
        asked.min_p or 0.0,
        asked.seed,
        asked.presence_penalty or 0.0,
        asked.frequency_penalty or 0.0,
        1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        _logit_bias(asked.logit_bias) if asked.logit_bias else {},
        logprobs,
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidValue("logit_bias: keys must be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
