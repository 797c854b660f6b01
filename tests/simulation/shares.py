"""What tenants are owed and what they may take: fairness within its bound, actives and rates within their limits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from calculet_core.clock import S
from calculet_core.config import TenantConfig

RATE_WINDOW_NS = 30 * S


class FairShares:
    """Self-clocked fair queueing bounds how far two tenants that both wait can drift apart: by one request of each (Golestani 1994).

    Service is what `FairQueue` charges: prompt and asked output, by weight. Measured over spans in which both have a waiting request at
    every look, from each admission of a board's generation to the next. A request that leaves the queue unserved (cancelled, expired) was
    charged for all the same when it came; by so much its tenant may fall behind.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._served: dict[str, float] = defaultdict(float)
        self._largest: dict[str, float] = defaultdict(float)
        self._waiting: frozenset[str] = frozenset()
        self._since: dict[tuple[str, str], tuple[float, float, float]] = {}
        self._unserved: dict[str, float] = defaultdict(float)
        self.looks = 0

    def left(self, tenant: str, cost: float) -> None:
        """A waiting request is gone without a lane."""
        self._unserved[tenant] += cost / self._weights[tenant]

    def admitted(self, tenant: str, cost: float, waiting: Mapping[str, float]) -> str | None:
        """A lane went to `tenant` while those in `waiting` have requests in the queue, each with the cost of its largest. What was
        unfair, in words."""
        normal = cost / self._weights[tenant]
        both = waiting.keys() & self._waiting
        self._served[tenant] += normal
        self._largest[tenant] = max(self._largest[tenant], normal)
        for one, largest in waiting.items():
            self._largest[one] = max(self._largest[one], largest / self._weights[one])
        self._waiting = frozenset(waiting)
        unfair = None
        for one in sorted(both):
            for other in sorted(both):
                if one >= other:
                    continue
                unserved = self._unserved[one] + self._unserved[other]
                start = self._since.setdefault((one, other), (self._served[one], self._served[other], unserved))
                apart = abs((self._served[one] - start[0]) - (self._served[other] - start[1]))
                bound = 2 * (self._largest[one] + self._largest[other]) + unserved - start[2]
                self.looks += 1
                if apart > bound:
                    unfair = f"{one} and {other} both waited and are {apart:.0f} apart, at most {bound:.0f} is fair"
        self._since = {pair: start for pair, start in self._since.items() if pair[0] in both and pair[1] in both}
        return unfair


class TenantLimits:
    """What the fleet may let in of each tenant: so many requests at once, and so many calls in a while, whichever routers do."""

    def __init__(self, tenants: Iterable[TenantConfig]) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._active: Counter[tuple[int, str]] = Counter()
        self._calls: dict[str, list[int]] = defaultdict(list)

    def accepted(self, router: int, name: str, now_ns: int, first: bool, alive: Iterable[int]) -> str | None:
        """A request was let in by one of the routers `alive`, the first of its call or another. What was not kept, in words."""
        tenant = self._tenants[name]
        self._active[router, name] += 1
        active = sum(self._active[one, name] for one in alive)
        if tenant.max_active is not None and active > tenant.max_active:
            return f"{active} requests of {name} at once, {tenant.max_active} allowed"
        if tenant.requests_per_s is None or not first:
            return None
        calls = self._calls[name] = [at for at in self._calls[name] if at > now_ns - RATE_WINDOW_NS] + [now_ns]
        burst = max(1.0, tenant.requests_per_s)
        for place, since in enumerate(calls):
            allowed = burst + tenant.requests_per_s * (now_ns - since) / S + 1e-6
            if len(calls) - place > allowed:
                return f"{len(calls) - place} calls of {name} within {(now_ns - since) / S:.2f} s, {allowed:.2f} allowed"
        return None

    def ended(self, router: int, name: str) -> None:
        """One of them is over."""
        self._active[router, name] -= 1
