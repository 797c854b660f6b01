"""Limits and time-outs of the HTTP server: each takes effect, is counted, and hurts nobody but who reached it."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from builders_router import FakeWorker, HttpClient, RouterProcess, events_of, until
from builders_stage import CHAT, PATH, STREAM, Stage, accepts, error_of, metrics_of, says, value_of

from calculet_core import wire
from calculet_core.config import RouterConfig
from calculet_router.shell.http_server import tune


async def hits(router: RouterProcess, limit: str) -> float:
    return await value_of(router, f'calculet_router_limit_hits_total{{limit="{limit}"}}')


def a_deaf_client(port: int, body: dict[str, Any]) -> socket.socket:
    """Sends a request and reads nothing of its answer."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = json.dumps(body).encode()
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return sock


# ---------------------------------------------------------------- readers
def test_an_unread_stream_is_cancelled_at_256_kib_while_others_are_served(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker)
        assert await value_of(router, 'calculet_router_limit{limit="max_output_buffer_bytes"}') == 256 * 1024
        deaf = a_deaf_client(router.port, STREAM)
        await until(lambda: worker.submits)
        other = await HttpClient.connect(router.port)
        other.post(PATH, STREAM)
        await until(lambda: len(worker.submits) == 2)
        worker.piece(worker.submits[1], "heard")
        await other.head()
        assert events_of(await other.chunk())[0]["choices"][0]["delta"]["content"] == "heard"
        sent = 0
        while not worker.cancels:
            worker.piece(worker.submits[0], "x" * 10_000)
            worker.piece(worker.submits[1], "y")
            await other.chunk()
            sent += 10_000
            assert sent < 4_000_000, "an unread stream must end long before"
        assert worker.cancels[0].request_id == worker.submits[0].request_id
        worker.piece(worker.submits[1], "", finish="stop")
        while b"[DONE]" not in await other.chunk():
            pass
        assert await hits(router, "max_output_buffer_bytes") == 1
        assert await value_of(router, "calculet_router_slow_readers_total") == 1
        deaf.close()

    stage.play(scene)


def test_a_whole_answer_may_take_its_time_but_not_for_ever(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        text = "x" * 3_000_000
        router = await stage.serve(stage.worker(on_submit=says(text)), write_timeout_s=1)
        deaf = a_deaf_client(router.port, CHAT)
        slow = await HttpClient.connect(router.port)
        slow.post(PATH, CHAT)
        slow.get("/livez")
        status, headers = await slow.head()
        body = b""
        while len(body) < int(headers["content-length"]):
            body += await slow.reader.read(min(1_000_000, int(headers["content-length"]) - len(body)))
            await asyncio.sleep(0)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == text
        assert (await slow.response())[2] == b'{"status":"ok"}'
        client = await HttpClient.connect(router.port)
        client.get("/livez")
        assert (await client.response())[0] == 200

        async with asyncio.timeout(20):
            while not await hits(router, "write_timeout_s"):
                await asyncio.sleep(0.05)
        assert await value_of(router, "calculet_router_connections") == 3, "slow, client and the one that asks"
        deaf.close()

    stage.play(scene)


# ---------------------------------------------------------------- connections
def test_dawdling_clients_are_timed_out(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("ok")), header_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=0.2)
        for begun, what in ((b"GET /livez HTTP/1.1\r\n", "headers"), (b"POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nab", "body")):
            client = await HttpClient.connect(router.port)
            client.send(begun)
            status, _, body = await client.response()
            assert status == 408 and what in error_of(body)["message"]
            assert await client.closed()
        pipelined = await HttpClient.connect(router.port)
        pipelined.send(b"GET /livez HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nab")
        assert [(await pipelined.response())[0] for _ in range(2)] == [200, 408]
        idle = await HttpClient.connect(router.port)
        idle.get("/livez")
        assert (await idle.response())[0] == 200
        assert await idle.closed()
        assert await (await HttpClient.connect(router.port)).closed()
        assert await hits(router, "header_timeout_s") == 1 and await hits(router, "body_timeout_s") == 2
        assert await hits(router, "idle_timeout_s") >= 2
        assert await value_of(router, 'calculet_router_errors_total{code="request_timeout"}') == 3

    stage.play(scene)


