"""Answers that keep to a schema: what is compiled, what is refused by which name, how tokens are drawn, and what a dead end is."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders_constraints import BYTES, BYTES_EOS, Letters, a_matcher, a_tool, may_end, takes
from builders_engine import EOS, VOCABULARY, Driver, a_manifest
from builders_worker import a_chat_package
from hypothesis import given, settings
from hypothesis import strategies as st

from calculet_core import history
from calculet_core.clock import S
from calculet_core.config import ConstraintsConfig
from calculet_core.errors import CalculetError, InvalidValue, OverCapacity, Unsupported
from calculet_core.ids import WireKey
from calculet_core.requests import Constraint, Prompt, SamplingParams, StopRules, ToolRule
from calculet_worker import actions, events
from calculet_worker.output.sampling import NO_TOKEN, Sampler
from calculet_worker.output.tools import CallingText
from calculet_worker.shell.constraints import Constraints
from calculet_worker.shell.prompts import Prompts
from calculet_worker.shell.tokenizing import PromptTokenizer

NUMBER = Constraint({"type": "integer", "minimum": 100, "maximum": 999})
PERSON: dict[str, Any] = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


# ---------------------------------------------------------------- grammars
def test_json_is_written_one_way_and_ends_with_its_last_character() -> None:
    matcher = a_matcher(Constraint(PERSON))
    assert takes(matcher, '{"name": "Zoë", "age": 7') and not matcher.complete
    assert takes(matcher, "}") and matcher.complete
    for wrong in ('{"name":"', '{ "name"', '{"age"', '{"name": "x", "age": 121', '{"name": "x", "age": 7, '):
        assert not takes(a_matcher(Constraint(PERSON)), wrong), wrong


def test_control_tokens_are_part_of_no_answer() -> None:
    mask = a_matcher(Constraint({"type": "string"})).mask()
    assert mask is not None and mask.dtype == np.float32 and np.isneginf(mask[[256, 257]]).all() and mask[ord('"')] == 0


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PAIR = (a_tool("get", n={"enum": [1, 2]}), a_tool("now"))


def test_a_required_call_is_nothing_else() -> None:
    wanted = Constraint(tools=PAIR, required=True)
    assert not takes(a_matcher(wanted), "Hello") and not takes(a_matcher(wanted), '<tool_call>\n{"name": "put')
    assert not takes(a_matcher(wanted), '<tool_call>\n{"name": "get", "arguments": {"n": 3')
    matcher = a_matcher(wanted)
    assert takes(matcher, call("get", '{"n": 2}')) and may_end(matcher)
    assert takes(matcher, "\n" + call("now", "{}")) and may_end(matcher)
    assert not takes(matcher, "\nand")
    alone = a_matcher(Constraint(tools=PAIR, required=True, parallel=False))
    assert takes(alone, call("now", "{}")) and alone.complete


def test_a_call_that_is_not_required_may_follow_text_or_never_come() -> None:
    matcher = a_matcher(Constraint(tools=PAIR))
    assert may_end(matcher) and takes(matcher, "It is <tool, then\nquiet. ") and may_end(matcher)
    assert takes(matcher, call("now", "{}")) and may_end(matcher)
    assert not takes(a_matcher(Constraint(tools=PAIR)), "x<tool_call> not a call")


def test_with_a_schema_and_tools_an_answer_is_either() -> None:
    both = Constraint(PERSON, tools=PAIR)
    assert takes(a_matcher(both), '{"name": "x", "age": 1}') and takes(a_matcher(both), call("now", "{}"))
    assert not takes(a_matcher(both), "Hello")


@pytest.mark.parametrize(
    ("schema", "kind", "words"),
    [
        ({"type": "objct"}, InvalidValue, "objct"),
        ({"type": 5}, InvalidValue, "type"),
        ({"$ref": "#/$defs/nobody"}, InvalidValue, "nobody"),
        ({"$ref": "http://127.0.0.1:1/schema"}, InvalidValue, "retriev"),
        ({"type": "string", "pattern": "("}, InvalidValue, "unclosed group"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, InvalidValue, "minimum"),
        ({"not": {"type": "string"}}, Unsupported, "not"),
        ({"type": "array", "uniqueItems": True}, Unsupported, "uniqueItems"),
        ({"enum": ["x" * 2000]}, InvalidValue, "max_schema_bytes"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused_by_its_place(schema: dict[str, Any], kind: type[CalculetError], words: str) -> None:
    for constraint, param in (
        (Constraint(schema, "response_format.json_schema.schema"), "response_format.json_schema.schema"),
        (Constraint(tools=(*PAIR, ToolRule("bad", schema, "tools[2].function.parameters"))), "tools[2].function.parameters"),
    ):
        with pytest.raises(kind) as caught:
            a_matcher(constraint, max_schema_bytes=1000)
        assert words in caught.value.message and caught.value.http_status == 400
        assert caught.value.param in (param, "tools")
        assert caught.value.param == param or "max_schema_bytes" in words


def test_formats_that_nobody_knows_are_remarks_and_options_of_the_library_are_not_for_clients() -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": "password", "maxLength": 2}}, "required": ["format"]}
    assert takes(a_matcher(Constraint(schema)), '{"format": "ab"')
    dated = {"type": "string", "format": "date"}
    assert takes(a_matcher(Constraint(dated)), '"2026-01-31"') and not takes(a_matcher(Constraint(dated)), '"yesterday"')
    with pytest.raises(Unsupported):
        a_matcher(Constraint({"not": {"type": "string"}, "x-guidance": {"lenient": True}}))


def test_objects_that_name_their_properties_get_no_others_unless_schemas_are_joined() -> None:
    flag = {"type": "boolean"}
    named: dict[str, Any] = {"type": "object", "properties": {"a": flag, "properties": {"type": "object", "properties": {"b": flag}}}}
    more = '{"a": true, "z"'
    assert not takes(a_matcher(Constraint(named)), more) and not takes(a_matcher(Constraint(named)), '{"properties": {"z"')
    assert takes(a_matcher(Constraint({**named, "additionalProperties": True})), more)
    assert takes(a_matcher(Constraint({"type": "object"})), '{"z"'), "nothing is named"
    joined = {"type": "object", "allOf": [{"properties": {"a": flag}}, {"properties": {"z": flag}}]}
    assert takes(a_matcher(Constraint(joined)), '{"a": true, "z": false}')
    either = {"type": "object", "properties": {"a": flag}, "anyOf": [{"properties": {"z": flag}, "required": ["z"]}]}
    assert takes(a_matcher(Constraint(either)), '{"a": true, "z": false}')
    told = {"enum": [{"properties": {"a": 1}, "format": "x"}]}
    assert takes(a_matcher(Constraint(told)), '{"properties": {"a": 1}, "format": "x"}'), "values are data"
    odd = {"type": "object", "properties": {"default": {"type": "string", "format": "odd", "maxLength": 1}, "enum": flag}, "required": ["default"]}
    assert takes(a_matcher(Constraint(odd)), '{"default": "x", "enum": true}')


def test_limits_of_work_are_the_request_s_error() -> None:
    patterns = {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": f"(a|b|c{n}){{1,500}}x"} for n in range(40)}}
    with pytest.raises(Unsupported, match="compile_fuel"):
        a_matcher(Constraint(patterns), compile_fuel=1)
    with pytest.raises(InvalidValue, match="max_tools"):
        a_matcher(Constraint(tools=PAIR), max_tools=1)


def test_a_model_without_an_end_cannot_keep_to_a_schema() -> None:
    with pytest.raises(Unsupported, match="end-of-sequence"):
        a_matcher(NUMBER, Letters(eos_token_ids=()))


# ---------------------------------------------------------------- draws
def draw_all(sampler: Sampler, row: Any, vocabulary: list[bytes], limit: int = 200) -> bytes:
    text = b""
    for _ in range(limit):
        token = sampler.draw(row, vocabulary).token_id
        if token == NO_TOKEN or sampler.stops(token, 1):
            return text
        text += vocabulary[token]
        assert sampler.matcher is not None
        if sampler.matcher.complete:
            return text
    raise AssertionError("no end")


def a_sampler(constraint: Constraint, stop: StopRules = StopRules(), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), stop, (BYTES_EOS,), np.array([], np.int32), 1, a_matcher(constraint))


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.7, 2.0]), top_p=st.sampled_from([0.1, 1.0]))
@settings(max_examples=30, deadline=None)
def test_whatever_the_logits_the_answer_keeps_to_the_schema(seed: int, temperature: float, top_p: float) -> None:
    row = np.random.default_rng(seed).normal(0, 5, len(BYTES)).astype(np.float32)
    before = row.copy()
    sampler = a_sampler(Constraint(PERSON), temperature=temperature, top_p=top_p, seed=seed, frequency_penalty=0.5, top_k=5)
    found = json.loads(draw_all(sampler, row, BYTES))
    assert set(found) == {"name", "age"} and len(found["name"]) <= 9 and 0 <= found["age"] <= 120
    assert (row == before).all(), "the row belongs to the device"


def test_bans_and_biases_do_not_outweigh_the_schema() -> None:
    row = np.zeros(len(BYTES), np.float32)
    row[BYTES_EOS] = 50
    bias = dict.fromkeys(b"0123456789", -100.0)
    sampler = a_sampler(NUMBER, StopRules(ignore_eos=True, min_tokens=50, token_ids=(BYTES_EOS,)), temperature=0.0, logit_bias=bias)
    assert 100 <= int(draw_all(sampler, row, BYTES)) <= 999, "EOS is not allowed before, and the end is the schema's"
    pair = a_sampler(Constraint(tools=PAIR), StopRules(min_tokens=5), temperature=0.0)
    assert pair.draw(row, BYTES).token_id != BYTES_EOS, "where text may go on, min_tokens holds"


# ---------------------------------------------------------------- an engine
class Constrained(Driver):
    """Compiles as the worker's shell does."""

    def tokenized(self, action: actions.Tokenize) -> events.Tokenized:
        matcher = None if action.constraint is None else a_matcher(action.constraint, Letters(VOCABULARY, (EOS,)))
        return events.Tokenized(action.key, np.array(action.prompt.token_ids, np.int32), matcher)


