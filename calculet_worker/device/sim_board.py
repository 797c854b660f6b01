"""The simulated board, pure: no clock of its own, so that a day passes in minutes in the simulation and `sim` runs it in real time.

It is honest. It keeps the token ids each lane was given at the positions it was given them, and the next token follows from
exactly that content by `TokenRule`: every position adds one scrambled number to the lane's digest. A swapped, lost, repeated or
misplaced token, or a lane reused before it was released (what was overwritten leaves a scar), gives other tokens, and
`reference_tokens` says which ones are right. Input arrays that change while their job is in flight end it with a CCU exception.

Logits are a row of noise with the derived token lifted above it by a seeded margin. The noise stays in the output buffers; a job
lifts one number a row and `give_back` lowers it again, so that a late reader sees other numbers. Jobs take the time that the
artifact's `SimProfile` states, longer while a chip is throttled. Two engines may compute at once: `overlap` is the share of
another job's remaining time during which a new one already runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from calculet_core.artifact import Manifest, Package
from calculet_core.batches import InactiveMode
from calculet_core.clock import MS, S
from calculet_core.jobs import (
    ChipTelemetry,
    Completion,
    DeviceCounters,
    DeviceVersions,
    EngineBank,
    Job,
    JobHandle,
    JobKind,
    JobTimings,
    OutputStatus,
    ReturnCode,
)
from calculet_worker.device.base import DeviceLimits, Inspection
from calculet_worker.device.sim_chip import BEHIND_C, NOMINAL_MHZ, POWER_MODES, Chip
from calculet_worker.device.sim_rule import Floats, Ints, SimProfile, TokenRule, profile_of, reference_tokens

__all__ = ["EMPTY", "SimBoard", "reference_tokens"]

EMPTY = -1
"""What a lane holds at a position that it was never given."""
MAX_ENGINES, BUFFERS_PER_ENGINE = 2, 2
FEW = 64
"""Up to here plain Python is quicker than numpy."""
LIFE_STEP_NS = 100 * MS
"""How often a busy board's chips are looked after."""


class _Buffer:
    """An output buffer: noise, and what a job has lifted above it."""

    __slots__ = ("id", "job_id", "logits", "rows", "tokens")

    def __init__(self, number: int, rows: int, noise: Floats) -> None:
        self.id, self.job_id = number, 0
        self.logits: Floats = np.tile(noise, (rows, 1))
        self.rows: list[int] = []
        self.tokens: list[int] = []


@dataclass(slots=True)
class _Input:
    """The rows of a job that carry a sequence."""

    lanes: list[int]
    token_ids: Ints
    positions: Ints
    rows: list[int]


@dataclass(slots=True)
class _Flight:
    """A job that the board has."""

    job: Job
    engine: EngineBank
    lanes: list[int]
    done_ns: int
    timings: JobTimings
    buffer: _Buffer
    logits: Any
    seen: tuple[bytes, ...]
    """The input as it was submitted."""


