"""A configured simulated artifact: what its lanes hold, which jobs fit it, and the numbers that it puts into output buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from calculet_core.artifact import Manifest
from calculet_core.batches import InactiveMode
from calculet_core.jobs import Job, JobKind, ReturnCode
from calculet_worker.device.sim_rule import Ints, TokenRule, profile_of
from calculet_worker.output.bf16 import narrow

EMPTY = -1
"""What a lane holds at a position that it was never given."""
CUT = -2
"""Stands for a prompt that was continued where the artifact does not do so exactly."""
BUFFERS_PER_ENGINE = 2
_min, _max = np.minimum.reduce, np.maximum.reduce
INT32, UINT8 = np.dtype(np.int32), np.dtype(np.uint8)


class Buffer:
    """An output buffer: noise, and what a job has lifted above it."""

    __slots__ = ("id", "job_id", "logits", "rows", "tokens")

    def __init__(self, number: int, rows: int, noise: Any) -> None:
        self.id, self.job_id = number, 0
        self.logits: Any = np.tile(noise, (rows, 1))
        self.rows: list[int] = []
        self.tokens: list[int] = []


@dataclass(slots=True)
class Input:
    """What a job gives: a step's rows that carry a sequence. Of a prompt only the lane; its arrays stay with the job."""

    lanes: list[int]
    tokens: list[int]
    positions: list[int]
    rows: list[int]


