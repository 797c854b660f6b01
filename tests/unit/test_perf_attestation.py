"""Signed reports: one altered byte is found and named."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from calculet_core.artifact import key_id
from calculet_perf.attestation import ATTESTATION_NAME, PAYLOAD_TYPE, AttestationError, pae
from calculet_perf.shell.attest import sign_folder, verify_folder

KEY = Ed25519PrivateKey.generate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in {"run.json": b"{}\n", "requests.jsonl": b"1\n2\n", "deep/figure.svg": b"<svg/>", "empty": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / ".lock").write_bytes(b"123\n")
    assert sign_folder(tmp_path, {"exit_code": 0}, KEY) == 4
    return tmp_path


def test_what_was_signed_verifies_and_says_what_it_said(folder: Path) -> None:
    statement, signer = verify_folder(folder, [Ed25519PrivateKey.generate().public_key(), KEY.public_key()])
    assert signer == key_id(KEY.public_key()) and statement.predicate == {"exit_code": 0}
    assert [subject.name for subject in statement.subject] == ["deep/figure.svg", "empty", "requests.jsonl", "run.json"]


@pytest.mark.parametrize("name", ["run.json", "requests.jsonl", "deep/figure.svg"])
def test_one_altered_byte_is_named(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    for index in range(len(data)):
        changed = data.copy()
        changed[index] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(AttestationError, match=f"{name} was changed"):
            verify_folder(folder, [KEY.public_key()])


def test_missing_and_added_files_are_named(folder: Path) -> None:
    (folder / "empty").unlink()
    (folder / "extra.txt").write_text("x")
    with pytest.raises(AttestationError, match=r"empty is missing; extra.txt is not covered"):
        verify_folder(folder, [KEY.public_key()])


def test_a_link_in_the_folder_is_refused(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "run.json")
    with pytest.raises(AttestationError, match="link is not a plain file"):
        verify_folder(folder, [KEY.public_key()])


def test_every_altered_byte_of_the_attestation_is_found(folder: Path) -> None:
    path = folder / ATTESTATION_NAME
    data = path.read_bytes()
    for index in range(0, len(data) - 1, 7):
        changed = bytearray(data)
        changed[index] ^= 1
        path.write_bytes(changed)
        with pytest.raises(AttestationError, match=ATTESTATION_NAME):
            verify_folder(folder, [KEY.public_key()])


def test_an_unknown_signer_and_no_signature_are_refused(folder: Path) -> None:
    with pytest.raises(AttestationError, match="signed by .* trusted: "):
        verify_folder(folder, [Ed25519PrivateKey.generate().public_key()])
    (folder / ATTESTATION_NAME).unlink()
    with pytest.raises(AttestationError, match="not signed"):
        verify_folder(folder, [KEY.public_key()])


def test_the_envelope_is_dsse_over_in_toto(folder: Path) -> None:
    """Checked as the two specifications say, without our reader."""
    envelope = json.loads((folder / ATTESTATION_NAME).read_bytes())
    payload = base64.b64decode(envelope["payload"])
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    KEY.public_key().verify(base64.b64decode(envelope["signatures"][0]["sig"]), pae(PAYLOAD_TYPE, payload))
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1" and set(statement) == {
        "_type",
        "subject",
        "predicateType",
        "predicate",
    }
    assert len(statement["subject"][0]["digest"]["sha256"]) == 64
    assert pae("http://example.com/HelloWorld", b"hello world") == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
