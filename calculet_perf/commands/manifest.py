"""`calculet-perf manifest init`: a manifest with what the server tells of itself; the rest stays REQUIRED."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from calculet_perf.commands.common import Exit, end, json_option
from calculet_perf.manifest import REQUIRED, dump_manifest, open_fields, parse_manifest


@click.group()
def manifest() -> None:
    """Run manifests (acceptance §5)."""


@manifest.command()
@click.argument("url")
@click.option("--model", "alias", help="The model's name.  [default: the only one that is served]")
@click.option("--matrix", default="configs/perf/full.yaml", show_default=True, help="File of the cases, relative to the manifest.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write there instead of to the terminal.")
@click.option("--chat", is_flag=True, help="Use /v1/chat/completions.")
@click.option("--api-key-env", help="Environment variable that holds the API key; only its name is written.")
@click.option(
    "--ca-file", type=click.Path(dir_okay=False), help="PEM file of the authorities of an https:// server.  [default: the system's]"
)
@click.option("--server-name", help="Name in its certificate, where the url has another.")
@click.option("--insecure", is_flag=True, help="Believe any certificate; the run says so.")
@click.option("--foreign-null", is_flag=True, help="Write null, not REQUIRED, for what the server does not tell.")
def init(
    url: str, alias: str | None, matrix: str, out: Path | None, chat: bool, api_key_env: str | None, ca_file: str | None,
    server_name: str | None, insecure: bool, foreign_null: bool,
) -> None:  # fmt: skip
    """Fill a manifest for the server at URL: what it tells of itself, the round trip, this host. What nobody can ask a server
    stays REQUIRED, and a run refuses it by name.

    Exit codes: 0 written, 2 wrong usage, 3 the server cannot be reached.
    """
    import uvloop

    tls: dict[str, Any] | None = None
    if ca_file or server_name or insecure:
        tls = {"ca_file": ca_file and str(Path(ca_file).resolve()), "server_name": server_name, "verify": not insecure}
    if out is not None and not (out.parent / matrix).is_file() and Path(matrix).is_file():
        matrix = os.path.relpath(matrix, out.parent)  # it is named from here, and read from beside the manifest
    fields = uvloop.run(_fields(url, alias, matrix, chat, api_key_env, tls))
    left = list(open_fields(fields))
    if foreign_null:
        fields = _null(fields)
        left = []
    data = dump_manifest(fields)
    if out is None:
        click.echo(data.decode(), nl=False)
    else:
        out.write_bytes(data)
        click.echo(str(out))
    if left:
        click.echo(f"left at {REQUIRED}: {', '.join(left)}", err=True)
        click.echo("  fill them in, or write null where it cannot be had (--foreign-null: for all of them)", err=True)


@manifest.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@json_option
def check(file: Path, as_json: bool) -> None:
    """Check FILE and its matrix without a server. Exit 2 names what is wrong."""
    from calculet_perf.commands.run import read_inputs

    found = parse_manifest(file.read_bytes(), str(file))
    read_inputs(file)
    answer = {"file": str(file), "run_id": found.run_id, "matrix": found.matrix}
    click.echo(json.dumps(answer, indent=2) if as_json else f"{file}: fine")


async def _fields(
    url: str, alias: str | None, matrix: str, chat: bool, api_key_env: str | None, tls: dict[str, Any] | None
) -> dict[str, Any]:
    from calculet_perf.shell.http import AskError, HttpClient
    from calculet_perf.shell.probe import facts, round_trips, target_of
    from calculet_perf.shell.tls import TlsSettings
    from calculet_perf.shell.wall_clock import ntp_offset_ms

    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        end(Exit.INVALID, f"the environment has no {api_key_env}")
    client = HttpClient(target_of(url, key, TlsSettings(**tls) if tls else None))
    try:
        told = await facts(client, alias or "")
        if alias is None:
            if len(told.models) != 1:
                served = ", ".join(told.models) or "none"
                end(Exit.INVALID, f"which model? served: {served}", "name it with --model")
            alias = told.models[0]
            told = await facts(client, alias)
        rtt, jitter = await round_trips(client)
    except AskError as error:
        hint = "--ca-file names its authority, --server-name its name" if error.code == "tls_failed" else "does it serve there?"
        end(Exit.INFRASTRUCTURE, f"the server cannot be reached: {error}", hint)
    finally:
        client.close()
    if told.models and alias not in told.models:
        end(Exit.INVALID, f"{alias!r} is not served (served: {', '.join(told.models)})")

    secure = {"tls": tls} if tls else {}

    def known(value: Any) -> Any:
        return REQUIRED if value is None else value

    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in Path(alias).name)
    return {
        "schema": "calculet-perf-run/v1", "run_id": f"{datetime.now(UTC):%Y%m%d}-{name}-baseline-001", "purpose": "baseline",
        "model": {
            "alias": alias, "generation": told.generation,
            "calbin_sha256": known(told.calbin_sha256),
        },
        "software": {
            "server_commit": known(told.server_commit), "image_digest": known(told.image_digest), "calrt": known(told.calrt),
            "driver": known(told.driver), "firmware": known(told.firmware),
        },
        "hardware": {"board": known(told.board_serial_hash), "chips": known(told.chips), "power_mode": known(told.power_mode)},
        "environment": {
            "ambient_c": REQUIRED, "vpn_in_path": False, "rtt_ms": _rounded(rtt), "jitter_ms": _rounded(jitter),
            "ntp_offset_ms": _rounded(ntp_offset_ms()),
        },
        "client": {"host": socket.gethostname(), "transport": "http-sse", "processes": None},
        "server": {"url": url, **secure, "api": "chat" if chat else "completions", "api_key_env": api_key_env},
        "matrix": matrix,
        "warmup_requests": 10, "measured_requests": 100, "timeout_s": 900, "seed": 1234,
    }  # fmt: skip


def _null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null(item) for key, item in value.items()}
    return None if value == REQUIRED else value


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
