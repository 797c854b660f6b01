"""What the client saw of one request, before it becomes a record."""

from __future__ import annotations

import msgspec

from calculet_perf.client.answers import AnswerReader
from calculet_perf.records import Chunks, ClientNs, ServerMs


class Asked(msgspec.Struct):
    """One request to send. Bodies are ready bytes, so that nothing but a send happens at its time."""

    index: int
    body: bytes
    request_id: str
    stream: bool
    offset_ns: int = 0
    """Scheduled start after the cell's (open loop) or its group's (burst)."""
    group: int = 0
    """Bursts: requests of a group belong together; the next group waits for all of them."""


class Seen(msgspec.Struct):
    """The outcome of one request, as a client process hands it over."""

    index: int
    request_id: str
    scheduled_ns: int | None
    client: ClientNs
    http_status: int | None
    server_request_id: str | None
    finish_reason: str | None
    error_code: str | None
    error_message: str | None
    token_hash: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    chunks: Chunks | None
    server_ms: ServerMs
    device_ms: float | None
    generation: int | None
    clock_complete: bool


def clock_complete(client: ClientNs, *, stream: bool, tokens: int | None) -> bool:
    """Every time that such a request can have is there, and none is before the one it follows."""
    times = [client.request_start, client.headers_sent, client.response_headers, client.first_event]
    if stream and tokens != 0:
        times += [client.first_token, client.last_token]
    times.append(client.response_end)
    known = [time for time in times if time is not None]
    return len(known) == len(times) and known == sorted(known)


def seen(
    asked: Asked, answer: AnswerReader, client: ClientNs, status: int | None, header_id: str | None, scheduled_ns: int | None
) -> Seen:
    """Put together what was seen; `client` lacks t3..t5, which the answer has."""
    client.first_event = answer.first_event_ns
    if asked.stream:
        client.first_token, client.last_token = answer.first_token_ns, answer.last_token_ns
    tokens, extension = answer.output_tokens, answer.extension
    chunks = None
    if asked.stream and answer.token_events:
        told, counted = answer.completion_tokens, answer.tokens
        chunks = Chunks(
            events=answer.token_events, tokens=counted, first=answer.first_chunk, largest=answer.largest_chunk,
            coalesced=answer.coalesced, mismatch=None if told is None or counted is None else told != counted,
        )  # fmt: skip
    server = ServerMs()
    if extension is not None:
        server = ServerMs(
            queue=extension.queue_ms, prefill=extension.prefill_ms, decode_total=extension.decode_ms,
            postprocess=extension.postprocess_ms, sampling=extension.sampling_ms,
        )  # fmt: skip
    return Seen(
        index=asked.index, request_id=asked.request_id, scheduled_ns=scheduled_ns, client=client, http_status=status,
        server_request_id=answer.server_id or header_id, finish_reason=answer.finish_reason, error_code=answer.error_code,
        error_message=answer.error_message, token_hash=answer.token_hash, prompt_tokens=answer.prompt_tokens, output_tokens=tokens,
        chunks=chunks, server_ms=server, device_ms=None if extension is None else extension.device_ms,
        generation=None if extension is None else extension.generation,
        clock_complete=clock_complete(client, stream=asked.stream, tokens=tokens),
    )  # fmt: skip
