"""How long a job should take, from what jobs took: decides its time limit and what its class is charged in advance."""

from __future__ import annotations

from calculet_core.clock import MS, S
from calculet_core.config import ExecutorConfig

SMOOTHING = 0.2
UNMEASURED_LIMIT_NS = 60 * S
"""Limit of the first job of a kind: a cold board may be slow once."""


class Durations:
    """A moving average of device time per decode profile and per prompt token, in nanoseconds."""

    __slots__ = ("_decode", "_factor", "_floor_ns", "_per_token")

    def __init__(self, config: ExecutorConfig) -> None:
        self._factor, self._floor_ns = config.job_timeout_factor, config.job_timeout_min_ms * MS
        self._decode: dict[int, float] = {}
        self._per_token: float | None = None

    def decode_ns(self, compiled_batch: int) -> int | None:
        """What a step of that profile should take; None before the first."""
        value = self._decode.get(compiled_batch)
        return None if value is None else int(value)

    def prefill_ns(self, tokens: int) -> int | None:
        """What so many prompt tokens should take; None before the first."""
        return None if self._per_token is None else int(self._per_token * tokens)

    def limit_ns(self, expected_ns: int | None) -> int:
        """After how long a job with that expectation is given up (rc 13)."""
        if expected_ns is None:
            return max(UNMEASURED_LIMIT_NS, self._floor_ns)
        return max(self._floor_ns, int(expected_ns * self._factor))

    def saw_decode(self, compiled_batch: int, took_ns: int) -> None:
        """A step has ended."""
        before = self._decode.get(compiled_batch)
        self._decode[compiled_batch] = took_ns if before is None else before + SMOOTHING * (took_ns - before)

    def saw_prefill(self, tokens: int, took_ns: int) -> None:
        """A prefill has ended."""
        value, before = took_ns / tokens, self._per_token
        self._per_token = value if before is None else before + SMOOTHING * (value - before)


def backoff_ns(executor: ExecutorConfig, failures: int) -> int:
    """The pause after rc 17: it doubles."""
    return int(executor.busy_backoff_ms * MS * 2 ** (failures - 1))
