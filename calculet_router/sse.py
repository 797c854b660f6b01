"""Answers as bytes: server-sent events for streams, one JSON object otherwise.

Everything of an event but its text is known before the first token, so it is built once per choice; a token costs one JSON
encoding of its text between a prepared head and tail. `finish_reason` is null until a choice's last chunk, and the role comes with
the first text, so that nobody can take a role chunk for the first token. A stream that fails ends with an error event and
without `[DONE]`: clients take a clean end for success.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from calculet_core.clock import MS
from calculet_core.errors import CalculetError
from calculet_core.wire import Piece, TokenLogprob, ToolCallPart, Usage
from calculet_router.openai import Call, Kind

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_EVENT_END = b"}\n\n"
_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""
_encode = msgspec.json.Encoder().encode
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Answer(Protocol):
    """What a reply needs: `add` what a choice got, `restart` one that moved, `ended` once every choice has its terminal."""

    def add(self, index: int, piece: Piece) -> bytes:
        """Bytes to write now, maybe none."""
        ...

    def restart(self, index: int) -> None:
        """Forget what was collected of a choice; nothing of it was written."""
        ...

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        ...


def make_answer(call: Call, request_id: str, created_s: int, digest: str) -> Answer:
    """The renderer of a call's answer; `request_id` is the first choice's, 16 hexadecimal digits."""
    if call.timing:
        timed = TimedStreamAnswer if call.stream else TimedWholeAnswer
        return timed(call, request_id, created_s, digest)
    cls = StreamAnswer if call.stream else WholeAnswer
    return cls(call, request_id, created_s, digest)


def error_body(error: CalculetError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _encode({"error": fields})


def error_event(error: CalculetError) -> bytes:
    """The last event of a stream that failed."""
    return b"data: %b\n\n" % error_body(error)


class StreamAnswer:
    """Chunks of `chat.completion.chunk` or `text_completion`."""

    def __init__(self, call: Call, request_id: str, created_s: int, digest: str) -> None:
        chat = call.kind is Kind.CHAT
        self._logprobs = _Logprobs(call)
        self._call, self._left, self._usage = call, call.choices, _UsageSum(call)
        self._call_prefix = f"call_{request_id}"
        name = "chat.completion.chunk" if chat else "text_completion"
        head = _object_head(call, request_id, name, created_s, digest)
        self._usage_head = b'data: %b"choices":[],"usage":' % head
        tail = b'}],"usage":null}\n\n' if call.include_usage else b"}]}\n\n"
        key, close = (b'"delta":{', b"}") if chat else (b"", b"")
        choice = b'data: %b"choices":[{"index":%%d,%b' % (head.replace(b"%", b"%%"), key)
        self._heads = [choice % index for index in range(call.choices)]
        text = b'"content":' if chat else b'"text":'
        self._texts = [head + text for head in self._heads]
        first = b'"role":"assistant",' if chat else b""
        self._firsts: list[bytes | None] = [head + first + text for head in self._heads]
        self._chat, self._close = chat, close
        self._more = close + b',"logprobs":null,"finish_reason":null' + tail
        self._tail = tail

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return self._left == 0

    def restart(self, index: int) -> None:
        """Nothing of the choice was written, so nothing was collected."""

    def add(self, index: int, piece: Piece) -> bytes:
        """The choice's next event; with its last one, if all others have ended, the stream's end."""
        first = self._firsts[index]
        if piece.finish is None and piece.logprobs is None and piece.calls is None:
            if first is None:
                return b"%b%b%b" % (self._texts[index], _encode(piece.text), self._more) if piece.text else b""
            if not piece.text:
                return b""
        return self._add_slowly(index, piece, first)

    def _add_slowly(self, index: int, piece: Piece, first: bytes | None) -> bytes:
        text = piece.text
        if first is not None:
            self._firsts[index] = None
            if self._call.echo:
                text = (self._call.prompts[index // self._call.n].text or "") + text
        if piece.calls:
            body = self._called(index, piece.calls, text, first)
        elif self._chat and first is None and not text:
            body = self._heads[index]
        else:
            body = (first or self._texts[index]) + _encode(text)
        logprobs = _encode(self._logprobs.take(index, piece.logprobs)) if piece.logprobs else b"null"
        finish = b"null" if piece.finish is None else b'"%b"' % piece.finish.encode()
        event = b'%b%b,"logprobs":%b,"finish_reason":%b%b' % (body, self._close, logprobs, finish, self._tail)
        if piece.finish is None:
            return event
        self._left -= 1
        self._usage.add(index, piece.usage)
        return event if self._left else event + self._end()

    def _called(self, index: int, parts: list[ToolCallPart], text: str, first: bytes | None) -> bytes:
        """A delta with parts of calls; `content` is null where the answer begins with one."""
        calls = _encode([_call_delta(self._call_prefix, index, part) for part in parts])
        if first is not None:
            return b'%b%b,"tool_calls":%b' % (first, _encode(text or None), calls)
        content = b'"content":%b,' % _encode(text) if text else b""
        return b'%b%b"tool_calls":%b' % (self._heads[index], content, calls)

    def _end(self) -> bytes:
        if not self._call.include_usage:
            return DONE
        return b"%b%b}\n\n%b" % (self._usage_head, self._usage.total(), DONE)


class WholeAnswer:
    """One `chat.completion` or `text_completion` object, complete with the last choice."""

    __slots__ = (
        "_call", "_calls", "_created_s", "_digest", "_finish", "_left", "_logprobs", "_request_id", "_texts", "_usage",
    )  # fmt: skip

    def __init__(self, call: Call, request_id: str, created_s: int, digest: str) -> None:
        self._call, self._request_id, self._created_s, self._digest = call, request_id, created_s, digest
        self._left, self._usage = call.choices, _UsageSum(call)
        self._texts = [""] * call.choices
        self._finish = [""] * call.choices
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._calls: dict[int, list[ToolCallPart]] = {}
        """Whole calls by choice."""

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return self._left == 0

    def restart(self, index: int) -> None:
        """Forget what was collected of a choice."""
        self._texts[index] = ""
        self._logprobs.pop(index, None)
        self._calls.pop(index, None)

    def add(self, index: int, piece: Piece) -> bytes:
        """The whole body with the last choice's end; nothing before."""
        if piece.text:
            self._texts[index] += piece.text
        if piece.logprobs:
            self._logprobs.setdefault(index, []).extend(piece.logprobs)
        if piece.calls:
            _join(self._calls.setdefault(index, []), piece.calls)
        if piece.finish is None:
            return b""
        self._left -= 1
        self._finish[index] = piece.finish
        self._usage.add(index, piece.usage)
        return b"" if self._left else self._body()

    def _body(self) -> bytes:
        call = self._call
        name = "chat.completion" if call.kind is Kind.CHAT else "text_completion"
        head = _object_head(call, self._request_id, name, self._created_s, self._digest)
        choices = self._choice(0) if call.choices == 1 else b",".join(map(self._choice, range(call.choices)))
        return b'%b"choices":[%b],"usage":%b}' % (head, choices, self._usage.total())

    def _choice(self, index: int) -> bytes:
        call, text, logprobs = self._call, self._texts[index], b"null"
        if call.echo:
            text = (call.prompts[index // call.n].text or "") + text
        if call.sampling.logprobs is not None:
            logprobs = _encode(_Logprobs(call).take(index, self._logprobs.get(index, [])))
        made = b""
        if calls := self._calls.get(index):
            made = b',"tool_calls":' + _encode([_whole_call(f"call_{self._request_id}", index, one) for one in calls])
        content, finish = _encode(None if made and not text else text), self._finish[index].encode()
        if call.kind is Kind.CHAT:
            form = b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null%b},"logprobs":%b,"finish_reason":"%b"}'
            return form % (index, content, made, logprobs, finish)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":"%b"}' % (index, content, logprobs, finish)


