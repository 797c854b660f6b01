"""The router's HTTP interface: which path does what, and the reply of a call.

Model calls go to the dispatcher and are answered when it says so; everything else is answered here and now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from calculet_core.errors import CalculetError, MethodNotAllowed, NoReadyWorker, NotFound, ShuttingDown, UnsupportedMediaType
from calculet_core.shell.build import build
from calculet_core.shell.telemetry import CONTENT_TYPE
from calculet_core.tracing import TraceContext, parse_traceparent
from calculet_core.wire import PROTOCOL, AliasView, BoardView, Piece
from calculet_router import events
from calculet_router.actions import Ticket
from calculet_router.dispatch import Dispatcher
from calculet_router.fleet import Worker
from calculet_router.lookups import Question, parse_detokenize, parse_tokenize
from calculet_router.openai import Call, parse_chat, parse_switch, parse_text, parse_timeout_ms
from calculet_router.openapi import document
from calculet_router.shell.exchange import Exchange
from calculet_router.shell.spans import Spans
from calculet_router.sse import Answer, make_answer
from calculet_router.tenants import Identity

PARSERS: dict[bytes, Callable[[bytes], Call]] = {b"/v1/chat/completions": parse_chat, b"/v1/completions": parse_text}
QUESTIONS: dict[bytes, Callable[[bytes], Question]] = {b"/tokenize": parse_tokenize, b"/detokenize": parse_detokenize}
MODELS = b"/v1/models"
DEVICE_VERSIONS = ("device", "serial_hash", "runtime", "driver", "firmware", "power_mode")
TIMING = b"x-calculet-timing"
TRACEPARENT = b"traceparent"
GET_HEAD = (b"GET", b"HEAD")
_encode = msgspec.json.Encoder().encode


class App(Protocol):
    """What endpoints need of the process."""

    dispatcher: Dispatcher
    spans: Spans | None
    draining: bool
    """SIGTERM was heard: what open connections bring is still served."""
    closed: bool
    """The drain is over."""

    def feed(self, event: events.Event) -> None:
        """Tell the dispatcher and do what it wants."""
        ...

    def count_error(self, error: CalculetError) -> None:
        """An error that never became a call."""
        ...

    def count_lookup(self, kind: str, outcome: str) -> None:
        """The end of a question about tokens."""
        ...

    async def exposition(self) -> bytes:
        """The whole fleet's metrics."""
        ...


class Reply:
    """One call's answer on its way to its exchange: what the dispatcher calls the owner."""

    __slots__ = ("_answer", "_call", "_exchange", "_ticket")

    def __init__(self, exchange: Exchange, call: Call) -> None:
        self._exchange, self._call = exchange, call
        self._answer: Answer | None = None
        self._ticket: Ticket | None = None
        if call.stream:
            exchange.begin_stream()
        exchange.owner = self

    def open(self, ticket: Ticket) -> None:
        """The call has an id; a client that gave none learns ours."""
        self._ticket = self._exchange.ticket = ticket
        if self._exchange.label is None:
            self._exchange.label = ticket.name.encode()

    def admit(self) -> None:
        """No status but 200 is to be expected: a silent stream may be kept alive."""
        self._exchange.may_ping = True

    def deliver(self, index: int, piece: Piece) -> None:
        """Tokens of a choice, or its end."""
        answer, exchange, call = self._answer, self._exchange, self._call
        if answer is None:
            ticket = self._ticket
            assert ticket is not None
            self._answer = answer = make_answer(call, ticket.name, ticket.created_s, ticket.digest)
        data = answer.add(index, piece)
        if call.stream:
            if data:
                exchange.stream(data)
            if piece.finish is not None and answer.ended:
                exchange.end_stream()
        elif data:
            exchange.respond(200, data)

    def restart(self, index: int) -> None:
        """A choice moved to another worker."""
        if self._answer is not None:
            self._answer.restart(index)

    def fail(self, error: CalculetError) -> None:
        """The call failed."""
        self._exchange.fail(error)


class Told:
    """The owner of a question about tokens."""

    __slots__ = ("_app", "_exchange", "_kind")

    def __init__(self, exchange: Exchange, kind: str, app: App) -> None:
        self._exchange, self._kind, self._app = exchange, kind, app

    def tell(self, body: bytes) -> None:
        """The answer."""
        self._app.count_lookup(self._kind, "answered")
        self._exchange.respond(200, body)

    def fail(self, error: CalculetError) -> None:
        """There is none."""
        self._app.count_lookup(self._kind, "failed")
        self._app.count_error(error)
        self._exchange.fail(error)


