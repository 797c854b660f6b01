"""An OpenAI-shaped server that does what a script says and records when it did it.

Runs in a process of its own, so that neither its clock nor its CPU is the client's. Its own send times are CLOCK_MONOTONIC, the
clock of the client: a test compares the two, and a loaded machine delays both.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SELF = Path(__file__)


@dataclass
class MockServer:
    """A running mock. `script` keys: see `Script`."""

    port: int
    process: subprocess.Popen[str]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self) -> dict[str, dict[str, Any]]:
        """Request id -> what was written when, of requests that ended."""
        found = {}
        for line in self.log.read_text().splitlines():
            entry = json.loads(line)
            found[entry["id"]] = entry
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def a_mock_server(folder: Path, **script: Any) -> Iterator[MockServer]:
    log = folder / f"mock-{time.monotonic_ns()}.jsonl"
    log.touch()
    command = [sys.executable, str(SELF), json.dumps(script), str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    server = MockServer(port, process, log)
    try:
        yield server
    finally:
        server.stop()


@dataclass
class Script:
    """What every answer is like; a request's `user` field may carry JSON that overrides it."""

    first_ms: float = 5
    """Request read to first token."""
    gap_ms: float = 2
    """Between chunks."""
    tokens: int | None = None
    """None: the request's max_tokens."""
    chunk_tokens: int = 1
    counts: bool = False
    """Running usage on every chunk, as vLLM's `continuous_usage_stats`."""
    usage: bool = True
    role_chunk: bool = True
    coalesce: int = 1
    """Chunks per write."""
    status: int = 200
    code: str = "over_capacity"
    cut_after: int | None = None
    """Close the connection after so many chunks."""
    error_after: int | None = None
    """An error event after so many chunks, and no [DONE]."""
    done: bool = True
    finish: bool = True
    split_bytes: bool = False
    """Write events in two halves."""
    crlf: bool = False
    together: int = 0
    """Wait until so many requests are there and answer them at once."""
    close: bool = False
    """`connection: close`."""
    context: int = 0
    """Refuse what does not fit with `context_length_exceeded`; 0: no limit."""
    text_only: bool = False
    """Refuse prompts of token ids, as some servers do."""
    drift: bool = False
    """Every answer's text differs: a model that is not deterministic."""
    key: str = ""
    """The API key that every request needs."""
    certificate: str = ""
    """PEM file with certificate and key: HTTPS."""
    models: dict[str, Any] = field(default_factory=lambda: {"data": [{"id": "toy"}]})


