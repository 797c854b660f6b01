"""Weighted fair queueing of waiting requests (scheduling §5.3).

    cost = prompt_tokens + cost_decode_weight * max_new_tokens
    virtual_finish = max(tenant's virtual time, global virtual time) + cost / weight

Within a line finish times only grow, so lines are first-in-first-out and a heap holds their heads. A tenant has one line, and a
second one for long prompts, of which only `max_long` may be in prefill at once (§6: what cannot be cut is held back by a quota);
those that wait for that hold up nobody else, their own tenant's short ones included. Global time is the finish time of what was
last taken (self-clocked), so a tenant that was idle starts at the present: idleness earns nothing. A tenant at its
`max_active` leaves the heap until one of its requests ends. What a tenant lets wait is taken from a ledger that all boards share.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from calculet_core.config import TenantConfig
from calculet_core.errors import TenantQuota
from calculet_core.limits import Limits, LocalLimits
from calculet_core.requests import SequenceState


class Line:
    """Requests of one tenant that are served in order."""

    __slots__ = ("long", "requests", "tenant", "version")

    def __init__(self, tenant: Tenant, long: bool) -> None:
        self.tenant, self.long = tenant, long
        self.requests: OrderedDict[int, SequenceState] = OrderedDict()
        self.version = 0

    def head(self) -> SequenceState:
        """The oldest waiting request of a line that is not empty."""
        return next(iter(self.requests.values()))


class Tenant:
    """One tenant's lines and limits."""

    __slots__ = ("active", "lines", "max_active", "max_waiting_tokens", "name", "virtual_time", "waiting_tokens")

    def __init__(self, name: str, config: TenantConfig | None) -> None:
        self.name = name
        self.limit(config)
        self.lines = (Line(self, False), Line(self, True))
        self.active = self.waiting_tokens = 0
        self.virtual_time = 0.0

    def limit(self, config: TenantConfig | None) -> None:
        """What it may; None: it is not configured."""
        self.max_active = config.max_active if config else None
        self.max_waiting_tokens = config.max_waiting_tokens if config else None

    @property
    def may_start(self) -> bool:
        """Below `max_active`."""
        return self.max_active is None or self.active < self.max_active


class TenantShown(NamedTuple):
    """One tenant for metrics."""

    active: int
    waiting_tokens: int
    virtual_lag: float
    """Virtual finish of what it would start next, less global virtual time; grows while others are served before it."""


