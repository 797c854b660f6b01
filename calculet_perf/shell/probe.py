"""Asks a server what it is, and how far away."""

from __future__ import annotations

import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from calculet_perf.manifest import ManifestError
from calculet_perf.shell.http import AskError, HttpClient, Target
from calculet_perf.shell.tls import TlsSettings, context_of
from calculet_perf.validity import round_trip_ms
from calculet_perf.workloads.facts import ServerFacts, facts_of

PINGS = 21


def target_of(url: str, api_key: str | None = None, tls: TlsSettings | None = None) -> Target:
    """A server's address.

    Args:
        tls: how an `https://` server proves who it is; None: by the system's authorities.

    Raises:
        ManifestError: the url is not one that can be measured, or the file of authorities cannot be used; names it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ManifestError(f"$.server.url: {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ManifestError(f"$.server.url: {url}: must be http://HOST:PORT or https://HOST:PORT")
    secure = parts.scheme == "https"
    if tls is not None and not secure:
        raise ManifestError(f"$.server.tls: {url} is not https://")
    if secure:
        tls = tls or TlsSettings()
        try:
            context_of(tls)
        except OSError as error:
            raise ManifestError(f"$.server.tls.ca_file: {tls.ca_file}: {_why(error)}") from None
    headers = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    root = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, port or (443 if secure else 80), root, headers, tls)


def _why(error: OSError) -> str:
    return "holds no certificate in PEM form" if isinstance(error, ssl.SSLError) else error.strerror or str(error)


async def facts(client: HttpClient, alias: str) -> ServerFacts:
    """What the server tells of itself.

    Raises:
        AskError: it does not answer at all.
        ManifestError: it wants an API key.
    """
    return facts_of(alias, await _json(client, "/v1/models"), await _json(client, "/version", optional=True))


async def round_trips(client: HttpClient) -> tuple[float | None, float | None]:
    """(RTT, jitter) in milliseconds, from small requests on one connection (acceptance §5).

    Raises:
        AskError: the server does not answer.
    """
    times = [(await client.fetch("/v1/models")).round_trip_ns for _ in range(PINGS)]
    return round_trip_ms(times[1:])


async def alive(client: HttpClient) -> bool:
    """Whether anything answers, whatever it says."""
    try:
        await client.fetch("/v1/models", timeout_s=5)
    except AskError:
        return False
    return True


async def _json(client: HttpClient, path: str, *, optional: bool = False) -> Any:
    try:
        answer = await client.fetch(path)
    except AskError:
        if optional:
            return None
        raise
    if answer.status in (401, 403):
        hint = "name the variable that holds the key in $.server.api_key_env"
        raise ManifestError(f"{client.target.name}{path}: the server wants another API key (HTTP {answer.status}); {hint}")
    if answer.status != 200:
        return None
    try:
        return json.loads(answer.body)
    except ValueError:
        return None
