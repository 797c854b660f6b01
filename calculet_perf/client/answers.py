"""Reads the answer of one request: when tokens came, how many, and how it ended.

The first token is the first chunk with generated text or a positive token count, on any channel; a role chunk is none
(acceptance §2.2). Tokens per chunk come from whatever the server tells, in this order: Calculet's own count, `token_ids`,
running usage, running timings of llama.cpp, log probabilities. A server that tells nothing of it yields null: events are never
counted as tokens. The final usage is the truth; a disagreement is flagged.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Extension(msgspec.Struct):
    """Calculet's opt-in timing extension: `tokens` with every chunk, the rest with a choice's last one; a whole answer has both per
    choice. A time that no server tells yet (postprocess, sampling) is None."""

    tokens: int | None = None
    token_hash: str | None = None
    generation: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    device_ms: float | None = None
    postprocess_ms: float | None = None
    sampling_ms: float | None = None
    choices: list[_Extension] | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's server, with `timings_per_token`."""

    predicted_n: int | None = None


class _Payload(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    calculet: _Extension | None = None
    timings: _Timings | None = None


_decode = msgspec.json.Decoder(_Payload).decode
_encode = msgspec.json.Encoder().encode
_TEXT_KEYS = (b'"text":', b'"content":', b'"text": ', b'"content": ')
MISSES = 8
"""A stream whose events were unlike each other so often is read event by event."""


class _Shape:
    """Events of a stream are mostly alike but for the text of their one choice. An event with the bytes of an earlier one before
    and after its text, which holds neither a quote nor a backslash, is that event with another text: no JSON has to be read for it.
    """

    __slots__ = ("after", "before", "counted", "misses")

    def __init__(self) -> None:
        self.before, self.after = b"", b""
        """Around the text; empty: no event was seen yet that others may be like."""
        self.counted: int | None = None
        """Tokens of an event of this shape."""
        self.misses = 0

    def learn(self, payload: bytes, text: str, counted: int | None) -> None:
        """Take an event as an example; one whose text cannot be placed for certain is none."""
        quoted = _encode(text)
        before, found, after = payload.partition(quoted)
        if found and before.endswith(_TEXT_KEYS) and quoted not in after and b"\\" not in quoted:
            self.before, self.after, self.counted = before + b'"', b'"' + after, counted

    def text(self, payload: bytes) -> bytes | None:
        """The text of an event of this shape, ASCII; None: it must be read."""
        before, after = self.before, self.after
        if not (before and payload.startswith(before) and payload.endswith(after)):
            return None
        text = payload[len(before) : -len(after)]
        return text if text and text.isascii() and b'"' not in text and b"\\" not in text else None


class AnswerReader:
    """State of one answer. `event` takes each payload of a stream with its time; `body` a whole JSON answer."""

    __slots__ = (
        "_digest",
        "_had_text",
        "_ids",
        "_last_read",
        "_predicted",
        "_running",
        "_shape",
        "coalesced",
        "completion_tokens",
        "done",
        "error_code",
        "error_message",
        "extension",
        "finish_reason",
        "first_chunk",
        "first_event_ns",
        "first_token_ns",
        "largest_chunk",
        "last_token_ns",
        "prompt_tokens",
        "server_id",
        "token_events",
        "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._ids: list[int] | None = None
        self._had_text = False
        self._running = self._predicted = 0
        self._last_read = -1
        self._shape = _Shape()
        self.first_event_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.token_events = self.coalesced = 0
        self.tokens: int | None = None
        """Sum of counts per chunk; None while no chunk told one."""
        self.first_chunk: int | None = None
        self.largest_chunk: int | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error_code: str | None = None
        self.error_message: str | None = None
        self.server_id: str | None = None
        self.extension: _Extension | None = None
        self.done = False

    def event(self, payload: bytes, at_ns: int, read: int) -> None:
        """One payload of a stream; `read` numbers the socket read that completed it."""
        if (same := self._shape.text(payload)) is not None:
            self._digest.update(same)
            self._token_event(self._shape.counted, at_ns, read)
            return
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            part = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._bad(error)
            return
        if self.first_event_ns is None:
            self.first_event_ns = at_ns
            self.server_id = part.id
        if part.error is not None:
            self._error(part.error)
            return
        generated = False
        counted: int | None = None
        for choice in part.choices:
            text = choice.text if choice.delta is None else self._delta(choice.delta)
            if text:
                generated = self._had_text = True
                self._digest.update(text.encode())
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
            if (ids := choice.token_ids) is not None:
                counted = (counted or 0) + len(ids)
                self._ids = ids if self._ids is None else self._ids + ids
            elif choice.logprobs is not None:
                listed = choice.logprobs.content if choice.logprobs.content is not None else choice.logprobs.tokens
                counted = counted if listed is None else (counted or 0) + len(listed)
        counted = self._told(part, counted)
        if generated or counted:
            self._token_event(counted, at_ns, read)
            self._learn(payload, part, counted)

    def _learn(self, payload: bytes, part: _Payload, counted: int | None) -> None:
        """Only what says nothing but its text, and its count by Calculet's extension, can stand for others."""
        shape = self._shape
        if shape.misses > MISSES or len(part.choices) != 1 or part.usage is not None or part.timings is not None:
            return
        choice, extension = part.choices[0], part.calculet
        text = choice.text if choice.delta is None else choice.delta.content
        if choice.delta is not None and self._delta(choice.delta) != text:
            return  # text on another channel too
        plain = choice.finish_reason is None and choice.token_ids is None and choice.logprobs is None
        if text and plain and (extension is None or (extension.tokens is not None and extension.token_hash is None)):
            shape.misses += 1
            shape.learn(payload, text, counted)

    def _told(self, part: _Payload, counted: int | None) -> int | None:
        """Tokens of this payload, by the best that it tells; also keeps usage and extension."""
        if (usage := part.usage) is not None:
            if usage.prompt_tokens is not None:
                self.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                self.completion_tokens = usage.completion_tokens
                if part.choices:  # running usage; the last chunk's alone is only the total
                    counted, self._running = usage.completion_tokens - self._running, usage.completion_tokens
        if part.timings is not None and part.timings.predicted_n is not None and part.choices and part.usage is None:
            counted, self._predicted = part.timings.predicted_n - self._predicted, part.timings.predicted_n
        if (extension := part.calculet) is not None:
            if extension.tokens is not None:
                counted = extension.tokens
            if self.extension is None or extension.token_hash is not None:
                self.extension = extension
        return counted

    def _token_event(self, counted: int | None, at_ns: int, read: int) -> None:
        if self.first_token_ns is None:
            self.first_token_ns, self.first_chunk = at_ns, counted
        elif read == self._last_read:
            self.coalesced += 1
        self._last_read = read
        self.last_token_ns = at_ns
        self.token_events += 1
        if counted is not None:
            self.tokens = counted if self.tokens is None else self.tokens + counted
            if self.largest_chunk is None or counted > self.largest_chunk:
                self.largest_chunk = counted

    def _delta(self, delta: _Delta) -> str:
        """Generated text of a chat message or delta, over all channels; a tool call's bytes count as text."""
        if delta.content and not delta.tool_calls:
            return delta.content
        texts = [delta.reasoning_content, delta.reasoning, delta.content, delta.refusal]
        calls = [bytes(call).decode() for call in delta.tool_calls or []]
        return "".join(text for text in (*texts, *calls) if text)

    def body(self, data: bytes, status: int, at_ns: int) -> None:
        """A whole answer, or an error's body."""
        try:
            part = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if status == 200:
                self._bad(error)
            else:
                self.error_code, self.error_message = f"http_{status}", data[:200].decode("utf-8", "replace")
            return
        self.first_event_ns, self.server_id = at_ns, part.id
        if part.error is not None or status >= 400:
            self._error(part.error)
            if self.error_code == "stream_error":
                self.error_code = f"http_{status}"
            return
        for choice in part.choices:
            text = choice.text if choice.message is None else self._delta(choice.message)
            self._digest.update((text or "").encode())
            self._had_text = self._had_text or bool(text)
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.token_ids is not None:
                self._ids = (self._ids or []) + choice.token_ids
        if part.usage is not None:
            self.prompt_tokens, self.completion_tokens = part.usage.prompt_tokens, part.usage.completion_tokens
        if part.calculet is not None:
            self.extension = part.calculet.choices[0] if part.calculet.choices else part.calculet
        self.done = True
        if not part.choices:
            self.error_code = "bad_event"

    def end_of_stream(self) -> None:
        """The response ended in good form: was it an answer?"""
        if self.error_code is None and not self.done and self.finish_reason is None:
            self.error_code = "incomplete_stream"

    @property
    def output_tokens(self) -> int | None:
        """The server's usage; without it the counts per chunk; without them null."""
        return self.tokens if self.completion_tokens is None else self.completion_tokens

    @property
    def token_hash(self) -> str | None:
        """Of token ids where they are told, else of the text (see `Result.token_hash`)."""
        if self.extension is not None and self.extension.token_hash is not None:
            return f"ids:{self.extension.token_hash}"
        if self._ids:
            data = b"".join(token.to_bytes(4, "little", signed=True) for token in self._ids)
            return f"ids:{hashlib.sha256(data).hexdigest()[:16]}"
        return f"text:{self._digest.hexdigest()[:16]}" if self._had_text else None

    def _error(self, error: Any) -> None:
        fields = error if isinstance(error, dict) else {}
        code = fields.get("code") or fields.get("type")
        self.error_code = str(code) if code is not None and not isinstance(code, dict) else "stream_error"
        self.error_message = str(fields.get("message", error))[:500]

    def _bad(self, error: Exception) -> None:
        if self.error_code is None:
            self.error_code, self.error_message = "bad_event", str(error)[:500]
