"""How the packages that ship with Calculet are made; one recipe a model.

A recipe writes its files into a folder and returns the manifest's mapping without hashes and golden cases; `build_package`
adds those by running the device. `smollm2` is imported only when it is asked for: it needs the real engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calculet_core.artifact import LANE_FAULT_ISOLATION
from calculet_core.capacity import GIB
from calculet_core.clock import MS
from calculet_core.errors import ArtifactError

IMAGE, TEMPLATE = "model.sim", "chat_template.jinja"
SPECIALS = {"<|bos|>": 256, "<|eos|>": 257, "<|im_start|>": 258, "<|im_end|>": 259}
VOCABULARY = 260
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GOLDEN_TEXTS = {"one": "a", "hello": "Hello, board.", "longer": "The quick brown fox jumps over the lazy dog."}
GOLDEN_TOKENS, GOLDEN_MIN_MARGIN = 8, 0.25
"""Few, since a board runs them before it serves; simulated margins are above 0.5, so every token is compared."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the simulated recipes for tests may be varied by; None: the recipe's own. Durations in milliseconds."""

    step_ms: float | None = None
    context: int | None = None
    lanes: int | None = None
    logits: str | None = None
    """`logit_dtype` of every profile."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`build(folder, options)` gives the manifest's mapping; `golden_prompts(folder)` the cases to record."""

    build: Callable[[Path, Options], dict[str, Any]]
    golden_prompts: Callable[[Path], dict[str, list[int]]]
    golden_tokens: int
    min_margin: float
    cuts: tuple[int, ...] = ()
    """Granularities at which cuts of prompts are to be proven on the device; none: prompts are never cut."""


def byte_prompts(folder: Path) -> dict[str, list[int]]:
    """Golden prompts of a byte-level tokenizer."""
    return {name: list(text.encode()) for name, text in GOLDEN_TEXTS.items()}


def profile(size: int, context: int, kv_bytes: int, logits: str = "float32") -> dict[str, Any]:
    """A simulated profile; above B1 the runtime is told by a mask which rows carry no sequence."""
    policy = {"mode": "mask_tensor", "kv_mode": "masked", "logits_returned": True, "writes_kv": False}
    return {
        "exact_submodel": f"decode_b{size}", "compiled_batch": size, "max_seq": context, "token_dtype": "int32",
        "logit_dtype": logits, "kv_layout": {"kind": "per_lane_contiguous", "dtype": "bf16", "bytes_per_token": kv_bytes},
        **({"inactive_policy": policy} if size > 1 else {}),
    }  # fmt: skip


