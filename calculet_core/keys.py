"""API keys: what is kept of them, and the file that holds it (`calculet-keys/v1`).

A key is `ck-ID-SECRET`: the id is public (lists, usage, logs), the secret has 256 random bits and is shown once. Only the SHA-256
of the whole key is kept; with so much randomness a slow hash would add nothing, and a request costs one look-up of its hash.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from calculet_core.config import Name
from calculet_core.errors import ConfigError

SCHEMA = "calculet-keys/v1"
SECRET_BYTES = 32
KEY_ID_BYTES = 4
MAX_KEYS = 100_000
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
_KeyId = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}$")]
_Second = Annotated[int, Meta(ge=0)]


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. Times are UTC seconds since 1970; a revoked key stays, so that a list tells when and by whom."""

    id: _KeyId
    tenant: Name
    sha256: _Digest
    created_s: _Second
    created_by: int
    """User id of who made it."""
    note: Annotated[str, Meta(max_length=200)] = ""
    expires_s: _Second | None = None
    revoked_s: _Second | None = None
    revoked_by: int | None = None
    replaced_by: _KeyId | None = None
    """The key that a rotation made of it."""

    def state(self, now_s: float) -> str:
        """`active`, `expiring` (a time is set), `expired` or `revoked`."""
        if self.revoked_s is not None:
            return "revoked"
        if self.expires_s is None:
            return "active"
        return "expiring" if now_s < self.expires_s else "expired"


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. Versions only grow, so that it can be said which one a router has."""

    version: Annotated[int, Meta(ge=1)]
    keys: Annotated[tuple[KeyRecord, ...], Meta(max_length=MAX_KEYS)]
    schema: Literal["calculet-keys/v1"] = "calculet-keys/v1"

    def find(self, key_id: str) -> KeyRecord | None:
        """The record of that id."""
        return next((record for record in self.keys if record.id == key_id), None)


def parse_keys(data: bytes, source: str) -> KeyFile:
    """Parse a key file.

    Raises:
        ConfigError: names `source`, the path in it and what is wrong; never anything of a key.
    """
    try:
        found = msgspec.json.decode(data, type=KeyFile)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise ConfigError(f"{source}: {path.rstrip('`') or '$'}: {message}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from None
    ids = [record.id for record in found.keys]
    for index, key_id in enumerate(ids):
        if key_id in ids[:index]:
            raise ConfigError(f"{source}: $.keys[{index}].id: {key_id} is there twice")
    return found


def format_keys(keys: KeyFile) -> bytes:
    """The file's content."""
    return msgspec.json.format(msgspec.json.encode(keys), indent=1) + b"\n"


def make_key(random: bytes) -> tuple[str, str]:
    """(id, key) from `KEY_ID_BYTES + SECRET_BYTES` random bytes.

    Raises:
        ValueError: there are fewer or more.
    """
    if len(random) != KEY_ID_BYTES + SECRET_BYTES:
        raise ValueError(f"a key is made of {KEY_ID_BYTES + SECRET_BYTES} bytes, not {len(random)}")
    key_id = random[:KEY_ID_BYTES].hex()
    secret = base64.urlsafe_b64encode(random[KEY_ID_BYTES:]).rstrip(b"=").decode()
    return key_id, f"ck-{key_id}-{secret}"


def hash_key(key: bytes) -> bytes:
    """SHA-256 of a whole key, 32 bytes."""
    return hashlib.sha256(key).digest()
