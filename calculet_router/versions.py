"""What a router counts of each artifact while an alias has two of them: the evidence that a canary is judged by.

A failure is what a server can be blamed for (5xx), and a request that had to leave the artifact because its workers were lost.
Times go into buckets that can be added up over routers.
"""

from __future__ import annotations

from calculet_core.wire import VersionReport, bucket_of

KEPT = 8
"""Artifacts; the one that was counted longest ago goes first."""
_MS = 1_000_000


class Tally:
    """Counts by artifact digest; they only grow."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, tuple[list[int], dict[int, int], dict[int, int]]] = {}

    def add(self, digest: str, failed: bool, accepted_ns: int, first_ns: int | None, ended_ns: int, tokens: int) -> None:
        """One request ended."""
        counts = self._counts.pop(digest, None) or ([0, 0], {}, {})
        self._counts[digest] = counts
        while len(self._counts) > KEPT:
            del self._counts[next(iter(self._counts))]
        sums, first, between = counts
        sums[0] += 1
        sums[1] += failed
        if failed or first_ns is None:
            return
        _count(first, (first_ns - accepted_ns) / _MS)
        if tokens > 1:
            _count(between, (ended_ns - first_ns) / _MS / (tokens - 1))

    def reports(self) -> list[VersionReport]:
        """For the supervisor."""
        return [
            VersionReport(digest, sums[0], sums[1], dict(first), dict(between))
            for digest, (sums, first, between) in self._counts.items()
        ]


def _count(buckets: dict[int, int], ms: float) -> None:
    bucket = bucket_of(ms)
    buckets[bucket] = buckets.get(bucket, 0) + 1
