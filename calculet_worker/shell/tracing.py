"""Writes the step trace: what the engine knows of a step, with the moments that only the shell sees.

Lines wait for the message that carries their tokens and are written by the journal's rules: in a size-capped file that rotates, and
a disk that takes nothing is counted and stops nobody.
"""

from __future__ import annotations

import msgspec

from calculet_core.ids import request_id_text
from calculet_core.shell.journal import LineFile
from calculet_core.trace import StepBatch, StepMoments, StepTrace, device_ms, ms
from calculet_worker.actions import TraceSteps

_encode = msgspec.json.Encoder().encode


class Tracer:
    """Of one board's life."""

    def __init__(self, file: LineFile, board: str, epoch: int) -> None:
        self._file, self._board, self._epoch = file, board, epoch
        self._submits: dict[int, tuple[int, int]] = {}
        self._waiting: list[tuple[TraceSteps, int | None, int | None, int | None]] = []

    def submitted(self, job_id: int, start_ns: int, ok_ns: int) -> None:
        """The device took the job between these moments."""
        self._submits[job_id] = (start_ns, ok_ns)

    def steps(self, action: TraceSteps) -> None:
        """A job's steps; their tokens leave with the next message."""
        start_ns, ok_ns = self._submits.pop(action.job_id, (None, None))
        self._waiting.append((action, start_ns, ok_ns, action.wait_done_ns or None))

    def flushed(self, now_ns: int) -> None:
        """What the steps so far brought has left for the routers."""
        if self._waiting:
            for action, start_ns, ok_ns, done_ns in self._waiting:
                self._write(action, start_ns, ok_ns, done_ns, now_ns)
            self._waiting.clear()

    def flush(self, now_ns: int) -> None:
        """Write to the file; steps that brought nothing to send do not wait for a message for ever."""
        self.flushed(now_ns)
        self._file.flush()

    def close(self, now_ns: int) -> None:
        """Flush and close."""
        self.flushed(now_ns)
        self._file.close()

    def _write(
        self, action: TraceSteps, start_ns: int | None, ok_ns: int | None, done_ns: int | None, flushed_ns: int
    ) -> None:
        h2d, wait, d2h = device_ms(action.timings)
        sampled_ns = action.logits_ready_ns + (action.sampling_ns or 0)
        prepare = None if start_ns is None else ms(start_ns - action.built_ns)
        batch, engine, good = StepBatch(action.compiled, len(action.rows)), action.engine.name.lower(), action.status == "done"
        for row in action.rows:
            key = row.key
            at = StepMoments(
                row.accepted_ns, row.admitted_ns, row.admitted_ns, action.built_ns, start_ns, ok_ns, done_ns,
                action.logits_ready_ns, sampled_ns, flushed_ns if good and row.draws else None,
            )  # fmt: skip
            line = StepTrace(
                "calculet-step/v1", request_id_text(key.request_id), key.attempt, action.job_id, row.seq_id, action.kind.value,
                row.step, ms(action.built_ns - row.ready_ns) or 0.0, prepare, h2d, wait, d2h, ms(action.bf16_ns),
                ms(action.sampling_ns), engine, row.kv_before, row.kv_after if good else row.kv_before, action.status,
                self._board, self._epoch, action.generation, batch, at,
            )  # fmt: skip
            self._file.add(_encode(line))
