"""What tenants used: one record for each request that was let in, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

GROUPS = ("day", "tenant", "key", "model", "outcome")
"""What sums may be grouped by."""


class UsageRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a usage file. A request that one call answers several times over (`choices`) counts its prompt once."""

    at: str
    """When it ended, UTC: 2026-11-30T15:53:51.123Z."""
    request: str
    """Its id, 16 hexadecimal digits; for several choices the first one's."""
    tenant: str
    model: str
    outcome: str
    """`completed`, `failed` or `cancelled` (its client left)."""
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    """From when it was parsed until it ended."""
    key: str | None = None
    """Id of its API key."""
    code: str | None = None
    """Stable code of the error, when it failed."""
    choices: int = 1
    label: str | None = None
    """The client's own `X-Request-Id`."""
    recovered: bool = False
    """Its router was killed; the tokens are what the workers' journals know."""

    @property
    def day(self) -> str:
        """2026-11-30."""
        return self.at[:10]


class UsageSum(msgspec.Struct):
    """Sums of one group."""

    group: tuple[str, ...]
    requests: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    recovered: int = 0

    def add(self, record: UsageRecord) -> None:
        """One more record."""
        self.requests += 1
        self.completed += record.outcome == "completed"
        self.failed += record.outcome == "failed"
        self.cancelled += record.outcome == "cancelled"
        self.prompt_tokens += record.prompt_tokens
        self.generated_tokens += record.generated_tokens
        self.recovered += record.recovered


def sum_usage(records: Iterable[UsageRecord], by: tuple[str, ...]) -> list[UsageSum]:
    """Sums by any of `GROUPS`, in the groups' order. A request id counts once, however often it is there."""
    sums: dict[tuple[str, ...], UsageSum] = {}
    seen: set[str] = set()
    for record in records:
        if record.request in seen:
            continue
        seen.add(record.request)
        group = tuple(str(getattr(record, name) or "-") for name in by)
        if (found := sums.get(group)) is None:
            found = sums[group] = UsageSum(group)
        found.add(record)
    return [sums[group] for group in sorted(sums)]
