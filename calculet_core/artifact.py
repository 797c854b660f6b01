"""Artifacts: a signed folder with one model image, its manifest, golden cases and tokenizer (`calculet-artifact/v1`).

The manifest lists the sha256 of every other file; its own sha256 is the artifact's digest, and the signature is over the
manifest's bytes. So one Ed25519 signature covers everything, and one digest names it. Parsed from bytes; `shell/packages`
reads folders. What a manifest does not prove does not exist: no profile, no cut of a prompt, no context operation.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from calculet_core.batches import BatchProfile
from calculet_core.errors import ArtifactError

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST_NAME = "manifest.yaml"
SIGNATURE_NAME = "manifest.sig"

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, Meta(pattern=r"^(?!/)(?!.*(^|/)\.\.(/|$))[A-Za-z0-9._/-]+$")]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: frozen, unknown keys are errors."""


class TokenizerInfo(_Section, frozen=True):
    """How text becomes token ids."""

    kind: Literal["bytes", "tokenizers"]
    """`bytes`: id = byte value, specials above 255; `tokenizers`: a tokenizer.json of the library of that name."""
    vocab_size: Annotated[int, Meta(ge=2)]
    file: RelativePath | None = None
    chat_template: RelativePath | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    special_tokens: dict[str, int] = {}


class CapacityInfo(_Section, frozen=True):
    """What the artifact occupies on a board, in bytes."""

    parameters_bytes: int
    kv_bytes: int
    reserved_bytes: int
    """The whole DRAM reservation."""
    inferred: bool = False
    """True: worked out by us, not stated by the vendor."""
    source: str = ""


class SamplingDefaults(_Section, frozen=True):
    """How the model's makers draw tokens; for requests that do not say. None: the interface's own default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None


class Proof(_Section, frozen=True):
    """Evidence for one ability."""

    level: Literal["C0", "C1", "C2", "C3", "C4"]
    evidence: str
    granularity: int | None = None
    """Incremental prefill: cuts are allowed at multiples of this many tokens."""


class Compatibility(_Section, frozen=True):
    """Versions the artifact was built for; empty: any."""

    runtime: tuple[str, ...] = ()
    driver: tuple[str, ...] = ()
    firmware: tuple[str, ...] = ()
    chips: int | None = None


def incompatible(
    wanted: Compatibility, runtime: str | None, driver: str | None, firmware: str | None, chips: int | None
) -> list[str]:
    """What a board has that the artifact was not built for (scheduling §11 step 3); what is unknown of the board passes."""
    wrong = []
    found = (("runtime", wanted.runtime, runtime), ("driver", wanted.driver, driver), ("firmware", wanted.firmware, firmware))
    for name, allowed, real in found:
        if allowed and real and real not in allowed:
            wrong.append(f"{name} {real}, built for {' or '.join(allowed)}")
    if wanted.chips is not None and chips and chips != wanted.chips:
        wrong.append(f"{chips} chips, built for {wanted.chips}")
    return wrong


LOGIT_DTYPES = ("float32", "bfloat16")
"""How logits may leave a device."""
ABILITIES = ("incremental_prefill", "remove_tail", "lane_fault_isolation", "ping_pong_overlap", "batch_decode")
"""Names that `abilities` may have."""
LANE_FAULT_ISOLATION = "lane_fault_isolation"
"""A fault of one lane leaves what the others hold, and the rest of its job's output, as they should be."""


