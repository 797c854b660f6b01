"""How a request can fail without the server's own word for it; `result.error_code` is one of these or the server's code."""

from __future__ import annotations

import errno

ERRORS: dict[str, str] = {
    "connect_refused": "nothing listens at the address",
    "connect_timeout": "the connection was not established in time",
    "unknown_host": "the host's name has no address",
    "tls_failed": "no TLS session: the certificate is not believed, or the other side does not speak TLS",
    "network_broken": "the network said that the host or net cannot be reached; a pre-registered exclusion",
    "connection_reset": "the connection ended or was reset before the answer was complete",
    "incomplete_stream": "the stream ended in good form but without [DONE], an error event or a finish_reason",
    "client_timeout": "not complete within the manifest's timeout_s",
    "bad_http": "what came is not HTTP",
    "bad_event": "an event or body is not what an OpenAI-compatible server sends",
    "stream_error": "an error event without a code",
    "client_interrupted": "the measuring program was stopped; a pre-registered exclusion",
}
"""Code -> meaning. `http_NNN` stands for a status without a code in its body."""

NETWORK = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT}
UNREACHABLE = ("connect_refused", "connect_timeout", "unknown_host", "tls_failed", "network_broken")
"""Codes that say that the server could not even be asked."""


class UnknownHost(OSError):
    """The name has no address; the message says why."""


class TlsFailed(OSError):
    """There is no TLS session, or none any more; the message says why."""


def of_os_error(error: OSError) -> str:
    """The code of a failed connect or a broken connection."""
    if error.errno in NETWORK:
        return "network_broken"
    if isinstance(error, TlsFailed):
        return "tls_failed"
    if isinstance(error, UnknownHost):
        return "unknown_host"
    if isinstance(error, ConnectionRefusedError):
        return "connect_refused"
    return "connect_timeout" if isinstance(error, TimeoutError) else "connection_reset"
