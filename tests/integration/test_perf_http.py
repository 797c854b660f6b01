"""What the client reports equals what a scripted server did, by the server's own clock."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from builders_fleet import free_port, until
from builders_mock_server import MockServer, a_mock_server

from calculet_perf.client.observation import Asked, Seen
from calculet_perf.shell.http import AskError, HttpClient, Target
from calculet_perf.shell.shard import Job, Load

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
MS = 1_000_000


def asked(index: int = 0, *, tokens: int = 4, stream: bool = True, prompt: int = 3, chat: bool = False, **more: Any) -> Asked:
    given: dict[str, Any] = {"model": "toy", "max_tokens": tokens, "stream": stream}
    given |= {"messages": [{"role": "user", "content": "a " * prompt}]} if chat else {"prompt": [1] * prompt}
    if script := more.pop("script", None):
        given["user"] = json.dumps(script)
    return Asked(index, json.dumps(given).encode(), f"r{index}", stream, **more)


def run(server: MockServer, *requests: Asked, path: str = PATH, timeout_s: float = 60, **job: Any) -> list[Seen]:
    """By the loop of a client process."""
    fields = {
        "host": "127.0.0.1", "port": server.port, "root": "", "path": path, "headers": [], "timeout_s": timeout_s, "arrival": "closed",
        "concurrency": 1, "start_ns": time.monotonic_ns(), "asked": list(requests), **job,
    }  # fmt: skip

    async def go() -> list[Seen]:
        found: list[Seen] = []
        await Load(Job(**fields), found.append).run()
        return found

    return uvloop.run(go())


def one(server: MockServer, request: Asked, **more: Any) -> Seen:
    (found,) = run(server, request, **more)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with a_mock_server(tmp_path_factory.mktemp("mock")) as server:
        yield server


# ---------------------------------------------------------------- times
def test_times_are_those_of_the_server(server: MockServer) -> None:
    found = one(server, asked(100, tokens=20, script={"counts": True}))
    until(lambda: "r100" in server.sent(), "the server has written down what it did")
    writes = server.sent()["r100"]["writes"]
    clock = found.client
    assert found.clock_complete
    assert (found.prompt_tokens, found.output_tokens) == (3, 20)
    assert found.chunks is not None
    assert (found.chunks.events, found.chunks.tokens, found.chunks.first, found.chunks.mismatch) == (20, 20, 1, False)
    assert clock.first_token is not None and clock.last_token is not None and clock.request_start is not None
    assert clock.request_start < server.sent()["r100"]["read_ns"]
    # Never before the server wrote it; how long after is the machine's load.
    assert writes[0][0] < clock.first_token < writes[1][0] + 500 * MS
    assert writes[-1][0] < clock.last_token


def test_64_spread_streams_are_stamped_when_they_were_sent(server: MockServer) -> None:
    requests = [asked(200 + n, tokens=5, offset_ns=n * 3 * MS) for n in range(64)]
    late = []
    for _ in range(8):  # a loaded machine delays many; a client that stamps late delays all, in every run
        found = run(server, *requests, arrival="scheduled", concurrency=64, start_ns=time.monotonic_ns() + 50 * MS)
        assert all(one.error_code is None for one in found)
        sent = server.sent()
        late = sorted((one.client.first_token or 0) - sent[one.request_id]["writes"][0][0] for one in found)
        assert late[0] > 0, "nothing is seen before it was sent"
        if late[6] < 2 * MS:
            break
    assert late[6] < 2 * MS, late


def test_64_streams_that_fire_at_once_are_stamped_together(server: MockServer) -> None:
    script = {"together": 64, "gap_ms": 200}
    spreads = []
    for _ in range(8):
        found = run(server, *[asked(300 + n, tokens=2, script=script) for n in range(64)], concurrency=64)
        sent = server.sent()
        late = sorted((one.client.first_token or 0) - sent[one.request_id]["writes"][0][0] for one in found)
        assert late[0] > 0
        spreads.append(late[32])
        if late[32] < 10 * MS:
            break
    assert min(spreads) < 10 * MS, spreads


def test_open_loop_keeps_an_absolute_schedule(server: MockServer) -> None:
    requests = [asked(400 + n, tokens=2, offset_ns=n * 5 * MS, script={"first_ms": 100}) for n in range(40)]
    start = time.monotonic_ns() + 20 * MS
    found = run(server, *requests, arrival="scheduled", concurrency=40, start_ns=start)
    delays = sorted((one.client.request_start or 0) - (one.scheduled_ns or 0) for one in found)
    assert [one.scheduled_ns for one in sorted(found, key=lambda one: one.index)] == [start + n * 5 * MS for n in range(40)]
    assert delays[0] >= 0, "nothing is sent before its time"
    assert delays[20] < 20 * MS, "answers that take 100 ms do not hold the schedule up"


def test_a_group_waits_for_the_one_before(server: MockServer) -> None:
    requests = [asked(500 + n, tokens=2, group=n // 4) for n in range(8)]
    found = run(server, *requests, arrival="groups", concurrency=4, gap_s=0.01)
    first = [one for one in found if one.index < 504]
    second = [one for one in found if one.index >= 504]
    assert max(one.client.response_end or 0 for one in first) < min(one.client.request_start or 0 for one in second)


def test_closed_loop_has_never_more_in_flight_than_asked(server: MockServer) -> None:
    found = run(server, *[asked(600 + n, tokens=3) for n in range(12)], concurrency=3)
    starts = [(one.client.request_start or 0, 1) for one in found] + [(one.client.response_end or 0, -1) for one in found]
    level = peak = 0
    for _, step in sorted(starts):
        level += step
        peak = max(peak, level)
    assert peak == 3


# ---------------------------------------------------------------- shapes of answers
@pytest.mark.parametrize("script", [{"split_bytes": True}, {"crlf": True}, {"coalesce": 3}, {"close": True}, {"chunk_tokens": 2}])
def test_streams_of_every_shape_are_read(server: MockServer, script: dict[str, Any]) -> None:
    found = one(server, asked(tokens=6, script={**script, "counts": True}))
    assert (found.error_code, found.output_tokens, found.finish_reason, found.clock_complete) == (None, 6, "length", True)
    assert found.chunks is not None
    assert found.chunks.tokens == 6
    assert found.chunks.largest == script.get("chunk_tokens", 1)
    if "coalesce" in script:
        assert found.chunks.coalesced == 4


def test_the_role_chunk_is_the_first_event_and_not_the_first_token(server: MockServer) -> None:
    clock = one(server, asked(700, chat=True, script={"gap_ms": 30}), path=CHAT).client
    assert (clock.first_token or 0) - (clock.first_event or 0) > 20 * MS


def test_without_a_stream_tokens_have_no_times(server: MockServer) -> None:
    found = one(server, asked(stream=False))
    assert (found.error_code, found.output_tokens) == (None, 4)
    assert (found.client.first_token, found.client.last_token, found.chunks) == (None, None, None)
    assert found.clock_complete


def test_equal_answers_have_equal_hashes_streamed_or_not(server: MockServer) -> None:
    streamed, whole = one(server, asked()), one(server, asked(stream=False))
    assert streamed.token_hash == whole.token_hash
    assert str(streamed.token_hash).startswith("text:")
    assert one(server, asked(tokens=5)).token_hash != streamed.token_hash


def test_a_large_prompt_goes_out_whole(server: MockServer) -> None:
    found = one(server, asked(prompt=400_000))
    assert (found.error_code, found.prompt_tokens) == (None, 400_000)
    assert found.clock_complete


# ---------------------------------------------------------------- failures
@pytest.mark.parametrize(
    ("script", "code", "status"),
    [
        ({"status": 429}, "over_capacity", 429),
        ({"error_after": 2}, "worker_lost", 200),
        ({"cut_after": 2}, "connection_reset", 200),
        ({"done": False, "finish": False, "usage": False}, "incomplete_stream", 200),
        ({"context": 5}, "context_length_exceeded", 400),
    ],
)
def test_failures_are_classified(server: MockServer, script: dict[str, Any], code: str, status: int) -> None:
    found = one(server, asked(script=script))
    assert (found.error_code, found.http_status) == (code, status)


def test_a_request_that_takes_too_long_is_a_client_timeout(server: MockServer) -> None:
    found = one(server, asked(script={"first_ms": 60_000}), timeout_s=0.2)
    assert (found.error_code, found.client.first_token) == ("client_timeout", None)


def test_a_server_that_is_not_there_is_refused_and_not_waited_for() -> None:
    async def go() -> None:
        await HttpClient(Target("127.0.0.1", free_port())).prepare(1)

    with pytest.raises(AskError) as raised:
        uvloop.run(go())
    assert raised.value.code == "connect_refused"


def a_raw_server(answer: Callable[[socket.socket, int], None]) -> Any:
    """A server of a few lines, in a thread: `answer` gets each connection and its number."""
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        number = 0
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            answer(connection, number)
            number += 1

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_an_idle_connection_that_the_server_closed_is_replaced_once() -> None:
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(reply)
        if number == 0:
            connection.recv(65536)  # the second request's bytes, which get no answer
        connection.close()

    listener = a_raw_server(answer)

    async def go() -> tuple[bytes, bytes, int]:
        client = HttpClient(Target("127.0.0.1", listener.getsockname()[1]))
        first, second = await client.fetch("/"), await client.fetch("/")
        client.close()
        return first.body, second.body, client.opened

    assert uvloop.run(go()) == (b"ok", b"ok", 2)
    listener.close()


EVENTS = [b'data: {"id":"a","choices":[{"index":0,"text":"w%d","finish_reason":null}]}\n\n' % number for number in range(20)]
ENDING = [b'data: {"id":"a","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
EVENT_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(*parts: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]


LAST = b"".join(chunked(*ENDING)) + b"0\r\n\r\n"
STREAMS = {
    "the end is cut everywhere": [EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\n", *chunked(*EVENTS), *(bytes([byte]) for byte in LAST)],
    "the last two bytes come late": [EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\n", *chunked(*EVENTS), LAST[:-2], LAST[-2:]],
    "a trailer": [EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\n", *chunked(*EVENTS), LAST[:-2] + b"x-took: 1\r\n\r\n"],
    "a length": [EVENT_STREAM + b"content-length: %d\r\n\r\n" % sum(map(len, EVENTS + ENDING)), *EVENTS, *ENDING],
    "until the connection's end": [EVENT_STREAM + b"connection: close\r\n\r\n", *EVENTS, *ENDING, b""],
    "an informational answer first": [b"HTTP/1.1 100 Continue\r\n\r\n", EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\n", *chunked(*EVENTS), LAST],
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_an_answer_ends_when_its_bytes_say_so_however_they_are_cut(name: str) -> None:
    """Events are parsed some at a time; its end is never one of those that may wait."""

    async def go() -> Seen:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            for piece in STREAMS[name]:
                if not piece:
                    writer.close()
                    return
                writer.write(piece)
                await asyncio.sleep(0.001)  # a read of its own
            await reader.read()  # the connection stays open
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(Target("127.0.0.1", server.sockets[0].getsockname()[1]), timeout_s=20)
        try:
            return await client.ask(asked(0), PATH)
        finally:
            client.close()
            server.close()

    found = uvloop.run(go())
    assert (found.error_code, found.finish_reason, found.clock_complete) == (None, "stop", True)
    assert found.chunks is not None and found.chunks.events == 20
    assert found.chunks.coalesced < 20, "each has the time of its own read"


def test_what_is_not_http_is_said_so() -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

    listener = a_raw_server(answer)

    async def go() -> str | None:
        client = HttpClient(Target("127.0.0.1", listener.getsockname()[1]))
        return (await client.ask(asked(), PATH)).error_code

    assert uvloop.run(go()) == "bad_http"
    listener.close()


def test_stopping_ends_what_is_in_flight_as_interrupted(server: MockServer) -> None:
    async def go() -> list[Seen]:
        found: list[Seen] = []
        job = Job(
            host="127.0.0.1", port=server.port, root="", path=PATH, headers=[], timeout_s=60, arrival="closed", concurrency=2,
            start_ns=0, asked=[asked(n, script={"first_ms": 60_000}) for n in range(6)],
        )  # fmt: skip
        load = Load(job, found.append)
        running = asyncio.ensure_future(load.run())
        await load.client.prepare(0)
        while len(load.client._busy) < 2:
            await asyncio.sleep(0.01)
        load.stop()
        await running
        return found

    found = uvloop.run(go())
    assert [one.error_code for one in found] == ["client_interrupted"] * 2


def open_loop(port: int, requests: list[Asked], tell: Callable[[Seen], None], **more: Any) -> None:
    fields: dict[str, Any] = {"concurrency": 1, "timeout_s": 20, "start_ns": time.monotonic_ns(), **more}
    job = Job(host="127.0.0.1", port=port, root="", path=PATH, headers=[], arrival="scheduled", asked=requests, **fields)

    async def go() -> None:
        await Load(job, tell).run()

    uvloop.run(go())


def test_open_loop_too_replaces_an_idle_connection_that_the_server_closed() -> None:
    body = b'{"id":"a","choices":[{"index":0,"text":"w","finish_reason":"stop"}]}'

    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        if number == 0:
            connection.recv(65536)  # the second request's bytes, which get no answer
        connection.close()

    listener, found = a_raw_server(answer), []
    open_loop(listener.getsockname()[1], [asked(0, stream=False), asked(1, stream=False, offset_ns=300 * MS)], found.append)
    listener.close()
    assert [one.error_code for one in found] == [None, None]


def test_in_open_loop_each_request_has_its_own_time_limit(server: MockServer) -> None:
    slow = [asked(900 + n, offset_ns=n * 100 * MS, script={"first_ms": 60_000}) for n in range(3)]
    quick = [asked(910 + n, offset_ns=n * 50 * MS) for n in range(8)]
    found: list[Seen] = []
    open_loop(server.port, slow + quick, found.append, timeout_s=2, concurrency=11)
    assert {one.index for one in found if one.error_code == "client_timeout"} == {900, 901, 902}
    assert {one.index for one in found if one.error_code is None} == {one.index for one in quick}


@pytest.mark.timeout(30)
def test_what_goes_wrong_with_an_outcome_ends_the_load_and_is_not_lost(server: MockServer) -> None:
    def tell(seen: Seen) -> None:
        raise BrokenPipeError("nobody takes what was seen")

    with pytest.raises(BrokenPipeError):
        open_loop(server.port, [asked(920), asked(921, offset_ns=50 * MS)], tell)
