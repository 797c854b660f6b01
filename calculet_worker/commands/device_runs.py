"""Running single jobs on a configured device: prompts on lane 0 for golden cases and proofs, and whatever is to be timed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from calculet_core.artifact import Package
from calculet_core.errors import ArtifactError
from calculet_core.jobs import Completion, Job, JobHandle, JobKind, OutputStatus
from calculet_worker.device.base import Device
from calculet_worker.output.bf16 import BITS, widen

JOB_LIMIT_NS = 300 * 10**9


class Refused(ArtifactError):
    """The device took a whole prompt and refuses a part of one."""


class Runs:
    """One job at a time, generation 1, the B1 profile."""

    def __init__(self, device: Device, package: Package) -> None:
        self._device, self.profile = device, package.manifest.profile(1)
        self.vocab_size = package.manifest.tokenizer.vocab_size

    def answer(self, prompt: Sequence[int], cuts: Iterable[int], steps: int, shift: int = 0) -> list[Any]:
        """Logits float32 [vocabulary] after the prompt and after each of `steps` greedy steps; the lane is empty again.

        `cuts` is after how many tokens the prompt is cut; `shift` moves the last part's positions, which is wrong.

        Raises:
            Refused: a part that is not the first is refused.
            ArtifactError: the device does not finish what it took, or refuses a whole prompt.
        """
        try:
            logits = [self._prompt(np.array(prompt, np.int32), [*cuts], shift)]
            for step in range(steps):
                logits.append(self._run(self._step(int(logits[-1].argmax()), len(prompt) + step)))
            return logits
        finally:
            self._device.release(0)

    def _prompt(self, ids: Any, cuts: list[int], shift: int) -> Any:
        starts, logits = [0, *cuts], None
        for start, end in zip(starts, [*cuts, len(ids)], strict=True):
            last = end == len(ids)
            moved = start + shift if shift and last and start else start
            positions = np.arange(moved, moved + end - start, dtype=np.int32)
            job = Job(1, 1, JobKind.PREFILL, self.profile, np.zeros(1, np.int32), ids[start:end], positions, None, last)
            logits = self._run(job, part=start > 0)
        return logits

    def _step(self, token: int, position: int) -> Job:
        lane, tokens, positions = (np.array([value], np.int32) for value in (0, token, position))
        return Job(1, 1, JobKind.DECODE, self.profile, lane, tokens, positions, np.ones(1, np.uint8))

    def timed(self, job: Job) -> int:
        """Run a job; nanoseconds of device time where the device tells it, else of the clock on the wall.

        Raises:
            ArtifactError: the device refuses the job, or does not finish it.
        """
        start_ns = time.perf_counter_ns()
        done = self._done(job, False)
        took_ns = time.perf_counter_ns() - start_ns
        self._device.give_back(done)
        return took_ns if done.timings.wait_ns is None else done.timings.wait_ns

    def _run(self, job: Job, part: bool = False) -> Any:
        """Logits of the job's only row, as a copy; None for a part of a prompt."""
        done = self._done(job, part)
        logits = None if done.logits is None else _row(done.logits[0])
        self._device.give_back(done)
        return logits

    def _done(self, job: Job, part: bool) -> Completion:
        handle = self._device.submit(job)
        if not isinstance(handle, JobHandle):
            raise (Refused if part else ArtifactError)(f"the device refuses a {job.kind} job (code {int(handle)})")
        done = self._device.wait_any(JOB_LIMIT_NS)
        if not isinstance(done, Completion) or done.status is not OutputStatus.DONE:
            raise ArtifactError(f"the device does not finish a {job.kind} job")
        return done


def _row(row: Any) -> Any:
    """A copy that outlives the lease, float32 [vocabulary]."""
    return widen(row) if row.dtype == BITS else np.array(row)