class TimedStreamAnswer(StreamAnswer):
    """A stream whose chunks say how many tokens they bring, and whose choices end with times and the hash of their tokens."""

    def __init__(self, call: Call, request_id: str, created_s: int, digest: str) -> None:
        super().__init__(call, request_id, created_s, digest)
        self._tokens = [0] * call.choices

    def restart(self, index: int) -> None:
        """Tokens that were held back are another attempt's."""
        self._tokens[index] = 0

    def add(self, index: int, piece: Piece) -> bytes:
        """Of `StreamAnswer`; tokens whose text is held back count with the chunk that shows it."""
        self._tokens[index] += piece.tokens
        data = super().add(index, piece)
        if not data:
            return data
        event, _, rest = data.partition(_EVENT_END)
        told = {"tokens": self._tokens[index], **(_times(piece.usage) if piece.finish is not None else {})}
        self._tokens[index] = 0
        return b'%b,"calculet":%b%b%b' % (event, _encode(told), _EVENT_END, rest)


class TimedWholeAnswer(WholeAnswer):
    """A whole answer with its choices' times and hashes."""

    __slots__ = ("_timed",)

    def __init__(self, call: Call, request_id: str, created_s: int, digest: str) -> None:
        super().__init__(call, request_id, created_s, digest)
        self._timed: list[dict[str, Any]] = [{}] * call.choices

    def add(self, index: int, piece: Piece) -> bytes:
        """Of `WholeAnswer`."""
        if piece.finish is not None:
            tokens = 0 if piece.usage is None else piece.usage.completion_tokens
            self._timed[index] = {"index": index, "tokens": tokens, **_times(piece.usage)}
        data = super().add(index, piece)
        return b'%b,"calculet":{"choices":%b}}' % (data[:-1], _encode(self._timed)) if data else data


