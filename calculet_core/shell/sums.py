"""Counters and histograms for loops that serve: plain numbers, which a scrape carries over or reads.

A Prometheus child costs a microsecond and more to touch, a lock among others; one of these a fraction of that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

from calculet_core.metrics import metrics_of
from calculet_core.shell.telemetry import Collectors

Labels = tuple[str, ...]
"""Values of a metric's labels, in the catalogue's order."""


class Sums:
    """Counters of the catalogue, by name and label values."""

    def __init__(self, component: str, collectors: Collectors) -> None:
        self._collectors = collectors
        self._labels = {name: metric.labels for name, metric in metrics_of(component).items()}
        self.grown: defaultdict[tuple[str, Labels], float] = defaultdict(int)
        """By how much since the last `settle`; add to it: `sums.grown[name, (value, ...)] += 1`."""

    def settle(self) -> None:
        """Carry everything over to the collectors.

        Raises:
            KeyError: the catalogue has no such metric.
            ValueError: it has other labels.
        """
        for (name, values), amount in self.grown.items():
            self._collectors(name, **dict(zip(self._labels[name], values, strict=True))).inc(amount)
        self.grown.clear()


class Histogram:
    """A histogram of the catalogue, cheap to observe and to tell; it replaces the registry's own. `constant`: labels of them all.

    A scrape is on the loop that serves: lines are made once for each set of labels, and a scrape only puts numbers behind them.
    """

    def __init__(self, component: str, name: str, collectors: Collectors, constant: Mapping[str, str]) -> None:
        metric = metrics_of(component)[name]
        self._name, self._bounds, self._labels, self._constant = name, metric.buckets, metric.labels, constant
        self._head = f"# HELP {name} {metric.help}\n# TYPE {name} histogram\n".encode()
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lines: dict[Labels, bytes] = {}
        collectors.replace(name, self.text)

    def observe(self, labels: Labels, value: float) -> None:
        """One more."""
        counts = self._counts.get(labels)
        if counts is None:
            self._lines[labels] = self._template(labels)
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of all buckets but the last, which has none."""
        return self._bounds

    def sums(self) -> tuple[int, ...]:
        """All labels together, by bucket."""
        return tuple(map(sum, zip(*self._counts.values(), strict=True))) or (0,) * (len(self._bounds) + 1)

    def text(self) -> bytes:
        """As a scrape shows it."""
        parts = [self._head]
        for labels, counts in self._counts.items():
            running = tuple(accumulate(counts))
            parts.append(self._lines[labels] % (*running, running[-1], repr(self._sums[labels]).encode()))
        return b"".join(parts)

    def _template(self, values: Labels) -> bytes:
        """The lines of one set of labels, with places for its numbers. Aliases and names need no quoting."""

        def line(suffix: str, **more: str) -> str:
            labels = {**dict(zip(self._labels, values, strict=True)), **self._constant, **more}
            inner = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items())).replace("%", "%%")
            return f"{self._name}{suffix}{{{inner}}} "

        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        lines = [line("_bucket", le=bound) + "%d.0\n" for bound in bounds]
        return "".join([*lines, line("_count") + "%d.0\n", line("_sum") + "%b\n"]).encode()