def test_a_slowloris_only_evicts_itself(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, max_connections=8, header_timeout_s=300, body_timeout_s=300)
        streaming = await HttpClient.connect(router.port)
        streaming.post(PATH, STREAM)
        await until(lambda: worker.submits)
        kept: list[HttpClient] = []  # none of them ends by itself: every one that is gone was evicted
        for wave in range(3):
            slow = [await HttpClient.connect(router.port) for _ in range(12)]
            kept += slow
            for number, client in enumerate(slow):
                client.send(b"GET /livez HTTP/1.1\r\nx-a: " if number % 2 else b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n")
            client = await HttpClient.connect(router.port)
            client.get("/livez")
            assert (await client.response())[0] == 200, f"wave {wave}"
            client.close()
        worker.piece(worker.submits[0], "still here", finish="stop")
        assert b"still here" in (await streaming.response())[2]
        assert await hits(router, "max_connections") > 20

    stage.play(scene)


def test_an_idle_connection_gives_way_and_busy_ones_do_not(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, max_connections=2)
        idle, busy = [await HttpClient.connect(router.port) for _ in range(2)]
        idle.get("/livez")
        assert (await idle.response())[0] == 200
        busy.post(PATH, CHAT)
        await until(lambda: worker.submits)
        third = await HttpClient.connect(router.port)
        third.post(PATH, CHAT)
        assert await idle.closed()
        await until(lambda: len(worker.submits) == 2)
        fourth = await HttpClient.connect(router.port)
        fourth.get("/livez")
        status, headers, body = await fourth.response()
        assert status == 503 and "max_connections" in error_of(body)["message"] and headers["retry-after"]
        assert await fourth.closed()
        for submit in worker.submits:
            worker.piece(submit, "done", finish="stop")
        assert (await busy.response())[0] == (await third.response())[0] == 200

    stage.play(scene)


def test_one_address_may_be_kept_from_taking_all(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(), max_connections_per_address=2)
        kept = [await HttpClient.connect(router.port) for _ in range(2)]
        for client in kept:
            client.get("/livez")
            assert (await client.response())[0] == 200
        third = await HttpClient.connect(router.port)
        status, headers, body = await third.response()
        assert status == 429 and "max_connections_per_address" in error_of(body)["message"] and headers["retry-after"]
        kept[0].close()

        async def let_in() -> bool:
            client = await HttpClient.connect(router.port)
            client.get("/livez")
            return (await client.response())[0] == 200

        async with asyncio.timeout(20):
            while not await let_in():
                await asyncio.sleep(0.01)

    stage.play(scene)


def test_streams_are_counted_and_bounded(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, max_open_streams=2)
        streams = [await HttpClient.connect(router.port) for _ in range(2)]
        for client in streams:
            client.post(PATH, STREAM)
        await until(lambda: len(worker.submits) == 2)
        assert await value_of(router, "calculet_router_streams") == 2
        third = await HttpClient.connect(router.port)
        third.post(PATH, STREAM)
        status, headers, body = await third.response()
        assert status == 429 and "max_open_streams" in error_of(body)["message"] and headers["retry-after"]
        third.post(PATH, CHAT)
        await until(lambda: len(worker.submits) == 3)
        worker.piece(worker.submits[0], "end", finish="stop")
        assert (await streams[0].response())[0] == 200
        streams[1].close()
        await until(lambda: worker.cancels)
        assert await value_of(router, "calculet_router_streams") == 0
        worker.piece(worker.submits[2], "whole", finish="stop")
        assert (await third.response())[0] == 200

    stage.play(scene)


def test_large_bodies_share_a_budget_and_the_slowest_gives_way(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=says("ok"))
        router = await stage.serve(worker, max_buffered_body_bytes=1_000_000, max_body_bytes=900_000)
        slow = await HttpClient.connect(router.port)
        slow.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 900000\r\n\r\n" + b"x" * 600_000)

        async def held() -> float:
            return await value_of(router, "calculet_router_body_bytes")

        async with asyncio.timeout(20):
            while await held() < 600_000:
                await asyncio.sleep(0.01)
        quick = await HttpClient.connect(router.port)
        quick.post(PATH, {**CHAT, "messages": [{"role": "user", "content": "y" * 800_000}]})
        assert (await quick.response())[0] == 200
        status, headers, body = await slow.response()
        assert status == 429 and "max_buffered_body_bytes" in error_of(body)["message"] and headers["retry-after"]
        assert await held() == 0 and await hits(router, "max_buffered_body_bytes") == 1

    stage.play(scene)


def test_what_waits_on_one_connection_is_bounded(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, max_pipelined_requests=4)
        client = await HttpClient.connect(router.port)
        client.post(PATH, CHAT)
        await until(lambda: worker.submits)
        flood = b"GET /livez HTTP/1.1\r\nx-filler: " + b"a" * 8_000 + b"\r\n\r\n"
        for _ in range(3_000):
            client.send(flood)
        await asyncio.sleep(0)
        other = await HttpClient.connect(router.port)
        other.get("/livez")
        assert (await other.response())[0] == 200
        worker.piece(worker.submits[0], "first", finish="stop")
        assert b"first" in (await client.response())[2]
        for _ in range(3_000):
            assert (await client.response())[0] == 200

    stage.play(scene)


def test_a_half_open_peer_is_probed_and_the_kernel_keeps_little_unsent() -> None:
    config = RouterConfig(tcp_keepalive_s=30, write_timeout_s=40, max_output_buffer_bytes=65_536)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tune(listener, config)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                tcp = {
                    name: accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_NOTSENT_LOWAT")
                }
                assert tcp == {
                    "TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 40_000, "TCP_NOTSENT_LOWAT": 65_536,
                }  # fmt: skip
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_every_limit_and_what_is_used_of_it_is_a_metric(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker())
        text = await metrics_of(router)
        for name in RouterConfig.__struct_fields__:
            value = getattr(RouterConfig(), name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert f'calculet_router_limit{{limit="{name}"}} ' in text, name
        for gauge in ("connections", "streams", "body_bytes", "inflight"):
            assert f"\ncalculet_router_{gauge} " in text

    stage.play(scene)


def test_a_refused_message_is_counted_as_an_error(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        def never(worker: FakeWorker, submit: wire.Submit) -> None:
            raise AssertionError("nothing of it may reach a worker")

        router = await stage.serve(stage.worker(on_submit=never), max_header_bytes=8_192)
        client = await HttpClient.connect(router.port)
        client.send(b"GET /livez HTTP/1.1\r\nx-a: " + b"a" * 9_000 + b"\r\n\r\n")
        assert (await client.response())[0] == 431
        client = await HttpClient.connect(router.port)
        client.send(b"NONSENSE\r\n\r\n")
        assert (await client.response())[0] == 400
        assert await value_of(router, 'calculet_router_errors_total{code="headers_too_large"}') == 1
        assert await value_of(router, 'calculet_router_errors_total{code="invalid_value"}') == 1
        assert await hits(router, "max_header_bytes") == 1

    stage.play(scene)
