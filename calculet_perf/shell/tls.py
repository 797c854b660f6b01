"""TLS around the measuring client's own sockets.

The record layer works in memory (`ssl.MemoryBIO`), so that times stay those of the socket: t1 is taken after the `send` of the
encrypted request, and what a read brought is decrypted after its time was taken. Handshakes belong to connections, which are
opened before anything is measured wherever the load allows it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import msgspec
from cryptography import x509

from calculet_perf.client.outcomes import TlsFailed

_PIECE = 1 << 16


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server proves who it is."""

    ca_file: str | None = None
    """PEM file of the authorities that are believed, and no others; None: the system's."""
    server_name: str | None = None
    """Name sent (SNI) and looked for in the certificate; None: the url's host."""
    verify: bool = True
    """False: anybody is believed; the run says so."""


def context_of(settings: TlsSettings) -> ssl.SSLContext:
    """A client's context.

    Raises:
        OSError: the file of authorities cannot be read, or holds no certificate (then an `ssl.SSLError`).
    """
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.ca_file is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whatever it holds is believed, a server's own certificate too
    context.set_alpn_protocols(["http/1.1"])
    if not settings.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def own_certificate(path: str) -> TlsSettings:
    """For a server on this host whose certificate's file is at hand: that certificate is believed, by the first name that it has.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no certificate.
    """
    certificate = x509.load_pem_x509_certificates(Path(path).read_bytes())[0]
    names: list[str] = []
    with suppress(x509.ExtensionNotFound):
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    if not names:
        raise ValueError("the certificate has no name (subjectAltName)")
    return TlsSettings(ca_file=path, server_name=names[0].replace("*", "any", 1))


class TlsSession:
    """One connection's encryption."""

    __slots__ = ("_incoming", "_object", "_outgoing", "ended")

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self.ended = False
        """The server said in the session that nothing more comes; without it, the end may be somebody's cut."""

    async def handshake(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        """Agree on keys over a connected socket that nobody else reads yet.

        Raises:
            TlsFailed: the certificate is not believed, or the other side does not speak TLS; says what and why.
            OSError: the connection broke.
        """
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush(loop, sock)
            except ssl.SSLCertVerificationError as error:
                await self._flush(loop, sock)  # the alert tells the server why we leave
                raise TlsFailed(f"the certificate is not believed: {error.verify_message}") from None
            except ssl.SSLError as error:
                raise TlsFailed(f"no TLS session: {_words(error)}") from None
            else:
                await self._flush(loop, sock)
                return
            data = await loop.sock_recv(sock, _PIECE)
            if not data:
                raise TlsFailed("no TLS session: the server closed the connection during the handshake")
            self._incoming.write(data)

    def encrypt(self, data: bytes) -> bytes:
        """Records that carry `data`, and whatever the session has to say itself."""
        self._object.write(data)
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """What the records carry that `data` completes; may be empty.

        Raises:
            TlsFailed: a record is not one of this session.
        """
        self._incoming.write(data)
        found = []
        try:
            while piece := self._object.read(_PIECE):
                found.append(piece)
            self.ended = True  # an empty read is the end of the session
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLError as error:
            raise TlsFailed(f"a broken TLS record: {_words(error)}") from None
        return b"".join(found)

    def answer(self) -> bytes:
        """What the session itself has to say after a `decrypt`, as a new key; mostly nothing."""
        return self._outgoing.read()

    async def _flush(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        if data := self._outgoing.read():
            await loop.sock_sendall(sock, data)


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
