"""An OpenTelemetry collector in this process: keeps what it is sent, or refuses it."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass
class Seen:
    """One span as it came over the wire."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None


@dataclass
class Collector:
    url: str
    spans: list[Seen] = field(default_factory=list)
    status: int = 200
    posts: int = 0

    def trace(self, trace_id: str) -> list[Seen]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def named(self, trace_id: str) -> dict[str, list[Seen]]:
        """Spans of a trace by name, each in the order of its start."""
        found: dict[str, list[Seen]] = defaultdict(list)
        for span in sorted(self.trace(trace_id), key=lambda span: span.start_ns):
            found[span.name].append(span)
        return dict(found)


@contextmanager
def a_collector() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def value(any_value: Any) -> Any:
        return getattr(any_value, any_value.WhichOneof("value"))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            collector.posts += 1
            if collector.status == 200 and self.path == "/v1/traces":
                keep(ExportTraceServiceRequest.FromString(body))
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    def keep(message: Any) -> None:
        for resource in message.resource_spans:
            of = {one.key: value(one.value) for one in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                collector.spans.append(
                    Seen(
                        of["service.name"], of["service.instance.id"], span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                        KINDS[span.kind], span.start_time_unix_nano, span.end_time_unix_nano, {one.key: value(one.value) for one in span.attributes},
                        span.status.message if span.status.code == 2 else None,
                    )
                )  # fmt: skip

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
