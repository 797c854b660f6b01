"""The router's counters.

A Prometheus child costs microseconds to touch, so a request only adds to plain numbers here. `settle` carries sums over before a
scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping

from msgspec.structs import fields

from calculet_core.clock import S
from calculet_core.config import RouterConfig
from calculet_core.errors import CalculetError
from calculet_core.metrics import CONCURRENCY_CLASSES, OUTPUT_CLASSES, PROMPT_CLASSES
from calculet_core.shell.sums import Histogram
from calculet_core.shell.telemetry import Collectors
from calculet_router import actions

FIRST = "router"
"""Name of a fleet's first router. Metrics of further ones carry the label `router`."""
OTHER = "other"
"""Label of a model that is not ours: labels come from a closed set."""
CLIENT_LEFT = "499"
"""Status label of a call whose client left before an answer."""


class RouterTelemetry:
    """Counts what actions report."""

    def __init__(self, config: RouterConfig, name: str = FIRST) -> None:
        constant = {} if name == FIRST else {"router": name}
        self.collectors = Collectors("router", **constant)
        self.requests = self.failed = self.resent = self.generated = 0
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._tenants: dict[tuple[str, str], list[int]] = {}
        """(tenant, outcome) -> requests, prompt tokens, generated tokens."""
        self._others: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._first = Histogram("router", "calculet_router_ttft_seconds", self.collectors, constant)
        self._between = Histogram("router", "calculet_router_tpot_seconds", self.collectors, constant)
        self._whole = Histogram("router", "calculet_router_e2e_seconds", self.collectors, constant)
        self.take_limits(config)

    def take_limits(self, config: RouterConfig) -> None:
        """Show what holds."""
        for field in fields(config):
            value = getattr(config, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.collectors("calculet_router_limit", limit=field.name).set(value)

    def ended(self, action: actions.Ended, model: str, concurrency: int = 1) -> None:
        """A call's end; `concurrency`: requests that were in flight until then, its own among them."""
        error = action.error
        status = str(error.http_status) if error is not None else "200" if action.outcome == "completed" else CLIENT_LEFT
        self._ended[model, action.outcome, status] += 1
        self.requests += 1
        sums = self._tenants.get((action.tenant, action.outcome))
        if sums is None:
            sums = self._tenants[action.tenant, action.outcome] = [0, 0, 0]
        sums[0] += 1
        sums[1] += action.prompt_tokens
        sums[2] += action.generated_tokens
        self.generated += action.generated_tokens
        if error is not None:
            self.failed += 1
            self.error(error)
            self.count("calculet_router_tenant_refusals", tenant=action.tenant, code=error.code)
        if action.prompt_tokens:
            self._tokens["calculet_router_prompt_tokens", model] += action.prompt_tokens
        if action.generated_tokens:
            self._tokens["calculet_router_generated_tokens", model] += action.generated_tokens
        if action.outcome == "completed":
            classes = (model, _prompt(action.prompt_tokens), _output(action.generated_tokens), _concurrency(concurrency))
            if action.first_ns is not None:
                self._first.observe(classes, (action.first_ns - action.accepted_ns) / S)
                if action.choices == 1 and action.generated_tokens > 1:
                    self._between.observe(classes, (action.ended_ns - action.first_ns) / S / (action.generated_tokens - 1))
            self._whole.observe(classes, (action.ended_ns - action.accepted_ns) / S)

    def error(self, error: CalculetError) -> None:
        """An error that a client got."""
        self.count("calculet_router_errors", code=error.code)

    def limited(self, limit: str) -> None:
        """A limit of the configuration took effect."""
        self.count("calculet_router_limit_hits", limit=limit)

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Any other counter of the catalogue."""
        self._others[name, tuple(labels.items())] += amount

    def resend(self, reason: str) -> None:
        """An attempt beyond the first."""
        self.resent += 1
        self.count("calculet_router_resends", reason=reason)

    @property
    def first_bounds_s(self) -> tuple[float, ...]:
        """Upper bounds of the buckets of `first_counts`; the last has none."""
        return self._first.bounds

    def first_counts(self) -> tuple[int, ...]:
        """Times to the first token of all models, by bucket."""
        return self._first.sums()

    def settle(self) -> None:
        """Carry everything over to the collectors."""
        collectors = self.collectors
        for (model, outcome, status), amount in self._ended.items():
            collectors("calculet_router_requests", model=model, outcome=outcome, status=status).inc(amount)
        for (name, model), amount in self._tokens.items():
            collectors(name, model=model).inc(amount)
        for (name, labels), amount in self._others.items():
            collectors(name, **dict(labels)).inc(amount)
        for (tenant, outcome), (requests, prompts, generated) in self._tenants.items():
            collectors("calculet_router_tenant_requests", tenant=tenant, outcome=outcome).inc(requests)
            collectors("calculet_router_tenant_tokens", tenant=tenant, kind="prompt").inc(prompts)
            collectors("calculet_router_tenant_tokens", tenant=tenant, kind="generated").inc(generated)
        for kept in (self._ended, self._tokens, self._others, self._tenants):
            kept.clear()


def _classifier(classes: Mapping[int | None, str]) -> Callable[[int], str]:
    bounds, labels = [bound for bound in classes if bound is not None], list(classes.values())
    return lambda value: labels[bisect_left(bounds, value)]


_prompt, _output, _concurrency = map(_classifier, (PROMPT_CLASSES, OUTPUT_CLASSES, CONCURRENCY_CLASSES))
