"""The dashboard: one page and its live data, read-only, on an address of its own (`router.admin_listen`).

Data leaves once a second as a server-sent event, to whoever looks; the supervisor and its journal are asked only then. Without a
supervisor the page shows what this router knows by itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import msgspec

from calculet_core.config import RouterConfig
from calculet_core.errors import MethodNotAllowed, NotFound, OverCapacity
from calculet_core.history import FLEET_VIEW_PUBLISHED, Event
from calculet_core.shell.build import build
from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import Fleet
from calculet_router.dispatch import Dispatcher
from calculet_router.openapi_admin import admin_document
from calculet_router.samples import Reading, Samples
from calculet_router.shell.exchange import Exchange
from calculet_router.shell.http_server import HttpServer
from calculet_router.shell.telemetry import RouterTelemetry

SECOND_S = 1.0
MAX_VIEWERS = 32
STATUS_TIMEOUT_S = 2.0
EVENTS = 40
TAIL_BYTES = 65_536
HEADERS = (
    b"cache-control: no-store\r\nreferrer-policy: no-referrer\r\nx-content-type-options: nosniff\r\nx-frame-options: DENY\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    b"img-src data:\r\n"
)
log = logging.getLogger("calculet.dashboard")
_encode = msgspec.json.Encoder().encode


class App(Protocol):
    """What the dashboard needs of the process."""

    fleet: Fleet
    config: RouterConfig
    name: str
    dispatcher: Dispatcher
    telemetry: RouterTelemetry


class Dashboard:
    """Call `tick` once a second."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._samples = Samples(app.telemetry.first_bounds_s)
        self._viewers: set[Exchange] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._telling: asyncio.Task[None] | None = None
        self._page = files("calculet_router").joinpath("web/dashboard.html").read_bytes()
        self._document = _encode(admin_document(build()["version"] or ""))
        limits = msgspec.structs.replace(app.config, max_connections=4 * MAX_VIEWERS, max_body_bytes=1024)
        self._server = HttpServer(limits, self._handle, self._gone, lambda _: None, lambda _: None)

    async def listen(self, sock: socket.socket) -> None:
        """Serve on a bound socket."""
        await self._server.listen([sock])

    def close(self) -> None:
        """Cut everybody."""
        self._server.stop_listening()
        self._server.abort()
        for task in self._tasks:
            task.cancel()

    def tick(self) -> None:
        """Take a reading; tell it to whoever looks."""
        app = self._app
        telemetry, dispatcher = app.telemetry, app.dispatcher
        generated = telemetry.generated + dispatcher.running_tokens()
        counts = telemetry.first_counts()
        self._samples.add(Reading(time.time(), telemetry.requests, telemetry.failed, generated, dispatcher.inflight, counts))
        if self._viewers and (self._telling is None or self._telling.done()):
            self._telling = self._spawn(self._tell())

    async def snapshot(self, history: bool) -> dict[str, Any]:
        """All that the page shows; with `history` all points of the charts, else the last."""
        status, events = await asyncio.to_thread(self._ask)
        app, points = self._app, list(self._samples.points)
        roster = app.dispatcher.roster
        return {
            "now_s": time.time(),
            "router": app.name,
            "version": build()["version"],
            "status": status,
            "view": {"version": roster.version, "boards": roster.view.boards, "aliases": roster.view.aliases},
            "links": roster.links(),
            "tenants": dict(app.dispatcher.tenants.active),
            "points": points if history else points[-1:],
            "events": events,
        }

    def _ask(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """On a thread: the supervisor's status, and its last words."""
        fleet = self._app.fleet
        try:
            status = call(fleet.control_socket, "status", timeout_s=STATUS_TIMEOUT_S)
        except ControlError:
            status = None
        return status, last_events(fleet.journal("supervisor"))

    # ---------------------------------------------------------------- HTTP
    def _handle(self, exchange: Exchange) -> None:
        path = exchange.target.partition(b"?")[0]
        if exchange.method not in (b"GET", b"HEAD"):
            exchange.fail(MethodNotAllowed("this page only shows"), b"allow: GET, HEAD\r\n")
        elif path == b"/":
            exchange.respond(200, self._page, b"text/html; charset=utf-8", HEADERS)
        elif path == b"/snapshot.json":
            self._spawn(self._answer(exchange))
        elif path == b"/openapi.json":
            exchange.respond(200, self._document, headers=HEADERS)
        elif path == b"/events" and exchange.method == b"GET":
            if len(self._viewers) >= MAX_VIEWERS:
                exchange.fail(OverCapacity(f"{MAX_VIEWERS} pages are open"))
            else:
                exchange.begin_stream()
                exchange.owner = self
                self._spawn(self._greet(exchange))
        else:
            exchange.fail(NotFound("there is only the page here: /"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the dashboard failed", exc_info=error)

    async def _answer(self, exchange: Exchange) -> None:
        exchange.respond(200, _encode(await self.snapshot(history=True)), headers=HEADERS)

    async def _greet(self, exchange: Exchange) -> None:
        exchange.stream(b"retry: 1000\n\ndata: %b\n\n" % _encode(await self.snapshot(history=True)))
        if not exchange.finished:
            self._viewers.add(exchange)

    async def _tell(self) -> None:
        data = b"data: %b\n\n" % _encode(await self.snapshot(history=False))
        for exchange in list(self._viewers):
            exchange.stream(data)

    def _gone(self, exchange: Exchange, reason: str, code: str | None) -> None:
        self._viewers.discard(exchange)


def last_events(journal: Path) -> list[dict[str, Any]]:
    """The last lines of the supervisor's journal, newest first."""
    try:
        with journal.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()[1 if size > TAIL_BYTES else 0 :]
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in reversed(lines):
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError:
            continue
        if event.event == FLEET_VIEW_PUBLISHED:  # follows everything else
            continue
        if len(found) == EVENTS:
            break
        found.append({"event": event.event, "board": event.board, "wall": event.wall, "data": event.data})
    return found