def test_lanes_with_and_without_a_schema_share_their_steps() -> None:
    driver = Constrained(a_manifest(lanes=4, profiles=(1, 4))).ready()
    free = [driver.submit(number, [number, 2, 3], 6) for number in (1, 2)]
    held = [driver.submit(number, [number, 2, 3], 6, constraint=NUMBER) for number in (3, 4)]
    driver.until(lambda: all(told.ended for told in free + held))
    alone = Constrained().ready()
    for number, told in enumerate(free, 1):
        once = alone.submit(number, [number, 2, 3], 6)
        alone.until(lambda once=once: once.ended)  # type: ignore[misc]
        assert told.text == once.text and told.finish == "length"
    for told in held:
        assert 100 <= int(told.text) <= 999 and told.finish == "stop"
        assert told.last.usage is not None and told.last.usage.completion_tokens == 3, "no step is spent on an EOS"
    assert max(event.data["rows"] for event in driver.events_of(history.BOARD_JOB) if event.data["kind"] == "decode") == 4


def test_a_dead_end_is_an_error_and_no_garbage() -> None:
    driver = Constrained().ready()
    told = driver.submit(1, [1, 2, 3], 9, constraint=Constraint({"type": "boolean"}))
    other = driver.submit(2, [2, 2, 3], 9)
    driver.until(lambda: told.ended and other.ended)
    error = told.last.error
    assert error is not None and (error.code, error.param) == ("constraint_failed", "response_format")
    assert "after 3 tokens" in error.message and told.text == "fal", "the vocabulary has no s and no t"
    assert other.finish == "length"
    driver.run(2 * S)
    report = driver.engine.report(driver.now)
    assert (report.inflight, report.active, report.kv_tokens_reserved) == (0, 0, 0)
    assert history.check(driver.records, require_done=False) == []