class Graph:
    """A configured artifact with its lanes and buffers."""

    def __init__(self, manifest: Manifest, generation: int, first_buffer: int) -> None:
        self.manifest, self.generation = manifest, generation
        self.profile = profile_of(manifest)
        self.rule = TokenRule(manifest, self.profile)
        self.modes = {p.compiled_batch: p.inactive_policy.mode if p.inactive_policy else None for p in manifest.profiles}
        self.step_ns = {size: self.profile.step_ns(size) for size in self.modes}
        self.tokens: Ints = np.full((manifest.lanes, manifest.context), EMPTY, np.int32)
        self.lengths = [0] * manifest.lanes
        self.digests = [0] * manifest.lanes
        self.scars = [0] * manifest.lanes
        self._ascending = np.arange(manifest.context, dtype=np.int32)
        self.noise = self.rule.noise(manifest.tokenizer.vocab_size)
        self.top = float(self.noise.max())
        self.bf16 = manifest.profiles[0].logit_dtype == "bfloat16"
        """Logits leave as bfloat16 bits; margins are far above what that rounds off."""
        self._quiet: Any = narrow(self.noise) if self.bf16 else self.noise
        count, rows = self.profile.engines * BUFFERS_PER_ENGINE, max(self.modes)
        self.buffers = [Buffer(first_buffer + index, rows, self._quiet) for index in range(count)]

    # ---------------------------------------------------------------- input
    def read(self, job: Job) -> Input | ReturnCode:
        """What the job gives, or why it does not fit the graph."""
        for array in (job.lanes, job.token_ids, job.positions):
            if not isinstance(array, np.ndarray) or array.dtype != INT32:
                return ReturnCode.INVALID_DTYPE
        valid = job.lane_valid
        if valid is not None and (not isinstance(valid, np.ndarray) or valid.dtype != UINT8):
            return ReturnCode.INVALID_DTYPE
        shape = job.token_ids.shape
        if job.profile.compiled_batch not in self.modes or len(shape) != 1 or not shape[0] or job.positions.shape != shape:
            return ReturnCode.INVALID_SHAPE
        found = self._read_prompt(job) if job.kind is JobKind.PREFILL else self._read_step(job)
        return ReturnCode.INVALID_SHAPE if found is None else found

    def _read_prompt(self, job: Job) -> Input | None:
        manifest, tokens, positions = self.manifest, job.token_ids, job.positions
        if job.lanes.shape != (1,) or job.lane_valid is not None:
            return None
        lane = int(job.lanes[0])
        fits = (
            0 <= lane < manifest.lanes
            and 0 <= _min(tokens) <= _max(tokens) < manifest.tokenizer.vocab_size
            and 0 <= _min(positions) <= _max(positions) < manifest.context
        )
        return Input([lane], [], [], [0]) if fits else None

    def _read_step(self, job: Job) -> Input | None:
        batch, shape, manifest = job.profile.compiled_batch, job.token_ids.shape, self.manifest
        if job.lanes.shape != shape or (job.lane_valid is not None and job.lane_valid.shape != shape):
            return None
        valid = [1] * batch if job.lane_valid is None else job.lane_valid.tolist()
        compact = self.modes[batch] is InactiveMode.COMPACT
        if (shape[0] > batch or not all(valid)) if compact else (shape[0] != batch or not any(valid)):
            return None
        lanes, tokens, positions = job.lanes.tolist(), job.token_ids.tolist(), job.positions.tolist()
        rows = list(range(shape[0]))
        if not all(valid):
            rows = [row for row in rows if valid[row]]
            lanes, tokens, positions = ([values[row] for row in rows] for values in (lanes, tokens, positions))
        fits = (
            min(lanes) >= 0
            and max(lanes) < manifest.lanes
            and len(set(lanes)) == len(lanes)
            and min(tokens) >= 0
            and max(tokens) < manifest.tokenizer.vocab_size
            and min(positions) >= 0
            and max(positions) < manifest.context
        )
        return Input(lanes, tokens, positions, rows) if fits else None

    # ---------------------------------------------------------------- content
    def write(self, lane: int, tokens: Ints, positions: Ints) -> None:
        """A prompt's tokens, where they belong or not."""
        length, count = self.lengths[lane], len(tokens)
        if int(positions[0]) == length and np.array_equal(positions, self._ascending[length : length + count]):
            self.tokens[lane, length : length + count] = tokens
            self.lengths[lane] += count
            self.digests[lane] += self.rule.traces(tokens, length)
            if length and (not self.profile.exact_cuts or length % self.profile.exact_cuts):
                self.scar(lane, self.rule.trace(CUT, length))
            return
        for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
            self.misplace(lane, token, position)

    def append(self, lane: int, token: int, position: int) -> None:
        """One token."""
        if position != self.lengths[lane]:
            self.misplace(lane, token, position)
            return
        self.tokens[lane, position] = token
        self.lengths[lane] = position + 1
        self.digests[lane] += self.rule.trace(token, position)

    def misplace(self, lane: int, token: int, position: int) -> None:
        """A token that overwrites or leaves a hole: the digest is worked out anew from all that is there."""
        old = int(self.tokens[lane, position])
        if old != EMPTY:
            self.scars[lane] += self.rule.trace(old, position)
        self.tokens[lane, position] = token
        self.lengths[lane] = length = max(self.lengths[lane], position + 1)
        self.digests[lane] = self.rule.traces(self.tokens[lane, :length], 0) + self.scars[lane]

    def scar(self, lane: int, trace: int) -> None:
        """Something that the lane's tokens do not show has changed what it computes."""
        self.scars[lane] += trace
        self.digests[lane] += trace

    def clear(self, lane: int) -> None:
        """The lane is empty."""
        self.tokens[lane, : self.lengths[lane]] = EMPTY
        self.lengths[lane] = self.digests[lane] = self.scars[lane] = 0

    # ---------------------------------------------------------------- output
    def compute(self, job: Job, given: Input, buffer: Buffer) -> Any:
        """Write the tokens into the lanes; a read-only view of `buffer` with the logits, or None."""
        lanes, rows, tokens = given.lanes, given.rows, given.tokens
        if job.kind is JobKind.PREFILL:
            self.write(lanes[0], job.token_ids, job.positions)
            if not job.want_logits:
                return None
            tokens = [int(job.token_ids[-1])]
        else:
            for lane, token, position in zip(lanes, tokens, given.positions, strict=True):
                self.append(lane, token, position)
        logits, best = buffer.logits, []
        for row, lane, last in zip(rows, lanes, tokens, strict=True):
            token, margin = self.rule.next_token(self.digests[lane], last)
            logits[row, token] = narrow([self.top + margin])[0] if self.bf16 else self.top + margin
            best.append(token)
        buffer.rows, buffer.tokens = rows, best
        view = logits[: 1 if job.kind is JobKind.PREFILL else len(job.token_ids)]
        view.flags.writeable = False
        return view

    def restore(self, buffer: Buffer) -> None:
        """Nothing but noise again."""
        for row, token in zip(buffer.rows, buffer.tokens, strict=True):
            buffer.logits[row, token] = self._quiet[token]
        buffer.rows, buffer.tokens = [], []
