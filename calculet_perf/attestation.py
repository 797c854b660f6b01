"""What a signature on a report says (acceptance §15): an in-toto Statement v1 with the sha256 of every file, in a DSSE envelope.

Both formats are public, so that anybody's tools can check a report. The signature is Ed25519, with the keys that packages use
(`calculet_core.artifact`); it is over the envelope's pre-authentication encoding, which binds the payload's type. Pure: bytes in,
bytes out; `shell/attest` reads folders.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from calculet_core.artifact import key_id

ATTESTATION_NAME = "attestation.dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
PREDICATE_TYPE = "urn:calculet:perf-verdict:v1"


class AttestationError(Exception):
    """A report is not what was signed: names the file. Exit code 2."""


class Subject(msgspec.Struct, frozen=True):
    """One file."""

    name: str
    digest: dict[str, str]


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """in-toto Statement v1. The predicate is ours: who judged what, and how it ended."""

    type_: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type", default="https://in-toto.io/Statement/v1")
    subject: list[Subject]
    predicateType: str = PREDICATE_TYPE
    predicate: dict[str, Any]


class Signature(msgspec.Struct, frozen=True):
    """By whom, over the pre-authentication encoding, base64."""

    keyid: str
    sig: str


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """DSSE."""

    payload: str
    payloadType: str
    signatures: list[Signature]


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sign(files: Mapping[str, str], predicate: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    """An envelope over files (relative path -> hexadecimal sha256) and what is said about them."""
    subjects = [Subject(name, {"sha256": digest}) for name, digest in sorted(files.items())]
    payload = msgspec.json.encode(Statement(subject=subjects, predicate=predicate))
    signature = Signature(key_id(key.public_key()), base64.b64encode(key.sign(pae(PAYLOAD_TYPE, payload))).decode())
    envelope = Envelope(payload=base64.b64encode(payload).decode(), payloadType=PAYLOAD_TYPE, signatures=[signature])
    return msgspec.json.encode(envelope) + b"\n"


def open_envelope(data: bytes, keys: Sequence[Ed25519PublicKey], source: str) -> tuple[Statement, str]:
    """The statement, and the id of the trusted key that signed it.

    Raises:
        AttestationError: malformed, by no trusted key, or not over this payload.
    """
    try:
        envelope = msgspec.json.decode(data, type=Envelope)
        payload = base64.b64decode(envelope.payload, validate=True)
        signatures = [(item.keyid, base64.b64decode(item.sig, validate=True)) for item in envelope.signatures]
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise AttestationError(f"{source}: not a DSSE envelope: {error}") from None
    if envelope.payloadType != PAYLOAD_TYPE:
        raise AttestationError(f"{source}: the payload is {envelope.payloadType!r}, not {PAYLOAD_TYPE!r}")
    signer = _signer(pae(PAYLOAD_TYPE, payload), signatures, keys, source)
    try:
        statement = msgspec.json.decode(payload, type=Statement)
    except msgspec.DecodeError as error:
        raise AttestationError(f"{source}: signed, but no in-toto Statement v1: {error}") from None
    if statement.predicateType != PREDICATE_TYPE:
        raise AttestationError(f"{source}: states {statement.predicateType!r}, not {PREDICATE_TYPE!r}")
    return statement, signer


def _signer(signed: bytes, signatures: Sequence[tuple[str, bytes]], keys: Sequence[Ed25519PublicKey], source: str) -> str:
    by_id = {key_id(key): key for key in keys}
    for name, signature in signatures:
        if (key := by_id.get(name)) is not None:
            try:
                key.verify(signature, signed)
            except InvalidSignature:
                raise AttestationError(f"{source}: the signature of key {name} does not match: the file was changed") from None
            return name
    signers, trusted = (", ".join(names) or "nobody" for names in ([name for name, _ in signatures], by_id))
    raise AttestationError(f"{source}: signed by {signers}, trusted: {trusted}")


def check_files(statement: Statement, found: Mapping[str, str], source: str) -> None:
    """Compare a folder's files (relative path -> sha256) with the statement's.

    Raises:
        AttestationError: one is missing, changed, or not covered; names each of them.
    """
    signed = {subject.name: subject.digest.get("sha256", "") for subject in statement.subject}
    problems = [f"{name} is missing" for name in signed if name not in found]
    problems += [f"{name} was changed" for name, digest in signed.items() if name in found and found[name] != digest]
    problems += [f"{name} is not covered by the signature" for name in sorted(set(found) - set(signed))]
    if problems:
        raise AttestationError(f"{source}: {'; '.join(problems)}")
