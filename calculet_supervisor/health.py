"""Is a worker well? Judged by progress, not by a ping: a loop that answers while its board hangs is not well.

Starting, loading and serving have budgets of their own, so that a slow load is never taken for silence and silence never for a
slow load. A worker hangs when jobs are in flight and its step counter has not moved for `hang_timeout_ms`.
"""

from __future__ import annotations

from calculet_core.clock import MS
from calculet_core.config import SupervisionConfig
from calculet_core.states.model_generation import ModelState
from calculet_core.wire import WorkerReport

LOADING = frozenset(state.name for state in (ModelState.VALIDATING, ModelState.CONFIGURING, ModelState.WARMING))
SERVING = frozenset(state.name for state in (ModelState.READY, ModelState.DRAINING))


class Health:
    """One life of a worker, from its spawn (or its adoption) on."""

    __slots__ = ("_busy_ns", "_config", "_deaf_ns", "_heard_ns", "_load_ns", "_start_ns", "_steps", "serving_ns")

    def __init__(self, config: SupervisionConfig, now_ns: int) -> None:
        self._config, self._start_ns = config, now_ns
        self._heard_ns: int | None = None
        self._deaf_ns = 0
        """How long nobody listened since then."""
        self._steps = -1
        self._busy_ns: int | None = None
        self._load_ns: int | None = None
        self.serving_ns: int | None = None
        """Since when it serves; None while it does not."""

    def hear(self, report: WorkerReport, at_ns: int, now_ns: int) -> None:
        """Take the newest report, heard at `at_ns`."""
        if at_ns != self._heard_ns:
            self._heard_ns, self._deaf_ns = at_ns, 0
        if report.inflight == 0:
            self._busy_ns = None
        elif self._busy_ns is None or report.steps != self._steps:
            self._busy_ns = at_ns
        self._steps = report.steps
        if report.state not in LOADING:
            self._load_ns = None
        elif self._load_ns is None:
            self._load_ns = now_ns
        if report.state not in SERVING:
            self.serving_ns = None
        elif self.serving_ns is None:
            self.serving_ns = now_ns

    def overslept(self, by_ns: int) -> None:
        """Whoever listens stood still for so long, and cannot tell whether the worker was silent meanwhile."""
        self._start_ns += by_ns
        self._deaf_ns += by_ns
        if self._busy_ns is not None:
            self._busy_ns += by_ns
        if self._load_ns is not None:
            self._load_ns += by_ns

    def complaint(self, now_ns: int) -> str | None:
        """Why the worker must be replaced, in words; None while it is well."""
        config = self._config
        if self._heard_ns is None:
            return _over("no first report", now_ns - self._start_ns, config.startup_timeout_ms)
        busy_ns = 0 if self._busy_ns is None else now_ns - self._busy_ns
        loading_ns = 0 if self._load_ns is None else now_ns - self._load_ns
        return (
            _over("no heartbeat", now_ns - self._heard_ns - self._deaf_ns, config.heartbeat_timeout_ms)
            or _over("jobs in flight and no step", busy_ns, config.hang_timeout_ms)
            or _over("the load did not end", loading_ns, config.load_timeout_ms)
        )


def _over(what: str, passed_ns: int, limit_ms: int) -> str | None:
    return f"{what} within {limit_ms} ms" if passed_ns > limit_ms * MS else None
