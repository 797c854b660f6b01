"""HTTPS with the operator's own files: served, renewed without a restart, refused when they cannot be used."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import openai
import pytest
from builders_router import HttpClient, RouterProcess, events_of, until
from builders_stage import CHAT, PATH, STREAM, Stage, accepts, says
from builders_tls import trusting, write_certificate

SETTINGS: dict[str, Any] = {"tls": {"certificate": "tls.crt", "key": "tls.key"}}


async def connect(router: RouterProcess, folder: Path) -> HttpClient:
    return HttpClient(
        *await asyncio.open_connection("127.0.0.1", router.port, limit=16 << 20, ssl=trusting(folder), server_hostname="localhost")
    )


def served_certificate(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port)) as sock, context.wrap_socket(sock) as wrapped:
        found = wrapped.getpeercert(binary_form=True)
    assert found is not None
    return found


async def metric(router: RouterProcess, folder: Path, name: str) -> float:
    client = await connect(router, folder)
    client.get("/metrics")
    text = (await client.response())[2].decode()
    client.close()
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[1])


def test_streams_whole_answers_and_errors_go_over_tls(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        write_certificate(stage.folder)
        worker = stage.worker(on_submit=says("Hel", "lo"))
        router = await stage.serve(worker, **SETTINGS)
        assert any("listening at=https://" in line for line in router.log)
        client = await connect(router, stage.folder)
        client.post(PATH, STREAM)
        assert events_of((await client.response())[2])[-1] == "[DONE]"
        client.post(PATH, {**CHAT, "temperature": 9})
        assert (await client.response())[0] == 400
        client.send(b"NONSENSE\r\n\r\n")
        assert (await client.response())[0] == 400
        http = openai.DefaultAsyncHttpxClient(verify=trusting(stage.folder))
        async with openai.AsyncOpenAI(base_url=f"https://localhost:{router.port}/v1", api_key="any", http_client=http) as real:
            assert (await real.chat.completions.create(model="qwen3", messages=CHAT["messages"])).choices[0].message.content == "Hello"

    stage.play(scene)


def test_a_renewed_certificate_is_served_and_open_connections_go_on(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        first = write_certificate(stage.folder)
        router = await stage.serve(stage.worker(on_submit=says("ok")), **SETTINGS)
        kept = await connect(router, stage.folder)
        assert await asyncio.to_thread(served_certificate, router.port) == first
        second = write_certificate(stage.folder, days=90)

        async def renewed() -> bool:
            return await asyncio.to_thread(served_certificate, router.port) == second

        async with asyncio.timeout(20):
            while not await renewed():
                await asyncio.sleep(0.05)
        kept.post(PATH, CHAT)
        assert (await kept.response())[0] == 200
        (stage.folder / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\ntorn")
        await until(lambda: any("goes on serving" in line for line in router.log))
        assert await asyncio.to_thread(served_certificate, router.port) == second
        kept.get("/metrics")
        text = (await kept.response())[2].decode()
        assert "calculet_router_tls_usable 0.0" in text
        third = write_certificate(stage.folder)
        await until(lambda: sum("read again" in line for line in router.log) == 2)
        assert await asyncio.to_thread(served_certificate, router.port) == third
        assert await metric(router, stage.folder, "calculet_router_tls_usable") == 1

    stage.play(scene)


def test_plain_http_and_half_a_handshake_harm_nobody(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        write_certificate(stage.folder)
        router = await stage.serve(stage.worker(on_submit=says("ok")), header_timeout_s=1, **SETTINGS)
        plain = await HttpClient.connect(router.port)
        plain.get("/livez")
        assert await plain.closed() or b"HTTP" not in await plain.reader.read(100)
        silent = await HttpClient.connect(router.port)
        silent.send(b"\x16\x03\x01")
        client = await connect(router, stage.folder)
        client.post(PATH, CHAT)
        assert (await client.response())[0] == 200
        assert await silent.closed(), "a handshake has its time, too"
        assert not any("Traceback" in line for line in router.log)

    stage.play(scene)


def test_a_slow_reader_is_cut_off_over_tls_too(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        write_certificate(stage.folder)
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, **SETTINGS)
        client = await connect(router, stage.folder)
        client.post(PATH, STREAM)
        await until(lambda: worker.submits)
        worker.piece(worker.submits[0], "x")
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent = 0
        while not worker.cancels:
            worker.piece(worker.submits[0], "x" * 50_000)
            await asyncio.sleep(0.001)
            sent += 50_000
            assert sent < 40_000_000
        assert await metric(router, stage.folder, "calculet_router_slow_readers_total") == 1

    stage.play(scene)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "tls.key").unlink(), "tls.key: No such file"),
        (lambda folder: (folder / "tls.key").chmod(0o644), "everybody may read it"),
        (lambda folder: (folder / "tls.crt").write_text("x"), "tls.crt: not a certificate"),
        (lambda folder: (folder / "tls.key").write_text("x"), "tls.key: cannot be used with"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(stage: Stage, spoil: Any, words: str) -> None:
    async def scene(stage: Stage) -> None:
        write_certificate(stage.folder)
        spoil(stage.folder)
        router = stage.router(**SETTINGS)
        router.start()
        assert await router.ended() == 78
        await until(lambda: router.log)
        assert len(router.log) == 1 and words in router.log[0], router.log
        assert json.dumps(router.log).count("PRIVATE") == 0

    stage.play(scene)
