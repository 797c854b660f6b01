"""calculet-perf over HTTPS: authorities are believed by name, everybody else is not, and times stay those of the socket."""

from __future__ import annotations

import asyncio
import datetime
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml
from builders_fleet import BIN, free_port
from builders_mock_server import MockServer, a_mock_server
from builders_perf import MANIFEST
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from calculet_perf.client.observation import Asked, Seen
from calculet_perf.shell.http import AskError, HttpClient, Target
from calculet_perf.shell.run_dir import RunReader
from calculet_perf.shell.shard import Job, Load
from calculet_perf.shell.tls import TlsSettings

NAME = "board.example"
PATH = "/v1/completions"
PASS, INVALID, INFRASTRUCTURE = 0, 2, 3


def a_certificate(folder: Path, name: str = NAME) -> Path:
    """A self-signed certificate and its key in one PEM file; `ca.pem` beside it is the certificate alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(pem)
    (folder / "server.pem").write_bytes(pem + private)
    return folder / "server.pem"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that speaks TLS, and the folder with its `ca.pem`."""
    folder = tmp_path_factory.mktemp("tls")
    with a_mock_server(folder, certificate=str(a_certificate(folder)), counts=True) as server:
        yield server, folder


def settings(folder: Path, **changes: Any) -> TlsSettings:
    return TlsSettings(**{"ca_file": str(folder / "ca.pem"), "server_name": NAME, **changes})


def load(server: MockServer, tls: TlsSettings, *requests: Asked, **job: Any) -> list[Seen]:
    fields = {
        "host": "127.0.0.1", "port": server.port, "root": "", "path": PATH, "headers": [], "tls": tls, "timeout_s": 30, "arrival": "closed",
        "concurrency": 1, "start_ns": time.monotonic_ns(), "asked": list(requests), **job,
    }  # fmt: skip

    async def go() -> list[Seen]:
        found: list[Seen] = []
        await Load(Job(**fields), found.append).run()
        return found

    return uvloop.run(go())


def asked(index: int, tokens: int = 12, prompt: int = 3, stream: bool = True) -> Asked:
    body = json.dumps({"model": "toy", "max_tokens": tokens, "stream": stream, "prompt": [1] * prompt}).encode()
    return Asked(index, body, f"tls-{index}", stream)


def why_not(target: Target) -> AskError:
    async def go() -> None:
        await HttpClient(target).fetch("/v1/models")

    with pytest.raises(AskError) as caught:
        uvloop.run(go())
    return caught.value


# ---------------------------------------------------------------- answers and their times
def test_streams_over_tls_are_whole_and_their_times_are_the_servers(secure: tuple[MockServer, Path]) -> None:
    server, folder = secure
    found = load(server, settings(folder), *(asked(index) for index in range(12)), concurrency=4)
    sent = server.sent()
    assert [one.error_code for one in found] == [None] * 12
    for one in found:
        writes = sent[one.request_id]["writes"]
        assert one.clock_complete and one.chunks is not None
        assert (one.output_tokens, one.chunks.events, one.chunks.tokens, one.chunks.mismatch) == (12, 12, 12, False)
        assert one.client.first_token is not None and one.client.last_token is not None
        assert writes[0][0] < one.client.first_token
        assert writes[-1][0] < one.client.last_token
        assert sent[one.request_id]["read_ns"] > (one.client.request_start or 0)


def test_whole_answers_and_prompts_of_many_records_go_over_tls(secure: tuple[MockServer, Path]) -> None:
    server, folder = secure
    (whole, large) = load(server, settings(folder), asked(0, stream=False), asked(1, tokens=2, prompt=60_000))
    assert (whole.error_code, whole.output_tokens, whole.client.first_token) == (None, 12, None)
    assert (large.error_code, large.prompt_tokens) == (None, 60_000)


# ---------------------------------------------------------------- who is believed
def test_an_unknown_authority_is_not_believed_unless_one_says_so(secure: tuple[MockServer, Path]) -> None:
    server, _ = secure
    error = why_not(Target("127.0.0.1", server.port, tls=TlsSettings(server_name=NAME)))
    assert (error.code, "self-signed certificate" in str(error)) == ("tls_failed", True)
    assert f"https://127.0.0.1:{server.port}" in str(error)
    (found,) = load(server, TlsSettings(verify=False), asked(0))
    assert found.error_code is None


