"""A certificate for localhost, and clients that believe it."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_certificate(folder: Path, days: int = 1) -> bytes:
    """A self-signed certificate for localhost with its key; its DER form."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    for path, data in (
        (folder / "tls.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)),
        (folder / "tls.crt", certificate.public_bytes(pem)),
    ):
        new = path.with_suffix(".new")
        new.touch(0o600)
        new.write_bytes(data)
        new.rename(path)
    return certificate.public_bytes(serialization.Encoding.DER)


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "tls.crt"))
