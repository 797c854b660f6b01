"""The router's side of tracing: which calls are traced, and spans of what its journal is told."""

from __future__ import annotations

import secrets

from calculet_core.config import TracingConfig
from calculet_core.errors import CalculetError
from calculet_core.history import Event
from calculet_core.shell.journal import Journal
from calculet_core.shell.spans import SpanSender, open_sender
from calculet_core.tracing import TraceContext, chosen, parse_traceparent
from calculet_router.spans import RouterSpans, refused_span


class Spans:
    """Stands before the journal: what is written there is also looked at."""

    def __init__(self, sender: SpanSender, config: TracingConfig, journal: Journal) -> None:
        self._sender, self._ratio, self._write = sender, config.sample_ratio, journal.append
        self._spans = RouterSpans()

    def context(self, header: bytes | None) -> TraceContext:
        """The span of a call that has just come: in its client's trace, or in one of its own."""
        client = parse_traceparent(header) if header is not None else None
        span_id = secrets.token_hex(8)
        if client is not None:
            return TraceContext(client.trace_id, span_id, client.sampled, client.span_id, own=True)
        trace_id = secrets.token_hex(16)
        return TraceContext(trace_id, span_id, chosen(trace_id, self._ratio), own=True)

    def append(self, event: Event) -> None:
        """Journal it, and send the spans that it ends."""
        self._write(event)
        if event.request is not None and (found := self._spans.see(event)):
            self._sender.add(found)

    def refused(
        self, trace: TraceContext, error: CalculetError, start_ns: int, end_ns: int, *, model: str | None = None,
        tenant: str | None = None, label: str | None = None,
    ) -> None:  # fmt: skip
        """The one span of a call that was refused at the door."""
        if trace.own and trace.sampled:
            self._sender.add([refused_span(trace, error, start_ns, end_ns, model, tenant, label)])

    def close(self) -> None:
        """Send what is left."""
        self._sender.close()


def open_spans(config: TracingConfig, name: str, journal: Journal) -> Spans | None:
    """None while tracing is off.

    Raises:
        ConfigError: the extra is not installed.
    """
    sender = open_sender(config, "calculet-router", **{"service.instance.id": name})
    return None if sender is None else Spans(sender, config, journal)
