"""Signing and verifying a folder: every file in it is covered, but the attestation itself and the writer's lock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from calculet_core.errors import ArtifactError
from calculet_core.shell.files import read_bounded, write_atomic
from calculet_core.shell.packages import hash_file, read_private_key
from calculet_perf.attestation import ATTESTATION_NAME, AttestationError, Statement, check_files, open_envelope, sign

MAX_ENVELOPE_BYTES = 64 << 20
NOT_COVERED = (ATTESTATION_NAME, ".lock")


def hashes(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file.

    Raises:
        AttestationError: something in it is no plain file: what a link points to would not be covered.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise AttestationError(f"{folder}: {name} is not a plain file")
        if path.is_file() and name not in NOT_COVERED:
            found[name] = hash_file(path)
    return found


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """A signing key.

    Raises:
        AttestationError: it cannot be read, or is no Ed25519 key.
    """
    try:
        return read_private_key(path)
    except ArtifactError as error:
        raise AttestationError(str(error)) from None


def sign_folder(folder: Path, predicate: dict[str, Any], key: Ed25519PrivateKey) -> int:
    """Write the attestation over everything in the folder; how many files it covers."""
    files = hashes(folder)
    write_atomic(folder / ATTESTATION_NAME, sign(files, predicate, key), 0o644)
    return len(files)


def verify_folder(folder: Path, keys: Sequence[Ed25519PublicKey]) -> tuple[Statement, str]:
    """The statement about a folder that is exactly as it was signed, and the signer's key id.

    Raises:
        AttestationError: names the file that is missing, changed or not covered, or what is wrong with the signature.
    """
    if not folder.is_dir():
        raise AttestationError(f"{folder}: no such folder")
    path = folder / ATTESTATION_NAME
    try:
        data = read_bounded(path, MAX_ENVELOPE_BYTES)
    except FileNotFoundError:
        raise AttestationError(f"{path} is missing: the report is not signed (calculet-perf report DIR --key KEY)") from None
    except OSError as error:
        raise AttestationError(f"{path}: {error.strerror}") from None
    statement, signer = open_envelope(data, keys, str(path))
    check_files(statement, hashes(folder), str(folder))
    return statement, signer
