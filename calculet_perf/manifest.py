"""The run manifest (acceptance §5): who measures what, on which software and hardware.

The keys of the specification keep their names and places. A value left at `REQUIRED` is an error that names it; a value that cannot
be had (a foreign server tells no driver) is written as `null`, which is a statement, where a missing key is an omission.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

REQUIRED = "REQUIRED"
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Meta(ge=1)]


class ManifestError(Exception):
    """A manifest or matrix is wrong: names the file and the field. Exit code 2."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: frozen, unknown keys are errors."""


class ModelPart(_Section, frozen=True, kw_only=True):
    """What is measured."""

    alias: Annotated[str, Meta(min_length=1)]
    generation: int | None
    calbin_sha256: Sha256 | None


class SoftwarePart(_Section, frozen=True, kw_only=True):
    """Versions; null: the server cannot tell and nobody knows."""

    server_commit: str | None
    image_digest: str | None
    calrt: str | None
    driver: str | None
    firmware: str | None


class HardwarePart(_Section, frozen=True, kw_only=True):
    """The board."""

    board: str | None
    """Its serial number's salted hash, or a name that identifies it."""
    chips: Annotated[int, Meta(ge=0)] | None
    power_mode: str | None


class EnvironmentPart(_Section, frozen=True, kw_only=True):
    """Around it. The VPN is for management only; where it is in the path, that and the round trip are recorded (acceptance §5)."""

    ambient_c: float | None
    vpn_in_path: bool = False
    rtt_ms: float | None = None
    """An addition: median round trip of a small request on an open connection."""
    jitter_ms: float | None = None
    """An addition: its 95th percentile less its median."""
    ntp_offset_ms: float | None = None
    """An addition: the client's wall clock against its time source; correlation only."""


class ClientPart(_Section, frozen=True, kw_only=True):
    """Where the load comes from."""

    host: str
    transport: Literal["http-sse"] = "http-sse"
    processes: Positive | None = None
    """An addition. None: one, and more when the self-test says that one core does not do."""


class TlsPart(_Section, frozen=True, kw_only=True):
    """How an `https://` server proves who it is."""

    ca_file: str | None = None
    """PEM file of the only authorities that are believed, relative to the manifest; None: the system's."""
    server_name: str | None = None
    """Name that is sent (SNI) and must be in the certificate; None: the url's host."""
    verify: bool = True
    """False believes anybody: the run notes it, and the note is on the report."""


class ServerPart(_Section, frozen=True, kw_only=True):
    """An addition: where to send it."""

    url: Annotated[str, Meta(pattern=r"^https?://[^/\s]+(/.*)?$")]
    """The server's root, as `http://127.0.0.1:8080`; requests go to `/v1/...` under it."""
    tls: TlsPart | None = None
    """Only with `https://`; None: verified against the system's authorities."""
    api: Literal["completions", "chat"] = "completions"
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; the key itself is never written."""
    ignore_eos: bool = True
    """Ask for exactly the cell's output tokens; where a server refuses the parameter: false, and answers may be shorter."""
    extra_body: dict[str, Any] = {}
    """Fields added to every request's body, as `cache_prompt: false` for llama-server."""


class SwapsPart(_Section, frozen=True, kw_only=True):
    """Loads, ways back and unloads that `soak` drives on the fleet (scheduling §19 M4)."""

    allow: bool
    """The switch: without `true` nothing is ever loaded or unloaded. There is no default."""
    other: Annotated[str, Meta(min_length=1)]
    """Folder of a signed package on the fleet's host, relative to the manifest: another package of the same model, whose greedy
    answers are those of what the fleet serves."""
    cycles: Positive = 100
    """Over the whole stage, evenly spread; below 100 is labelled as shortened."""
    unload_every: Annotated[int, Meta(ge=0)] = 5
    """Each so-manieth cycle empties all boards first, in a pause of the load; 0: none does."""
    rollback_every: Annotated[int, Meta(ge=0)] = 10
    """Each so-manieth way home is `rollback` and not a load; the first one is, too. 0: none is."""
    allow_downtime: bool = False
    """For a fleet with one board: every cycle happens in a pause of the load, because nobody serves meanwhile."""
    timeout_s: Annotated[float, Meta(gt=0)] = 900
    """Of one cycle; what takes longer has failed, whatever becomes of it."""


class FleetPart(_Section, frozen=True, kw_only=True):
    """An addition: what may be done to the Calculet fleet that is measured, by its control channel and so on its host."""

    config: Annotated[str, Meta(min_length=1)]
    """The fleet's configuration file, relative to the manifest."""
    swaps: SwapsPart | None = None


class Manifest(_Section, frozen=True, kw_only=True):
    """`calculet-perf-run/v1`."""

    schema: Literal["calculet-perf-run/v1"]
    run_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    purpose: str
    model: ModelPart
    software: SoftwarePart
    hardware: HardwarePart
    environment: EnvironmentPart
    client: ClientPart
    server: ServerPart
    fleet: FleetPart | None = None
    """An addition; None: the server is only asked, never changed."""
    matrix: str
    """File of the cases (`calculet-perf-matrix/v1`); relative to the manifest."""
    warmup_requests: Annotated[int, Meta(ge=0)] = 10
    """Per model and shape, before anything is measured (acceptance §8.4)."""
    measured_requests: Positive = 100
    """Samples of a short case; a case is never below the matrix's `min_requests` unless shortened (acceptance §8.6)."""
    timeout_s: Annotated[float, Meta(gt=0)] = 900
    """Of one request; above it the request failed with `client_timeout`."""
    seed: int = 1234
    """An addition: case order, arrivals and business sampling."""


def open_fields(value: Any, path: str = "$") -> Iterator[str]:
    """Paths of values that were left at REQUIRED."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from open_fields(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from open_fields(item, f"{path}[{index}]")
    elif value == REQUIRED:
        yield path


def load_yaml(data: bytes, source: str) -> Any:
    """YAML from bytes.

    Raises:
        ManifestError: names the file and the line.
    """
    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ManifestError(f"{source}: not valid YAML: {error}") from None


def convert(value: Any, cls: type[msgspec.Struct], source: str) -> Any:
    """The struct of a parsed file.

    Raises:
        ManifestError: names the file, the path in it and what is wrong.
    """
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise ManifestError(f"{source}: {path.rstrip('`') or '$'}: {message}") from None


def parse_manifest(data: bytes, source: str) -> Manifest:
    """A manifest ready to run.

    Raises:
        ManifestError: not YAML, an unknown or missing key, a wrong type, or a field left at REQUIRED; names each of those.
    """
    value = load_yaml(data, source)
    if left := list(open_fields(value)):
        some = ", ".join(left)
        raise ManifestError(f"{source}: {some}: left at REQUIRED; fill it in, or write null where it cannot be had")
    manifest: Manifest = convert(value, Manifest, source)
    return manifest


def dump_manifest(fields: dict[str, Any]) -> bytes:
    """A manifest's YAML, in the given order."""
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).encode()