class _Graph:
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
        self.noise = self.rule.noise(manifest.tokenizer.vocab_size)
        self.top = float(self.noise.max())
        count, rows = self.profile.engines * BUFFERS_PER_ENGINE, max(self.modes)
        self.buffers = [_Buffer(first_buffer + index, rows, self.noise) for index in range(count)]

    # ---------------------------------------------------------------- input
    def read(self, job: Job) -> _Input | ReturnCode:
        """The rows of a job that carry a sequence, or why the job does not fit the graph."""
        valid = job.lane_valid
        for array in (job.lanes, job.token_ids, job.positions):
            if not isinstance(array, np.ndarray) or array.dtype != np.int32:
                return ReturnCode.INVALID_DTYPE
        if valid is not None and (not isinstance(valid, np.ndarray) or valid.dtype != np.uint8):
            return ReturnCode.INVALID_DTYPE
        if not self._shapes_fit(job):
            return ReturnCode.INVALID_SHAPE
        lanes, count = job.lanes.tolist(), len(job.token_ids)
        rows = list(range(count)) if valid is None or valid.all() else valid.nonzero()[0].tolist()
        if job.kind is JobKind.DECODE and len(rows) < count:
            lanes = [lanes[row] for row in rows]
            found = _Input(lanes, job.token_ids[rows], job.positions[rows], rows)
        else:
            found = _Input(lanes, job.token_ids, job.positions, rows)
        manifest = self.manifest
        fits = (
            min(lanes) >= 0
            and max(lanes) < manifest.lanes
            and len(set(lanes)) == len(lanes)
            and _within(found.token_ids, manifest.tokenizer.vocab_size)
            and _within(found.positions, manifest.context)
        )
        return found if fits else ReturnCode.INVALID_SHAPE

    def _shapes_fit(self, job: Job) -> bool:
        batch, shape, valid = job.profile.compiled_batch, job.token_ids.shape, job.lane_valid
        if batch not in self.modes or len(shape) != 1 or not shape[0] or job.positions.shape != shape:
            return False
        if job.kind is JobKind.PREFILL:
            return job.lanes.shape == (1,) and valid is None
        if job.lanes.shape != shape or (valid is not None and valid.shape != shape):
            return False
        if self.modes[batch] is InactiveMode.COMPACT:
            return shape[0] <= batch and (valid is None or bool(valid.all()))
        return shape[0] == batch and (batch == 1 if valid is None else bool(valid.any()))

    # ---------------------------------------------------------------- content
    def write(self, lane: int, tokens: Ints, positions: Ints) -> None:
        """A prompt's tokens, where they belong or not."""
        length, count = self.lengths[lane], len(tokens)
        if int(positions[0]) == length and (count == 1 or bool((positions[1:] - positions[:-1] == 1).all())):
            self.tokens[lane, length : length + count] = tokens
            self.lengths[lane] += count
            self.digests[lane] += self.rule.traces(tokens, length)
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

    def clear(self, lane: int) -> None:
        """The lane is empty."""
        self.tokens[lane, : self.lengths[lane]] = EMPTY
        self.lengths[lane] = self.digests[lane] = self.scars[lane] = 0

    # ---------------------------------------------------------------- output
    def compute(self, job: Job, given: _Input, buffer: _Buffer) -> Any:
        """Write the tokens into the lanes; a read-only view of `buffer` with the logits, or None."""
        lanes, rows, tokens = given.lanes, given.rows, given.token_ids.tolist()
        if job.kind is JobKind.PREFILL:
            self.write(lanes[0], given.token_ids, given.positions)
            if not job.want_logits:
                return None
            rows, tokens = [0], tokens[-1:]
        else:
            for lane, token, position in zip(lanes, tokens, given.positions.tolist(), strict=True):
                self.append(lane, token, position)
        logits, best = buffer.logits, []
        for row, lane, last in zip(rows, lanes, tokens, strict=True):
            token, margin = self.rule.next_token(self.digests[lane], last)
            logits[row, token] = self.top + margin
            best.append(token)
        buffer.rows, buffer.tokens = rows, best
        view = logits[: 1 if job.kind is JobKind.PREFILL else len(job.token_ids)]
        view.flags.writeable = False
        return view

    def restore(self, buffer: _Buffer) -> None:
        """Nothing but noise again."""
        for row, token in zip(buffer.rows, buffer.tokens, strict=True):
            buffer.logits[row, token] = self.noise[token]
        buffer.rows, buffer.tokens = [], []


