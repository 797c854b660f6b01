"""Bodies of the two model endpoints: what is taken, and what is refused by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from calculet_core.errors import CalculetError, InternalError, InvalidJson, InvalidValue, Unsupported
from calculet_core.kv import CONTEXT_OPS, ContextOp, refuse
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_router.openai import CONTEXT_PARAMETERS, UNSUPPORTED, Kind, parse_chat, parse_text, parse_timeout_ms

CHAT: dict[str, Any] = {"model": "qwen3", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "qwen3", "prompt": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({**TEXT, **fields}).encode()


def refused(body: bytes, parse: Any = parse_chat) -> CalculetError:
    with pytest.raises(CalculetError) as caught:
        parse(body)
    return caught.value


def test_a_minimal_chat_gets_the_defaults() -> None:
    call = parse_chat(chat())
    assert call.kind is Kind.CHAT and call.model == "qwen3" and call.choices == 1
    assert call.prompts == [Prompt(messages=[{"role": "user", "content": "hi"}])]
    assert call.max_new_tokens is None, "absent means what fits the context"
    assert call.sampling == SamplingParams() and call.stop == StopRules()
    assert not call.stream and not call.include_usage and not call.echo


def test_every_parameter_arrives() -> None:
    call = parse_text(
        text(
            max_tokens=5, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-3, stop=["a", "b"], n=2, logprobs=3,
            presence_penalty=-1, frequency_penalty=1.5, repetition_penalty=1.1, logit_bias={"7": -100, "9": 2.5}, stream=True,
            stream_options={"include_usage": True}, user="u", ignore_eos=True, min_tokens=2, stop_token_ids=[1, 2],
        )
    )
    assert call.sampling == SamplingParams(0.5, 0.9, 40, 0.1, -3, -1.0, 1.5, 1.1, {7: -100.0, 9: 2.5}, 3)
    assert call.stop == StopRules(("a", "b"), (1, 2), True, 2)
    assert (call.max_new_tokens, call.n, call.choices, call.stream, call.include_usage) == (5, 2, 2, True, True)


def test_null_means_absent_and_unknown_fields_are_ignored() -> None:
    nulls = dict.fromkeys(["temperature", "stop", "n", "seed", "tools", "stream", "logit_bias", "stream_options", "max_tokens"])
    assert parse_chat(chat(**nulls, colour="red", store=True, metadata={"a": [1]})) == parse_chat(chat())


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=9)).max_new_tokens == 9
    assert parse_chat(chat(max_tokens=5)).max_new_tokens == 5


def test_max_completion_tokens_counts_for_texts_too() -> None:
    assert parse_text(text(max_tokens=7, max_completion_tokens=5)).max_new_tokens == 5
    assert refused(text(max_completion_tokens=5, min_tokens=6), parse_text).param == "min_tokens"


def test_what_the_assistant_refused_to_say_is_taken_back_as_its_words() -> None:
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "Yes.", "refusal": None},
        {"role": "assistant", "content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "cannot."}]},
    ]
    messages = parse_chat(chat(messages=said)).prompts[0].messages
    assert messages is not None and [message["content"] for message in messages] == ["No.", "Yes.", "I cannot."]
    for content, param, kind in (
        ([{"type": "refusal"}], "messages[0].content[0].refusal", InvalidValue), (None, "messages[0].content", InvalidValue),
    ):  # fmt: skip
        error = refused(chat(messages=[{"role": "assistant", "content": content}]))
        assert (error.param, type(error)) == (param, kind)
    by_user = refused(chat(messages=[{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]))
    assert by_user.param == "messages[0].content[0].type"
    assert refused(chat(messages=[{"role": "user", "content": None, "refusal": "no"}])).param == "messages[0].content"


def test_variables_of_the_template_arrive_as_they_were_written() -> None:
    assert parse_chat(chat(chat_template_kwargs={"enable_thinking": False})).prompts[0].options == '{"enable_thinking": false}'
    for nothing in (None, {}):
        assert parse_chat(chat(chat_template_kwargs=nothing)).prompts[0].options in (None, "{}")
    for wrong in (5, [], "x", True):
        assert refused(chat(chat_template_kwargs=wrong)).param == "chat_template_kwargs"
    assert refused(text(chat_template_kwargs={"a": 1}), parse_text).param == "chat_template_kwargs"


@pytest.mark.parametrize("body", [b"\xef\xbb\xbf{}", '{"model":"m"}'.encode("utf-16")])
def test_a_byte_order_mark_is_named(body: bytes) -> None:
    assert "byte order mark" in refused(body).message


def test_temperature_zero_is_greedy_and_top_k_minus_one_is_off() -> None:
    assert parse_chat(chat(temperature=0)).sampling.greedy
    assert parse_chat(chat(top_k=-1)).sampling.top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", [Prompt(text="one")]),
        (["one", "two"], [Prompt(text="one"), Prompt(text="two")]),
        ([1, 2, 3], [Prompt(token_ids=(1, 2, 3))]),
        ([[1], [2, 3]], [Prompt(token_ids=(1,)), Prompt(token_ids=(2, 3))]),
    ],
)
def test_a_prompt_may_be_text_texts_tokens_or_lists_of_tokens(prompt: Any, expected: list[Prompt]) -> None:
    call = parse_text(text(prompt=prompt, n=2))
    assert call.prompts == expected and call.choices == 2 * len(expected)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", 1], [1, [2]], [["a"]], 5, None, {"a": 1}, [-1], [2**31], [1.5], [True]])
def test_other_prompts_are_refused_by_name(prompt: Any) -> None:
    error = refused(text(prompt=prompt), parse_text)
    assert error.http_status == 400 and (error.param or "").startswith("prompt")


def test_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "name": "bob", "content": parts}]
    expected = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab", "name": "bob"}]
    assert parse_chat(chat(messages=messages)).prompts == [Prompt(messages=expected)]


@pytest.mark.parametrize(
    ("messages", "param", "kind"),
    [
        ([], "messages", InvalidValue),
        ("hi", "messages", InvalidValue),
        ([{"role": "user"}], "messages[0].content", InvalidValue),
        ([{"content": "x"}], "messages[0].role", InvalidValue),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", InvalidValue),
        ([{"role": "function", "content": "x"}], "messages[0].role", Unsupported),
        ([{"role": "tool"}], "messages[0].content", InvalidValue),
        ([{"role": "user", "content": 5}], "messages[0].content", InvalidValue),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", Unsupported),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", InvalidValue),
        ([{"role": "assistant", "content": None, "tool_calls": [1]}], "messages[0].tool_calls[0]", InvalidValue),
        ([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls", InvalidValue),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call", Unsupported),
    ],
)
def test_bad_messages_are_refused_by_their_place(messages: Any, param: str, kind: type[CalculetError]) -> None:
    error = refused(chat(messages=messages))
    assert type(error) is kind
    assert error.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2),
        ("seed", 2**63), ("seed", 10**400), ("seed", "x"), ("stop", ["a"] * 5), ("stop", 5), ("stop", ""), ("n", 0), ("n", 17), ("n", "2"),
        ("n", True), ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}), ("stream", "yes"), ("stream_options", {"include_usage": True}), ("user", 5), ("ignore_eos", 1),
        ("min_tokens", -1), ("stop_token_ids", [-1]), ("max_tokens", 0), ("max_tokens", -7584), ("max_tokens", 1.5),
        ("max_completion_tokens", 0), ("logprobs", 5), ("top_logprobs", 21), ("top_logprobs", 2), ("model", ""), ("model", 5),
    ],
)  # fmt: skip
def test_wrong_types_and_ranges_name_the_parameter(field: str, value: Any) -> None:
    error = refused(chat(**{field: value}))
    assert type(error) is InvalidValue and error.http_status == 400
    assert error.param is not None and error.param.split("[")[0].split(".")[0] == field
    assert field in error.message


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_would_change_the_answer_is_refused_by_name(name: str) -> None:
    error = refused(chat(**{name: {"type": "json_object"}}))
    assert type(error) is Unsupported and error.param == name
    for harmless in UNSUPPORTED[name]:
        assert parse_chat(chat(**{name: harmless})) == parse_chat(chat())


def test_a_value_in_a_mapping_names_the_mapping() -> None:
    assert refused(chat(logit_bias={"5": None})).param == "logit_bias"


def test_best_of_above_n_needs_a_fork_that_nobody_has() -> None:
    assert type(refused(text(best_of=3), parse_text)) is Unsupported
    assert type(refused(text(best_of=1, n=2), parse_text)) is InvalidValue
    assert parse_text(text(best_of=2, n=2)).choices == 2


def test_min_tokens_above_the_limit_is_refused() -> None:
    assert refused(chat(min_tokens=6, max_tokens=5)).param == "min_tokens"


def test_a_call_has_a_bounded_number_of_choices() -> None:
    assert refused(text(prompt=["a"] * 9, n=16), parse_text).param == "n"


def test_echo_works_for_text_and_is_refused_where_it_cannot() -> None:
    assert parse_text(text(echo=True)).echo
    assert parse_text(text(echo=True, prompt=[1])).echo
    assert refused(text(echo=True, logprobs=1), parse_text).param == "echo"


def test_chat_logprobs_count_their_alternatives() -> None:
    assert parse_chat(chat(logprobs=True)).sampling.logprobs == 0
    assert parse_chat(chat(logprobs=True, top_logprobs=4)).sampling.logprobs == 4
    assert parse_chat(chat(logprobs=False)).sampling.logprobs is None


def test_missing_fields_are_named() -> None:
    assert refused(b'{"messages":[{"role":"user","content":"x"}]}').param == "model"
    assert refused(b'{"model":"m"}').param == "messages"
    assert refused(b'{"model":"m"}', parse_text).param == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'{"model":"m",}', b'{"model":"\xff"}', b'{"model":"\\ud800"}', b'{"temperature":NaN}',
        b'{"x":' + b"[" * 200_000, b'{"x":' + b'{"a":' * 200_000, b"\x00", b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_what_is_no_json_is_invalid_json(body: bytes) -> None:
    assert type(refused(body)) is InvalidJson


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null"])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    assert refused(body).http_status == 400


@pytest.mark.parametrize("value", [b"", b"0", b"-5", b"1.5", b"soon", b"9" * 40])
def test_a_timeout_is_a_positive_number_of_milliseconds(value: bytes) -> None:
    with pytest.raises(InvalidValue, match="X-Request-Timeout-Ms"):
        parse_timeout_ms(value)
    assert parse_timeout_ms(b"1500") == 1500


@pytest.mark.parametrize(
    ("parameter", "value", "operation"),
    [
        ("use_beam_search", True, "copy"), ("best_of", 4, "copy"), ("n_keep", 64, "keep_one"),
        ("context_shift", True, "shift"), ("id_slot", 3, "save_load"),
    ],
)  # fmt: skip
def test_what_needs_an_operation_on_the_context_is_refused_by_that_operations_name(parameter: str, value: object, operation: str) -> None:
    """Scheduling §9.3: the table decides, and its reason is told."""
    body = {"model": "m", "prompt": "x", parameter: value}
    with pytest.raises(CalculetError) as refused:
        parse_text(json.dumps(body).encode())
    error = refused.value
    assert (error.code, error.http_status, error.param) == ("unsupported", 400, parameter)
    assert repr(operation) in error.message and CONTEXT_OPS[ContextOp(operation)].reason in error.message
    assert CONTEXT_PARAMETERS[parameter] is ContextOp(operation)


@pytest.mark.parametrize("parameter", sorted(set(CONTEXT_PARAMETERS) - {"best_of"}))
def test_what_asks_for_no_operation_on_the_context_is_no_reason_to_refuse(parameter: str) -> None:
    for harmless in (None, *UNSUPPORTED[parameter]):
        parse_text(json.dumps({"model": "m", "prompt": "x", parameter: harmless}).encode())


def test_an_operation_that_the_table_allows_is_not_refused() -> None:
    assert refuse(ContextOp.APPEND, "prompt") is None
    assert "remove_tail" in (refuse(ContextOp.REMOVE_TAIL, "rewind") or InternalError("")).message
