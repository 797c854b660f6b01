"""Answers as clients read them: chunks, whole bodies, log probabilities, usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders_router import a_chat, a_text, events_of

from calculet_core.errors import NoReadyWorker
from calculet_core.wire import Piece, TokenLogprob, Usage
from calculet_router.openai import Call
from calculet_router.sse import error_body, error_event, make_answer

NAME = "00000005" + "00000001"


def piece(text: str, finish: str | None = None, tokens: int = 1, **fields: Any) -> Piece:
    return Piece(1, 1, tokens, text, finish, usage=Usage(3, 2) if finish else None, **fields)


def answer(call: Call, *pieces: tuple[int, Piece]) -> bytes:
    made = make_answer(call, NAME, 1_700_000_000, "digest")
    data = b"".join(made.add(index, one) for index, one in pieces)
    assert made.ended
    return data


def test_a_chat_stream_has_the_role_once_and_a_finish_once() -> None:
    events = events_of(answer(a_chat(stream=True), (0, piece("Hé")), (0, piece('"lo"')), (0, piece("", "stop", 0))))
    assert events.pop() == "[DONE]"
    assert {(event["id"], event["object"], event["created"], event["model"], event["system_fingerprint"]) for event in events} == {
        (f"chatcmpl-{NAME}", "chat.completion.chunk", 1_700_000_000, "qwen3", "digest")
    }
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": "Hé"}, {"content": '"lo"'}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert all("usage" not in event for event in events)


def test_an_answer_of_one_token_is_one_chunk() -> None:
    events = events_of(answer(a_chat(stream=True), (0, piece("x", "length"))))
    assert events[0]["choices"][0] == {
        "index": 0, "delta": {"role": "assistant", "content": "x"}, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert events[1:] == ["[DONE]"]


def test_held_text_writes_nothing() -> None:
    made = make_answer(a_chat(stream=True), NAME, 1, "d")
    assert made.add(0, piece("")) == b""
    assert made.add(0, piece("x")) != b""
    assert made.add(0, piece("")) == b""


def test_an_empty_answer_still_has_a_role_and_a_finish() -> None:
    events = events_of(answer(a_chat(stream=True), (0, piece("", "stop", 0))))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_usage_comes_once_at_the_end_and_only_when_asked() -> None:
    call = a_chat(stream=True, stream_options={"include_usage": True})
    events = events_of(answer(call, (0, piece("a")), (0, piece("b", "stop"))))
    assert events[-1] == "[DONE]"
    assert [event["usage"] for event in events[:-1]] == [
        None, None, {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    ]  # fmt: skip
    assert events[-2]["choices"] == []


def test_a_text_stream_speaks_text_completion() -> None:
    events = events_of(answer(a_text(stream=True), (0, piece("a")), (0, piece("b", "length"))))
    assert events[0]["object"] == "text_completion" and events[0]["id"] == f"cmpl-{NAME}"
    assert events[0]["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    assert events[1]["choices"] == [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "length"}]


def test_choices_are_interleaved_and_the_stream_ends_after_the_last() -> None:
    call = a_text(stream=True, prompt=["p", "q"], n=2, stream_options={"include_usage": True})
    parts = [(3, piece("d")), (0, piece("a", "stop")), (3, piece("", "stop", 0)), (1, piece("b", "stop")), (2, piece("c", "stop"))]
    events = events_of(answer(call, *parts))
    assert [event["choices"][0]["index"] for event in events[:5]] == [3, 0, 3, 1, 2]
    assert events[5]["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}, "a prompt counts once"
    assert events[6:] == ["[DONE]"]


def test_whole_bodies_of_both_kinds() -> None:
    chat = json.loads(answer(a_chat(), (0, piece("Hé")), (0, piece('"\n', "stop"))))
    assert chat == {
        "id": f"chatcmpl-{NAME}", "object": "chat.completion", "created": 1_700_000_000, "model": "qwen3", "system_fingerprint": "digest",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": 'Hé"\n', "refusal": None}, "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }  # fmt: skip
    text = json.loads(answer(a_text(n=2), (1, piece("b", "stop")), (0, piece("a", "length"))))
    assert text["object"] == "text_completion"
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in text["choices"]] == [
        (0, "a", "length"), (1, "b", "stop"),
    ]  # fmt: skip
    assert text["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_a_restarted_choice_forgets_what_it_had() -> None:
    made = make_answer(a_chat(n=2), NAME, 1, "d")
    made.add(0, piece("old"))
    made.add(1, piece("kept"))
    made.restart(0)
    made.add(0, piece("new", "stop"))
    body = json.loads(made.add(1, piece("", "stop", 0)))
    assert [choice["message"]["content"] for choice in body["choices"]] == ["new", "kept"]


def test_echo_puts_the_prompt_first() -> None:
    assert json.loads(answer(a_text(echo=True), (0, piece("!", "stop"))))["choices"][0]["text"] == "hi!"
    events = events_of(answer(a_text(echo=True, stream=True), (0, piece("!")), (0, piece("?", "stop"))))
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["hi!", "?"]


LOGPROBS = [TokenLogprob(5, b"\xc3", -0.5, [(5, b"\xc3", -0.5), (6, b"a", float("-inf"))]), TokenLogprob(6, b"ab", -0.25, [])]


def test_chat_logprobs_carry_bytes_and_stay_json() -> None:
    call = a_chat(logprobs=True, top_logprobs=2)
    body = json.loads(answer(call, (0, piece("x", "stop", logprobs=LOGPROBS))))
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first["token"] == "\ufffd" and first["bytes"] == [0xC3] and first["logprob"] == -0.5
    assert first["top_logprobs"][1] == {"token": "a", "logprob": -9999.0, "bytes": [97]}
    assert second == {"token": "ab", "logprob": -0.25, "bytes": [97, 98], "top_logprobs": []}


def test_text_logprobs_have_offsets_that_run_on_in_a_stream() -> None:
    call = a_text(stream=True, logprobs=2)
    events = events_of(answer(call, (0, piece("x", logprobs=[LOGPROBS[1]])), (0, piece("y", "stop", logprobs=[LOGPROBS[1]]))))
    shown = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert shown[0] == {"tokens": ["ab"], "token_logprobs": [-0.25], "top_logprobs": [{"ab": -0.25}], "text_offset": [0]}
    assert shown[1]["text_offset"] == [2]


def test_text_logprobs_keep_the_drawn_token_among_the_alternatives_and_count_characters() -> None:
    parts = [TokenLogprob(1, b"\xe2\x82", -0.1, [(9, b"a", -0.05)]), TokenLogprob(2, b"\xac", -0.2, [(2, b"\xac", -0.2)]), TokenLogprob(3, b"x", -0.3, [])]
    (choice,) = json.loads(answer(a_text(logprobs=1), (0, piece("\u20acx", "stop", logprobs=parts))))["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe2\\x82", "bytes:\\xac", "x"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1], "of the text, in characters"
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.05, "bytes:\\xe2\\x82": -0.1}, {"bytes:\\xac": -0.2}, {"x": -0.3}]


def test_held_text_with_logprobs_is_written() -> None:
    made = make_answer(a_chat(stream=True, logprobs=True), NAME, 1, "d")
    assert b'"logprobs":{"content":[' in made.add(0, piece("", logprobs=[LOGPROBS[0]]))


@pytest.mark.parametrize("text", ["%s %d %b", 'quote " and \\', "line\nbreak", "\u2028\x00", "😀"])
def test_any_text_stays_one_valid_event(text: str) -> None:
    events = events_of(answer(a_text(stream=True, model='m"%'), (0, piece(text)), (0, piece(text, "stop"))))
    assert [event["choices"][0]["text"] for event in events[:-1]] == [text, text]
    assert events[0]["model"] == 'm"%'


def test_errors_have_the_public_shape() -> None:
    error = NoReadyWorker("nobody", param="model")
    body = json.loads(error_body(error))
    assert body == {"error": {"message": "nobody", "type": "server_error", "param": "model", "code": "no_ready_worker"}}
    assert events_of(error_event(error)) == [body]