def test_a_dead_end_at_the_first_token_frees_its_lane() -> None:
    driver = Constrained().ready()
    told = driver.submit(1, [1, 2, 3], 9, constraint=Constraint({"enum": ["x"]}))
    driver.until(lambda: told.ended)
    assert told.error == "constraint_failed" and told.text == ""
    driver.run(2 * S)
    assert driver.engine.report(driver.now).active == 0


def test_a_step_that_takes_too_much_work_ends_its_answer_by_the_limits_name() -> None:
    schema = {"type": "string", "pattern": "^(" + "|".join(f"[a-z]{{1,40}}{n}[0-9]{{1,40}}" for n in range(60)) + ")$"}
    matcher = a_matcher(Constraint(schema), step_fuel=50)
    for byte in b'"abcdefghij':
        if matcher.mask() is None:
            break
        matcher.accept(byte)
    assert "constraints.step_fuel" in matcher.failure, matcher.failure


def test_stop_strings_are_looked_for_beside_calls_only() -> None:
    vocabulary = BYTES
    for stop in ("\n", '"', "<tool", "name"):
        text = CallingText(vocabulary, (stop,))
        shown = "".join(text.push(byte) for byte in call("now", "{}").encode()) + text.flush()
        assert (shown, text.stopped, [part.name for part in text.take() if part.name]) == ("", False, ["now"])
    text = CallingText(vocabulary, ("END",))
    shown = "".join(text.push(byte) for byte in b"Well. EN" + call("now", "{}").encode()) + text.flush()
    assert shown == "Well. EN" and text.called
    text = CallingText(vocabulary, ("END",))
    shown = "".join(text.push(byte) for byte in b"Well. <tool EN")
    assert shown == "Well. <tool " and text.held == 2 and text.flush() == "EN"
    text = CallingText(vocabulary, ("END",))
    shown = "".join(text.push(byte) for byte in b"Well. END of it")
    assert shown == "Well. " and text.stopped


