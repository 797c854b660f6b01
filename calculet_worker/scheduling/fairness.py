"""Weighted fair queueing of waiting requests (scheduling §5.3).

    cost = prompt_tokens + cost_decode_weight * max_new_tokens
    virtual_finish = max(tenant's virtual time, global virtual time) + cost / weight

Within a tenant finish times only grow, so each tenant is a first-in-first-out line and a heap holds the lines' heads. Global time
is the finish time of what was last taken (self-clocked), so a tenant that was idle starts at the present: idleness earns
nothing. A tenant at its `max_active` leaves the heap until one of its requests ends, and holds up nobody else.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from calculet_core.config import TenantConfig
from calculet_core.errors import TenantQuota
from calculet_core.requests import SequenceState


class Tenant:
    """One tenant's line and limits."""

    __slots__ = ("active", "line", "max_active", "max_waiting_tokens", "name", "version", "virtual_time", "waiting_tokens")

    def __init__(self, name: str, config: TenantConfig | None, version: int) -> None:
        self.name = name
        self.max_active = config.max_active if config else None
        self.max_waiting_tokens = config.max_waiting_tokens if config else None
        self.line: OrderedDict[int, SequenceState] = OrderedDict()
        self.active = self.waiting_tokens = 0
        self.version = version
        self.virtual_time = 0.0

    @property
    def may_start(self) -> bool:
        """Below `max_active`."""
        return self.max_active is None or self.active < self.max_active

    def head(self) -> SequenceState:
        """The oldest waiting request of a line that is not empty."""
        return next(iter(self.line.values()))


class FairQueue:
    """Requests that wait for a lane. Weights come from the control plane, never from a request's parameters."""

    def __init__(self, tenants: Iterable[TenantConfig], cost_decode_weight: float) -> None:
        self._configs = {tenant.name: tenant for tenant in tenants}
        self._tenants: dict[str, Tenant] = {}
        self._heads: list[tuple[float, str, int]] = []
        """(virtual finish, tenant, version): stale when the version is not the tenant's."""
        self._decode_weight = cost_decode_weight
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

    # ---------------------------------------------------------------- arrival
    def over_quota(self, tenant: str, prompt_tokens: int) -> TenantQuota | None:
        """Why this tenant may not let so many more prompt tokens wait."""
        state = self._tenant(tenant)
        limit = state.max_waiting_tokens
        if limit is None or state.waiting_tokens + prompt_tokens <= limit:
            return None
        return TenantQuota(
            f"tenant {tenant}: {state.waiting_tokens} prompt tokens wait and {prompt_tokens} more would pass its limit of {limit}"
        )

    def may_start(self, tenant: str) -> bool:
        """Whether the tenant is below its `max_active`."""
        return self._tenant(tenant).may_start

    def stamp(self, tenant: str, weight: float, prompt_tokens: int, max_new_tokens: int) -> float:
        """The virtual finish time of a request that arrives now."""
        state, config = self._tenant(tenant), self._configs.get(tenant)
        cost = prompt_tokens + self._decode_weight * max_new_tokens
        state.virtual_time = max(state.virtual_time, self._now) + cost / (config.weight if config else weight)
        return state.virtual_time

    def push(self, seq: SequenceState) -> None:
        """A stamped request joins its tenant's line."""
        state = self._tenant(seq.tenant)
        state.line[seq.seq_id] = seq
        state.waiting_tokens += seq.prompt_tokens
        self._tokens += seq.prompt_tokens
        self._count += 1
        if len(state.line) == 1:
            self._offer(state)

    # ---------------------------------------------------------------- departure
    def head(self) -> SequenceState | None:
        """Whose turn it is among tenants that may start one; None when nobody may."""
        while self._heads:
            _, name, version = self._heads[0]
            state = self._tenants.get(name)
            if state is not None and version == state.version:
                return state.head()
            heapq.heappop(self._heads)
        return None

    def take(self, seq: SequenceState) -> None:
        """The head was given a lane."""
        self._now = max(self._now, seq.virtual_finish_time)
        self._tenants[seq.tenant].active += 1
        self.remove(seq)

    def remove(self, seq: SequenceState) -> None:
        """A waiting request leaves: taken, cancelled, expired or refused."""
        state = self._tenants[seq.tenant]
        was_head = state.head() is seq
        del state.line[seq.seq_id]
        state.waiting_tokens -= seq.prompt_tokens
        self._tokens -= seq.prompt_tokens
        self._count -= 1
        if was_head or not state.may_start:
            self._offer(state)

    def ended(self, tenant: str) -> None:
        """One of the tenant's active requests has ended."""
        state = self._tenants[tenant]
        could = state.may_start
        state.active -= 1
        if not could:
            self._offer(state)
        if not state.line and not state.active and tenant not in self._configs and state.virtual_time <= self._now:
            del self._tenants[tenant]  # nothing of it is left to remember

    def _offer(self, state: Tenant) -> None:
        """Put the line's head into the heap if it may start; earlier entries of the tenant become stale."""
        self._versions += 1
        state.version = self._versions
        if state.line and state.may_start:
            heapq.heappush(self._heads, (state.head().virtual_finish_time, state.name, state.version))

    def _tenant(self, name: str) -> Tenant:
        if (state := self._tenants.get(name)) is None:
            state = self._tenants[name] = Tenant(name, self._configs.get(name), self._versions)
        return state

    # ---------------------------------------------------------------- views
    def waiting(self) -> Iterator[SequenceState]:
        """Every waiting request, tenant by tenant, each line in order."""
        for state in list(self._tenants.values()):
            yield from list(state.line.values())

    def oldest_ns(self) -> int | None:
        """Since when the longest-waiting request waits."""
        return min((state.head().waiting_since_ns for state in self._tenants.values() if state.line), default=None)

    def active(self, tenant: str) -> int:
        """The tenant's requests that hold a lane."""
        return self._tenant(tenant).active