class FairQueue:
    """Requests that wait for a lane. Weights come from the control plane, never from a request's parameters.

    A prompt of more than `long_above` tokens is long; None for `max_long`: as many as there are lanes. `limits` is the ledger of
    waiting tokens; None: this board is alone.
    """

    def __init__(
        self,
        tenants: Iterable[TenantConfig],
        cost_decode_weight: float,
        long_above: int = 0,
        max_long: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._configs = {tenant.name: tenant for tenant in tenants}
        self._tenants: dict[str, Tenant] = {}
        self._heads: list[tuple[float, str, bool, int]] = []
        """(virtual finish, tenant, long, version): stale when the version is not the line's."""
        self._decode_weight = cost_decode_weight
        self._long_above, self._max_long = long_above, max_long
        self._long: set[int] = set()
        """Sequences with a long prompt that have a lane and no token yet."""
        self._limits: Limits = LocalLimits() if limits is None else limits
        self._counted: set[int] = set()
        """Waiting sequences whose tokens were taken from the ledger."""
        self._now = 0.0
        self._count = self._tokens = self._versions = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    @property
    def virtual_time(self) -> float:
        """Global virtual time."""
        return self._now

    def take_tenants(self, tenants: Iterable[TenantConfig]) -> None:
        """Other weights and limits from now on. What waits keeps its place; what is active runs on, above a smaller limit, too."""
        self._configs = {tenant.name: tenant for tenant in tenants}
        for tenant in self._tenants.values():
            tenant.limit(self._configs.get(tenant.name))
            for line in tenant.lines:
                self._offer(line)

    # ---------------------------------------------------------------- arrival
    def take_quota(self, seq: SequenceState, prompt_tokens: int) -> TenantQuota | None:
        """Take what the sequence will let wait, until it leaves the queue; or why its tenant may not let so much more wait."""
        tenant = seq.tenant
        limit = self._tenant(tenant).max_waiting_tokens
        if limit is None:
            return None
        if self._limits.take(tenant, prompt_tokens, limit):
            self._counted.add(seq.seq_id)
            return None
        wait = self._limits.total(tenant)
        return TenantQuota(f"tenant {tenant}: {wait} prompt tokens wait and {prompt_tokens} more would pass its limit of {limit}")

    def may_start(self, tenant: str, prompt_tokens: int) -> bool:
        """Whether the tenant is below its `max_active`, and the quota of long prompts allows one of that size."""
        return self._may_start(self._line(tenant, prompt_tokens))

    def stamp(self, tenant: str, weight: float, prompt_tokens: int, max_new_tokens: int) -> float:
        """The virtual finish time of a request that arrives now."""
        state, config = self._tenant(tenant), self._configs.get(tenant)
        cost = prompt_tokens + self._decode_weight * max_new_tokens
        state.virtual_time = max(state.virtual_time, self._now) + cost / (config.weight if config else weight)
        return state.virtual_time

    def push(self, seq: SequenceState) -> None:
        """A stamped request joins its line."""
        line = self._line(seq.tenant, seq.prompt_tokens)
        line.requests[seq.seq_id] = seq
        line.tenant.waiting_tokens += seq.prompt_tokens
        self._tokens += seq.prompt_tokens
        self._count += 1
        if len(line.requests) == 1:
            self._offer(line)

    # ---------------------------------------------------------------- departure
    def head(self) -> SequenceState | None:
        """Whose turn it is among those that may start; None when nobody may."""
        while self._heads:
            _, name, long, version = self._heads[0]
            tenant = self._tenants.get(name)
            if tenant is not None and version == tenant.lines[long].version:
                return tenant.lines[long].head()
            heapq.heappop(self._heads)
        return None

    def take(self, seq: SequenceState) -> None:
        """The head was given a lane."""
        self._now = max(self._now, seq.virtual_finish_time)
        line = self._line(seq.tenant, seq.prompt_tokens)
        line.tenant.active += 1
        if line.long:
            self._long.add(seq.seq_id)
        self.remove(seq)
        if not line.tenant.may_start:
            self._offer(line.tenant.lines[not line.long])
        if line.long and self._long_full:
            self._offer_long()

    def remove(self, seq: SequenceState) -> None:
        """A waiting request leaves: taken, cancelled, expired or refused."""
        line = self._line(seq.tenant, seq.prompt_tokens)
        was_head = line.head() is seq
        del line.requests[seq.seq_id]
        line.tenant.waiting_tokens -= seq.prompt_tokens
        if seq.seq_id in self._counted:
            self._counted.remove(seq.seq_id)
            self._limits.give(seq.tenant, seq.prompt_tokens)
        self._tokens -= seq.prompt_tokens
        self._count -= 1
        if was_head or not self._may_start(line):
            self._offer(line)

    def prefilled(self, seq: SequenceState) -> None:
        """An active request's prompt is in KV."""
        if seq.seq_id in self._long:
            was_full = self._long_full
            self._long.remove(seq.seq_id)
            if was_full:
                self._offer_long()

    def ended(self, seq: SequenceState) -> None:
        """An active request has ended."""
        self.prefilled(seq)
        tenant = self._tenants[seq.tenant]
        could = tenant.may_start
        tenant.active -= 1
        if not could:
            for line in tenant.lines:
                self._offer(line)
        idle = not tenant.active and not any(line.requests for line in tenant.lines)
        if idle and tenant.name not in self._configs and tenant.virtual_time <= self._now:
            del self._tenants[tenant.name]  # nothing of it is left to remember

    @property
    def _long_full(self) -> bool:
        return self._max_long is not None and len(self._long) >= self._max_long

    def _may_start(self, line: Line) -> bool:
        return line.tenant.may_start and not (line.long and self._long_full)

    def _offer(self, line: Line) -> None:
        """Put the line's head into the heap if it may start; earlier entries of the line become stale."""
        self._versions += 1
        line.version = self._versions
        if line.requests and self._may_start(line):
            heapq.heappush(self._heads, (line.head().virtual_finish_time, line.tenant.name, line.long, line.version))

    def _offer_long(self) -> None:
        for tenant in self._tenants.values():
            if tenant.lines[True].requests:
                self._offer(tenant.lines[True])

    def _tenant(self, name: str) -> Tenant:
        if (tenant := self._tenants.get(name)) is None:
            tenant = self._tenants[name] = Tenant(name, self._configs.get(name))
        return tenant

    def _line(self, tenant: str, prompt_tokens: int) -> Line:
        return self._tenant(tenant).lines[self._max_long is not None and prompt_tokens > self._long_above]

    # ---------------------------------------------------------------- views
    @property
    def long_prefills(self) -> int:
        """Long prompts that have a lane and no token yet; counted only where they are limited."""
        return len(self._long)

    def waiting(self) -> Iterator[SequenceState]:
        """Every waiting request, tenant by tenant, each line in order."""
        for tenant in list(self._tenants.values()):
            for line in tenant.lines:
                yield from list(line.requests.values())

    def oldest_ns(self) -> int | None:
        """Since when the longest-waiting request waits."""
        lines = (line for tenant in self._tenants.values() for line in tenant.lines if line.requests)
        return min((line.head().waiting_since_ns for line in lines), default=None)

    def shown(self) -> dict[str, TenantShown]:
        """Every tenant that is configured or has something here."""
        found = {name: self._tenant(name) for name in self._configs} | self._tenants
        return {name: self._shown(tenant) for name, tenant in found.items()}

    def _shown(self, tenant: Tenant) -> TenantShown:
        heads = [line.head().virtual_finish_time for line in tenant.lines if line.requests]
        return TenantShown(tenant.active, tenant.waiting_tokens, min(heads) - self._now if heads else 0.0)

    def active(self, tenant: str) -> int:
        """The tenant's requests that hold a lane."""
        return self._tenant(tenant).active
