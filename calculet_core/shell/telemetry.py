"""Prometheus collectors built from the catalogue, served on a Unix socket; and merging several processes into one scrape."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from calculet_core.metrics import metrics_of
from calculet_core.shell.doors import UnixServer, serve_unix
from calculet_core.shell.journal import LineFile
from calculet_core.shell.spans import SpanSender

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_EXPOSITION_BYTES = 8 << 20
_CLASSES: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class ProcessCollector(Collector):
    """What this process takes of the machine, read when somebody scrapes; `name` is its label `process`."""

    def __init__(self, name: str) -> None:
        self._name, self._process = name, psutil.Process()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Of prometheus_client."""
        with self._process.oneshot():
            cpu = self._process.cpu_times()
            values = {
                "calculet_process_resident_bytes": self._process.memory_info().rss,
                "calculet_process_cpu_seconds": cpu.user + cpu.system,
                "calculet_process_threads": self._process.num_threads(),
                "calculet_process_open_fds": self._process.num_fds(),
                "calculet_process_max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                "calculet_process_start_timestamp_seconds": self._process.create_time(),
                "calculet_process_journal_lost": LineFile.lost_by_process,
                "calculet_process_spans_queued": SpanSender.queued_by_process,
                "calculet_process_spans_exported": SpanSender.exported_by_process,
                "calculet_process_spans_lost": SpanSender.lost_by_process,
            }
        for name, metric in metrics_of("process").items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.help, labels=metric.labels)
            family.add_metric([self._name], values[name])
            yield family


class Collectors:
    """The component's metrics; `constant` labels (a worker's board) are put on each. The process tells about itself beside them.

    `collectors("calculet_router_errors", code="over_capacity").inc()`; children are kept, so the look-up is one dict access.
    """

    def __init__(self, component: str, **constant: str) -> None:
        self.registry = CollectorRegistry()
        self._constant = constant
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._texts: list[Callable[[], bytes]] = []
        for name, metric in metrics_of(component).items():
            extra = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            labels = (*constant, *metric.labels)
            self._metrics[name] = _CLASSES[metric.kind](name, metric.help, labels, registry=self.registry, **extra)
        # As sockets and logs name it: `supervisor`, `router` or a further router's own name, `worker-BOARD`.
        name = f"worker-{constant['board']}" if component == "worker" else constant.get("router", component)
        self.registry.register(ProcessCollector(name))

    def __call__(self, name: str, **labels: str) -> Any:
        """The child of a metric.

        Raises:
            KeyError: the catalogue has no such metric for the component.
            ValueError: the labels are not the catalogue's.
        """
        key = (name, *labels.values())
        child = self._children.get(key)
        if child is None:
            metric = self._metrics[name]
            child = metric.labels(**self._constant, **labels) if self._constant or labels else metric
            self._children[key] = child
        return child

    def replace(self, name: str, text: Callable[[], bytes]) -> None:
        """Let `text` tell this metric from now on, as the scrape shall have it: where the client's own is too slow."""
        self.registry.unregister(self._metrics.pop(name))
        self._texts.append(text)

    def forget(self, name: str, **labels: str) -> None:
        """A child whose subject is gone: it is not told any more. Nothing when there was none."""
        if self._children.pop((name, *labels.values()), None) is not None:
            self._metrics[name].remove(*self._constant.values(), *labels.values())

    def exposition(self) -> bytes:
        """The scrape's text."""
        return b"".join([generate_latest(self.registry), *(text() for text in self._texts)])


async def serve_metrics(path: Path, exposition: Callable[[], bytes]) -> UnixServer:
    """Answer every connection on the socket with the exposition, then close; mode 0600."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(exposition())
            await writer.drain()
        except OSError:
            pass  # whoever asked has gone, or there is no descriptor left to look with
        finally:
            writer.close()

    return await serve_unix(path, answer)


async def fetch_metrics(path: Path, timeout_s: float = 1.0) -> bytes:
    """Another process's exposition; empty when it does not answer."""

    async def read() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            chunks, size = [], 0
            while chunk := await reader.read(65_536):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_EXPOSITION_BYTES:
                    return b""
            return b"".join(chunks)
        finally:
            writer.close()

    try:
        return await asyncio.wait_for(read(), timeout_s)
    except (OSError, TimeoutError):
        return b""


def merge_expositions(parts: Iterable[bytes]) -> bytes:
    """One valid exposition of several: each family's HELP and TYPE once, its samples together."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for part in parts:
        family = b""
        for line in part.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(family, []).append(line)
    lines = [line for family in heads for line in (*heads[family], *samples.get(family, ()))]
    return b"\n".join(lines) + b"\n"
