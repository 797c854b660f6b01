"""Jobs that the device has, or is about to get: at most two, in separate banks, and no sequence in both (scheduling §14).

Two in flight need the configuration's word and the device's. A device that is busy while it holds another job cannot really take
two: then new jobs go one at a time for the rest of the generation, and what was submitted drains.
"""

from __future__ import annotations

from dataclasses import dataclass

from calculet_core.config import ExecutorConfig
from calculet_core.jobs import EngineBank, Job
from calculet_core.requests import SequenceState
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
    accepted: bool = False
    """The device took it (`JobSubmitted`)."""


class Inflight:
    """By job id. `limit` is what may be in flight now."""

    __slots__ = ("_banks", "_jobs", "_members", "limit")

    def __init__(self, config: ExecutorConfig, device_max: int, output_buffers: int) -> None:
        self.limit = max(1, min(config.max_inflight, device_max, output_buffers))
        pair = (EngineBank.PING, EngineBank.PING) if config.fixed_engine else (EngineBank.PING, EngineBank.PONG)
        self._banks = pair if self.limit > 1 else pair[:1] if config.fixed_engine else (EngineBank.AUTO,)
        self._jobs: dict[int, InflightJob] = {}
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._jobs)

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

    def degrade(self) -> None:
        """One at a time from now on."""
        self.limit = 1

    def expected_ns(self) -> int:
        """What the jobs in flight should still take at most."""
        return sum(entry.expected_ns or 0 for entry in self._jobs.values())