class Endpoints:
    """Answers exchanges."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()
        self._get: dict[bytes, Callable[[Exchange], None]] = {
            MODELS: self._models,
            b"/health": self._health,
            b"/livez": lambda exchange: exchange.respond(200, b'{"status":"ok"}'),
            b"/readyz": self._readyz,
            b"/version": self._version,
            b"/metrics": self._metrics,
            b"/openapi.json": self._openapi,
        }
        self._document = b""

    def handle(self, exchange: Exchange) -> None:
        """One parsed message."""
        parser = PARSERS.get(exchange.target)
        if parser is not None and exchange.method == b"POST":
            self._call(exchange, parser)
            return
        path = _path(exchange.target)
        if path in PARSERS or path in QUESTIONS:
            if exchange.method != b"POST":
                self._wrong_method(exchange, b"POST")
            elif path in PARSERS:
                self._call(exchange, PARSERS[path])
            else:
                self._question(exchange, path)
            return
        answer = self._get.get(path)
        if answer is None and path.startswith(MODELS + b"/") and len(path) > len(MODELS) + 1:
            answer = self._model
        if answer is None and exchange.method == b"CONNECT":
            self._wrong_method(exchange, b"GET, HEAD, POST")
        elif answer is None:
            self._fail(exchange, NotFound(f"there is no {path[:128].decode('ascii', 'replace')} here"))
        elif exchange.method not in GET_HEAD:
            self._wrong_method(exchange, b"GET, HEAD")
        else:
            answer(exchange)

    # ---------------------------------------------------------------- calls
    def _call(self, exchange: Exchange, parse: Callable[[bytes], Call]) -> None:
        headers, app = exchange.headers, self._app
        began_ns, trace = time.monotonic_ns(), self._context(headers)
        if app.closed:
            self._refuse(exchange, ShuttingDown("the router is shutting down"), trace, began_ns)
            return
        now_s = time.time()
        identity = app.dispatcher.tenants.identify(headers.get(b"authorization"), now_s)
        if not isinstance(identity, Identity):
            self._refuse(exchange, identity, trace, began_ns)
            return
        try:
            call = parse(_plain(exchange))
            timeout = headers.get(b"x-request-timeout-ms")
            timeout_ms = None if timeout is None else parse_timeout_ms(timeout)
            if TIMING in headers and parse_switch(headers[TIMING], "X-Calculet-Timing"):
                call = msgspec.structs.replace(call, timing=True)
        except CalculetError as error:
            self._refuse(exchange, error, trace, began_ns, identity)
            return
        exchange.body = b""
        if call.stream and (full := exchange.connection.server.no_stream_left()):
            self._refuse(exchange, full, trace, began_ns, identity, call.model)
            return
        label = None if exchange.label is None else exchange.label.decode()
        app.feed(events.CallArrived(Reply(exchange, call), call, int(now_s), identity, timeout_ms, label, trace))

    def _context(self, headers: dict[bytes, bytes]) -> TraceContext | None:
        if self._app.spans is not None:
            return self._app.spans.context(headers.get(TRACEPARENT))
        return parse_traceparent(headers[TRACEPARENT]) if TRACEPARENT in headers else None

    def _refuse(
        self, exchange: Exchange, error: CalculetError, trace: TraceContext | None, began_ns: int,
        identity: Identity | None = None, model: str | None = None,
    ) -> None:  # fmt: skip
        """A call that never became one: its answer, and its span where calls have spans."""
        spans, headers = self._app.spans, b""
        if trace is not None:
            headers = b"traceparent: %b\r\n" % trace.text().encode()
            if spans is not None:
                tenant = None if identity is None else identity.tenant.name
                label = None if exchange.label is None else exchange.label.decode()
                spans.refused(trace, error, began_ns, time.monotonic_ns(), model=model, tenant=tenant, label=label)
        self._unknown(exchange, error, headers)

    def _question(self, exchange: Exchange, path: bytes) -> None:
        if (identity := self._who(exchange)) is None:
            return
        try:
            question = QUESTIONS[path](_plain(exchange))
        except CalculetError as error:
            self._fail(exchange, error)
            return
        exchange.body = b""
        self._app.feed(events.LookupAsked(Told(exchange, path[1:].decode(), self._app), question, identity))

    def _unknown(self, exchange: Exchange, error: CalculetError, headers: bytes = b"") -> None:
        """A 401 says how to do better."""
        self._fail(exchange, error, headers + (b"www-authenticate: Bearer\r\n" if error.http_status == 401 else b""))

    def _who(self, exchange: Exchange) -> Identity | None:
        """Who asks; None when that was answered with an error."""
        identity = self._app.dispatcher.tenants.identify(exchange.headers.get(b"authorization"), time.time())
        if isinstance(identity, Identity):
            return identity
        self._unknown(exchange, identity)
        return None

    def _fail(self, exchange: Exchange, error: CalculetError, headers: bytes = b"") -> None:
        self._app.count_error(error)
        if error.http_status == 415:
            headers += b"accept-encoding: identity\r\n"
        exchange.fail(error, headers)

    def _wrong_method(self, exchange: Exchange, allowed: bytes) -> None:
        method = exchange.method.decode("ascii", "replace")
        self._fail(exchange, MethodNotAllowed(f"{method} is not allowed here"), b"allow: %b\r\n" % allowed)

    # ---------------------------------------------------------------- what is served
    def _models(self, exchange: Exchange) -> None:
        if (identity := self._who(exchange)) is None:
            return
        dispatcher = self._app.dispatcher
        views = [view for view in dispatcher.aliases.views() if not dispatcher.tenants.forbids(identity.tenant, view.alias)]
        data = [self._describe(view) for view in views if self._boards(view) or view.parks]
        exchange.respond(200, _encode({"object": "list", "data": data}))

    def _model(self, exchange: Exchange) -> None:
        if (identity := self._who(exchange)) is None:
            return
        name = unquote(_path(exchange.target)[len(MODELS) + 1 :].decode("latin-1"))
        found = self._app.dispatcher.aliases.resolve(name)
        if forbidden := self._app.dispatcher.tenants.forbids(identity.tenant, name):
            self._fail(exchange, forbidden)
        elif isinstance(found, CalculetError):
            self._fail(exchange, found)
        elif not self._boards(found) and not found.parks:
            self._fail(exchange, NoReadyWorker(f"no worker is ready to serve {name!r}"))
        else:
            exchange.respond(200, _encode(self._describe(found)))

    def _boards(self, view: AliasView) -> int:
        return len(self._app.dispatcher.roster.eligible(view.alias, view.digest))

    def _describe(self, view: AliasView) -> dict[str, Any]:
        workers = self._app.dispatcher.roster.eligible(view.alias, view.digest)
        return {
            "id": view.alias,
            "object": "model",
            "created": view.created,
            "owned_by": "calculet",
            "max_model_len": view.max_model_len,
            "calculet": {
                "artifact": view.artifact,
                "digest": view.digest,
                "calbin_sha256": view.calbin_sha256,
                "profiles": view.profiles,
                "capability": view.capability,
                "backend": view.backend,
                "state": "ready" if workers else "waits",
                "generations": {worker.board: worker.view.generation for worker in workers},
            },
        }

    # ---------------------------------------------------------------- how it is
    def _health(self, exchange: Exchange) -> None:
        ready = self._app.dispatcher.ready()
        if ready:
            exchange.respond(200, _encode({"status": "ok", "ready_boards": ready}))
        else:
            self._fail(exchange, NoReadyWorker("no generation is ready"))

    def _readyz(self, exchange: Exchange) -> None:
        if self._app.draining:
            self._fail(exchange, ShuttingDown("the router is shutting down"))
        else:
            self._health(exchange)

    def _version(self, exchange: Exchange) -> None:
        roster = self._app.dispatcher.roster
        body = {
            **build(),
            "protocol": PROTOCOL,
            "view_version": roster.version if roster.version >= 0 else None,
            "boards": [self._board(board, roster.find(board.board, board.epoch)) for board in roster.view.boards],
        }
        exchange.respond(200, _encode(body))

    def _openapi(self, exchange: Exchange) -> None:
        self._document = self._document or _encode(document(str(build()["version"])))
        exchange.respond(200, self._document)

    @staticmethod
    def _board(view: BoardView, worker: Worker | None) -> dict[str, Any]:
        """A board with its device's versions, as its worker told them when it greeted this router."""
        hello = worker.hello if worker is not None else None
        return {
            "board": view.board, "epoch": view.epoch, "generation": view.generation, "digest": view.digest, "alias": view.alias,
            "state": view.state, "device": dict.fromkeys(DEVICE_VERSIONS) | (hello.versions if hello else {}),
            "chips": hello.chips if hello else None,
        }  # fmt: skip

    def _metrics(self, exchange: Exchange) -> None:
        async def answer() -> None:
            exchange.respond(200, await self._app.exposition(), CONTENT_TYPE.encode())

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _plain(exchange: Exchange) -> bytes:
    """The body, which must not be compressed.

    Raises:
        UnsupportedMediaType: it is.
    """
    coding = exchange.headers.get(b"content-encoding", b"identity")
    if coding.lower() not in (b"identity", b""):
        name = coding[:32].decode("ascii", "replace")
        raise UnsupportedMediaType(f"Content-Encoding: bodies in {name} are not taken, only plain ones", param="Content-Encoding")
    return exchange.body


def _path(target: bytes) -> bytes:
    """The path of a request target: without its query, and without scheme and host where a proxy left them."""
    path = target.partition(b"?")[0]
    if path.startswith(b"/"):
        return path
    try:
        return urlsplit(path).path or b"/"
    except ValueError:
        return b"/"
