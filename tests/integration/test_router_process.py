"""A real router process in front of workers that speak the wire from this test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from builders_router import DEADLINE_S, FakeWorker, HttpClient, RouterProcess, a_sleeping_process, a_view, events_of, until
from builders_stage import CHAT, PATH, STREAM, Stage, accepts, error_of, says, value_of

from calculet_core import wire
from calculet_core.shell.link import Frames, bind_router


# ---------------------------------------------------------------- the real client
def test_the_openai_client_chats_completes_streams_and_sees_errors(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("Hel", "lo", " 😀")))
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="any", max_retries=0)
        chat = await client.chat.completions.create(model="qwen3", messages=CHAT["messages"])
        assert chat.choices[0].message.content == "Hello 😀" and chat.choices[0].finish_reason == "stop"
        assert chat.usage and (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (3, 3)
        stream = await client.chat.completions.create(
            model="qwen3", messages=CHAT["messages"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello 😀"
        assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].usage and chunks[-1].usage.total_tokens == 6
        text = await client.completions.create(model="qwen3", prompt=["a", "b"], n=2, extra_headers={"x-request-id": "mine"})
        assert [choice.text for choice in text.choices] == ["Hello 😀"] * 4 and text._request_id == "mine"
        assert [model.id async for model in client.models.list()] == ["qwen3"]
        assert (await client.models.retrieve("qwen3")).id == "qwen3"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=CHAT["messages"])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as invalid:
            await client.chat.completions.create(model="qwen3", messages=CHAT["messages"], temperature=9)
        assert invalid.value.param == "temperature"
        await client.close()

    stage.play(scene)


def test_the_openai_client_raises_on_a_stream_that_breaks(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        def breaks(worker: FakeWorker, submit: wire.Submit) -> None:
            worker.piece(submit, "Hel")
            worker.piece(submit, "", 0, error=wire.ErrorInfo("bad_output", "NaN"))

        router = await stage.serve(stage.worker(on_submit=breaks))
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="any", max_retries=0)
        seen = []
        with pytest.raises(openai.APIError, match="NaN"):
            async for chunk in await client.chat.completions.create(model="qwen3", messages=CHAT["messages"], stream=True):
                seen.append(chunk.choices[0].delta.content)
        assert seen == ["Hel"]
        await client.close()

    stage.play(scene)


# ---------------------------------------------------------------- streams
def test_tokens_arrive_as_they_come_and_headers_wait_for_the_first(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, lease_interval_ms=20)
        client = await HttpClient.connect(router.port)
        client.post(PATH, STREAM)
        await until(lambda: worker.submits)
        submit = worker.submits[0]
        worker.tick()
        await until(lambda: worker.leases and worker.leases[-1].acked_seq == worker.seq)
        assert not client.reader._buffer, "no header before the first token"  # type: ignore[attr-defined]
        worker.piece(submit, "a")
        status, headers = await client.head()
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
        assert len(headers["x-request-id"]) == 16
        assert events_of(await client.chunk())[0]["choices"][0]["delta"]["content"] == "a"
        worker.piece(submit, "b", finish="length")
        assert events_of(await client.chunk())[-1] == "[DONE]"
        assert await client.chunk() == b""

    stage.play(scene)


def test_a_silent_stream_is_kept_alive_once_it_is_admitted(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, ping_interval_s=0.1)
        client = await HttpClient.connect(router.port)
        client.post(PATH, STREAM)
        assert (await client.head())[0] == 200
        assert await client.chunk() == b": ping\n\n"
        worker.piece(worker.submits[0], "late", finish="stop")
        data = b""
        while b"[DONE]" not in data:
            data += await client.chunk()
        assert events_of(data)[0]["choices"][0]["delta"]["content"] == "late"

    stage.play(scene)


def test_an_old_client_gets_a_stream_without_chunks(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("a", "b")))
        client = await HttpClient.connect(router.port)
        body = json.dumps(STREAM).encode()
        client.send(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        status, headers = await client.head()
        rest = await client.reader.read()
        assert status == 200 and "transfer-encoding" not in headers and headers["connection"] == "close"
        assert [event if isinstance(event, str) else event["choices"][0]["delta"].get("content") for event in events_of(rest)] == [
            "a", "b", None, "[DONE]",
        ]  # fmt: skip

    stage.play(scene)


def test_a_client_that_leaves_cancels_its_request(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker)
        for begun in (False, True):
            client = await HttpClient.connect(router.port)
            client.post(PATH, STREAM if begun else CHAT)
            await until(lambda begun=begun: len(worker.submits) == begun + 1)
            if begun:
                worker.piece(worker.submits[1], "a")
                await client.head()
            client.close()
            await until(lambda begun=begun: len(worker.cancels) == begun + 1)
            assert worker.cancels[begun].request_id == worker.submits[begun].request_id

    stage.play(scene)


# ---------------------------------------------------------------- workers that die
def test_a_worker_that_dies_before_the_first_token_costs_nothing(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        with a_sleeping_process() as mortal:
            dying = stage.worker("board0", pid=mortal.pid, on_submit=accepts)
            healthy = stage.worker("board1", on_submit=says("from the other"))
            router = await stage.serve(dying, healthy)
            clients = [await HttpClient.connect(router.port) for _ in range(4)]
            for number, client in enumerate(clients):
                client.post(PATH, STREAM if number % 2 else CHAT)
            await until(lambda: dying.submits and len(dying.submits) + len(healthy.submits) == 4)
            mortal.kill()
            for client in clients:
                status, _, body = await client.response()
                assert status == 200 and b"from the other" in body
            resent = [submit for submit in healthy.submits if submit.attempt == 2]
            assert {submit.request_id for submit in resent} == {submit.request_id for submit in dying.submits}

    stage.play(scene)


def test_a_worker_that_dies_after_the_first_token_is_an_error_event_without_done(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        with a_sleeping_process() as mortal:
            dying = stage.worker("board0", pid=mortal.pid, on_submit=lambda worker, submit: worker.piece(submit, "begun"))
            router = await stage.serve(dying)
            client = await HttpClient.connect(router.port)
            client.post(PATH, STREAM)
            await client.head()
            first = await client.chunk()
            mortal.kill()
            rest = b"".join([chunk async for chunk in client.chunks()])
            begun, failed = events_of(first + rest)
            assert begun["choices"][0]["delta"]["content"] == "begun"
            assert failed["error"]["code"] == "worker_lost" and b"[DONE]" not in rest
            client.post(PATH, CHAT)
            status, headers, body = await client.response()
            assert status == 503 and headers["retry-after"] and error_of(body)["code"] == "no_ready_worker"
            client.get("/health")
            assert (await client.response())[0] == 503

    stage.play(scene)


def test_a_new_life_of_a_worker_is_used_as_soon_as_the_view_has_it(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        reports: list[tuple[bytes, wire.RouterReport]] = []

        def hear(frames: Frames) -> None:
            message = wire.decode(*frames[1:])
            assert isinstance(message, wire.RouterReport)
            reports.append((frames[0], message))

        supervisor = bind_router(stage.context, stage.run_dir / "supervisor.sock", hear)
        first = stage.worker("board0", on_submit=says("one"))
        router = await stage.serve(first)
        await until(lambda: reports and reports[-1][1].links == {"board0": "up"})
        assert reports[-1][1].view_version == 1
        second = stage.worker("board0", epoch=2, on_submit=says("two"))
        supervisor.send([reports[-1][0], *wire.encode(a_view(second.view(), version=2))])
        await until(lambda: reports[-1][1].view_version == 2 and reports[-1][1].links == {"board0": "up"})
        client = await HttpClient.connect(router.port)
        client.post(PATH, CHAT)
        assert b"two" in (await client.response())[2] and not first.submits
        assert reports[-1][1].rss_bytes < 70_000_000
        supervisor.close()

    stage.play(scene)


# ---------------------------------------------------------------- full, empty, wrong
def test_full_and_absent_are_429_and_503_with_retry_after(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        def full(worker: FakeWorker, submit: wire.Submit) -> None:
            worker.refuse(submit, "over_capacity", retry_after_s=7.2 if worker.board == "board0" else 4.0)

        one, other = stage.worker("board0", on_submit=full), stage.worker("board1", on_submit=full)
        router = await stage.serve(one, other)
        client = await HttpClient.connect(router.port)
        for body in (CHAT, STREAM):
            client.post(PATH, body)
            status, headers, answer = await client.response()
            assert (status, headers["retry-after"], error_of(answer)["code"]) == (429, "4", "over_capacity")
        assert len(one.submits) == len(other.submits) == 2
        one.state = other.state = "DRAINING"
        one.hello()
        other.hello()
        await until(lambda: health(router) == 503)
        client.post(PATH, STREAM)
        status, headers, answer = await client.response()
        assert (status, error_of(answer)["code"]) == (503, "no_ready_worker") and int(headers["retry-after"]) >= 1

    stage.play(scene)


def health(router: RouterProcess) -> int:
    with socket.create_connection(("127.0.0.1", router.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return int(sock.recv(65_536).split()[1])


def test_a_400_never_comes_inside_a_200(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        def refuses(worker: FakeWorker, submit: wire.Submit) -> None:
            worker.refuse(submit, "context_length_exceeded", retryable=False)

        router = await stage.serve(stage.worker(on_submit=refuses))
        client = await HttpClient.connect(router.port)
        client.post(PATH, STREAM)
        status, _, body = await client.response()
        assert status == 400 and error_of(body)["code"] == "context_length_exceeded"

    stage.play(scene)


def test_bad_requests_are_answered_and_the_connection_goes_on(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("ok")))
        client = await HttpClient.connect(router.port)
        for body, status, code in (
            (b"{", 400, "invalid_json"),
            (b"\xff\xfe", 400, "invalid_json"),
            (b'{"x":' + b"[" * 100_000, 400, "invalid_json"),
            (b'{"model":"qwen3"}', 400, "invalid_value"),
            (json.dumps({**CHAT, "model": "a/b"}).encode(), 404, "model_not_found"),
            (json.dumps({**CHAT, "tools": [{}]}).encode(), 400, "invalid_value"),
            (json.dumps({**CHAT, "functions": [{}]}).encode(), 400, "unsupported"),
            (json.dumps({**CHAT, "use_beam_search": True}).encode(), 400, "unsupported"),
        ):
            client.post(PATH, body)
            got, _, answer = await client.response()
            assert (got, error_of(answer)["code"]) == (status, code)
        for method, path, status, code in (
            ("GET", PATH, 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
            ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
            ("GET", "/", 404, "not_found"),
            ("GET", "/v1/models/a%2Fb/c", 404, "model_not_found"),
        ):
            client.get(path, method)
            got, headers, answer = await client.response()
            assert (got, error_of(answer)["code"]) == (status, code) and ("allow" in headers) == (status == 405)
        client.post(PATH, CHAT, "x-request-timeout-ms: soon")
        assert error_of((await client.response())[2])["param"] == "X-Request-Timeout-Ms"
        client.post(PATH, CHAT, "authorization: Bearer any", "x-request-id: a\tb c" + "c" * 300)
        status, headers, _ = await client.response()
        assert status == 200 and headers["x-request-id"].startswith("abc") and len(headers["x-request-id"]) <= 128

    stage.play(scene)


def test_everything_else_answers_json_and_metrics(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("ok")))
        client = await HttpClient.connect(router.port)
        client.post(PATH, CHAT)
        await client.response()
        for path in ("/health", "/livez", "/readyz", "/version", "/v1/models", "/v1/models/qwen3"):
            client.get(path + "?x=1")
            status, headers, body = await client.response()
            assert status == 200 and headers["content-type"] == "application/json" and json.loads(body)
        client.get("/v1/models", "HEAD")
        status, headers = await client.head()
        assert status == 200 and int(headers["content-length"]) > 0
        client.get("/metrics")
        _, headers, body = await client.response()
        text = body.decode()
        assert headers["content-type"].startswith("text/plain")
        assert 'calculet_router_requests_total{model="qwen3",outcome="completed",status="200"} 1.0' in text
        assert 'calculet_router_e2e_seconds_bucket{concurrency="1",le="+Inf",model="qwen3",output="1-64",prompt="1-512"} 1.0' in text
        assert 'calculet_router_workers{state="up"} 1.0' in text

    stage.play(scene)


# ---------------------------------------------------------------- HTTP
def test_pipelined_requests_are_answered_in_their_order(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker)
        client = await HttpClient.connect(router.port)
        client.post(PATH, STREAM)
        client.get("/livez")
        client.post(PATH, CHAT)
        client.get("/nope")
        await until(lambda: worker.submits)
        worker.piece(worker.submits[0], "first", finish="stop")
        assert b"first" in (await client.response())[2]
        assert (await client.response())[2] == b'{"status":"ok"}'
        await until(lambda: len(worker.submits) == 2)
        worker.piece(worker.submits[1], "second", finish="stop")
        assert b"second" in (await client.response())[2]
        assert (await client.response())[0] == 404

    stage.play(scene)


def test_chunked_bodies_and_expectations_and_split_headers(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(on_submit=says("ok")))
        client = await HttpClient.connect(router.port)
        body = json.dumps(CHAT).encode()
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (body[:7], body[7:]):
            client.send(b"%x\r\n%b\r\n" % (len(part), part))
        client.send(b"0\r\nx-request-id: trailer\r\n\r\n")
        assert (await client.response())[0] == 200
        client.post(PATH, CHAT)
        assert (await client.response())[1]["x-request-id"] != "trailer"
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nExpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert (await client.head())[0] == 100
        client.send(body)
        assert (await client.response())[0] == 200
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nX-Request-Id: split\r\ncontent-length: %d\r\n\r\n" % len(body)
        for index in range(len(head)):
            client.send(head[index : index + 1])
            await client.writer.drain()
            await asyncio.sleep(0)
        client.send(body)
        assert (await client.response())[1]["x-request-id"] == "split"

    stage.play(scene)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"GET /livez HTTP/1.1\r\n" + b"x-a: " + b"a" * 9_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /livez HTTP/1.1\r\nx-endless: " + b"a" * 100_000, 431, "headers_too_large"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000, 413, "request_too_large"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413, "request_too_large"),
        (
            b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 5,
            413, "request_too_large",
        ),
        (b"NONSENSE\r\n\r\n", 400, "invalid_value"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_value"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_no_http_is_refused_readably_and_closed(
    stage: Stage, request_bytes: bytes, status: int, code: str
) -> None:
    async def scene(stage: Stage) -> None:
        router = await stage.serve(stage.worker(), max_header_bytes=8_192, max_body_bytes=100_000)
        client = await HttpClient.connect(router.port)
        client.send(request_bytes)
        got, headers, body = await client.response()
        assert (got, error_of(body)["code"], headers["connection"]) == (status, code, "close")
        assert await client.closed()

    stage.play(scene)


# ---------------------------------------------------------------- life of the process
def test_sigterm_finishes_streams_accepts_nobody_more_and_ends_with_0(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker)
        idle, client = await HttpClient.connect(router.port), await HttpClient.connect(router.port)
        idle.get("/livez")
        await idle.response()
        client.post(PATH, STREAM)
        await until(lambda: worker.submits)
        worker.piece(worker.submits[0], "a")
        await client.head()
        router.terminate()
        assert await idle.closed()
        await until(lambda: refuses_connections(router.port))
        worker.piece(worker.submits[0], "b", finish="stop")
        rest = b"".join([chunk async for chunk in client.chunks()])
        assert events_of(rest)[-1] == "[DONE]"
        assert await router.ended() == 0
        assert not (stage.run_dir / "m-router.sock").exists()

    stage.play(scene)


def test_a_drain_serves_what_kept_alive_connections_still_bring_and_tells_them_to_go(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, drain_idle_s=30)
        idle, streaming = await HttpClient.connect(router.port), await HttpClient.connect(router.port)
        idle.get("/livez")
        assert "connection" not in (await idle.response())[1]
        streaming.post(PATH, STREAM)
        await until(lambda: worker.submits)
        worker.piece(worker.submits[0], "a")
        assert "connection" not in (await streaming.head())[1]
        router.terminate()
        await until(lambda: any("draining" in line for line in router.log))
        idle.post(PATH, CHAT)
        await until(lambda: len(worker.submits) == 2)
        worker.piece(worker.submits[1], "whole", finish="stop")
        status, headers, body = await idle.response()
        assert (status, headers["connection"]) == (200, "close") and b"whole" in body
        assert await idle.closed()
        worker.piece(worker.submits[0], "b", finish="stop")
        assert events_of(b"".join([chunk async for chunk in streaming.chunks()]))[-1] == "[DONE]"
        streaming.post(PATH, STREAM)
        await until(lambda: len(worker.submits) == 3)
        worker.piece(worker.submits[2], "last", finish="stop")
        assert (await streaming.head())[1]["connection"] == "close"
        assert events_of(b"".join([chunk async for chunk in streaming.chunks()]))[-1] == "[DONE]"
        assert await router.ended() == 0

    stage.play(scene)


def test_routers_on_one_socket_take_turns_and_none_refuses(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=says("hi"))
        routers = [stage.router(listen="127.0.0.1:1"), stage.router(listen="127.0.0.1:1")]
        routers[0].publish(a_view(worker.view()))
        with socket.create_server(("127.0.0.1", 0), backlog=64) as shared:
            routers[0].start(listening=shared)
            routers[1].start("--name", "router-2", listening=shared)
            for router in routers:
                await router.listening()
                assert any("router.listen says 127.0.0.1:1" in line for line in router.log), "it says that the configuration differs"
            for leaving in routers:
                leaving.terminate()
                assert await leaving.ended() == 0
                clients = [await HttpClient.connect(shared.getsockname()[1]) for _ in range(8)]
                if leaving is routers[1]:
                    routers[0].start(listening=shared)  # they wait for it in the socket that nobody closed
                for client in clients:
                    client.post(PATH, CHAT)
                    assert (await client.response())[0] == 200
                if leaving is routers[0]:
                    client.get("/metrics")
                    assert b'{model="qwen3",outcome="completed",router="router-2",status="200"} 8.0' in (await client.response())[2]
        assert (stage.folder / "log" / "router-2.jsonl").exists()

    stage.play(scene)


def test_a_tenants_actives_are_limited_over_all_routers_and_those_of_a_killed_one_come_back(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        sections = {"tenants": [{"name": "default", "max_active": 3}]}
        routers = [stage.router(sections=sections, lease_interval_ms=100) for _ in range(2)]
        routers[0].publish(a_view(worker.view()))
        routers[0].start()
        routers[1].start("--name", "router-2")
        clients = []
        for router in routers:
            await router.listening()
            client = await HttpClient.connect(router.port)
            client.post(PATH, STREAM)
            clients.append(client)
        await until(lambda: len(worker.submits) == 2)

        async def both() -> tuple[int, bytes]:
            client = await HttpClient.connect(routers[1].port)
            client.post(PATH, {**STREAM, "n": 2})
            status, _, body = await client.response()
            return status, body

        status, body = await both()
        assert status == 429 and error_of(body)["code"] == "tenant_quota" and b"2 of 3 requests are active" in body
        routers[0].kill()
        status, body = await both()
        assert status == 429, "what a killed router let in runs until the workers have cancelled it"
        killed_s, last = time.monotonic(), await HttpClient.connect(routers[1].port)
        while len(worker.submits) < 4:
            await asyncio.sleep(0.05)
            last = await HttpClient.connect(routers[1].port)
            last.post(PATH, {**STREAM, "n": 2})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    assert (await last.response())[0] == 429
            assert time.monotonic() < killed_s + 60
        assert time.monotonic() - killed_s > 1

    stage.play(scene)


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_drain_is_bounded_and_what_is_left_is_told_and_cancelled(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=lambda worker, submit: worker.piece(submit, "a"))
        router = await stage.serve(worker, drain_timeout_s=0.2)
        client = await HttpClient.connect(router.port)
        client.post(PATH, STREAM)
        await client.head()
        router.terminate()
        rest = b"".join([chunk async for chunk in client.chunks()])
        assert events_of(rest)[-1]["error"]["code"] == "shutting_down"
        assert await router.ended() == 0
        await until(lambda: worker.cancels)

    stage.play(scene)


def test_a_second_signal_ends_at_once(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=accepts)
        router = await stage.serve(worker, drain_timeout_s=300)
        client = await HttpClient.connect(router.port)
        client.post(PATH, STREAM)
        await until(lambda: worker.submits)
        router.terminate()
        await until(lambda: any("draining" in line for line in router.log))
        router.process.send_signal(signal.SIGINT)
        assert await router.ended() == 0

    stage.play(scene)


def test_it_starts_without_view_supervisor_or_workers_and_says_so(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = stage.router()
        (stage.folder / "state" / "fleet-view.json").write_bytes(b'{"version": "torn')
        router.start()
        await router.listening()
        assert any("cannot be used" in line for line in router.log)
        client = await HttpClient.connect(router.port)
        for path, status in (("/livez", 200), ("/health", 503), ("/readyz", 503), ("/v1/models", 200), ("/v1/models/qwen3", 503)):
            client.get(path)
            assert (await client.response())[0] == status
        client.post(PATH, CHAT)
        assert error_of((await client.response())[2])["code"] == "no_ready_worker"

    stage.play(scene)


def test_a_busy_port_is_one_clear_line_and_78(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            router = stage.router(listen=address)
            router.start()
            assert await router.ended() == 78
            await until(lambda: router.log)
            assert len(router.log) == 1 and f"{address} is in use by another process" in router.log[0]

    stage.play(scene)


def test_a_wrong_configuration_is_one_clear_line_and_78(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("schema: calculet-fleet/v1\nboards: 5\n")
    command = [sys.executable, "-m", "calculet_router", "run", "--config", str(tmp_path / "fleet.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 78 and len(done.stderr.splitlines()) == 1 and "fleet.yaml: $.boards" in done.stderr


def test_it_serves_on_an_inherited_socket(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=says("ok"))
        router = stage.router()
        router.publish(a_view(worker.view()))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            launcher = (
                "import os, sys; os.dup2(int(sys.argv[1]), 3, inheritable=True); os.environ['LISTEN_PID'] = str(os.getpid());"
                "os.environ['LISTEN_FDS'] = '1'; os.execv(sys.executable, [sys.executable, '-m', 'calculet_router', 'run', '--config', sys.argv[2]])"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", launcher, str(listener.fileno()), str(router.config)],
                pass_fds=[listener.fileno()], stderr=subprocess.PIPE,
            )  # fmt: skip
            try:
                client = await HttpClient.connect(listener.getsockname()[1])
                client.post(PATH, CHAT)
                assert (await client.response())[0] == 200
            finally:
                process.kill()
                process.wait(20)

    stage.play(scene)


def test_a_stream_that_waits_for_its_models_turn_is_kept_alive_and_its_leaving_is_seen_at_once(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=says("ok"))
        router = stage.router(ping_interval_s=0.2)
        view = a_view(worker.view())
        rare = wire.AliasView("rare", "e" * 64, 4_096, 1_700_000_000, parks=4)
        router.publish(wire.FleetView(view.version, view.boards, [*view.aliases, rare]))
        router.start()
        await router.listening()
        client = await HttpClient.connect(router.port)
        client.post(PATH, {**STREAM, "model": "rare"})
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert [await client.chunk() for _ in range(2)] == [b": ping\n\n"] * 2
        sample = 'calculet_router_waiting_model{model="rare"}'
        assert await value_of(router, sample) == 1
        client.close()
        async with asyncio.timeout(DEADLINE_S):
            while await value_of(router, sample):
                await asyncio.sleep(0.01)

    stage.play(scene)


def test_told_to_end_it_serves_what_it_has_and_a_second_word_changes_nothing(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=lambda worker, submit: (worker.accept(submit), worker.piece(submit, "Hel")))
        heard: list[wire.RouterReport] = []
        identities: set[bytes] = set()

        def hear(frames: Frames) -> None:
            identity, kind, body = frames
            identities.add(bytes(identity))
            if isinstance(message := wire.decode(bytes(kind), body), wire.RouterReport):
                heard.append(message)

        supervisor = bind_router(stage.context, stage.run_dir / "supervisor.sock", hear)
        try:
            router = await stage.serve(worker)
            client = await HttpClient.connect(router.port)
            client.post(PATH, STREAM)
            await client.head()
            await client.chunk()
            await until(lambda: heard and heard[-1].serves)
            assert (heard[-1].name, heard[-1].draining) == ("router", False)
            for _ in range(2):
                supervisor.send([next(iter(identities)), *wire.encode(wire.RetireRouter())])
            await until(lambda: heard[-1].draining and heard[-1].serves is None)
            with pytest.raises(OSError):
                await HttpClient.connect(router.port)
            worker.piece(worker.submits[-1], "lo", finish="stop")
            text = b"".join([chunk async for chunk in client.chunks()])
            assert text.rstrip().endswith(b"[DONE]"), text
            await until(lambda: router.process.poll() == 0)
        finally:
            supervisor.close()

    stage.play(scene)


def test_it_ends_with_its_keeper(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        router = stage.router()
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "calculet_router", "run", "--config", str(router.config)],
            pass_fds=[read], env={**os.environ, "CALCULET_DEATH_FD": str(read)}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(read)
        try:
            assert process.stderr
            line = await asyncio.to_thread(process.stderr.readline)
            while "listening" not in line:
                line = await asyncio.to_thread(process.stderr.readline)
            os.close(write)
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait(20)

    stage.play(scene)


def test_leases_are_renewed_with_what_was_received(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=says("a", "b"))
        router = await stage.serve(worker, lease_interval_ms=50)
        client = await HttpClient.connect(router.port)
        client.post(PATH, CHAT)
        await client.response()
        await until(lambda: worker.leases and worker.leases[-1].acked_seq == worker.seq)

    stage.play(scene)


def test_bytes_that_are_no_message_are_counted_and_ignored(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        worker = stage.worker(on_submit=says("fine"))
        router = await stage.serve(worker)
        for frames in ([b"ti", b"\xc1"], [b"??", b""], [b"one"], [b"a", b"b", b"c"], wire.encode(wire.Lease(1, 1, 1))):
            worker.link.send([worker._router, *frames])
        client = await HttpClient.connect(router.port)
        client.post(PATH, CHAT)
        assert (await client.response())[0] == 200
        client.get("/metrics")
        text = (await client.response())[2].decode()
        assert 'calculet_router_bad_messages_total{reason="malformed"} 4.0' in text
        assert 'calculet_router_bad_messages_total{reason="unexpected"} 1.0' in text

    stage.play(scene)