# ---------------------------------------------------------------- compiling
def compiled(constraints: Constraints, tokenizer: PromptTokenizer, constraint: Constraint) -> tuple[Any, Any]:
    arrived, found = threading.Event(), []
    constraints.compile(tokenizer, Prompt(text="hi"), constraint, lambda *result: (found.append(result), arrived.set()))
    assert arrived.wait(30)
    return found[0]


def test_a_schema_is_compiled_once_and_each_answer_has_its_own_way_through_it(tmp_path: Path) -> None:
    constraints, tokenizer = Constraints(ConstraintsConfig(cache_entries=2)), PromptTokenizer(a_chat_package(tmp_path))
    try:
        ids, first = compiled(constraints, tokenizer, NUMBER)
        assert ids.tolist() == list(b"hi") and takes(first, "12")
        _, second = compiled(constraints, tokenizer, NUMBER)
        assert takes(second, "345") and second.complete and takes(first, "9")
        assert (constraints.results["compiled"], constraints.results["cached"], constraints.cached) == (1, 1, 1)
        for maximum in (5, 6, 7):
            compiled(constraints, tokenizer, Constraint({"type": "integer", "maximum": maximum}))
        assert constraints.cached == 2
        for schema in ({"type": "nothing"}, {"$ref": "#"}):
            error, matcher = compiled(constraints, tokenizer, Constraint(schema))
            assert isinstance(error, InvalidValue) and matcher is None and error.param == "response_format"
        assert constraints.masks > 0 and constraints.mask_ns > 0
        other = PromptTokenizer(a_chat_package(tmp_path))
        compiled(constraints, other, NUMBER)
        assert constraints.cached == 1, "another artifact's tokens are not these"
    finally:
        constraints.close()


def test_too_many_that_wait_is_429_and_too_slow_tells_whose_fault_it_is() -> None:
    constraints = Constraints(ConstraintsConfig(max_compiling=1))
    try:
        assert constraints.refusal() is None
        constraints.compiling = 1
        assert isinstance(constraints.refusal(), OverCapacity)
    finally:
        constraints.close()


class Slow(PromptTokenizer):
    """Encodes when it is told to."""

    go = threading.Event()

    def encode(self, prompt: Prompt) -> Any:
        self.go.wait(60)
        return super().encode(prompt)


async def run_too_slow(tokenizer: Slow) -> None:
    told: list[Any] = []
    prompts = Prompts(ConstraintsConfig(compile_timeout_ms=50, max_compiling=3), told.append, lambda seconds: None)
    try:
        actions_ = [actions.Tokenize(WireKey(number, 1, 1), Prompt(text="hi"), 2, NUMBER) for number in range(4)]
        assert [prompts.start(action, tokenizer) for action in actions_[:3]] == [None] * 3
        full = prompts.start(actions_[3], tokenizer)
        assert isinstance(full, events.TokenizingFailed) and isinstance(full.error, OverCapacity), "max_compiling"
        async with asyncio.timeout(30):
            while len(told) < 3:
                await asyncio.sleep(0.01)
        codes = {event.key.request_id: event.error.code for event in told}
        assert codes == {0: "unsupported", 1: "unsupported", 2: "over_capacity"}, "two threads had begun theirs, the third had not"
        assert prompts.constraints.compiling == 0 and prompts.constraints.results["too_slow"] == 3
        tokenizer.go.set()
        done = prompts.start(actions_[0], tokenizer)
        assert done is None
        async with asyncio.timeout(30):
            while len(told) < 4:
                await asyncio.sleep(0.01)
        assert isinstance(told[3], events.Tokenized) and told[3].matcher is not None
        assert len(told) == 4, "what was given up is dropped"
    finally:
        tokenizer.go.set()
        prompts.close()


def test_what_is_not_compiled_in_time_is_told_and_dropped(tmp_path: Path) -> None:
    Slow.go.clear()
    asyncio.run(run_too_slow(Slow(a_chat_package(tmp_path))))
