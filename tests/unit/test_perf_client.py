"""The pure part of the client: events out of bytes, tokens out of events, outcomes out of both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calculet_perf.client.answers import AnswerReader
from calculet_perf.client.observation import Asked, clock_complete, seen
from calculet_perf.client.outcomes import of_os_error
from calculet_perf.client.sse import EventParser, EventTooLarge
from calculet_perf.records import ClientNs

# ---------------------------------------------------------------- bytes -> events
STREAM = b': ping\n\ndata: {"a":1}\n\nevent: x\ndata: {"b":2}\nid: 3\n\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_however_reads_cut_them(cuts: list[int]) -> None:
    parser, found, begin = EventParser(), [], 0
    for end in [*sorted(cuts), len(STREAM)]:
        found += parser.feed(STREAM[begin:end])
        begin = end
    assert found == PAYLOADS
    assert not parser.pending


def test_carriage_returns_are_line_ends_too() -> None:
    data, parser = STREAM.replace(b"\n", b"\r\n"), EventParser()
    found = []
    for place in range(len(data)):  # a read may end between \r and \n
        found += parser.feed(data[place : place + 1])
    assert found == PAYLOADS


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(EventTooLarge):
        EventParser().feed(b"data: " + b"x" * (17 << 20))


# ---------------------------------------------------------------- events -> tokens
def read(*payloads: Any, at: int = 0) -> AnswerReader:
    answer = AnswerReader()
    for place, payload in enumerate(payloads):
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        answer.event(data, at + place, place)
    return answer


def chat(content: str | None = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    fields = {**delta, **({} if content is None else {"content": content})}
    return {"id": "c1", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def test_a_role_chunk_is_an_event_and_no_token() -> None:
    answer = read(chat("", role="assistant"), chat("Hi"), chat(None, "stop"), b"[DONE]")
    assert (answer.first_event_ns, answer.first_token_ns, answer.last_token_ns, answer.token_events) == (0, 1, 1, 1)
    assert (answer.finish_reason, answer.done, answer.error_code) == ("stop", True, None)


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}]
)
def test_tokens_on_any_channel_are_tokens(delta: dict[str, Any]) -> None:
    assert read(chat("", role="assistant"), chat(**delta)).first_token_ns == 1


def test_events_are_never_counted_as_tokens() -> None:
    answer = read(chat("a"), chat("b c d"))
    assert answer.tokens is None
    assert answer.output_tokens is None, "the server told nothing"


def test_running_usage_counts_tokens_per_chunk() -> None:
    def chunk(total: int) -> dict[str, Any]:
        return {**chat("x"), "usage": {"prompt_tokens": 3, "completion_tokens": total}}

    answer = read(chunk(2), chunk(3), chunk(7), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}})
    assert (answer.tokens, answer.first_chunk, answer.largest_chunk) == (7, 2, 4)
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 7)


def test_token_ids_count_and_give_the_hash_that_a_server_of_ours_gives() -> None:
    from calculet_worker.answers import token_hash

    answer = read(
        {"choices": [{"index": 0, "text": "a", "token_ids": [5, 6]}]},
        {"choices": [{"index": 0, "text": "", "token_ids": [70000]}]},  # no text yet: still a token
    )
    assert (answer.tokens, answer.token_events) == (3, 2)
    assert answer.token_hash == f"ids:{token_hash([5, 6, 70000])}"


def test_log_probabilities_count_tokens() -> None:
    assert read({"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"]}}]}).tokens == 2
    assert read({"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{}, {}, {}]}}]}).tokens == 3


def test_llama_server_timings_count_tokens() -> None:
    answer = read({**chat("a"), "timings": {"predicted_n": 1}}, {**chat("b"), "timings": {"predicted_n": 4}})
    assert (answer.tokens, answer.largest_chunk) == (4, 3)


def test_the_extension_is_believed_before_anything_else() -> None:
    last = {**chat(None, "stop"), "calculet": {"tokens": 1, "token_hash": "ff", "queue_ms": 1.5, "generation": 7}}
    answer = read({**chat("abc"), "calculet": {"tokens": 3}}, last, {"choices": [], "usage": {"completion_tokens": 4}}, b"[DONE]")
    assert (answer.tokens, answer.completion_tokens, answer.token_hash) == (4, 4, "ids:ff")
    assert answer.last_token_ns == 1, "a last token without text is a token"
    assert answer.extension is not None
    assert answer.extension.queue_ms == 1.5
    assert answer.extension.sampling_ms is None


def test_events_out_of_one_read_are_coalesced() -> None:
    answer = AnswerReader()
    for read_number in (0, 1, 1, 1, 2):
        answer.event(json.dumps(chat("x")).encode(), read_number, read_number)
    assert (answer.token_events, answer.coalesced) == (5, 2)


TEXTS = st.text(alphabet='ab "\\\n\té€{}:,', max_size=6)
SHAPES: list[dict[str, Any]] = [
    {"delta": {}}, {"delta": {"role": "assistant"}}, {"delta": {"reasoning_content": "a"}}, {"text": ""}, {"text": "", "token_ids": [1, 2]},
    {"text": "", "logprobs": {"tokens": ["a"]}},
]  # fmt: skip
BESIDE: list[dict[str, Any]] = [{}, {"calculet": {"tokens": 1}}, {"calculet": {"tokens": 2}}, {"usage": {"completion_tokens": 3}},
                                {"timings": {"predicted_n": 1}}, {"system_fingerprint": "a"}]  # fmt: skip
ONE_EVENT = st.tuples(TEXTS, st.sampled_from(SHAPES), st.sampled_from(BESIDE), st.sampled_from([None, "stop"]), st.booleans())


def an_event(text: str, shape: dict[str, Any], beside: dict[str, Any], finish: str | None, spaces: bool) -> bytes:
    choice = {"index": 0, **shape, "finish_reason": finish}
    if "delta" in shape:
        choice["delta"] = {**shape["delta"], "content": text}
    else:
        choice["text"] = text
    return json.dumps({"id": "a", "choices": [choice], **beside}, separators=None if spaces else (",", ":")).encode()


@given(st.lists(ONE_EVENT, max_size=4), st.lists(st.integers(0, 3), max_size=20))
def test_events_that_are_like_an_earlier_one_are_read_as_if_they_were_not(kinds: list[Any], order: list[int]) -> None:
    """What a stream's shape spares is only the reading: every number, hash and time is that of an answer read event by event."""
    events = [an_event(*kinds[place % len(kinds)]) for place in order] if kinds else []
    quick, slow = AnswerReader(), AnswerReader()
    slow._shape.misses = 10**9
    for place, event in enumerate(events):
        quick.event(event, place, place // 2)
        slow.event(event, place, place // 2)
    for name in (*AnswerReader.__slots__, "token_hash", "output_tokens"):
        if name not in ("_shape", "_digest"):
            assert getattr(quick, name) == getattr(slow, name), name


def test_a_plain_stream_is_read_by_its_shape() -> None:
    answer = read(*({"id": "a", "choices": [{"index": 0, "text": f"w{n}", "finish_reason": None}]} for n in range(20)))
    assert (answer._shape.misses, answer.token_events) == (1, 20)


def test_an_error_event_is_a_failure_with_the_servers_code() -> None:
    answer = read(chat("a"), {"error": {"message": "gone", "code": "worker_lost"}})
    assert (answer.error_code, answer.error_message) == ("worker_lost", "gone")


@pytest.mark.parametrize(
    ("error", "code"), [("boom", "stream_error"), ({"type": "server_error"}, "server_error"), ({}, "stream_error")]
)
def test_an_error_event_without_a_code_is_still_a_failure(error: Any, code: str) -> None:
    assert read({"error": error}).error_code == code


def test_a_stream_that_just_ends_is_incomplete() -> None:
    answer = read(chat("a"))
    answer.end_of_stream()
    assert answer.error_code == "incomplete_stream"
    answer = read(chat("a", "stop"))
    answer.end_of_stream()
    assert answer.error_code is None, "a finish_reason is an end, whatever became of [DONE]"


def test_what_is_not_json_is_a_bad_event() -> None:
    assert read(b"<html>").error_code == "bad_event"
    assert read({"choices": "none"}).error_code == "bad_event"


def test_a_whole_answer_has_no_token_times() -> None:
    answer = AnswerReader()
    body = {
        "id": "x",
        "choices": [{"text": "ab", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    answer.body(json.dumps(body).encode(), 200, 9)
    assert (answer.first_event_ns, answer.first_token_ns, answer.output_tokens, answer.error_code) == (9, None, 2, None)
    body["calculet"] = {"choices": [{"index": 0, "tokens": 2, "token_hash": "ab", "device_ms": 3.0}]}  # type: ignore[assignment]
    answer.body(json.dumps(body).encode(), 200, 9)
    assert answer.token_hash == "ids:ab"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"error":{"code":"over_capacity","message":"full"}}', 429, "over_capacity"),
        (b"<html>bad gateway</html>", 502, "http_502"),
        (b'{"detail":"x"}', 404, "http_404"),
        (b"<html>", 200, "bad_event"),
        (b"{}", 200, "bad_event"),
    ],
)
def test_bodies_that_are_no_answers(body: bytes, status: int, code: str) -> None:
    answer = AnswerReader()
    answer.body(body, status, 1)
    assert answer.error_code == code


# ---------------------------------------------------------------- outcomes
def test_usage_is_believed_and_a_mismatch_is_flagged() -> None:
    answer = read(
        {"choices": [{"text": "a", "token_ids": [1]}]}, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    )
    got = seen(Asked(0, b"", "r", True), answer, ClientNs(request_start=0), 200, None, None)
    assert got.output_tokens == 2
    assert got.chunks is not None
    assert got.chunks.mismatch is True


def test_a_clock_is_complete_only_in_order() -> None:
    clock = ClientNs(
        request_start=1, headers_sent=2, response_headers=3, first_event=4, first_token=5, last_token=6, response_end=7
    )
    assert clock_complete(clock, stream=True, tokens=5)
    clock.first_token = 8
    assert not clock_complete(clock, stream=True, tokens=5)
    clock.first_token = clock.last_token = None
    assert not clock_complete(clock, stream=True, tokens=5)
    assert clock_complete(clock, stream=False, tokens=5)


def test_only_what_the_network_says_is_a_broken_network() -> None:
    assert of_os_error(OSError(101, "")) == "network_broken"
    assert of_os_error(ConnectionRefusedError()) == "connect_refused"
    assert of_os_error(ConnectionResetError()) == "connection_reset"
    assert of_os_error(TimeoutError()) == "connect_timeout"
