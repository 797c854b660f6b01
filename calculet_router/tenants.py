"""Whose request it is, and the limits that only the front door can keep fleet-wide: request rates and actives.

There are no API keys yet: everybody is the tenant `default`, and an Authorization header is accepted and means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from calculet_core.budgets import TokenBucket
from calculet_core.config import TenantConfig
from calculet_core.errors import CalculetError, TenantQuota, TenantRateLimited

DEFAULT = "default"


class Tenants:
    """Configured tenants with what they have used. A rate allows bursts of one second, and at least one request."""

    def __init__(self, configs: Iterable[TenantConfig], now_ns: int) -> None:
        self._configs = {config.name: config for config in configs}
        self._active = dict.fromkeys(self._configs, 0)
        self._rates = {
            name: TokenBucket(config.requests_per_s, max(1.0, config.requests_per_s), now_ns)
            for name, config in self._configs.items()
            if config.requests_per_s is not None
        }

    def identify(self, authorization: bytes | None) -> TenantConfig:
        """The tenant behind an Authorization header."""
        return self._configs[DEFAULT]

    def admit(self, tenant: TenantConfig, requests: int, now_ns: int) -> CalculetError | None:
        """Take one call's rate and its requests' actives, or say which limit is full; `release` gives the actives back."""
        limit, active = tenant.max_active, self._active[tenant.name]
        if limit is not None and active + requests > limit:
            return TenantQuota(f"tenant {tenant.name!r}: {active} of {limit} requests are active (max_active)")
        rate = self._rates.get(tenant.name)
        if rate is not None and not rate.take(now_ns):
            message = f"tenant {tenant.name!r}: more than {rate.per_s:g} requests/s (requests_per_s)"
            return TenantRateLimited(message, retry_after_s=rate.wait_s(now_ns))
        self._active[tenant.name] = active + requests
        return None

    def release(self, tenant: TenantConfig, requests: int) -> None:
        """Actives of an ended call."""
        self._active[tenant.name] -= requests