class Manifest(_Section, frozen=True):
    """`calculet-artifact/v1`."""

    schema: Literal["calculet-artifact/v1"]
    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    version: Annotated[str, Meta(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+-]{0,62}$")]
    backend: str
    """A key of the worker's `BACKENDS`."""
    image: RelativePath
    """The calbin or GGUF."""
    image_sha256: Sha256
    files: dict[RelativePath, Sha256]
    """Every file of the folder except manifest and signature."""
    profiles: Annotated[tuple[BatchProfile, ...], Meta(min_length=1)]
    context: Annotated[int, Meta(ge=2)]
    """Positions per sequence, prompt and output together."""
    lanes: Annotated[int, Meta(ge=1)]
    """Hardware lanes with KV of their own."""
    tokenizer: TokenizerInfo
    capacity: CapacityInfo
    golden: RelativePath
    """JSON lines of `GoldenCase`."""
    abilities: dict[str, Proof] = {}
    compatibility: Compatibility = Compatibility()
    sampling: SamplingDefaults = SamplingDefaults()
    backend_options: dict[str, Any] = {}
    """For `sim`: the timing profile; checked by the backend."""
    description: str = ""

    @property
    def compiled_batches(self) -> tuple[int, ...]:
        """Sizes of the proven profiles, ascending."""
        return tuple(sorted(profile.compiled_batch for profile in self.profiles))

    def profile(self, compiled_batch: int) -> BatchProfile:
        """The profile of that size.

        Raises:
            KeyError: the manifest has none.
        """
        for profile in self.profiles:
            if profile.compiled_batch == compiled_batch:
                return profile
        raise KeyError(f"{self.name} {self.version} has no profile B{compiled_batch}")


class GoldenCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reference prefix: greedy tokens of a prompt, compared only while the recorded top-2 margin is wide enough."""

    name: str
    prompt_token_ids: list[int]
    expected_token_ids: list[int]
    margins: list[float]
    """Logit of the best minus logit of the second best, at every expected token."""
    min_margin: float = 0.0
    """The comparison ends before the first token with a smaller margin."""

    def gated(self) -> list[int]:
        """The expected tokens up to the first narrow margin."""
        for index, margin in enumerate(self.margins):
            if margin < self.min_margin:
                return self.expected_token_ids[:index]
        return self.expected_token_ids


@dataclass(frozen=True, slots=True)
class Package:
    """A package as read from disk; `verified_by` is the id of the key that signed it, None when it was only read."""

    root: Path
    manifest: Manifest
    digest: str
    """sha256 of the manifest: the artifact's name everywhere."""
    golden: tuple[GoldenCase, ...]
    verified_by: str | None = None


class Signature(_Section, frozen=True):
    """Content of `manifest.sig`, as JSON."""

    schema: Literal["calculet-signature/v1"]
    algorithm: Literal["ed25519"]
    key_id: str
    """sha256 of the raw public key, its first 16 hexadecimal digits."""
    signature: str
    """Base64, over the manifest's bytes."""


def sha256_hex(data: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(data).hexdigest()


def parse_manifest(data: bytes, source: str) -> Manifest:
    """Parse and cross-check a manifest; static validation of scheduling §11 step 3.

    Raises:
        ArtifactError: names `source`, the path in it and what is wrong.
    """
    try:
        value = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{source}: not valid YAML: {error}") from None
    try:
        manifest = msgspec.convert(value, Manifest)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise ArtifactError(f"{source}: {path.rstrip('`') or '$'}: {message}") from None
    _cross_check(manifest, source)
    return manifest


def parse_golden(data: bytes, source: str) -> list[GoldenCase]:
    """Parse golden cases, one JSON object a line.

    Raises:
        ArtifactError: names the line; also when there is no case, or lengths disagree.
    """
    cases = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            case = msgspec.json.decode(line, type=GoldenCase)
        except msgspec.DecodeError as error:
            raise ArtifactError(f"{source}:{number}: {error}") from None
        if len(case.margins) != len(case.expected_token_ids) or not case.prompt_token_ids or not case.gated():
            raise ArtifactError(f"{source}:{number}: case {case.name!r} has no comparable token, or lengths disagree")
        cases.append(case)
    if not cases:
        raise ArtifactError(f"{source}: no golden case: an artifact without one can never become Ready")
    return cases


def key_id(key: Ed25519PublicKey) -> str:
    """How signatures name a public key."""
    return sha256_hex(key.public_bytes_raw())[:16]


def sign_manifest(manifest_bytes: bytes, key: Ed25519PrivateKey) -> bytes:
    """The content of `manifest.sig`."""
    signature = Signature(
        schema="calculet-signature/v1",
        algorithm="ed25519",
        key_id=key_id(key.public_key()),
        signature=base64.b64encode(key.sign(manifest_bytes)).decode(),
    )
    return msgspec.json.encode(signature) + b"\n"


def verify_signature(manifest_bytes: bytes, signature_bytes: bytes, keys: Sequence[Ed25519PublicKey], source: str) -> str:
    """The id of the trusted key that signed the manifest.

    Raises:
        ArtifactError: malformed, by a key that is not trusted, or not over these bytes.
    """
    try:
        signature = msgspec.json.decode(signature_bytes, type=Signature)
        raw = base64.b64decode(signature.signature, validate=True)
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise ArtifactError(f"{source}: not a signature: {error}") from None
    for key in keys:
        if key_id(key) == signature.key_id:
            try:
                key.verify(raw, manifest_bytes)
            except InvalidSignature:
                raise ArtifactError(f"{source}: the signature does not match {MANIFEST_NAME}: it was changed") from None
            return signature.key_id
    known = ", ".join(key_id(key) for key in keys) or "none"
    raise ArtifactError(f"{source}: signed by key {signature.key_id}, which is not trusted (trusted: {known})")


def check_hashes(manifest: Manifest, found: Mapping[str, str], source: str) -> None:
    """Compare the folder's files (relative path -> sha256) with the manifest's.

    Raises:
        ArtifactError: a file is missing, changed, or not listed.
    """
    for path, digest in manifest.files.items():
        if path not in found:
            raise ArtifactError(f"{source}: {path} is missing")
        if found[path] != digest:
            raise ArtifactError(f"{source}: {path} was changed: sha256 {found[path][:12]}, the manifest says {digest[:12]}")
    if extra := sorted(set(found) - set(manifest.files) - {MANIFEST_NAME, SIGNATURE_NAME}):
        raise ArtifactError(f"{source}: {extra[0]} is not listed in the manifest")


def _cross_check(manifest: Manifest, source: str) -> None:
    def refuse(path: str, message: str) -> None:
        raise ArtifactError(f"{source}: $.{path}: {message}")

    if manifest.files.get(manifest.image) != manifest.image_sha256:
        refuse("image_sha256", f"{manifest.image} is not in files with that hash")
    for path in filter(None, (manifest.golden, manifest.tokenizer.file, manifest.tokenizer.chat_template)):
        if path not in manifest.files:
            refuse("files", f"{path} is used but not listed")
    sizes = [profile.compiled_batch for profile in manifest.profiles]
    for index, profile in enumerate(manifest.profiles):
        if sizes.count(profile.compiled_batch) > 1:
            refuse(f"profiles[{index}].compiled_batch", f"B{profile.compiled_batch} is there twice")
        if profile.compiled_batch < 1 or profile.compiled_batch > manifest.lanes:
            refuse(f"profiles[{index}].compiled_batch", f"must be within 1..{manifest.lanes} (lanes)")
        if profile.compiled_batch > 1 and profile.inactive_policy is None:
            refuse(f"profiles[{index}].inactive_policy", f"B{profile.compiled_batch} needs one: token 0 is never assumed")
        if profile.logit_dtype not in LOGIT_DTYPES:
            refuse(f"profiles[{index}].logit_dtype", f"{profile.logit_dtype!r} is not known ({', '.join(LOGIT_DTYPES)})")
        if profile.max_seq < manifest.context:
            refuse(f"profiles[{index}].max_seq", f"below the context of {manifest.context}")
    if 1 not in sizes:
        refuse("profiles", "a B1 profile is required")
    for name, proof in manifest.abilities.items():
        if name not in ABILITIES:
            refuse(f"abilities.{name}", f"unknown ability (known: {', '.join(ABILITIES)})")
        if name == "incremental_prefill" and not (proof.granularity and proof.granularity > 0):
            refuse(f"abilities.{name}.granularity", "which cuts are proven?")
    if manifest.tokenizer.kind == "tokenizers" and manifest.tokenizer.file is None:
        refuse("tokenizer.file", "needed by kind 'tokenizers'")
