"""Simulated artifacts in memory, without files or signatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from calculet_core.artifact import GoldenCase, Manifest, Package
from calculet_core.artifact import parse_manifest as parse
from calculet_worker.device.sim_rule import MARGIN_MIN, reference_tokens

HASH = "5a" * 32


def a_sim_manifest(
    sizes: tuple[int, ...] = (1, 4, 8), lanes: int = 8, context: int = 512, image_sha256: str = HASH, **options: Any
) -> Manifest:
    """`options` are the timing profile's; steps take 5 ms unless they say otherwise."""
    policy = {"mode": "mask_tensor", "kv_mode": "masked", "logits_returned": True, "writes_kv": False}
    layout = {"kind": "per_lane_contiguous", "dtype": "bf16", "bytes_per_token": 1024}
    profiles = [
        {"exact_submodel": f"b{size}", "compiled_batch": size, "max_seq": context, "token_dtype": "int32", "logit_dtype": "float32",
         "kv_layout": layout, **({"inactive_policy": policy} if size > 1 else {})}
        for size in sizes
    ]  # fmt: skip
    mapping = {
        "schema": "calculet-artifact/v1", "name": "toy", "version": "1", "backend": "sim", "image": "model.sim",
        "image_sha256": image_sha256, "files": {"model.sim": image_sha256, "golden.jsonl": HASH}, "profiles": profiles,
        "context": context, "lanes": lanes, "tokenizer": {"kind": "bytes", "vocab_size": 260, "eos_token_ids": [257]},
        "capacity": {"parameters_bytes": 1, "kv_bytes": lanes * context * 1024, "reserved_bytes": 1 << 20}, "golden": "golden.jsonl",
        "backend_options": {
            "decode_ns": {str(size): 5_000_000 + 60_000 * size for size in sizes}, "prefill_token_ns": 50_000, "jitter": 0.05, **options,
        },
    }  # fmt: skip
    return parse(json.dumps(mapping).encode(), "toy")


def a_sim_package(**changes: Any) -> Package:
    """With two golden cases that the reference itself gives."""
    manifest = a_sim_manifest(**changes)
    cases = []
    for name, prompt in (("short", [1, 2, 3]), ("seventeen", list(range(17)))):
        tokens = reference_tokens(manifest, prompt, 8)
        cases.append(GoldenCase(name, prompt, tokens, [MARGIN_MIN] * len(tokens), MARGIN_MIN))
    return Package(Path("/nowhere"), manifest, "d" * 64, tuple(cases))
