"""TLS with the operator's own certificate files, read again when they change.

A renewed certificate serves the next connection; those that are open keep theirs. Files that do not fit together, or a key that
everybody may read, stop a start; later they change nothing, which is logged and a metric.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from calculet_core.config import TlsConfig
from calculet_core.errors import ConfigError
from calculet_core.shell.files import read_bounded
from calculet_core.shell.fleet import Fleet

LOOK_S = 1.0
log = logging.getLogger("calculet.tls")


class Tls:
    """`context` serves new connections; `expires_s` is the certificate's end, UTC seconds.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.usable = True
        self.expires_s = 0.0
        self._seen = self._signature()
        self._load()

    def look(self) -> None:
        """Take the files if they changed."""
        if (signature := self._signature()) == self._seen:
            return
        self._seen = signature
        try:
            self._load()
        except ConfigError as error:
            self.usable = False
            log.error("%s; the last certificate goes on serving", error)
            return
        self.usable = True
        log.info("certificate read again from %s", self._certificate)

    def _load(self) -> None:
        from cryptography import x509  # only a router with TLS pays for it

        try:
            certificate = x509.load_pem_x509_certificate(read_bounded(self._certificate))
        except OSError as error:
            raise ConfigError(f"{self._certificate}: {error.strerror}") from None
        except ValueError:
            raise ConfigError(f"{self._certificate}: not a certificate in PEM form") from None
        try:
            mode = self._key.stat().st_mode
        except OSError as error:
            raise ConfigError(f"{self._key}: {error.strerror}") from None
        if mode & 0o007:
            raise ConfigError(f"{self._key}: everybody may read it; it must be 0600 or 0640")
        try:
            trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            for context in (trial, self.context):  # a pair that does not fit must not half change what serves
                context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"{self._key}: cannot be used with {self._certificate}: {error.strerror or error}") from None
        self.expires_s = certificate.not_valid_after_utc.timestamp()

    def _signature(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(_stamp(path) for path in (self._certificate, self._key))


def open_tls(fleet: Fleet, config: TlsConfig) -> Tls | None:
    """As configured; None without.

    Raises:
        ConfigError: the files cannot be used.
    """
    if config.certificate is None or config.key is None:
        return None
    return Tls(fleet.resolve(config.certificate), fleet.resolve(config.key))


def _no_password() -> str:
    raise ConfigError("the TLS key has a passphrase; nobody is there to type it: remove it and protect the file")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode)