class Mock:
    def __init__(self, script: Script, log: Path) -> None:
        self.script, self.log, self.waiting, self.count = script, log.open("a", buffering=1), [], 0

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self.one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = lines[0].split(" ")
        if self.script.key and headers.get("authorization") != f"Bearer {self.script.key}":
            self.whole(writer, 401, {"error": {"message": "which key?", "code": "invalid_api_key"}})
            return True
        if method == "GET":
            found = self.script.models if path == "/v1/models" else None
            self.whole(writer, 200 if found else 404, found or {"error": {"message": "no", "code": "not_found"}})
            return True
        asked = json.loads(body)
        script = Script(**{**self.script.__dict__, **json.loads(asked.get("user") or "{}")})
        entry: dict[str, Any] = {"id": headers.get("x-request-id", ""), "read_ns": time.monotonic_ns(), "writes": []}
        try:
            return await self.answer(writer, asked, script, entry)
        finally:
            self.note(entry)

    def note(self, entry: dict[str, Any]) -> None:
        """Write it down, once; before the end of an answer is sent, so that a client who has the answer finds it."""
        if "end_ns" not in entry:
            entry["end_ns"] = time.monotonic_ns()
            self.log.write(json.dumps(entry) + "\n")

    async def answer(self, writer: asyncio.StreamWriter, asked: dict[str, Any], script: Script, entry: dict[str, Any]) -> bool:
        if script.text_only and isinstance(asked.get("prompt"), list):
            self.whole(writer, 500, {"error": {"message": "prompt should be a string", "type": "internal_server_error", "code": None}})
            return True
        prompt = len(asked["prompt"]) if "prompt" in asked else sum(len(m["content"].split()) for m in asked["messages"])
        tokens = asked.get("max_tokens", 16) if script.tokens is None else script.tokens
        if script.status != 200:
            self.whole(writer, script.status, {"error": {"message": "as told", "code": script.code}})
            return True
        if script.context and prompt + tokens > script.context:
            self.whole(writer, 400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
            return True
        if script.together:
            await self.all_there(script.together)
        await asyncio.sleep(script.first_ms / 1e3)
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        self.count += 1
        words = [f"w{index}{self.count if script.drift else ''} " for index in range(tokens)]
        chat = "messages" in asked
        if not asked.get("stream"):
            entry["writes"].append([time.monotonic_ns(), tokens])
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": "".join(words)}} if chat else {"text": "".join(words)}
            self.note(entry)
            self.whole(writer, 200, {"id": "mock-1", "choices": [choice], "usage": usage}, close=script.close)
            return not script.close
        end = b"connection: close\r\n" if script.close else b"transfer-encoding: chunked\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + end + b"\r\n")
        self.chunked, self.crlf = not script.close, script.crlf
        if script.role_chunk and chat:
            self.event(writer, {"id": "mock-1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await writer.drain()
            await asyncio.sleep(script.gap_ms / 1e3)
        sent, chunks, due = 0, 0, time.monotonic()
        while sent < tokens:
            batch = []
            for _ in range(script.coalesce):
                some = words[sent : sent + script.chunk_tokens]
                if not some:
                    break
                sent += len(some)
                chunks += 1
                last = sent >= tokens
                finish = "length" if last and script.finish else None
                choice = {"index": 0, "finish_reason": finish}
                choice |= {"delta": {"content": "".join(some)}} if chat else {"text": "".join(some)}
                event: dict[str, Any] = {"id": "mock-1", "choices": [choice]}
                if script.counts:
                    event["usage"] = {"prompt_tokens": prompt, "completion_tokens": sent, "total_tokens": prompt + sent}
                batch.append(event)
            entry["writes"].append([time.monotonic_ns(), len(batch) * script.chunk_tokens])
            self.event(writer, *batch, split=script.split_bytes)
            await writer.drain()
            if script.cut_after is not None and chunks >= script.cut_after:
                writer.transport.abort()
                return False
            if script.error_after is not None and chunks >= script.error_after:
                self.event(writer, {"error": {"message": "board gone", "code": "worker_lost"}})
                writer.write(b"0\r\n\r\n")
                return True
            due += script.gap_ms / 1e3
            await asyncio.sleep(max(0, due - time.monotonic()))
        self.note(entry)
        if script.usage:
            self.event(writer, {"id": "mock-1", "choices": [], "usage": usage})
        if script.done:
            self.raw(writer, b"data: [DONE]\n\n")
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not script.close

    async def all_there(self, wanted: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        if len(self.waiting) >= wanted:
            for one in self.waiting:
                one.set_result(None)
            self.waiting = []
        await future

    def event(self, writer: asyncio.StreamWriter, *payloads: dict[str, Any], split: bool = False) -> None:
        data = b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads)
        if split:
            middle = len(data) // 2
            self.raw(writer, data[:middle])
            self.raw(writer, data[middle:])
        else:
            self.raw(writer, data)

    def raw(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.crlf:
            data = data.replace(b"\n", b"\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def whole(self, writer: asyncio.StreamWriter, status: int, body: Any, close: bool = False) -> None:
        data = json.dumps(body).encode()
        end = b"connection: close\r\n" if close else b""
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n" % (status, end, len(data)) + data
        )


async def main() -> None:
    mock = Mock(Script(**json.loads(sys.argv[1])), Path(sys.argv[2]))
    context = None
    if mock.script.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(mock.script.certificate)
    server = await asyncio.start_server(mock.client, "127.0.0.1", 0, limit=1 << 24, backlog=512, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
