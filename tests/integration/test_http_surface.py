"""The whole HTTP interface against a fleet of simulated boards, as curl, LangChain, and a fuzzer see it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import hypothesis
import openai
import pytest
import schemathesis
from builders_fleet import Fleet, Packages, until
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from calculet_core.shell.build import SOURCE, head_of

EXAMPLES = 12
"""For each operation; the fuzzer's share of the test time is bounded by it."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "1")
    with Fleet(tmp_path_factory.mktemp("fleet"), package, packages.key.with_suffix(".pub")) as fleet:
        yield fleet
        assert fleet.completion().status == 200, "what served must still serve"


# ---------------------------------------------------------------- tokens
def test_tokens_of_a_text_and_of_a_chat_and_back(fleet: Fleet) -> None:
    asked = fleet.post("/tokenize", {"model": fleet.alias, "prompt": "Hé!", "return_token_strs": True}).json()
    assert asked["tokens"] == list("Hé!".encode()) and asked["count"] == 4 and asked["max_model_len"] == 4096
    assert asked["token_strs"][0] == "H" and len(asked["token_strs"]) == 4
    back = fleet.post("/detokenize", {"model": fleet.alias, "tokens": asked["tokens"]})
    assert back.json() == {"prompt": "Hé!"}
    messages = [{"role": "user", "content": "Hello"}]
    chat = fleet.post("/tokenize", {"model": fleet.alias, "messages": messages}).json()
    answer = fleet.post("/v1/chat/completions", {"model": fleet.alias, "messages": messages, "max_tokens": 1}).json()
    assert chat["count"] == answer["usage"]["prompt_tokens"]
    text = fleet.post("/detokenize", {"model": fleet.alias, "tokens": chat["tokens"]}).json()["prompt"]
    again = fleet.post("/tokenize", {"model": fleet.alias, "prompt": text}).json()
    assert again["tokens"] == chat["tokens"], "control tokens are spelled out and read again"
    assert fleet.post("/detokenize", {"model": fleet.alias, "tokens": []}).json() == {"prompt": ""}


def test_a_question_that_has_no_answer_is_a_clear_400(fleet: Fleet) -> None:
    for path, fields, param in (
        ("/detokenize", {"tokens": [999_999]}, "tokens"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ):
        answer = fleet.post(path, {"model": fleet.alias, **fields})
        assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer.body
    assert fleet.post("/tokenize", {"model": "nowhere", "prompt": "x"}).status == 404
    assert fleet.get("/tokenize").status == 405


def test_echo_of_texts_and_of_ids_whole_and_streamed(fleet: Fleet) -> None:
    ids = [*"Hé".encode(), 257]
    plain = fleet.completion(prompt=ids).text  # type: ignore[arg-type]
    assert fleet.completion(prompt=ids, echo=True).text == "Hé<|eos|>" + plain  # type: ignore[arg-type]
    long = [65] * 5000
    assert fleet.post("/v1/completions", {"model": fleet.alias, "prompt": long, "echo": True, "max_tokens": 1}).status == 400, "too long"
    asked = {"prompt": [ids, [72]], "n": 2, "echo": True, "max_tokens": 2}
    choices = fleet.completion(**asked).json()["choices"]
    assert [choice["text"][: len(text)] for choice, text in zip(choices, ["Hé<|eos|>", "Hé<|eos|>", "H", "H"], strict=True)] == ["Hé<|eos|>"] * 2 + ["H"] * 2
    events = [json.loads(event) for event in fleet.stream({"prompt": ids, "echo": True, "max_tokens": 8}) if event != "[DONE]"]
    assert "".join(event["choices"][0]["text"] for event in events) == "Hé<|eos|>" + plain


def test_echo_with_logprobs_scores_the_prompt_whole_and_streamed(fleet: Fleet) -> None:
    ids = list("Héllo".encode())
    asked: dict[str, Any] = {"prompt": ["Héllo", "World"], "n": 2, "echo": True, "logprobs": 3, "max_tokens": 4, "ignore_eos": True}
    whole = fleet.completion(**asked).json()
    events = [json.loads(event) for event in fleet.stream({**asked, "stream_options": {"include_usage": True}}) if event != "[DONE]"]
    assert whole["usage"] == {"prompt_tokens": 11, "completion_tokens": 16, "total_tokens": 27} == events[-1]["usage"]
    for choice in whole["choices"]:
        told, text = choice["logprobs"], choice["text"]
        assert text.startswith(("Héllo", "World")[choice["index"] // 2]) and choice["finish_reason"] == "length"
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert all(value <= 0 for value in told["token_logprobs"][1:]) and all(3 <= len(top) <= 4 for top in told["top_logprobs"][1:])
        chunks = [chunk for event in events for chunk in event["choices"] if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"][name]] == told[name], name
    (first,) = (choice for choice in whole["choices"] if choice["index"] == 0)
    assert first["logprobs"]["text_offset"][:6] == [0, 1, 1, 2, 3, 4], "two bytes of one letter are at one place"
    only = fleet.completion(prompt=ids, echo=True, logprobs=1, max_tokens=0).json()  # type: ignore[arg-type]
    assert (only["choices"][0]["text"], only["usage"]["completion_tokens"]) == ("Héllo", 0)
    assert only["choices"][0]["logprobs"]["token_logprobs"] == first["logprobs"]["token_logprobs"][:6]
    timed = fleet.post("/v1/completions", {"model": fleet.alias, **asked, "prompt": "Hé", "n": 1}, **{"x-calculet-timing": "1"}).json()
    assert timed["calculet"]["choices"][0]["tokens"] == 4
    longer = fleet.completion("x" * 5000, echo=True, logprobs=1, max_tokens=0).json()["error"]
    assert (longer["code"], longer["param"]) == ("context_length_exceeded", "prompt")


def test_every_parameter_does_what_it_says(fleet: Fleet) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        answer = fleet.post("/v1/completions", {"model": fleet.alias, "prompt": "Hello", "max_tokens": 12, "temperature": 0, **fields})
        assert answer.status == 200, (fields, answer.body)
        return answer.json()  # type: ignore[no-any-return]

    def text(**fields: Any) -> str:
        return str(ask(**fields)["choices"][0]["text"])

    plain, eos = text(), {"257": 100}
    ids = [ord(letter) for letter in plain]
    assert {choice["index"] for choice in ask(n=3, temperature=1)["choices"]} == {0, 1, 2}
    assert text(temperature=2, seed=5) == text(temperature=2, seed=5) and len({text(temperature=2, seed=seed) for seed in range(4)}) > 1
    for same in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert text(temperature=2, **same) == plain, same
    assert text(logit_bias={"65": 100}) == "A" * 12 and text(logit_bias={str(ids[0]): -100})[0] != plain[0]
    for ends in ({"stop": plain[4]}, {"stop": ["never", plain[4]]}, {"stop_token_ids": [ids[4]]}):
        assert text(**ends) == plain[: plain.index(plain[4])], ends
    assert ask(stop_token_ids=[ids[0]], min_tokens=5)["usage"]["completion_tokens"] >= 5
    ended, went_on = ask(logit_bias=eos), ask(logit_bias=eos, ignore_eos=True)
    assert (ended["choices"][0]["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", 1)
    assert (went_on["choices"][0]["finish_reason"], went_on["usage"]["completion_tokens"]) == ("length", 12)
    (choice,) = ask(logprobs=2)["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"] and told["text_offset"] == list(range(12)) and len(told["token_logprobs"]) == 12
    assert all(max(found.values()) >= found[name] for found, name in zip(told["top_logprobs"], told["tokens"], strict=True))
    absent = dict.fromkeys((
        "top_p", "top_k", "min_p", "seed", "stop", "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stream",
        "stream_options", "user", "ignore_eos", "min_tokens", "stop_token_ids", "logprobs", "echo", "best_of", "suffix", "tools", "response_format",
    ))  # fmt: skip
    assert text(**absent) == plain, "null is absent"
    for changes in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 50}):
        assert text(logit_bias={"65": 100, "66": 99}, **changes)[:2] == "AB", changes
    whole = ask(max_tokens=None)
    assert (whole["usage"]["total_tokens"], whole["choices"][0]["finish_reason"]) == (4096, "length"), "absent is what the context leaves"
    assert ask(max_tokens=4091)["usage"]["total_tokens"] == 4096
    over = fleet.completion(max_tokens=4092)
    assert over.status == 400 and all(number in over.json()["error"]["message"] for number in ("5 tokens", "4092", "4096"))


# ---------------------------------------------------------------- extension, version, document
def test_the_extension_counts_tokens_and_its_hash_is_the_answers(fleet: Fleet) -> None:
    body = {"model": fleet.alias, "prompt": "abc", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    whole = fleet.post("/v1/completions", body, **{"x-calculet-timing": "1"}).json()
    (told,) = whole["calculet"]["choices"]
    assert told["tokens"] == 9 == whole["usage"]["completion_tokens"] and len(told["token_hash"]) == 16
    assert all(told[name] >= 0 for name in ("queue_ms", "prefill_ms", "decode_ms", "device_ms"))
    events = [json.loads(event) for event in fleet.stream({**body, "calculet": {"timing": True}}) if event != "[DONE]"]
    assert sum(event["calculet"]["tokens"] for event in events) == 9
    assert events[-1]["calculet"]["token_hash"] == told["token_hash"]
    assert "calculet" not in fleet.post("/v1/completions", body).json()
    assert fleet.post("/v1/completions", body, **{"x-calculet-timing": "maybe"}).status == 400


def test_the_version_goes_down_to_the_boards(fleet: Fleet) -> None:
    told = fleet.get("/version").json()
    assert told["commit"] == head_of(SOURCE / ".git") and told["version"]
    assert [board["board"] for board in told["boards"]] == fleet.boards
    for board in told["boards"]:
        assert board["state"] == "READY" and board["chips"] >= 1 and len(board["digest"]) == 64
        assert board["device"]["device"] and board["device"]["runtime"]
        assert set(board["device"]) == {"device", "serial_hash", "runtime", "driver", "firmware", "power_mode"}


def test_the_document_describes_every_path_and_only_those(fleet: Fleet) -> None:
    document = fleet.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            found = fleet.ask(method.upper(), path.replace("{id}", fleet.alias), b"{}" if method == "post" else None)
            assert found.status in (200, 400), (path, found.body)
            assert str(found.status) in operations[method]["responses"]
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "top_logprobs"} <= set(chat)
    assert {"tools", "tool_choice", "parallel_tool_calls", "response_format"} <= set(chat)
    text = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert not {"tools", "response_format", "guided_json"} & set(text)


PATHS = (
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{id}"), ("GET", "/health"), ("GET", "/version"),
)  # fmt: skip


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_nothing_that_a_fuzzer_sends_gets_an_answer_that_is_not_in_the_document(
    fleet: Fleet, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{fleet.port}/openapi.json")
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("nothing in it can be wrong")

    answers: list[int] = []

    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.body = without_floats(case.body)
        if mode is GenerationMode.POSITIVE:
            case.headers.pop("X-Request-Timeout-Ms", None)  # else any answer may be late
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["model"] = fleet.alias
            if path.startswith("/v1/"):
                case.body["max_tokens"] = 2
            for name in {"tokens", "prompt"} & set(case.body):
                case.body[name] = within_vocabulary(case.body[name])
        response = case.call(timeout=60)
        if mode is GenerationMode.NEGATIVE:
            assert 400 <= response.status_code < 500, response.text
        assert response.status_code in (200, 400, 404), response.text
        answers.append(response.status_code)
        case.validate_response(response, checks=[status_code_conformance, content_type_conformance, response_schema_conformance])

    check()
    if mode is GenerationMode.POSITIVE and "{" not in path:
        assert answers.count(200) > len(answers) / 3, "the fuzzer must get past the parser"


def within_vocabulary(value: Any) -> Any:
    """Token ids that there are."""
    if isinstance(value, list):
        return [within_vocabulary(item) for item in value]
    return value % 256 if isinstance(value, int) else value


def without_floats(value: Any) -> Any:
    """1.0 is an integer in JSON Schema; in a body, where one is asked for, 1 is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: without_floats(item) for key, item in value.items()}
    return [without_floats(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- schemas and tools
class City(BaseModel):
    """What a test asks for."""

    name: str = Field(max_length=12)
    district: Literal["north", "south"]
    inhabitants: int = Field(ge=0, le=9999)
    tags: list[Literal["old", "new"]] = Field(min_length=1, max_length=2)


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="none", max_retries=0, timeout=60)


HELLO: Any = [{"role": "user", "content": "Hello"}]
LIMITS: Any = {"max_tokens": 250, "temperature": 0}


def test_the_openai_client_parses_answers_into_its_models(fleet: Fleet, client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(model=fleet.alias, messages=HELLO, response_format=City, **LIMITS).choices[0]
    assert found.finish_reason == "stop" and isinstance(found.message.parsed, City)
    for seed in range(3):
        asked = {"model": fleet.alias, "messages": HELLO, "response_format": City, "max_tokens": 250, "seed": seed}
        drawn = client.chat.completions.parse(**asked, temperature=2.0).choices[0].message
        assert isinstance(drawn.parsed, City), drawn.content
    with client.chat.completions.stream(model=fleet.alias, messages=HELLO, response_format=City, **LIMITS) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found.message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=fleet.alias, messages=HELLO, response_format=City, max_tokens=3)


def test_the_openai_client_gets_calls_whole_and_streamed(fleet: Fleet, client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(City, name="found_city")
    asked: Any = {"model": fleet.alias, "messages": HELLO, "tools": [tool], "parallel_tool_calls": False, **LIMITS}
    parsed = client.chat.completions.parse(**asked, tool_choice="required").choices[0]
    (call,) = parsed.message.tool_calls or []
    assert parsed.finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, City) and parsed.message.content is None
    with client.chat.completions.stream(**asked, tool_choice={"type": "function", "function": {"name": "found_city"}}) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments and streamed.id != call.id and streamed.id.startswith("call_")
    assert kinds.count("tool_calls.function.arguments.delta") > 3 and kinds.count("tool_calls.function.arguments.done") == 1
    answer = {"role": "assistant", "tool_calls": [call.to_dict()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
    last = client.chat.completions.create(**{**asked, "messages": [*HELLO, answer, result], "max_tokens": 8, "tool_choice": "none"})
    assert last.choices[0].finish_reason == "length" and last.choices[0].message.content and not last.choices[0].message.tool_calls
    free = client.chat.completions.create(**{**asked, "max_tokens": 8}).choices[0]
    assert free.message.content and free.message.tool_calls is None


def test_several_choices_have_calls_of_their_own(fleet: Fleet, client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "roll", "parameters": {"properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}}}
    found = client.chat.completions.create(model=fleet.alias, messages=HELLO, tools=[tool], tool_choice="required", n=3, max_tokens=200)
    ids = [call.id for choice in found.choices for call in choice.message.tool_calls or []]
    assert len(ids) == len(set(ids)) and all(choice.message.tool_calls for choice in found.choices)


def test_a_wrong_schema_is_a_400_that_names_it_also_in_a_stream(fleet: Fleet) -> None:
    for fields, param in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}]}, "tools[0].function.parameters"),
    ):
        for stream in (False, True):
            answer = fleet.post("/v1/chat/completions", {"model": fleet.alias, "messages": HELLO, "stream": stream, **fields})
            assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer.body


def test_langchain_binds_tools_and_structures_its_output(fleet: Fleet) -> None:
    model = ChatOpenAI(model=fleet.alias, base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="any", max_tokens=250, temperature=0)  # type: ignore[call-arg,arg-type]
    assert isinstance(model.with_structured_output(City).invoke("Hello"), City)
    assert isinstance(model.with_structured_output(City, method="function_calling").invoke("Hello"), City)
    bound = model.bind_tools([City], tool_choice="any", parallel_tool_calls=False)
    asked = bound.invoke("Hello")
    (call,) = asked.tool_calls
    assert call["name"] == "City" and City(**call["args"])
    gathered: Any = None
    for chunk in bound.stream("Hello"):
        gathered = chunk if gathered is None else gathered + chunk
    assert [(one["name"], one["args"]) for one in gathered.tool_calls] == [(call["name"], call["args"])]
    answered = model.bind_tools([City], tool_choice="none").invoke([("user", "Hello"), asked, ToolMessage("noted", tool_call_id=call["id"])])
    assert answered.content


def test_schemas_are_compiled_once_and_seen_in_the_metrics(fleet: Fleet) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["seen", "counted"]}}}
    for _ in range(6):
        answer = fleet.post("/v1/chat/completions", {"model": fleet.alias, "messages": HELLO, "response_format": form})
        assert answer.text in ('"seen"', '"counted"')
    metrics = fleet.get("/metrics").body.decode()
    for name in ('constraints_total{board="board0",result="cached"}', 'constraint_masks_total{board="board0"}', 'constraints_cached{board="board0"}'):
        assert float(metrics.partition(f"calculet_worker_{name} ")[2].split()[0]) > 0, name
    assert 'calculet_worker_limit{board="board0",limit="constraints.max_tools"} 128' in metrics


# ---------------------------------------------------------------- what hurts elsewhere
def test_junk_model_names_make_one_series_and_bad_requests_take_no_board_out(fleet: Fleet) -> None:
    for number in range(40):
        assert fleet.completion(model=f"junk-{number}").status == 404
        assert fleet.completion(max_tokens=10**6).json()["error"]["code"] == "context_length_exceeded"
    metrics = fleet.get("/metrics").body.decode()
    assert "junk-" not in metrics and 'model="other",outcome="failed",status="404"' in metrics
    assert fleet.ready_boards() == 2 and fleet.completion().status == 200, "a client's 400 says nothing of a board"


def test_no_process_writes_into_another_s_pipe(fleet: Fleet) -> None:
    for name, pid in fleet.pids().items():
        for descriptor in (1, 2):
            target = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
            assert target.is_file() and "pipe:" not in str(target), f"{name} would stop when nobody reads"


# ---------------------------------------------------------------- other clients
def test_langchain_chats_and_streams(fleet: Fleet) -> None:
    model = ChatOpenAI(model=fleet.alias, base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="any", max_tokens=8, temperature=0)  # type: ignore[call-arg,arg-type]
    whole = model.invoke("Hello")
    assert whole.content and whole.usage_metadata and whole.usage_metadata["output_tokens"] <= 8
    assert "".join(str(chunk.content) for chunk in model.stream("Hello")) == whole.content


def curl(fleet: Fleet, *arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *arguments], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_chats_streams_and_sees_errors(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.port}"
    body = json.dumps({"model": fleet.alias, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0})
    whole = json.loads(curl(fleet, f"{url}/v1/chat/completions", "--json", body))
    streamed = curl(fleet, "-N", f"{url}/v1/chat/completions", "--json", body[:-1] + ',"stream":true}')
    assert streamed.rstrip().endswith("data: [DONE]")
    texts = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    head = curl(fleet, "-i", "-H", "X-Request-Id: night-shift", f"{url}/v1/models/nowhere")
    assert head.startswith("HTTP/1.1 404") and "x-request-id: night-shift" in head and '"code":"model_not_found"' in head
    big = "x" * 2_000
    expected = curl(fleet, f"{url}/v1/completions", "-H", "Expect: 100-continue", "--json", json.dumps({"model": fleet.alias, "prompt": big, "max_tokens": 1}))
    assert json.loads(expected)["usage"]["prompt_tokens"] == 2_000
    assert curl(fleet, "-I", f"{url}/v1/models").startswith("HTTP/1.1 200")
    assert json.loads(curl(fleet, "--http2", f"{url}/livez")) == {"status": "ok"}, "an offer to upgrade is not taken, and does no harm"


def test_a_lookup_survives_a_killed_board(fleet: Fleet) -> None:
    fleet.kill("worker", fleet.boards[0])
    for _ in range(6):
        assert fleet.post("/tokenize", {"model": fleet.alias, "prompt": "x"}).status == 200
    until(lambda: fleet.ready_boards() == 2, "both boards again")