def simulated(
    folder: Path, name: str, description: str, sizes: tuple[int, ...], context: int, lanes: int, **parts: Any
) -> dict[str, Any]:
    """What all simulated recipes share. The image holds what the artifact is, so another artifact says other tokens."""
    image = {"format": "calculet-sim-image/v1", "model": name, "profiles": sizes, "context": context, "lanes": lanes}
    (folder / IMAGE).write_text(json.dumps(image) + "\n")
    (folder / TEMPLATE).write_text(CHAT_TEMPLATE)
    capacity, logits = parts.pop("capacity"), parts.pop("logits", None) or "float32"
    return {
        "schema": "calculet-artifact/v1", "name": name, "version": "1.0.0", "backend": "sim", "description": description,
        "image": IMAGE, "context": context, "lanes": lanes,
        "profiles": [profile(size, context, capacity["kv_bytes"] // (lanes * context), logits) for size in sizes],
        "tokenizer": {
            "kind": "bytes", "vocab_size": VOCABULARY, "chat_template": TEMPLATE, "bos_token_id": 256, "eos_token_ids": [257, 259],
            "add_bos": False, "special_tokens": SPECIALS,
        },
        "capacity": capacity, **parts,
    }  # fmt: skip


QWEN3_CONTEXT = 40_960
QWEN3_KV_TOKEN_BYTES = 2 * 48 * 4 * 128 * 2
"""Keys and values, 48 layers, 4 KV heads of 128, BF16."""


def qwen3_sim(folder: Path, options: Options) -> dict[str, Any]:
    """The product's baseline, with the specification's sizes (scheduling §13.1). Only its step time may be varied.

    Raises:
        ArtifactError: another context or more lanes were asked for.
    """
    if options.context is not None or options.lanes is not None or options.logits is not None:
        raise ArtifactError("qwen3-sim: context, lanes, logits are the product's (40960, 1, float32); vary sim-b1 or sim-batch")
    step_ns = int((15.0 if options.step_ms is None else options.step_ms) * MS)
    description = "Qwen3 on both chips, B1, as the simulated board models it. Its text is made up."
    return simulated(
        folder, "qwen3-sim", description, (1,), QWEN3_CONTEXT, 1,
        capacity={
            "parameters_bytes": int(16.938 * GIB), "kv_bytes": QWEN3_KV_TOKEN_BYTES * QWEN3_CONTEXT,
            "reserved_bytes": int(28.150 * GIB), "inferred": True,
            "source": "parameters 16.938, BF16 KV 3.750, whole reservation 28.150 GiB, none of it stated by the vendor. 3.750 GiB "
            "are 40960 positions of 2 x 48 layers x 4 KV heads x 128 x 2 B = 98304 B, so this KV is one lane's; a second would "
            "make 31.900 GiB. Software multi-slot shares a lane's positions out; it adds none.",
        },
        backend_options={
            "decode_ns": {"1": step_ns}, "decode_context_ns": step_ns / 120_000, "prefill_base_ns": step_ns,
            "prefill_token_ns": step_ns * 2 // 75, "h2d_ns": step_ns // 250, "d2h_ns": step_ns // 170, "jitter": 0.02,
            "configure_ns": 300 * MS, "exact_cuts": 0,
        },
        abilities={},
    )  # fmt: skip


def sim_batch(folder: Path, options: Options) -> dict[str, Any]:
    """A batching artifact for tests and benchmarks; it never bears the product's name."""
    lanes = options.lanes or 32
    sizes = tuple(size for size in (1, 4, 8, 16, 32) if size <= lanes)
    evidence = "tests/contract and tests/unit/test_sim_board.py; the simulated board only, it proves nothing about an NPU"
    abilities = {name: {"level": "C0", "evidence": evidence} for name in ("batch_decode", "ping_pong_overlap")}
    return for_tests(folder, "sim-batch", "Batched decoding on the simulated board, for tests.", sizes, lanes, abilities, options)


def sim_isolated(folder: Path, options: Options) -> dict[str, Any]:
    """`sim-batch` as it would be if a lane's fault were proven to be that lane's alone."""
    made = sim_batch(folder, options)
    evidence = "tests/integration/test_lane_faults.py; the simulated board only, it proves nothing about an NPU"
    abilities = {**made["abilities"], LANE_FAULT_ISOLATION: {"level": "C0", "evidence": evidence}}
    description = "Batched decoding on the simulated board, whose lanes fail alone, for tests."
    return {**made, "name": "sim-isolated", "description": description, "abilities": abilities}


def sim_b1(folder: Path, options: Options) -> dict[str, Any]:
    """B1 with several lanes that take turns, for tests and benchmarks."""
    description = "One sequence a step on the simulated board, for tests."
    return for_tests(folder, "sim-b1", description, (1,), options.lanes or 4, {}, options)


def for_tests(
    folder: Path, name: str, description: str, sizes: tuple[int, ...], lanes: int, abilities: dict[str, Any], options: Options
) -> dict[str, Any]:
    """An artifact of made-up size. A step takes the same time in every batch, so that a benchmark can be worked out by hand."""
    step_ns = int((5.0 if options.step_ms is None else options.step_ms) * MS)
    context = options.context or 4096
    kv_bytes = 1024 * context * lanes
    return simulated(
        folder, name, description, sizes, context, lanes,
        capacity={"parameters_bytes": GIB, "kv_bytes": kv_bytes, "reserved_bytes": GIB + kv_bytes, "source": "made up"},
        backend_options={
            "decode_ns": {str(sizes[-1]): step_ns}, "prefill_token_ns": step_ns // 500, "configure_ns": 20 * MS,
            "overlap": 0.5 if "ping_pong_overlap" in abilities else 0.0,
        },
        abilities=abilities, logits=options.logits,
    )  # fmt: skip


def smollm2() -> Recipe:
    """The real engine's recipe."""
    from calculet_worker.commands import recipe_smollm2 as module

    return Recipe(
        lambda folder, _: module.build(folder), module.golden_prompts, module.GOLDEN_TOKENS, module.GOLDEN_MIN_MARGIN,
        cuts=(module.MICRO_BATCH,),
    )  # fmt: skip


RECIPES: dict[str, Callable[[], Recipe]] = {
    "qwen3-sim": lambda: Recipe(qwen3_sim, byte_prompts, GOLDEN_TOKENS, GOLDEN_MIN_MARGIN),
    "sim-batch": lambda: Recipe(sim_batch, byte_prompts, GOLDEN_TOKENS, GOLDEN_MIN_MARGIN),
    "sim-isolated": lambda: Recipe(sim_isolated, byte_prompts, GOLDEN_TOKENS, GOLDEN_MIN_MARGIN),
    "sim-b1": lambda: Recipe(sim_b1, byte_prompts, GOLDEN_TOKENS, GOLDEN_MIN_MARGIN),
    "smollm2": smollm2,
}
