"""The OpenAPI document, made from the structs that bodies are parsed with, so that it cannot say anything else than the code.

Answers are written by hand as bytes (`sse`); their shapes are told by structs of their own here, and tests hold the two together by
fuzzing the server against the document.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from calculet_core.errors import ERROR_TYPES
from calculet_router.lookups import DetokenizeRequest, TokenizeRequest
from calculet_router.openai import ROLES, UNSUPPORTED, UNSUPPORTED_IN_TEXTS, ChatRequest, CompletionRequest

Natural = Annotated[int, Meta(ge=0)]
Finish = Literal["stop", "length", "tool_calls"]


class Usage(msgspec.Struct):
    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural


class MadeFunction(msgspec.Struct):
    name: str
    arguments: str
    """JSON of an object that keeps to the tool's `parameters`; cut where `finish_reason` is `length`."""


class MadeCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: MadeFunction


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """null where the answer is calls alone."""
    refusal: None
    tool_calls: list[MadeCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: Natural
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class TextChoice(msgspec.Struct):
    index: Natural
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class ChatCompletion(msgspec.Struct):
    """Streamed: `chat.completion.chunk` events with `delta` in place of `message`, then `data: [DONE]`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Completion(msgspec.Struct):
    """Streamed: events of the same shape, then `data: [DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Annotated[int, Meta(ge=1)]
    calculet: dict[str, Any]
    """Artifact, digest, proven profiles, capability level, generations."""


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    count: Natural
    max_model_len: Annotated[int, Meta(ge=1)]
    tokens: list[Natural]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    prompt: str


class Status(msgspec.Struct):
    status: str
    ready_boards: Natural | None = None


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """Every answer that is no success."""

    error: ErrorDetail


class Version(msgspec.Struct):
    version: str
    commit: str | None
    image_digest: str | None
    protocol: int
    view_version: int | None
    boards: list[dict[str, Any]]


REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
ANSWERS = (ChatCompletion, Completion, Model, ModelList, Tokens, Text, Status, Error, Version)
REF = "#/components/schemas/{name}"
HEADERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("X-Request-Id", "The client's own id: echoed, journalled, never an identity.", {"type": "string"}),
    ("X-Request-Timeout-Ms", "A deadline, never beyond the configured one.", {"type": "integer", "minimum": 1, "maximum": 10**9}),
    ("X-Calculet-Timing", "1: the answer carries `calculet` with token counts, their hash and times.", {"enum": ["0", "1"]}),
)
OF_ALL = (400, 408, 413, 431, 500, 503)
OF_MODELS = (401, 403, 404)
OF_CALLS = (*OF_MODELS, 415, 429, 504)


def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of everything that the router serves."""
    _, schemas = msgspec.json.schema_components((*REQUESTS, *ANSWERS), ref_template=REF)
    _narrow(schemas)
    paths = {
        "/v1/chat/completions": {"post": _call("Chat", "ChatRequest", "ChatCompletion")},
        "/v1/completions": {"post": _call("Complete a text", "CompletionRequest", "Completion")},
        "/v1/models": {"get": _get("Models that can be served now", "ModelList", OF_MODELS[:2])},
        "/v1/models/{id}": {"get": _get("One model", "Model", OF_MODELS, [_path_parameter("id")])},
        "/tokenize": {"post": _question("Tokens of a prompt", "TokenizeRequest", "Tokens")},
        "/detokenize": {"post": _question("Text of tokens", "DetokenizeRequest", "Text")},
        "/health": {"get": _get("200 while a board is ready", "Status", open_to_all=True)},
        "/readyz": {"get": _get("200 while a board is ready and the router takes requests", "Status", open_to_all=True)},
        "/livez": {"get": _get("200 while the router lives", "Status", open_to_all=True)},
        "/version": {"get": _get("What serves here, down to the boards' drivers", "Version", open_to_all=True)},
        "/metrics": {"get": _text("All processes' metrics, for Prometheus")},
        "/openapi.json": {"get": _get("This document", None, open_to_all=True)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Calculet", "version": version, "description": "An OpenAI-compatible interface to a fleet of boards."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _narrow(schemas: dict[str, Any]) -> None:
    """Say what the parsers check beyond types: what is refused by name, and what must not be empty or both."""
    for name in ("ChatRequest", "CompletionRequest"):
        for unsupported in UNSUPPORTED:
            schemas[name]["properties"].pop(unsupported)
    for unsupported in UNSUPPORTED_IN_TEXTS:
        schemas["CompletionRequest"]["properties"].pop(unsupported)
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
    lists = [{"type": "array", "minItems": 1, "items": item} for item in (text, ids)]
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [text, ids, *lists]}
    parts = {"type": "array", "items": {"$ref": REF.format(name="ContentPart")}}
    content = {"anyOf": [{"type": "string"}, parts]}
    maybe = {"anyOf": [{"type": "null"}, *content["anyOf"]]}
    schema = {"$ref": REF.format(name="JsonSchema")}
    calls = {"type": "array", "minItems": 1, "items": {"$ref": REF.format(name="ToolCall")}}
    named = {"content": content, "name": {"type": "string"}}
    others = [role for role in ROLES if role != "tool"]
    schemas["Message"] = {
        "description": "A message of a chat.",
        "anyOf": [
            _object({"role": {"enum": others}, **named}, "role", "content"),
            _object({"role": {"const": "assistant"}, **named, "content": maybe, "tool_calls": calls}, "role", "tool_calls"),
            _object({"role": {"const": "tool"}, **named, "tool_call_id": {"type": "string"}}, "role", "content"),
        ],
    }  # fmt: skip
    schemas["ToolCall"]["properties"]["type"] = {"const": "function"}
    schemas["Tool"]["properties"]["type"] = {"const": "function"}
    schemas["Tool"]["required"] = ["type", "function"]
    schemas["Tool"]["properties"]["function"] = {"$ref": REF.format(name="Function")}
    schemas["Function"]["properties"]["parameters"]["description"] = "JSON schema; of `type` object"
    schemas["ResponseFormat"] = {
        "anyOf": [
            _object({"type": {"enum": ["text", "json_object"]}}, "type"),
            _object({"type": {"const": "json_schema"}, "json_schema": schema}, "type", "json_schema"),
        ],
    }  # fmt: skip
    schemas["JsonSchema"]["required"] = ["name", "schema"]
    schemas["JsonSchema"]["properties"]["schema"] = {"type": "object", "description": "JSON schema"}
    schemas["ChatRequest"]["properties"]["tool_choice"] = {
        "anyOf": [{"enum": ["none", "auto", "required"]}, {"$ref": REF.format(name="ToolChoice")}],
        "description": "`required` and objects need `tools`.",
    }  # fmt: skip
    part = schemas["ContentPart"]
    part["properties"], part["required"] = {"type": {"const": "text"}, "text": {"type": "string"}}, ["type", "text"]
    tokenize = schemas["TokenizeRequest"]
    tokenize["properties"] |= {
        "prompt": text,
        "messages": {"type": "array", "minItems": 1, "items": {"$ref": REF.format(name="Message")}},
        "add_generation_prompt": {"enum": [True, None]},
    }
    tokenize["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _call(summary: str, request: str, answer: str) -> dict[str, Any]:
    parameters = [{"name": name, "in": "header", "description": text, "schema": schema} for name, text, schema in HEADERS]
    content = {"text/event-stream": {}, **_json(answer)}
    return {
        "summary": summary, "parameters": parameters, "requestBody": _body(request), "security": [{}, {"key": []}],
        "responses": {"200": {"description": "The answer, whole or streamed", "content": content}, **errors(*OF_ALL, *OF_CALLS)},
    }  # fmt: skip


def _question(summary: str, request: str, answer: str) -> dict[str, Any]:
    found = _get(summary, answer, OF_CALLS)
    return {**found, "requestBody": _body(request)}


def _get(
    summary: str,
    answer: str | None,
    others: tuple[int, ...] = (),
    parameters: list[dict[str, Any]] | None = None,
    open_to_all: bool = False,
) -> dict[str, Any]:
    content = {"application/json": {}} if answer is None else _json(answer)
    return {
        "summary": summary, "parameters": parameters or [], "security": [{}] if open_to_all else [{}, {"key": []}],
        "responses": {"200": {"description": "Success", "content": content}, **errors(*OF_ALL, *others)},
    }  # fmt: skip


def _text(summary: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    success = {"description": "Success", "content": content}
    return {"summary": summary, "security": [{}], "responses": {"200": success, **errors(*OF_ALL)}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _body(name: str) -> dict[str, Any]:
    return {"required": True, "content": _json(name)}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=name)}}}


def errors(*statuses: int) -> dict[str, Any]:
    """Each status with the codes that it may carry."""
    found = {}
    for status in sorted(statuses):
        codes = sorted(error.code for error in ERROR_TYPES.values() if error.http_status == status)
        headers = {"Retry-After": {"schema": {"type": "integer"}}} if status in (429, 503) else {}
        found[str(status)] = {"description": ", ".join(codes), "content": _json("Error"), "headers": headers}
    return found
