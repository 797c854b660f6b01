"""Prometheus collectors built from the catalogue, and the text that a scrape gets."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from calculet_core.metrics import metrics_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLASSES: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Collectors:
    """The component's metrics: `collectors["calculet_router_inflight"].set(3)`.

    Raises:
        KeyError: the catalogue has no such metric for the component.
    """

    def __init__(self, component: str) -> None:
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {}
        for name, metric in metrics_of(component).items():
            extra = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            self._by_name[name] = _CLASSES[metric.kind](name, metric.help, metric.labels, registry=self.registry, **extra)

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def exposition(self) -> bytes:
        """The scrape's text."""
        return generate_latest(self.registry)
