"""Sends finished spans to an OpenTelemetry collector (OTLP over HTTP), from a thread of its own.

Whoever makes spans only appends to a bounded queue: what does not fit is dropped and counted, and so is what no collector took.
Needs the extra `otel`, which is imported here and nowhere else, when `tracing.endpoint` is set.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from calculet_core.config import TracingConfig
from calculet_core.errors import ConfigError
from calculet_core.shell.build import build
from calculet_core.tracing import Span

CLOSE_S = 2.0
"""For the last spans when the process ends."""
PATH = "/v1/traces"
log = logging.getLogger("calculet.spans")


class SpanSender:
    """`send` hands one span (a value of the SDK) or more to a collector and says whether it took them."""

    exported_by_process: ClassVar[int] = 0
    lost_by_process: ClassVar[int] = 0
    """Told by `calculet_process_spans_exported_total` and `_lost_total`."""
    queued_by_process: ClassVar[int] = 0

    def __init__(self, config: TracingConfig, send: Callable[[Sequence[Span]], bool]) -> None:
        self._config, self._send = config, send
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._ending = False
        self._good = True
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, spans: Iterable[Span]) -> None:
        """Queue finished spans; never waits."""
        queue = self._queue
        for span in spans:
            if len(queue) >= self._config.max_queue:
                SpanSender.lost_by_process += 1
            else:
                queue.append(span)
        SpanSender.queued_by_process = len(queue)
        if len(queue) >= self._config.batch:
            self._wake.set()

    def close(self) -> None:
        """Send what is left, within a moment; the rest is lost."""
        self._ending = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._ending or self._queue:
            self._wake.wait(self._config.interval_ms / 1000)
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._config.batch))]
                self._deliver(batch)
                SpanSender.queued_by_process = len(self._queue)

    def _deliver(self, batch: Sequence[Span]) -> None:
        try:
            good = self._send(batch)
        except Exception as error:  # a collector's answer is somebody else's bytes: nothing of it may end this thread
            log.debug("spans were not taken: %s", error)
            good = False
        if good:
            SpanSender.exported_by_process += len(batch)
        else:
            SpanSender.lost_by_process += len(batch)
        if good is not self._good:
            self._good = good
            words = "takes spans again" if good else "takes no spans; they are counted as lost"
            log.log(logging.INFO if good else logging.WARNING, "the collector at %s %s", self._config.endpoint, words)


def check_tracing(config: TracingConfig) -> None:
    """Whether spans could be sent at all.

    Raises:
        ConfigError: the extra is not installed.
    """
    if config.endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"$.tracing.endpoint: {error.name} is not installed: pip install 'calculet[otel]'") from None


def open_sender(config: TracingConfig, service: str, **attributes: str) -> SpanSender | None:
    """The process's sender; None while tracing is off. `attributes` tell the process from others of its service.

    Raises:
        ConfigError: the extra is not installed.
    """
    check_tracing(config)
    return SpanSender(config, _otlp(config, service, attributes)) if config.endpoint is not None else None


def _otlp(config: TracingConfig, service: str, attributes: dict[str, str]) -> Callable[[Sequence[Span]], bool]:
    """A function that sends spans with OpenTelemetry's own exporter."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    for name in ("opentelemetry", "urllib3"):  # said once, by us
        logging.getLogger(name).setLevel(logging.CRITICAL)
    endpoint = config.endpoint or ""
    whole = endpoint if endpoint.partition("://")[2].count("/") else endpoint + PATH
    exporter = OTLPSpanExporter(endpoint=whole, timeout=config.timeout_ms / 1000)
    version = str(build()["version"])
    resource = Resource.create({"service.name": service, "service.namespace": "calculet", "service.version": version, **attributes})
    scope = InstrumentationScope("calculet", version)
    kinds = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}

    def context(trace_id: str, span_id: str) -> SpanContext:
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def convert(span: Span, offset_ns: int) -> Any:
        parent = None if span.parent is None else context(span.trace_id, span.parent)
        status = Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error)
        return ReadableSpan(
            span.name, context(span.trace_id, span.span_id), parent, resource, span.attributes, kind=kinds[span.kind],
            status=status, start_time=span.start_ns + offset_ns, end_time=span.end_ns + offset_ns, instrumentation_scope=scope,
        )  # fmt: skip

    def send(spans: Sequence[Span]) -> bool:
        offset_ns = time.time_ns() - time.monotonic_ns()
        return bool(exporter.export([convert(span, offset_ns) for span in spans]) is SpanExportResult.SUCCESS)

    return send
