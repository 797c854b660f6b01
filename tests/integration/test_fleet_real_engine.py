"""The real engine behind real HTTP: curl and the openai client get sensible English from two supervised boards."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
from builders_fleet import Fleet, Packages, until
from builders_smollm2 import Driver, smollm2_package
from pydantic import BaseModel, Field

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    package = ROOT / ".calculet" / "packages" / "smollm2"
    if not (package / "manifest.yaml").exists():
        reason = "the real engine's package is not built (`make packages` builds it where a C++ compiler is)"
        if os.environ.get("CI") and shutil.which("c++"):
            pytest.fail(f"a compiler is here, but {reason}")
        pytest.skip(reason)
    trust = ROOT / ".calculet" / "keys" / "dev.pub"
    with Fleet(tmp_path_factory.mktemp("fleet"), package, trust, device="llamacpp", options={"threads": 1}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="none", max_retries=0, timeout=60)


def test_curl_streams_a_sensible_answer(fleet: Fleet) -> None:
    curl = shutil.which("curl")
    assert curl, "curl is installed by .ci/setup"
    body = json.dumps({"model": "toy", "stream": True, "messages": QUESTION, "temperature": 0, "max_tokens": 64})
    command = [curl, "-sN", f"http://127.0.0.1:{fleet.port}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    lines = [line for line in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert "sky" in text.lower() and ("light" in text.lower() or "scatter" in text.lower()), text


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=QUESTION, max_tokens=32, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 32
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 32


def test_the_openai_client_streams_what_it_would_get_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="toy", messages=QUESTION, max_tokens=48, temperature=0)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="toy", messages=QUESTION, max_tokens=48, temperature=0, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 48
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_openai_client_completes_and_stops_at_a_string(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="toy", prompt="The capital of France is", max_tokens=24, temperature=0)
    word = plain.choices[0].text.split()[2]
    cut = client.completions.create(model="toy", prompt="The capital of France is", max_tokens=24, temperature=0, stop=[word])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == plain.choices[0].text.split(word)[0]


def test_the_openai_client_gets_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="toy", prompt="word " * 20_000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="toy", prompt="x", temperature=9)
    assert wrong.value.param == "temperature"


def test_models_tell_what_is_proven(client: openai.OpenAI, fleet: Fleet) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    model = fleet.get("/v1/models/toy").json()
    assert model["max_model_len"] >= 1024
    assert model["calculet"]["calbin_sha256"]
    assert 1 in model["calculet"]["profiles"]


def test_greedy_answers_are_the_same_on_both_boards_whatever_runs_beside_them(fleet: Fleet) -> None:
    prompts = [f"Write one sentence about the number {index}." for index in range(12)]

    def ask(prompt: str) -> str:
        body = {"model": "toy", "messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "temperature": 0}
        answer = fleet.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        return answer.text

    alone = {prompt: ask(prompt) for prompt in prompts}
    with ThreadPoolExecutor(16) as pool:
        assert dict(zip(prompts, pool.map(ask, prompts), strict=True)) == alone


def test_log_probabilities_of_a_prompt_are_those_of_the_library_itself(fleet: Fleet) -> None:
    text = "The sky is blue because of the way sunlight is scattered."
    answer = fleet.completion(text, echo=True, logprobs=1, max_tokens=1).json()
    told = answer["choices"][0]["logprobs"]
    ids = fleet.post("/tokenize", {"model": fleet.alias, "prompt": text}).json()["tokens"]
    assert answer["usage"]["prompt_tokens"] == len(ids) and "".join(told["tokens"][: len(ids)]) == text
    assert told["token_logprobs"][0] is None
    board = Driver(smollm2_package(lanes=1), threads=1)
    try:
        for place in range(1, len(ids)):
            row = board.prefill(0, ids[:place]).astype(np.float64)
            expected = row[ids[place]] - row.max() - math.log(np.exp(row - row.max()).sum())
            assert told["token_logprobs"][place] == pytest.approx(expected, abs=0.05), (place, told["tokens"][place])
            board.release(0)
    finally:
        board.device.close()


def test_text_beyond_ascii_is_never_broken(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "Répète: 你好 🙂 é"}], max_tokens=40, temperature=0, stream=True
    )  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "\ufffd" not in text


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model="toy", prompt="Once upon a time", max_tokens=16, temperature=1.0, seed=7).choices[0].text
        for _ in range(3)
    }
    assert len(texts) == 1


def test_a_killed_worker_is_back_and_serves_the_same_text(fleet: Fleet, client: openai.OpenAI) -> None:
    def ask() -> str:
        answer = client.completions.create(model="toy", prompt="The moon is", max_tokens=48, temperature=0)
        return answer.choices[0].text

    before = ask()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask) for _ in range(4)]
        until(lambda: any(fleet.active()), "load")
        fleet.kill("worker", "board0")
        assert {answer.result() for answer in answers} == {before}
    fleet.wait_ready(2, 30)
    assert ask() == before


# ---------------------------------------------------------------- schemas and tools
class Person(BaseModel):
    """Free text inside: this model must find its own end of a string."""

    name: str
    age: int = Field(ge=0, le=150)
    pet: Literal["cat", "dog"]


ABOUT_ALICE: Any = [{"role": "user", "content": "Alice is 30 years old and has a cat. Describe her as JSON."}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "The weather in a city", "parameters": CITY}}
PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_a_real_model_fills_a_schema_beside_free_answers(client: openai.OpenAI) -> None:
    free = {"model": "toy", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    alone = client.chat.completions.create(**free).choices[0].message.content  # type: ignore[call-overload]
    held: Any = {"model": "toy", "messages": ABOUT_ALICE, "max_tokens": 100, "temperature": 0, "response_format": Person}
    with ThreadPoolExecutor(6) as pool:
        frees = [pool.submit(client.chat.completions.create, **free) for _ in range(3)]
        parsed = [pool.submit(client.chat.completions.parse, **held) for _ in range(3)]
        for answer in parsed:
            assert answer.result().choices[0].message.parsed == Person(name="Alice", age=30, pet="cat")
        assert all(answer.result().choices[0].message.content == alone for answer in frees)


def test_a_real_model_calls_a_tool_and_reads_its_result(client: openai.OpenAI) -> None:
    asked: Any = {"model": "toy", "messages": PARIS, "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    called = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = called.message.tool_calls or []
    assert called.finish_reason == "tool_calls"
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}
    told = client.chat.completions.create(**{**asked, "messages": [*PARIS, called.message.to_dict(), result]})
    assert told.choices[0].message.content or told.choices[0].message.tool_calls
    free = client.chat.completions.create(**asked).choices[0]
    assert free.message.content, "with `auto` this model talks"