def _call_id(prefix: str, choice: int, index: int) -> str:
    """Unique in this fleet: the call's request, the choice, and the place in it."""
    return f"{prefix}_{choice}_{index}"


def _call_delta(prefix: str, choice: int, part: ToolCallPart) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.name is None:
        return {"index": part.index, "function": function}
    function = {"name": part.name, **function}
    return {"index": part.index, "id": _call_id(prefix, choice, part.index), "type": "function", "function": function}


def _whole_call(prefix: str, choice: int, call: ToolCallPart) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": _call_id(prefix, choice, call.index), "type": "function", "function": function}


def _join(calls: list[ToolCallPart], parts: list[ToolCallPart]) -> None:
    """Add parts to the calls that they belong to."""
    for part in parts:
        if part.name is not None:
            calls.append(part)
        else:
            last = calls[-1]
            calls[-1] = ToolCallPart(last.index, last.name, last.arguments + part.arguments)


def _times(usage: Usage | None) -> dict[str, Any]:
    """What the worker measured; None where a phase was not reached."""
    if usage is None:
        return {}
    times = {"queue_ms": usage.queue_ns, "prefill_ms": usage.prefill_ns, "decode_ms": usage.decode_ns, "device_ms": usage.device_ns}
    in_ms = {name: None if ns is None else round(ns / MS, 3) for name, ns in times.items()}
    return {"token_hash": usage.token_hash, **in_ms}


def _object_head(call: Call, request_id: str, name: str, created_s: int, digest: str) -> bytes:
    prefix = "chatcmpl" if call.kind is Kind.CHAT else "cmpl"
    return f'{{"id":"{prefix}-{request_id}","created":{created_s},'.encode() + _object_tail(name, call.model, digest)


@lru_cache(maxsize=256)
def _object_tail(name: str, model: str, digest: str) -> bytes:
    """The part of an object's head that many calls share."""
    return b'"object":"%b","model":%b,"system_fingerprint":%b,' % (name.encode(), _encode(model), _encode(digest))


class _UsageSum:
    """Usage over choices: a prompt counts once however often it is answered."""

    __slots__ = ("_n", "completion", "prompt")

    def __init__(self, call: Call) -> None:
        self._n, self.prompt, self.completion = call.n, 0, 0

    def add(self, index: int, usage: Usage | None) -> None:
        if usage is not None:
            self.completion += usage.completion_tokens
            if index % self._n == 0:
                self.prompt += usage.prompt_tokens

    def total(self) -> bytes:
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
            self.prompt, self.completion, self.prompt + self.completion,
        )  # fmt: skip


class _Logprobs:
    """Both public shapes of log probabilities; text offsets run on per choice."""

    def __init__(self, call: Call) -> None:
        self._shape: Callable[[int, list[TokenLogprob]], Any] = self._chat if call.kind is Kind.CHAT else self._text
        self._offsets = [0] * call.choices
        asked = call.kind is Kind.TEXT and call.sampling.logprobs is not None
        self._decoders = [_utf8_decoder("replace") for _ in range(call.choices)] if asked else []
        """A character that is several tokens is at one offset: its first token's."""

    def take(self, index: int, tokens: list[TokenLogprob]) -> Any:
        """The `logprobs` object of these tokens of a choice."""
        return self._shape(index, tokens)

    def _chat(self, index: int, tokens: list[TokenLogprob]) -> Any:
        content = [
            {
                **_chat_token(token.token_bytes, token.logprob),
                "top_logprobs": [_chat_token(data, logprob) for _, data, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _text(self, index: int, tokens: list[TokenLogprob]) -> Any:
        offsets, decode = [], self._decoders[index].decode
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(decode(token.token_bytes))
        return {
            "tokens": [_name(token.token_bytes) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_alternatives(token) for token in tokens],
            "text_offset": offsets,
        }


def _chat_token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _alternatives(token: TokenLogprob) -> dict[str, float] | None:
    """The best by name; the drawn one is always among them, so there may be one more than was asked for. None where there is no
    log probability."""
    if token.logprob != token.logprob:
        return None
    found = {_name(data): _floor(logprob) for _, data, logprob in token.top}
    found.setdefault(_name(token.token_bytes), _floor(token.logprob))
    return found


def _name(data: bytes) -> str:
    """A token's text, or its bytes where it is no text of its own, so that names stay distinct."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float | None:
    """None for NaN: a prompt's first token has none."""
    if logprob != logprob:
        return None
    return _floor(logprob)


def _floor(logprob: float) -> float:
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB
