"""The server's own step trace, brought into the run's folder: only on the server's host, whose clock the client shares.

Workers write `calculet-step/v1` while `trace.steps` is on (acceptance §2.3). Lines of this run, by the moment their request was
accepted, become `steps.jsonl`; half a line at the end of a file that is still being written is left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from calculet_core.trace import StepTrace
from calculet_perf.records import Batch, StepRecord

PATTERN = "steps-*.jsonl*"
_decode = msgspec.json.Decoder(StepTrace).decode


class TraceError(Exception):
    """A trace's folder cannot be read; names it. Exit code 2."""


class StepTraces:
    """The step traces in some folders.

    Raises:
        TraceError: one of the folders is not there.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise TraceError(f"{folder}: no such folder; workers write step traces there while trace.steps is on")
        self._folders = folders
        self.unreadable = 0

    def between(self, start_ns: int, end_ns: int) -> Iterator[StepRecord]:
        """Steps of requests accepted in that time of CLOCK_MONOTONIC, file by file."""
        for folder in self._folders:
            for path in sorted(folder.glob(PATTERN)):
                yield from self._of(path, start_ns, end_ns)

    def _of(self, path: Path, start_ns: int, end_ns: int) -> Iterator[StepRecord]:
        with path.open("rb") as file:
            for line in file:
                try:
                    step = _decode(line)
                except msgspec.DecodeError:
                    self.unreadable += 1
                    continue
                if start_ns <= step.at_ns.accepted <= end_ns:
                    yield record_of(step)


def record_of(step: StepTrace) -> StepRecord:
    """A step as a run keeps it (acceptance §4)."""
    return StepRecord(
        request_id=step.request_id, job_id=step.job_id, seq_id=step.seq_id, kind="prefill" if step.kind == "prefill" else "decode",
        step=step.step, queue_ms=step.queue_ms, prepare_ms=step.prepare_ms, h2d_ms=step.h2d_ms, device_wait_ms=step.device_wait_ms,
        d2h_ms=step.d2h_ms, bf16_ms=step.bf16_ms, sampling_ms=step.sampling_ms, engine=step.engine, kv_before=step.kv_before,
        kv_after=step.kv_after, output_status=step.output_status, board=step.board, generation=step.generation,
        batch=Batch(compiled=step.batch.compiled, active=step.batch.active),
    )  # fmt: skip
