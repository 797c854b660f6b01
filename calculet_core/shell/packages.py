"""Packages on disk: reading and verifying a folder (scheduling §11 steps 1-3).

A package is trusted when its path leads nowhere else (no symbolic link in it), every file's sha256 is the manifest's, and a
trusted key signed the manifest. Nothing of it is opened before that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from calculet_core.artifact import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    Package,
    check_hashes,
    parse_golden,
    parse_manifest,
    sha256_hex,
    verify_signature,
)
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.files import read_bounded

MAX_GOLDEN_BYTES = 64 << 20


def read_package(root: Path) -> Package:
    """Read manifest and golden cases without verifying anything.

    Raises:
        ArtifactError: names the file and what is wrong with it.
    """
    data = _read(root / MANIFEST_NAME)
    manifest = parse_manifest(data, str(root / MANIFEST_NAME))
    golden_path = root / manifest.golden
    return Package(root, manifest, sha256_hex(data), tuple(parse_golden(_read(golden_path, MAX_GOLDEN_BYTES), str(golden_path))))


def verify_package(root: Path, keys: Sequence[Ed25519PublicKey]) -> Package:
    """Read and verify everything: path, signature, every hash, manifest.

    Raises:
        ArtifactError: names the file and what is wrong with it.
    """
    if not root.is_dir():
        raise ArtifactError(f"{root}: no such package folder (a package is a folder with {MANIFEST_NAME})")
    files = _files(root)
    data = _read(root / MANIFEST_NAME)
    if SIGNATURE_NAME not in files:
        raise ArtifactError(f"{root / SIGNATURE_NAME} is missing: the package is not signed (calculet package sign)")
    signer = verify_signature(data, _read(root / SIGNATURE_NAME), keys, str(root / SIGNATURE_NAME))
    manifest = parse_manifest(data, str(root / MANIFEST_NAME))
    check_hashes(manifest, {name: hash_file(path) for name, path in files.items()}, str(root))
    package = read_package(root)
    return Package(root, manifest, package.digest, package.golden, signer)


def load_keys(paths: Sequence[Path]) -> list[Ed25519PublicKey]:
    """Trusted public keys from PEM files.

    Raises:
        ConfigError: a file is missing or no Ed25519 public key.
    """
    keys = []
    for path in paths:
        try:
            key = load_pem_public_key(read_bounded(path))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: cannot read the trusted key") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not a PEM public key: {error}") from None
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"{path}: not an Ed25519 public key")
        keys.append(key)
    return keys


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """A signing key from a PEM file.

    Raises:
        ArtifactError: it cannot be read, or is no Ed25519 key.
    """
    try:
        key = load_pem_private_key(read_bounded(path), None)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: not a PEM private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ArtifactError(f"{path}: not an Ed25519 private key")
    return key


def hash_file(path: Path) -> str:
    """Hexadecimal sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(root: Path) -> dict[str, Path]:
    """Relative path -> file, refusing anything that leads out of the folder."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            raise ArtifactError(f"{root}: {name} is a symbolic link; a package holds only plain files")
        if path.is_file():
            found[name] = path
        elif not path.is_dir():
            raise ArtifactError(f"{root}: {name} is neither a file nor a folder")
    return found


def _read(path: Path, limit: int = 4 << 20) -> bytes:
    try:
        return read_bounded(path, limit)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
