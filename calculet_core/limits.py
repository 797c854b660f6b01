"""What a tenant's requests may use together, however many processes serve them (scheduling §5.3).

`Limits` is a ledger. Whoever lets a request in takes its amount first and gives it back at the end, and what all holders have taken
is never above the limit. A rate is one number for all, the moment at which everything taken so far is earned again (the generic
cell rate algorithm), so a crash leaves nothing half written. `LocalLimits` is the ledger of a process that is alone;
`shell/limits` is the one that the processes of a host share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from calculet_core.clock import S


@dataclass(frozen=True, slots=True)
class Rate:
    """`per_s` with bursts of up to `burst`, at least 1: in any time t at most `burst + t * per_s` are taken.

    `due_ns` is when everything taken so far is earned again. One that is further off than a burst can have put it was written by a
    clock that is no more, and counts as an empty burst.
    """

    per_s: float
    burst: float

    def take(self, due_ns: int, now_ns: int) -> int | None:
        """When everything will be earned again once one more is taken now; None: it is not there yet."""
        due_ns = self._start(due_ns, now_ns) + round(S / self.per_s)
        return due_ns if due_ns <= now_ns + self._burst_ns else None

    def level(self, due_ns: int, now_ns: int) -> float:
        """How much may be taken at once."""
        return self.burst - (self._start(due_ns, now_ns) - now_ns) * self.per_s / S

    def wait_s(self, due_ns: int, now_ns: int) -> float:
        """Seconds until one will be there; 0 when it is."""
        return max(0, self._start(due_ns, now_ns) + round(S / self.per_s) - now_ns - self._burst_ns) / S

    @property
    def _burst_ns(self) -> int:
        return round(self.burst * S / self.per_s)

    def _start(self, due_ns: int, now_ns: int) -> int:
        return min(max(due_ns, now_ns), now_ns + self._burst_ns)


class Limits(Protocol):
    """One quantity of each tenant, and each tenant's rate."""

    def take(self, tenant: str, amount: int, limit: int) -> bool:
        """Take `amount` when all holders together then have at most `limit`; False: nothing was taken."""
        ...

    def give(self, tenant: str, amount: int) -> None:
        """Give back what this holder took.

        Raises:
            ValueError: it has not taken so much.
        """
        ...

    def total(self, tenant: str) -> int:
        """What all holders have taken. Where there are others it is at once out of date, and may count twice what one gives back
        while another takes it; `take` never does."""
        ...

    def take_rate(self, tenant: str, rate: Rate, now_ns: int) -> bool:
        """Take one of the tenant's rate, if it is there. `now_ns` is the host's CLOCK_MONOTONIC."""
        ...

    def due_ns(self, tenant: str) -> int:
        """When the tenant's rate is whole again; in the past when it is."""
        ...


class LocalLimits:
    """The ledger of one process; also that of several holders in one, as in the simulation."""

    __slots__ = ("_due_ns", "_taken")

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._due_ns: dict[str, int] = {}

    def take(self, tenant: str, amount: int, limit: int) -> bool:
        """See `Limits`."""
        taken = self._taken.get(tenant, 0) + amount
        if taken > limit:
            return False
        self._taken[tenant] = taken
        return True

    def give(self, tenant: str, amount: int) -> None:
        """See `Limits`."""
        left = self._taken.get(tenant, 0) - amount
        if left < 0:
            raise ValueError(f"tenant {tenant}: {amount} given back, {left + amount} were taken")
        self._taken[tenant] = left

    def total(self, tenant: str) -> int:
        """See `Limits`."""
        return self._taken.get(tenant, 0)

    def take_rate(self, tenant: str, rate: Rate, now_ns: int) -> bool:
        """See `Limits`."""
        due_ns = rate.take(self.due_ns(tenant), now_ns)
        if due_ns is None:
            return False
        self._due_ns[tenant] = due_ns
        return True

    def due_ns(self, tenant: str) -> int:
        """See `Limits`."""
        return self._due_ns.get(tenant, -(1 << 62))
