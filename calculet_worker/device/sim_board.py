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

from calculet_core.artifact import Package
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
from calculet_worker.device.sim_graph import BUFFERS_PER_ENGINE, EMPTY, Buffer, Graph, Input
from calculet_worker.device.sim_rule import SimProfile, reference_tokens

__all__ = ["EMPTY", "SimBoard", "reference_tokens"]

MAX_ENGINES = 2
LIFE_STEP_NS = 100 * MS
"""How often a busy board's chips are looked after."""


@dataclass(slots=True)
class _Flight:
    """A job that the board has."""

    job: Job
    engine: EngineBank
    lanes: list[int]
    done_ns: int
    timings: JobTimings
    buffer: Buffer
    logits: Any
    seen: tuple[bytes, ...]
    """The input as it was submitted."""


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
        self._graph: Graph | None = None
        self._closed = False
        self._flights: list[_Flight] = []
        self._free: list[Buffer] = []
        self._leases: dict[int, tuple[Buffer, Graph]] = {}
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
        graph = Graph(manifest, generation, self._next_buffer)
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
        start_ns, done_ns = self._schedule(graph.profile, engine, timings, now_ns)
        timings = JobTimings(timings.h2d_ns, timings.wait_ns, timings.d2h_ns, start_ns + (timings.h2d_ns or 0))
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
    def _timings(self, graph: Graph, job: Job, given: Input) -> JobTimings:
        profile = graph.profile
        if job.kind is JobKind.PREFILL:
            compute = float(profile.prefill_base_ns + profile.prefill_token_ns * len(job.token_ids))
        else:
            compute = float(graph.step_ns[job.profile.compiled_batch])
            if profile.decode_context_ns:
                compute += profile.decode_context_ns * sum(given.positions)
        if profile.jitter:
            compute *= 1 + profile.jitter * (2 * self._random.random() - 1)
        return JobTimings(profile.h2d_ns, int(compute * NOMINAL_MHZ / self._slowest_mhz), profile.d2h_ns)

    def _schedule(self, profile: SimProfile, engine: EngineBank, timings: JobTimings, now_ns: int) -> tuple[int, int]:
        """When a job that is submitted now begins, and when it is done."""
        other = EngineBank.PONG if engine is EngineBank.PING else EngineBank.PING
        others_left = max(0, self._engine_free_ns[other] - now_ns)
        start = max(now_ns, self._engine_free_ns[engine], now_ns + int((1 - profile.overlap) * others_left))
        done = start + (timings.h2d_ns or 0) + (timings.wait_ns or 0) + (timings.d2h_ns or 0)
        self._engine_free_ns[engine] = done
        if done > self._busy_until_ns:
            self._busy_ns += done - max(start, self._busy_until_ns)
            self._busy_until_ns = done
        return start, done

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


def _bytes_of(job: Job) -> tuple[bytes, ...]:
    arrays = (job.lanes, job.token_ids, job.positions, job.lane_valid)
    return tuple([array.tobytes() for array in arrays if array is not None])
