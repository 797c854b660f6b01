"""No body, however made, raises anything but a `CalculetError`; what is taken survives the wire."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from calculet_core.errors import CalculetError
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_router import openai
from calculet_router.openai import parse_chat, parse_text

NAMES = sorted({*openai.ChatRequest.__struct_fields__, *openai.CompletionRequest.__struct_fields__, "surprise"})
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": JSON | st.text()}), max_size=3)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m") | JSON},
    optional={**dict.fromkeys([name for name in NAMES if name != "model"], JSON), "messages": MESSAGES | JSON},
)


def check(body: bytes) -> None:
    for parse in (parse_chat, parse_text):
        try:
            call = parse(body)
        except CalculetError as error:
            assert error.http_status == 400
            json.dumps({"message": error.message, "param": error.param}).encode()
            continue
        for value, kind in ((call.sampling, SamplingParams), (call.stop, StopRules), *((prompt, Prompt) for prompt in call.prompts)):
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value


@given(BODIES)
def test_any_json_object_is_taken_or_refused(body: Any) -> None:
    check(json.dumps(body).encode())


@given(st.binary(max_size=300))
@example(b'{"model":"m","prompt":"\\udc80"}')
@example(b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}')
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    check(body)


@given(st.text(), st.text())
def test_any_text_arrives_unchanged(prompt: str, stop: str) -> None:
    body = json.dumps({"model": "m", "prompt": prompt or "x", "stop": stop or "y"}).encode()
    try:
        call = parse_text(body)
    except CalculetError:
        return
    assert call.prompts[0].text == (prompt or "x") and call.stop.strings == (stop or "y",)
