"""When a worker that died is started again, and when no more.

The first restarts follow at once or nearly (full jitter), later ones back off. A windowed budget bounds them; when it is spent the
worker is quarantined and tried once in a long while (half open), until it has served for a stable period or an operator says
otherwise. A wrong configuration (exit 78) is not tried again: starting does not mend it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from calculet_core.budgets import Backoff, WindowBudget
from calculet_core.clock import MS, S
from calculet_core.config import RestartConfig
from calculet_core.errors import ExitCode


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows a death: try again at `retry_ns`; None: only an operator's word brings it back."""

    quarantine: bool
    retry_ns: int | None


class Restarts:
    """One board's restart budget. Spends survive a restart of the supervisor: hand them back as `spends`."""

    __slots__ = ("_backoff", "_budget", "_config", "_half_open", "_rng", "failures")

    def __init__(self, config: RestartConfig, rng: random.Random, spends: Iterable[int] = ()) -> None:
        self._config, self._rng = config, rng
        self._backoff = Backoff(config.backoff_base_ms * MS, config.backoff_max_ms * MS)
        self._budget = WindowBudget(config.max_restarts, int(config.window_s * S), spends)
        self._half_open = False
        self.failures = 0
        """Deaths since the last stable period."""

    def died(self, code: int | None, now_ns: int) -> Verdict:
        """A worker died that should not have."""
        self.failures += 1
        if code == ExitCode.CONFIG:
            return Verdict(True, None)
        if self._half_open or not self._budget.left(now_ns):
            later_ns = now_ns + int(self._config.half_open_after_s * S)
            return Verdict(True, max(later_ns, self._budget.next_ns(now_ns)))
        return Verdict(False, now_ns + self._backoff.delay_ns(self.failures, self._rng))

    def spend(self, now_ns: int, half_open: bool = False) -> None:
        """An automatic start happens now; `half_open` ones come out of quarantine and get a single try."""
        self._budget.spend(now_ns)
        self._half_open = self._half_open or half_open

    @property
    def half_open(self) -> bool:
        """A life out of quarantine that has not served for the stable period yet: its death costs the long time again."""
        return self._half_open

    def half_opened(self) -> None:
        """An earlier supervisor left the worker in quarantine, or let it try once."""
        self._half_open = True

    def serving(self, since_ns: int, now_ns: int) -> None:
        """It serves since `since_ns`; after the stable period everything is forgiven."""
        if (self.failures or self._half_open) and now_ns - since_ns >= self._config.stable_after_s * S:
            self.forgive()

    def forgive(self) -> None:
        """A stable period, or an operator's word: failures and spends are forgotten."""
        self.failures, self._half_open = 0, False
        self._budget.clear()

    def left(self, now_ns: int) -> int:
        """Automatic restarts that the window still allows."""
        return self._budget.left(now_ns)
