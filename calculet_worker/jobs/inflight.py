"""Jobs that the device has, or is about to get: at most two, in separate banks, and no sequence in both (scheduling §14).

Two in flight need the configuration's word and the device's, and `pingpong` must not have taken it back: then new jobs go one at a
time, and what was submitted drains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from calculet_core.config import ExecutorConfig
from calculet_core.jobs import EngineBank, Job, JobTimings
from calculet_core.requests import SequenceState
from calculet_worker.actions import TracedRow
from calculet_worker.jobs.pingpong import PingPong
from calculet_worker.scheduling.arbiter import Turn


@dataclass(slots=True, eq=False)
class InflightJob:
    """What the engine knows of one job."""

    job: Job
    turn: Turn
    sequences: list[SequenceState]
    expected_ns: int | None
    bank: EngineBank
    built_ns: int
    prefill_end: int = 0
    """Prompt positions that are in KV once it is done; 0 for a decode step."""
    prefill_last: bool = False
    waited_ns: int = 0
    """How long the sequence that was ready first had been so; decode steps only."""
    traced: list[TracedRow] = field(default_factory=list)
    """For the step trace, while it is on."""
    engine: EngineBank | None = None
    """Which engine took it (`JobSubmitted`); None before."""
    together: bool = False
    """Another job was in flight for a part of its time."""


class Inflight:
    """By job id. `most` is what configuration, device and buffers allow."""

    __slots__ = ("_banks", "_jobs", "_last", "_members", "_pingpong", "alone", "most")

    def __init__(self, config: ExecutorConfig, device_max: int, output_buffers: int, pingpong: PingPong) -> None:
        self.most = max(1, min(config.max_inflight, device_max, output_buffers))
        self._pingpong = pingpong
        self.alone = False
        """For now one at a time, to see how long steps take alone."""
        pair = (EngineBank.PING, EngineBank.PING) if config.fixed_engine else (EngineBank.PING, EngineBank.PONG)
        self._banks = pair if self.most > 1 else pair[:1] if config.fixed_engine else (EngineBank.AUTO,)
        self._jobs: dict[int, InflightJob] = {}
        self._members: set[int] = set()
        self._last = (0, 0)
        """When the job that completed last began and ended on the device."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def limit(self) -> int:
        """What may be in flight now."""
        return 1 if self.alone or self._pingpong.reason is not None else self.most

    @property
    def has_room(self) -> bool:
        """Whether another job may be submitted."""
        return len(self._jobs) < self.limit

    def next_bank(self) -> EngineBank:
        """The bank that no job in flight uses; fixed banks are shared."""
        used = {entry.bank for entry in self._jobs.values()}
        return next((bank for bank in self._banks if bank not in used), self._banks[0])

    def add(self, entry: InflightJob) -> None:
        """A job is on its way to the device.

        Raises:
            ValueError: one of its sequences is in another job.
        """
        members = [seq.seq_id for seq in entry.sequences]
        if not self._members.isdisjoint(members):
            raise ValueError(f"job {entry.job.job_id}: a sequence of it is in another job")
        self._members.update(members)
        if self._jobs:
            entry.together = True
            for other in self._jobs.values():
                other.together = True
        self._jobs[entry.job.job_id] = entry

    def get(self, job_id: int) -> InflightJob | None:
        """The job, if it is in flight."""
        return self._jobs.get(job_id)

    def pop(self, job_id: int) -> InflightJob | None:
        """The job ended, was refused or was lost."""
        entry = self._jobs.pop(job_id, None)
        if entry is not None:
            self._members.difference_update([seq.seq_id for seq in entry.sequences])
        return entry

    def pop_all(self) -> list[InflightJob]:
        """A fault takes every job."""
        return [entry for job_id in list(self._jobs) if (entry := self.pop(job_id)) is not None]

    def overlap_ns(self, timings: JobTimings) -> int:
        """How long a job that has just completed computed beside the one that completed before it, by the device's trace."""
        if timings.started_ns is None or timings.wait_ns is None:
            return 0
        start, end = timings.started_ns, timings.started_ns + timings.wait_ns
        before_start, before_end = self._last
        self._last = (start, end)
        return max(0, min(end, before_end) - max(start, before_start))

    def expected_ns(self) -> int:
        """What the jobs in flight should still take at most."""
        return sum(entry.expected_ns or 0 for entry in self._jobs.values())
