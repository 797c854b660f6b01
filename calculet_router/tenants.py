"""Whose request it is, and the limits that the front door keeps for the whole fleet: request rates, actives, allowed aliases.

While there is no key file everybody is the tenant `default`, and an Authorization header means nothing. From the first key on every
call needs one, and goes on needing one when the last key is revoked. What a tenant may do is the configuration's word, never the
request's. Rates and actives are taken from a ledger that all routers share (`calculet_core.limits`), so a limit holds however many
of them serve.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from calculet_core.config import TenantConfig
from calculet_core.errors import CalculetError, InvalidApiKey, PermissionDenied, TenantQuota, TenantRateLimited
from calculet_core.keys import KeyFile, hash_key
from calculet_core.limits import Limits, LocalLimits, Rate

DEFAULT = "default"
BEARER = b"bearer "
HOW = "send it as 'Authorization: Bearer KEY'"


class Identity(NamedTuple):
    """A tenant, and the id of the key that says so."""

    tenant: TenantConfig
    key: str | None = None


class _Holder(NamedTuple):
    """What a key's hash stands for."""

    found: Identity | CalculetError
    expires_s: float


class Tenants:
    """Configured tenants with what they have used, and the keys. A rate allows bursts of one second, and at least one request.

    `limits` is the ledger of actives and rates; None: this router is alone.
    """

    def __init__(self, configs: Iterable[TenantConfig], require_keys: bool = False, limits: Limits | None = None) -> None:
        self.active: dict[str, int] = {}
        """Requests by tenant that this router let in and that have not ended."""
        self._limits: Limits = LocalLimits() if limits is None else limits
        self._keys: KeyFile | None = None
        self._holders: dict[bytes, _Holder] | None = None
        self.keys_version = 0
        self.take_configs(configs, require_keys)

    # ---------------------------------------------------------------- the configuration
    def take_configs(self, configs: Iterable[TenantConfig], require_keys: bool = False) -> None:
        """Other tenants, weights and limits from now on. What was let in runs on, above a smaller limit, too; of a rate that
        changes, what is owed already is owed still."""
        self._configs = {config.name: config for config in configs}
        self.anonymous = Identity(self._configs[DEFAULT])
        self.active = {name: active for name, active in self.active.items() if active or name in self._configs}
        for name in self._configs:
            self.active.setdefault(name, 0)
        self._rates = {
            name: Rate(config.requests_per_s, max(1.0, config.requests_per_s))
            for name, config in self._configs.items()
            if config.requests_per_s is not None
        }
        self._has_headers = {name for name, config in self._configs.items() if name in self._rates or config.max_active is not None}
        self._require_keys = require_keys
        self.take_keys(self._keys)

    # ---------------------------------------------------------------- keys
    def take_keys(self, keys: KeyFile | None) -> None:
        """Another version of the key file is in force; without a file nobody needs a key."""
        self._keys = keys
        if keys is None:
            self._holders, self.keys_version = ({} if self._require_keys else None), 0
            return
        holders = {}
        for record in keys.keys:
            if record.revoked_s is not None:
                continue
            tenant = self._configs.get(record.tenant)
            found: Identity | CalculetError = (
                PermissionDenied(f"the key's tenant {record.tenant!r} is not configured here")
                if tenant is None
                else Identity(tenant, record.id)
            )
            expires_s = float("inf") if record.expires_s is None else float(record.expires_s)
            holders[bytes.fromhex(record.sha256)] = _Holder(found, expires_s)
        self._holders, self.keys_version = holders, keys.version

    def accepted_keys(self, now_s: float) -> int:
        """Keys that open the door now; `now_s` is UTC."""
        return sum(now_s < holder.expires_s for holder in (self._holders or {}).values())

    def identify(self, authorization: bytes | None, now_s: float) -> Identity | CalculetError:
        """Who asks, by an Authorization header; `now_s` is UTC. No answer ever contains anything of a key."""
        holders = self._holders
        if holders is None:
            return self.anonymous
        if not authorization:
            return InvalidApiKey(f"an API key is needed: {HOW}")
        if authorization[:7].lower() != BEARER:
            return InvalidApiKey(f"the Authorization header holds no API key: {HOW}")
        holder = holders.get(hash_key(authorization[7:].strip()))
        if holder is None or now_s >= holder.expires_s:
            return InvalidApiKey("the API key is not valid: it is wrong, was revoked or has expired")
        return holder.found

    # ---------------------------------------------------------------- limits
    def forbids(self, tenant: TenantConfig, model: str) -> CalculetError | None:
        """Why the tenant may not use this alias, whether or not there is such a one."""
        if not tenant.models or model in tenant.models:
            return None
        message = f"tenant {tenant.name!r} may not use the model {model[:128]!r} (it may use: {', '.join(tenant.models)})"
        return PermissionDenied(message, param="model")

    def admit(self, tenant: TenantConfig, requests: int, now_ns: int) -> CalculetError | None:
        """Take one call's rate and its requests' actives, or say which limit is full; `release` gives the actives back."""
        limit, name = tenant.max_active, tenant.name
        if limit is not None and not self._limits.take(name, requests, limit):
            return TenantQuota(f"tenant {name!r}: {self._limits.total(name)} of {limit} requests are active (max_active)")
        if error := self.take_rate(tenant, now_ns):
            if limit is not None:
                self._limits.give(name, requests)
            return error
        self.active[name] = self.active.get(name, 0) + requests
        return None

    def take_rate(self, tenant: TenantConfig, now_ns: int) -> CalculetError | None:
        """Take one call of the tenant's rate."""
        rate = self._rates.get(tenant.name)
        if rate is None or self._limits.take_rate(tenant.name, rate, now_ns):
            return None
        message = f"tenant {tenant.name!r}: more than {rate.per_s:g} requests/s (requests_per_s)"
        return TenantRateLimited(message, retry_after_s=rate.wait_s(self._limits.due_ns(tenant.name), now_ns))

    def release(self, tenant: TenantConfig, requests: int) -> None:
        """Actives of an ended call."""
        self.active[tenant.name] -= requests
        if tenant.max_active is not None:
            self._limits.give(tenant.name, requests)
        if not self.active[tenant.name] and tenant.name not in self._configs:
            del self.active[tenant.name]  # the last of a tenant that is configured no more

    def headers(self, tenant: TenantConfig, now_ns: int) -> bytes:
        """`x-ratelimit-*` lines: what the tenant may still ask for right now, and when its rate is whole again."""
        name = tenant.name
        if name not in self._has_headers:
            return b""
        lines = b""
        if (rate := self._rates.get(name)) is not None:
            level = rate.level(self._limits.due_ns(name), now_ns)
            lines = b"x-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %d\r\n" % (rate.burst, level)
            lines += b"x-ratelimit-reset-requests: %.3fs\r\n" % ((rate.burst - level) / rate.per_s)
        if (limit := tenant.max_active) is not None:
            left = max(0, limit - self._limits.total(name))
            lines += b"x-ratelimit-limit-active: %d\r\nx-ratelimit-remaining-active: %d\r\n" % (limit, left)
        return lines