def test_a_certificate_of_another_name_is_not_believed(secure: tuple[MockServer, Path]) -> None:
    server, folder = secure
    error = why_not(Target("127.0.0.1", server.port, tls=settings(folder, server_name="other.example")))
    assert (error.code, "other.example" in str(error)) == ("tls_failed", True)
    error = why_not(Target("127.0.0.1", server.port, tls=settings(folder, server_name=None)))
    assert error.code == "tls_failed", "the url's own host is what counts where no name is given"


def test_a_server_without_tls_is_said_to_have_none() -> None:
    async def go() -> None:
        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(plain, "127.0.0.1", 0)
        await HttpClient(Target("127.0.0.1", server.sockets[0].getsockname()[1], tls=TlsSettings())).fetch("/v1/models")

    with pytest.raises(AskError, match="wrong version number") as caught:
        uvloop.run(go())
    assert caught.value.code == "tls_failed"
    assert why_not(Target("127.0.0.1", free_port(), tls=TlsSettings())).code == "connect_refused"


def test_a_name_without_an_address_is_said_so() -> None:
    error = why_not(Target("no-such-host.invalid", 80))
    assert (error.code, "no-such-host.invalid" in str(error)) == ("unknown_host", True)


def test_an_answer_that_somebody_cut_off_is_not_taken_for_whole(tmp_path: Path) -> None:
    """Without `content-length` and chunks an answer ends with its connection; in TLS only the session's own word is an end."""
    a_certificate(tmp_path)

    async def go() -> Any:
        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data":[]}')
            await writer.drain()
            raw = writer.transport.get_extra_info("socket").dup()
            raw.shutdown(2)  # under the session, as whoever sits between can
            raw.close()
            writer.close()

        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.pem")
        server = await asyncio.start_server(cut, "127.0.0.1", 0, ssl=context)
        client = HttpClient(Target("127.0.0.1", server.sockets[0].getsockname()[1], tls=settings(tmp_path)))
        try:
            await client.fetch("/v1/models")
        finally:
            client.close()
            server.close()

    with pytest.raises(AskError) as caught:
        uvloop.run(go())
    assert caught.value.code == "connection_reset"


# ---------------------------------------------------------------- a run
def test_a_run_over_https_from_manifest_to_folder(secure: tuple[MockServer, Path], tmp_path: Path) -> None:
    server, folder = secure
    url = f"https://127.0.0.1:{server.port}"
    cells = [{"kind": "single", "prompts": [4], "outputs": [4], "requests": 3}]
    matrix = {"schema": "calculet-perf-matrix/v1", "name": "tls", "cells": cells, "idle_s": 0.1, "gap_s": 0.01,
              "golden": {"prompts": [3], "output": 4}}  # fmt: skip
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix))
    (tmp_path / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())

    def perf(tls: dict[str, Any] | None, out: str) -> subprocess.CompletedProcess[str]:
        manifest = {**json.loads(json.dumps(MANIFEST)), "server": {"url": url, "tls": tls}, "warmup_requests": 1}
        (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(manifest))
        command = [BIN / "calculet-perf", "run", tmp_path / "manifest.yaml", "--out", tmp_path / out, "--no-selftest"]
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100)

    refused = perf(None, "refused")
    assert refused.returncode == INFRASTRUCTURE
    assert "$.server.tls.ca_file" in refused.stderr and "Traceback" not in refused.stderr
    missing = perf({"ca_file": "nowhere.pem"}, "missing")
    assert (missing.returncode, "nowhere.pem: No such file" in missing.stderr) == (INVALID, True)
    done = perf({"ca_file": "ca.pem", "server_name": NAME}, "run")
    assert done.returncode == PASS, done.stderr
    assert RunReader(tmp_path / "run").info.target == url
    assert all(record.ok for record in RunReader(tmp_path / "run").requests())