class SimBoard:
    """The device protocol with time as an argument: `submit` and `collect` instead of waiting.

    Args:
        versions: who the board is; `power_mode` is one of `POWER_MODES`, `chips` at least 1.
        dram_bytes: of the whole board.
        seed: of the jitter.
        ambient_c: temperature of the air.
    """

    def __init__(self, versions: DeviceVersions, dram_bytes: int, seed: int = 0, ambient_c: float = 35.0) -> None:
        self._versions, self._dram_bytes = versions, dram_bytes
        self._random = random.Random(seed)
        mode = POWER_MODES[versions.power_mode or "balanced"]
        self._chips = [Chip(ambient_c + BEHIND_C * index, mode) for index in range(versions.chips or 1)]
        self._graph: _Graph | None = None
        self._closed = False
        self._flights: list[_Flight] = []
        self._free: list[_Buffer] = []
        self._leases: dict[int, tuple[_Buffer, _Graph]] = {}
        """By buffer; a reset does not end them."""
        self._engine_free_ns = {EngineBank.PING: 0, EngineBank.PONG: 0}
        self._slowest_mhz = min(chip.frequency_mhz for chip in self._chips)
        self._lived_ns: int | None = None
        self._busy_until_ns = self._busy_ns = 0
        """When all work so far ends, and how much of it the chips have not lived through yet."""
        self._next_buffer = self._finished = self._resets = 0

    # ---------------------------------------------------------------- who, how much
    def versions(self) -> DeviceVersions:
        """As told."""
        return self._versions

    def limits(self) -> DeviceLimits:
        """The configured artifact's; before `configure` what the board can have at most."""
        if self._graph is None:
            return DeviceLimits(MAX_ENGINES, MAX_ENGINES * BUFFERS_PER_ENGINE, False)
        profile = self._graph.profile
        return DeviceLimits(profile.engines, profile.engines * BUFFERS_PER_ENGINE, profile.engines > 1 and profile.overlap > 0)

    def counters(self) -> DeviceCounters:
        """Of the board's whole life."""
        return DeviceCounters(len(self._flights), self._finished, len(self._leases), self._resets)

    def telemetry(self, now_ns: int) -> tuple[ChipTelemetry, ...]:
        """Memory is shared equally by the chips."""
        self._live(now_ns)
        chips = len(self._chips)
        used = (self._graph.manifest.capacity.reserved_bytes if self._graph else 0) // chips
        total = self._dram_bytes // chips
        return tuple(ChipTelemetry(c.temperature_c, c.power_w, c.frequency_mhz, c.throttled, used, total) for c in self._chips)

    # ---------------------------------------------------------------- configuration
    def configure(self, package: Package, generation: int) -> ReturnCode:
        """`OTHER`: an image of another backend, or one that does not fit the board's DRAM.

        Raises:
            ConfigError: the manifest's `backend_options` are wrong.
        """
        manifest = package.manifest
        if self._closed:
            return ReturnCode.DEVICE_UNAVAILABLE
        if self._graph is not None:
            return ReturnCode.DEVICE_BUSY
        if manifest.backend != "sim" or manifest.capacity.reserved_bytes > self._dram_bytes:
            return ReturnCode.OTHER
        graph = _Graph(manifest, generation, self._next_buffer)
        self._next_buffer += len(graph.buffers)
        self._graph, self._free = graph, list(graph.buffers)
        return ReturnCode.OK

    @property
    def configure_ns(self) -> int:
        """How long the last `configure` takes; the caller lets that time pass."""
        return self._graph.profile.configure_ns if self._graph else 0

    def inspect(self) -> Inspection:
        """The manifest: a simulated image has no other description."""
        if self._graph is None:
            raise RuntimeError("the board is not configured")
        manifest = self._graph.manifest
        return Inspection(
            manifest.profiles, manifest.lanes, manifest.context, manifest.tokenizer.vocab_size, manifest.capacity.reserved_bytes
        )

    def reset_configuration(self) -> ReturnCode:
        """A leased buffer counts as a job in flight."""
        if self._graph is None:
            return ReturnCode.OK
        if self._flights or len(self._free) < len(self._graph.buffers):
            return ReturnCode.DEVICE_BUSY
        self._graph = None
        return ReturnCode.OK

    def reset(self) -> ReturnCode:
        """Leased buffers stay readable until they are given back; they are not used again."""
        if self._closed:
            return ReturnCode.DEVICE_UNAVAILABLE
        self._drop()
        self._resets += 1
        return ReturnCode.OK

    def close(self) -> None:
        """From now on the board is gone."""
        self._drop()
        self._closed = True

    @property
    def closed(self) -> bool:
        """After `close`."""
        return self._closed

    def _drop(self) -> None:
        self._graph = None
        self._flights, self._free = [], []
        self._engine_free_ns = dict.fromkeys(self._engine_free_ns, 0)

    # ---------------------------------------------------------------- lanes
    def can_allocate(self, sequences: int) -> bool:
        """Whether so many lanes are empty."""
        return self._graph is not None and self._graph.lengths.count(0) >= sequences

    def content(self, lane: int) -> list[int]:
        """The token ids that the lane holds, `EMPTY` where it was never given one."""
        assert self._graph is not None
        found: list[int] = self._graph.tokens[lane, : self._graph.lengths[lane]].tolist()
        return found

    def release(self, lane: int) -> ReturnCode:
        """`INVALID_SHAPE`: there is no such lane."""
        if self._graph is None:
            return ReturnCode.DEVICE_UNAVAILABLE
        if not 0 <= lane < len(self._graph.lengths):
            return ReturnCode.INVALID_SHAPE
        if any(lane in flight.lanes for flight in self._flights):
            return ReturnCode.DEVICE_BUSY
        self._graph.clear(lane)
        return ReturnCode.OK

    # ---------------------------------------------------------------- jobs
    def submit(self, job: Job, engine: EngineBank, now_ns: int) -> JobHandle | ReturnCode:
        """Take a job; also `OTHER` for one of another generation."""
        graph = self._graph
        if graph is None:
            return ReturnCode.DEVICE_UNAVAILABLE
        if job.generation != graph.generation:
            return ReturnCode.OTHER
        if len(self._flights) >= graph.profile.engines or not self._free:
            return ReturnCode.DEVICE_BUSY
        given = graph.read(job)
        if isinstance(given, ReturnCode):
            return given
        if self._lived_ns is None or now_ns - self._lived_ns > LIFE_STEP_NS:
            self._live(now_ns)
        engine = engine or min(self._engine_free_ns, key=self._engine_free_ns.__getitem__)
        buffer = self._free.pop()
        buffer.job_id = job.job_id
        timings = self._timings(graph, job, given)
        logits = graph.compute(job, given, buffer)
        done_ns = self._schedule(graph.profile, engine, timings, now_ns)
        self._flights.append(_Flight(job, engine, given.lanes, done_ns, timings, buffer, logits, _bytes_of(job)))
        return JobHandle(job.job_id, engine)

    def next_done_ns(self) -> int | None:
        """When the next job in flight is done."""
        return min([flight.done_ns for flight in self._flights], default=None)

    def collect(self, now_ns: int) -> list[Completion]:
        """What is done by now, in the order of completion."""
        done = [flight for flight in self._flights if flight.done_ns <= now_ns]
        if len(done) > 1:
            done.sort(key=lambda flight: flight.done_ns)
        return [self._complete(flight) for flight in done]

    def give_back(self, completion: Completion) -> None:
        """End the lease.

        Raises:
            ValueError: it was given back before.
        """
        buffer, graph = self._leases.get(completion.buffer_id, (None, None))
        if buffer is None or graph is None or buffer.job_id != completion.job_id:
            raise ValueError(f"job {completion.job_id}: its output buffer is not leased (given back before?)")
        del self._leases[buffer.id]
        graph.restore(buffer)
        if graph is self._graph:
            self._free.append(buffer)

    def _complete(self, flight: _Flight) -> Completion:
        self._flights.remove(flight)
        self._finished += 1
        job, buffer = flight.job, flight.buffer
        assert self._graph is not None
        self._leases[buffer.id] = (buffer, self._graph)
        status, logits = OutputStatus.DONE, flight.logits
        if _bytes_of(job) != flight.seen:
            status, logits = OutputStatus.CCU_EXCEPTION, None
        return Completion(job.job_id, job.generation, status, logits, flight.engine, flight.timings, buffer.id)

    # ---------------------------------------------------------------- time
    def _timings(self, graph: _Graph, job: Job, given: _Input) -> JobTimings:
        profile = graph.profile
        if job.kind is JobKind.PREFILL:
            compute = float(profile.prefill_base_ns + profile.prefill_token_ns * len(job.token_ids))
        else:
            compute = float(graph.step_ns[job.profile.compiled_batch])
            if profile.decode_context_ns:
                compute += profile.decode_context_ns * sum(given.positions.tolist())
        if profile.jitter:
            compute *= 1 + profile.jitter * (2 * self._random.random() - 1)
        return JobTimings(profile.h2d_ns, int(compute * NOMINAL_MHZ / self._slowest_mhz), profile.d2h_ns)

    def _schedule(self, profile: SimProfile, engine: EngineBank, timings: JobTimings, now_ns: int) -> int:
        """When a job that is submitted now is done."""
        other = EngineBank.PONG if engine is EngineBank.PING else EngineBank.PING
        others_left = max(0, self._engine_free_ns[other] - now_ns)
        start = max(now_ns, self._engine_free_ns[engine], now_ns + int((1 - profile.overlap) * others_left))
        done = start + (timings.h2d_ns or 0) + (timings.wait_ns or 0) + (timings.d2h_ns or 0)
        self._engine_free_ns[engine] = done
        if done > self._busy_until_ns:
            self._busy_ns += done - max(start, self._busy_until_ns)
            self._busy_until_ns = done
        return done

    def _live(self, now_ns: int) -> None:
        """Let the chips warm up or cool down until now."""
        lived_ns, self._lived_ns = self._lived_ns, now_ns
        if lived_ns is None or now_ns <= lived_ns:
            return
        passed_ns = now_ns - lived_ns
        busy_ns = min(passed_ns, self._busy_ns)
        self._busy_ns -= busy_ns
        for chip in self._chips:
            chip.live(passed_ns / S, busy_ns / passed_ns)
        self._slowest_mhz = min(chip.frequency_mhz for chip in self._chips)


def _within(values: Ints, end: int) -> bool:
    """Whether all values are in [0, end)."""
    if len(values) <= FEW:
        few: list[int] = values.tolist()
        return min(few) >= 0 and max(few) < end
    return bool(values.min() >= 0 and values.max() < end)


def _bytes_of(job: Job) -> tuple[bytes, ...]:
    arrays = (job.lanes, job.token_ids, job.positions, job.lane_valid)
    return tuple([array.tobytes() for array in arrays if array is not None])
