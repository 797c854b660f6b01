"""The derived tokenizer and chat template against the model's own, as libllama has them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from builders_smollm2 import needs_engine, smollm2_package
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from calculet_worker.commands.recipe_smollm2 import golden_prompts, installed_gguf
from calculet_worker.device.libllama import load_library

pytestmark = [pytest.mark.engine, needs_engine]

CORPUS = {
    "English": "Why is the sky blue? It's because shorter wavelengths scatter more; we've known that since 1871, haven't we?",
    "CJK": "为什么天空是蓝色的？因为短波长的光散射得更多。空はなぜ青いのですか？ 하늘은 왜 파란가요?",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ❤️ e\u0301 \u200d\ufe0f",
    "code": "def f(x: int) -> str:\n\treturn f'{x:>08.3f}'  # 3.14e-10\n\n\nfor (;;) { a[i++] |= 0xFF; }\r\n",
    "whitespace": "a  b   c\t\td \n\n  \n e\u00a0f\u3000g\u2003 \r\n  ",
    "numbers": "1 22 333 4444 1,234,567.89 ½ ² Ⅷ ٣ ৪",
    "special tokens": "<|im_start|>user\nhi<|im_end|>\n<|im_end|><|endoftext|> <repo_name><reponame><|im_start|",
    "control characters": "a\x00b\x01\x04c\x06 \x13!\x14!\x16\x1d\x7f\x85",
    "bytes outside the vocabulary": "x\U00041234y\U000a1234z \U0010ffff",
    "digits llama.cpp does not know": "a \n\U00010d40\U00010d40 \U00011bf0!\U0001e5f1 7",
    "mixed scripts": "Ελληνικά русский עברית العربية हिन्दी ภาษาไทย Tiếng Việt ﬁ ǅ ʰ",
    "nothing": "",
}


@pytest.fixture(scope="module")
def library() -> Any:
    return load_library()


@pytest.fixture(scope="module")
def model(library: Any) -> Any:
    parameters = library.llama_model_default_params()
    parameters.vocab_only = True
    return library.llama_model_load_from_file(str(installed_gguf()).encode(), parameters)


@pytest.fixture(scope="module")
def theirs(library: Any, model: Any) -> Callable[[str], list[int]]:
    vocabulary = library.llama_model_get_vocab(model)

    def encode(text: str) -> list[int]:
        data = text.encode()
        tokens = (ctypes.c_int32 * (len(data) + 8))()
        count = library.llama_tokenize(vocabulary, data, len(data), tokens, len(tokens), True, True)
        return list(tokens[:count])

    return encode


@pytest.fixture(scope="module")
def ours() -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2_package(1, 256).root / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", CORPUS)
def test_text_becomes_the_tokens_that_llama_cpp_makes_of_it(name: str, ours: Any, theirs: Any) -> None:
    assert ours(CORPUS[name]) == theirs(CORPUS[name])


def test_every_code_point_among_neighbours_becomes_the_same_tokens(ours: Any, theirs: Any) -> None:
    """Each assigned block and the planes' edges; every 17th of the rest."""
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    chosen = [point for point in points if point < 0x3000 or 0x10000 <= point < 0x12000 or point % 17 == 0 or point & 0xFFFF > 0xFFF0]
    for start in range(0, len(chosen), 512):
        text = "".join("a{0}1 {0}b {0} \n{0}{0}!".format(chr(point)) for point in chosen[start : start + 512])
        assert ours(text) == theirs(text), f"between U+{chosen[start]:04X} and U+{chosen[min(start + 511, len(chosen) - 1)]:04X}"


@given(st.text(max_size=60) | st.text(alphabet=" \t\n\r\u00a0'strevmld019.,!<|im_start|>\x04é好", max_size=60))
@example("'re're 's'S 'LL")
@settings(max_examples=400, deadline=None)
def test_random_text_becomes_the_same_tokens(ours: Any, theirs: Any, text: str) -> None:
    assert ours(text) == theirs(text)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Why is the sky blue?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ x }}"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": " c"}],
    ],
)
def test_the_chat_template_renders_what_the_model_ships(library: Any, model: Any, messages: list[dict[str, str]]) -> None:
    """The library renders by a built-in copy of the format, which has no default system prompt."""
    template = (smollm2_package(1, 256).root / "chat_template.jinja").read_text()
    shipped = library.llama_model_chat_template(model, None).decode()
    assert template == shipped
    rendered = ImmutableSandboxedEnvironment().from_string(template).render(messages=messages, add_generation_prompt=True)
    chat = (library.llama_chat_message * len(messages))(*[(m["role"].encode(), m["content"].encode()) for m in messages])
    buffer = ctypes.create_string_buffer(4096)
    size = library.llama_chat_apply_template(shipped.encode(), chat, len(messages), True, buffer, len(buffer))
    default = "" if messages[0]["role"] == "system" else (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n")  # fmt: skip
    assert rendered == default + buffer.raw[:size].decode()


def test_golden_prompts_are_within_the_vocabulary_and_one_is_longer_than_a_micro_batch() -> None:
    package = smollm2_package(1, 256)
    prompts = golden_prompts(package.root)
    assert all(0 <= token < package.manifest.tokenizer.vocab_size for prompt in prompts.values() for token in prompt)
    assert max(map(len, prompts.values())) > package.manifest.backend_options["micro_batch"]
