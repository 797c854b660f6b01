"""Manifests, golden cases and signatures: what is not proven or not signed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from calculet_core.artifact import check_hashes, parse_golden, parse_manifest, sign_manifest, verify_signature
from calculet_core.errors import ArtifactError

HASH = "ab" * 32


def profile(size: int, **changes: Any) -> dict[str, Any]:
    policy = {"mode": "mask_tensor", "kv_mode": "masked", "logits_returned": False, "writes_kv": False}
    layout = {"kind": "per_lane_contiguous", "dtype": "bf16", "bytes_per_token": 1024}
    base: dict[str, Any] = {
        "exact_submodel": f"decode_b{size}", "compiled_batch": size, "max_seq": 4096, "token_dtype": "int32", "logit_dtype": "float32",
        "kv_layout": layout,
    }  # fmt: skip
    return base | ({"inactive_policy": policy} if size > 1 else {}) | changes


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "schema": "calculet-artifact/v1", "name": "toy", "version": "1.0", "backend": "sim", "image": "model.bin", "image_sha256": HASH,
        "files": {"model.bin": HASH, "golden.jsonl": HASH}, "profiles": [profile(1)], "context": 4096, "lanes": 4,
        "tokenizer": {"kind": "bytes", "vocab_size": 260}, "golden": "golden.jsonl",
        "capacity": {"parameters_bytes": 1, "kv_bytes": 1, "reserved_bytes": 2},
    } | changes  # fmt: skip


def refusal(**changes: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(yaml.safe_dump(manifest(**changes)).encode(), "m.yaml")
    return str(caught.value)


def test_a_good_manifest_parses() -> None:
    parsed = parse_manifest(yaml.safe_dump(manifest(profiles=[profile(4), profile(1)])).encode(), "m.yaml")
    assert parsed.compiled_batches == (1, 4)
    with pytest.raises(KeyError, match="no profile B8"):
        parsed.profile(8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "calculet-artifact/v2"}, "m.yaml: $.schema"),
        ({"colour": 1}, "unknown field `colour`"),
        ({"image_sha256": "cd" * 32}, "$.image_sha256: model.bin is not in files with that hash"),
        ({"golden": "other.jsonl"}, "$.files: other.jsonl is used but not listed"),
        ({"image": "../model.bin"}, "$.image"),
        ({"profiles": [profile(4)]}, "$.profiles: a B1 profile is required"),
        ({"profiles": [profile(1), profile(8)]}, "$.profiles[1].compiled_batch: must be within 1..4 (lanes)"),
        ({"profiles": [profile(1), profile(1)]}, "$.profiles[0].compiled_batch: B1 is there twice"),
        ({"profiles": [profile(1), profile(4) | {"inactive_policy": None}]}, "token 0 is never assumed"),
        ({"profiles": [profile(1, max_seq=10)]}, "$.profiles[0].max_seq: below the context of 4096"),
        ({"abilities": {"telepathy": {"level": "C0", "evidence": "x"}}}, "$.abilities.telepathy: unknown ability"),
        ({"abilities": {"incremental_prefill": {"level": "C0", "evidence": "x"}}}, "granularity: which cuts are proven?"),
        ({"tokenizer": {"kind": "tokenizers", "vocab_size": 9}}, "$.tokenizer.file"),
    ],
)
def test_what_a_manifest_gets_wrong_is_named_with_its_path(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


def test_golden_cases_are_compared_only_while_the_margin_is_wide() -> None:
    line = b'{"name":"a","prompt_token_ids":[1],"expected_token_ids":[5,6,7],"margins":[2.0,0.1,2.0],"min_margin":0.5}'
    assert parse_golden(line, "g")[0].gated() == [5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no golden case"),
        (b"{", "g:1:"),
        (b'{"name":"a","prompt_token_ids":[1],"expected_token_ids":[5],"margins":[]}', "g:1: case 'a'"),
        (b'{"name":"a","prompt_token_ids":[1],"expected_token_ids":[5],"margins":[0.1],"min_margin":1}', "no comparable token"),
    ],
)
def test_golden_cases_that_prove_nothing_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse_golden(data, "g")


def test_a_signature_holds_for_these_bytes_and_a_trusted_key_only() -> None:
    key, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    signature = sign_manifest(b"manifest", key)
    assert verify_signature(b"manifest", signature, [stranger.public_key(), key.public_key()], "m.sig")
    with pytest.raises(ArtifactError, match="does not match manifest.yaml: it was changed"):
        verify_signature(b"manifest!", signature, [key.public_key()], "m.sig")
    with pytest.raises(ArtifactError, match="which is not trusted"):
        verify_signature(b"manifest", signature, [stranger.public_key()], "m.sig")
    with pytest.raises(ArtifactError, match="not a signature"):
        verify_signature(b"manifest", b"{}", [key.public_key()], "m.sig")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"model.bin": HASH}, "golden.jsonl is missing"),
        ({"model.bin": "cd" * 32, "golden.jsonl": HASH}, "model.bin was changed"),
        ({"model.bin": HASH, "golden.jsonl": HASH, "extra.so": HASH}, "extra.so is not listed"),
    ],
)
def test_a_folder_that_differs_from_its_manifest_is_refused(found: dict[str, str], message: str) -> None:
    parsed = parse_manifest(yaml.safe_dump(manifest()).encode(), "m.yaml")
    with pytest.raises(ArtifactError, match=message):
        check_hashes(parsed, found, "toy")
