"""What a job has for itself: input arrays and one output buffer, from submission until its end is proven (scheduling §14).

A job whose end nobody has seen keeps both: they are quarantined and never used again, unless its late completion or a board reset
proves that the device is done with them. Giving back twice is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class InputArrays:
    """One decode job's arrays, int32 and uint8 [rows of the largest profile]."""

    __slots__ = ("lane_valid", "lanes", "positions", "token_ids")

    def __init__(self, rows: int) -> None:
        self.lanes: Any = np.empty(rows, np.int32)
        self.token_ids: Any = np.empty(rows, np.int32)
        self.positions: Any = np.empty(rows, np.int32)
        self.lane_valid: Any = np.empty(rows, np.uint8)


class Buffers:
    """Leases by job id. `outputs` is how many output buffers the device has; arrays grow on demand to as many sets."""

    __slots__ = ("_leases", "_outputs", "_quarantined", "_rows", "_spare")

    def __init__(self, outputs: int, rows: int) -> None:
        self._outputs, self._rows = outputs, rows
        self._leases: dict[int, InputArrays] = {}
        self._quarantined: dict[int, InputArrays] = {}
        self._spare: list[InputArrays] = []

    @property
    def total(self) -> int:
        """Output buffers that the device has."""
        return self._outputs

    @property
    def leased(self) -> int:
        """Jobs that hold their buffers in good order."""
        return len(self._leases)

    @property
    def quarantined(self) -> int:
        """Jobs whose end is not proven."""
        return len(self._quarantined)

    @property
    def free(self) -> int:
        """Output buffers that a job may have."""
        return self._outputs - len(self._leases) - len(self._quarantined)

    def lease(self, job_id: int) -> InputArrays:
        """Buffers for a new job.

        Raises:
            ValueError: none is free, or the job has one.
        """
        if self.free < 1 or job_id in self._leases or job_id in self._quarantined:
            raise ValueError(f"job {job_id}: no free output buffer ({self._outputs} in all), or it has one already")
        arrays = self._leases[job_id] = self._spare.pop() if self._spare else InputArrays(self._rows)
        return arrays

    def give_back(self, job_id: int) -> None:
        """The job's end is proven and its output read.

        Raises:
            ValueError: the job has no lease.
        """
        arrays = self._leases.pop(job_id, None) or self._quarantined.pop(job_id, None)
        if arrays is None:
            raise ValueError(f"job {job_id}: its buffers were given back before")
        self._spare.append(arrays)

    def quarantine(self, job_id: int) -> None:
        """Nobody knows whether the device still uses them.

        Raises:
            ValueError: the job has no lease.
        """
        if job_id not in self._leases:
            raise ValueError(f"job {job_id}: it has no buffers to quarantine")
        self._quarantined[job_id] = self._leases.pop(job_id)

    def holds(self, job_id: int) -> bool:
        """Whether the job has buffers, in good order or not."""
        return job_id in self._leases or job_id in self._quarantined
