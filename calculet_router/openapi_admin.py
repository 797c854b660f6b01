"""The OpenAPI document of the dashboard's address (`router.admin_listen`), made from the structs that its answers are built of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from calculet_core.wire import AliasView, BoardView
from calculet_router.openapi import REF, Error, errors
from calculet_router.samples import Point

STATUSES = (400, 408, 413, 431, 503)
"""What reading a request, or having too many connections, may come to."""


class ShownView(msgspec.Struct):
    """The fleet view that the router follows."""

    version: int
    """-1 before the first."""
    boards: list[BoardView]
    aliases: list[AliasView]


class ShownEvent(msgspec.Struct):
    """Of the supervisor's journal."""

    event: str
    board: str | None
    wall: float | None
    """Seconds since 1970."""
    data: dict[str, Any]


class FleetStatus(msgspec.Struct):
    """As `calculet status --json` tells it; further members may follow."""

    schema: str
    version: str
    boards: list[dict[str, Any]]
    routers: list[dict[str, Any]]


class Snapshot(msgspec.Struct):
    """All that the page shows."""

    now_s: float
    router: str
    version: str
    status: FleetStatus | None
    """null while no supervisor answers."""
    view: ShownView
    links: dict[str, Literal["connecting", "up", "suspect", "lost"]]
    """By board."""
    tenants: dict[str, Annotated[int, Meta(ge=0)]]
    """Requests that have not ended."""
    points: list[Point]
    """One a second; an event of the stream after the first brings the last one only."""
    events: list[ShownEvent]
    """Newest first."""


def admin_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of the page, its data and its stream."""
    _, schemas = msgspec.json.schema_components((Snapshot, Error), ref_template=REF)
    snapshot = {"application/json": {"schema": {"$ref": REF.format(name="Snapshot")}}}
    stream = {"text/event-stream": {"schema": {"type": "string", "description": "`data:` lines, each a Snapshot, once a second"}}}
    page = {"text/html": {"schema": {"type": "string"}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Calculet: dashboard", "version": version,
            "description": "Read-only and without keys: for the hosts of those who operate the fleet.",
        },
        "paths": {
            "/": {"get": _get("The page", page)},
            "/snapshot.json": {"get": _get("What the page shows, now", snapshot)},
            "/events": {"get": _get("The same, live", stream, (*STATUSES, 429))},
            "/openapi.json": {"get": _get("This document", {"application/json": {}})},
        },
        "components": {"schemas": schemas},
    }  # fmt: skip


def _get(summary: str, content: dict[str, Any], statuses: tuple[int, ...] = STATUSES) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": "Success", "content": content}, **errors(*statuses)}}
