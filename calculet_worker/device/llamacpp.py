"""A board that is a CPU: libllama behind the device protocol.

One context with a KV stream per lane and flash attention. Three rules make the same prompt give the same bits whatever else
runs: a prefill is a `llama_decode` of its own; the library's micro-batch is as large as the cuts that the artifact allows, so
a prompt cut there is computed as the library itself would cut it; and a decode holds one token per lane.

`llama_decode` runs inside `wait_any` on the device thread, without the GIL; a job that has begun is finished, time-out or not.
There is one job and one output buffer, the library's own: logits are a read-only view of it, and nothing is submitted while
that view is leased. The library's memory may be touched by one thread only, so `release` notes the lane and the device thread
empties it before it computes anything else. `OK` is a confirmation all the same: no later job can see what the lane held, since
from then on the lane takes only a job that starts at position 0.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from calculet_core.artifact import Manifest, Package
from calculet_core.batches import BatchProfile, InactiveLanePolicy, InactiveMode, KvLayout
from calculet_core.config import BoardConfig
from calculet_core.errors import ConfigError
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
from calculet_worker.device.libllama import Int32s, Logits, Session, UnusableImage, load_library

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_THREADS_MAX = 4
RC_ABORTED = 2
"""Of `llama_decode`. Others: 1 no KV cells left, -1 an invalid batch, less: fatal. None tells what the lanes then hold."""


class LlamaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`boards[].options` of a `llamacpp` board."""

    threads: Annotated[int, Meta(ge=1, le=64)] | None = None
    """None: the CPUs of this process, at most 4. Boards on the same CPUs should share them out: threads wait by spinning."""


class LlamaArtifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`backend_options` of a `llamacpp` artifact."""

    micro_batch: Annotated[int, Meta(ge=32, le=4096)]
    """Prompt tokens per pass. It decides roundings, so it belongs to the artifact; cuts of a prompt are exact at its multiples."""


def open_llamacpp(board: BoardConfig) -> LlamaDevice:
    """The factory of `BACKENDS`.

    Raises:
        BoardUnavailable: the library is not installed here, or does not load.
        ConfigError: `board.options` is wrong.
    """
    options = _convert(board.options, LlamaOptions, f"board {board.name}: $.options")
    return LlamaDevice(load_library(), options.threads or min(DEFAULT_THREADS_MAX, len(os.sched_getaffinity(0))))


def batch_profile(batch: int, context: int, kv_bytes_per_token: int) -> BatchProfile:
    """What a batch of that size is in this backend: the recipe writes it, `inspect` reports it."""
    policy = InactiveLanePolicy(mode=InactiveMode.COMPACT, kv_mode="seq_id", logits_returned=False, writes_kv=False)
    return BatchProfile(
        exact_submodel=f"decode-b{batch}",
        compiled_batch=batch,
        max_seq=context,
        token_dtype="int32",
        logit_dtype="float32",
        kv_layout=KvLayout(kind="per_lane_contiguous", dtype="float16", bytes_per_token=kv_bytes_per_token),
        inactive_policy=policy if batch > 1 else None,
    )


class LlamaDevice:
    """See the module's theory. `open_llamacpp` makes one."""

    def __init__(self, library: Any, threads: int) -> None:
        self._library, self._threads = library, threads
        self._changed = threading.Condition()
        self._board: _Board | None = None
        self._job: Job | None = None
        self._leases: dict[int, _Board] = {}
        """Job id -> whose buffer its completion shows."""
        self._retired: list[_Board] = []
        """Reset while one of their buffers was leased."""
        self._finished = self._resets = 0

    # ------------------------------------------------------------------------------------------------ who, how much
    def versions(self) -> DeviceVersions:
        """Serial, firmware and the like do not exist here."""
        return DeviceVersions(device="llamacpp", runtime=f"llama.cpp {self._library.llama_version().decode()}")

    def limits(self) -> DeviceLimits:
        """One job, one buffer: a second would cost a copy of the logits at every step."""
        return DeviceLimits(max_inflight=1, output_buffers=1, overlap=False, on_host=True)

    def counters(self) -> DeviceCounters:
        """Of the whole life of this device."""
        with self._changed:
            return DeviceCounters(int(self._job is not None), self._finished, len(self._leases), self._resets)

    def telemetry(self) -> tuple[ChipTelemetry, ...]:
        """One chip that tells nothing."""
        return (ChipTelemetry(),)

    # ------------------------------------------------------------------------------------------------ configuration
    def configure(self, package: Package, generation: int) -> ReturnCode:
        """`INVALID_SHAPE`: not an artifact for this library; `DEVICE_UNAVAILABLE`: no memory. The log has the reason."""
        self._free_retired()
        if self._board is not None:
            return ReturnCode.DEVICE_BUSY
        manifest = package.manifest
        image = os.fsencode(package.root / manifest.image)
        try:
            options = _convert(manifest.backend_options, LlamaArtifact, "$.backend_options")
            session = Session(self._library, image, manifest.lanes, manifest.context, options.micro_batch, self._threads)
        except (ConfigError, UnusableImage) as error:
            log.error("%s %s: %s", manifest.name, manifest.version, error)
            return ReturnCode.INVALID_SHAPE
        except MemoryError as error:
            log.error("%s %s: %s", manifest.name, manifest.version, error)
            return ReturnCode.DEVICE_UNAVAILABLE
        with self._changed:
            self._board = _Board(session, manifest, generation)
        return ReturnCode.OK

    def inspect(self) -> Inspection:
        """Every batch up to the lanes is real here; those that the manifest names are reported as they are computed."""
        board = self._board
        if board is None:
            raise RuntimeError("the device is not configured")
        session = board.session
        sizes = [size for size in board.manifest.compiled_batches if size <= session.lanes]
        return Inspection(
            profiles=tuple(batch_profile(size, session.lane_context, session.kv_bytes_per_token()) for size in sizes),
            lanes=session.lanes,
            context=session.lane_context,
            vocab_size=session.vocab_size,
            reserved_bytes=None,
        )

    def reset_configuration(self) -> ReturnCode:
        """A leased buffer counts as a job in flight: it would vanish under its reader."""
        with self._changed:
            board = self._board
            if self._job is not None or board in self._leases.values():
                return ReturnCode.DEVICE_BUSY
            self._board = None
        if board is not None:
            board.session.free()
        return ReturnCode.OK

    def reset(self) -> ReturnCode:
        """Memory that a reader still looks at is freed after it was given back."""
        self._drop()
        self._resets += 1
        return ReturnCode.OK

    def close(self) -> None:
        """A buffer that is leased at the end is left to the end of the process."""
        self._drop()

    def _drop(self) -> None:
        with self._changed:
            if self._board is not None:
                self._retired.append(self._board)
            self._board = self._job = None
        self._free_retired()

    def _free_retired(self) -> None:
        with self._changed:
            leased = list(self._leases.values())
            free = [board for board in self._retired if board not in leased]
            self._retired = [board for board in self._retired if board in leased]
        for board in free:
            board.session.free()

    # ------------------------------------------------------------------------------------------------ lanes
    def can_allocate(self, sequences: int) -> bool:
        """Whether so many lanes are empty."""
        with self._changed:
            return self._board is not None and int(np.count_nonzero(self._board.lengths == 0)) >= sequences

    def release(self, lane: int) -> ReturnCode:
        """See the module's theory for why `OK` is a confirmation."""
        with self._changed:
            board = self._board
            if board is None:
                return ReturnCode.DEVICE_UNAVAILABLE
            if not 0 <= lane < len(board.lengths):
                return ReturnCode.INVALID_SHAPE
            if self._job is not None and lane in self._job.lanes:
                return ReturnCode.DEVICE_BUSY
            board.lengths[lane] = 0
            board.released.add(lane)
            return ReturnCode.OK

    # ------------------------------------------------------------------------------------------------ jobs
    def submit(self, job: Job, engine: EngineBank = EngineBank.AUTO) -> JobHandle | ReturnCode:
        """Also `INVALID_SHAPE`: a position that is not the lane's stored length, an idle row, a token outside the vocabulary."""
        with self._changed:
            board = self._board
            if board is None:
                return ReturnCode.DEVICE_UNAVAILABLE
            if self._job is not None or board in self._leases.values():
                return ReturnCode.DEVICE_BUSY
            if (refusal := board.refusal(job)) is not None:
                return refusal
            self._job = job
            self._changed.notify()
        return JobHandle(job.job_id, EngineBank.PING)

    def wait_any(self, timeout_ns: int) -> Completion | ReturnCode:
        """Computes the job that was submitted; see the module's theory."""
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None, timeout_ns / 1e9)
            job, board = self._job, self._board
            if job is None or board is None:
                return ReturnCode.TIMEOUT
            released, board.released = board.released, set()
            lengths = board.lengths.copy()
        for lane in released:
            board.session.truncate(lane, 0)
        started = time.monotonic_ns()
        status, logits = board.compute(job, lengths)
        spent = time.monotonic_ns() - started
        with self._changed:
            self._job = None
            self._finished += 1
            self._leases[job.job_id] = board
            board.lengths[job.lanes] = board.length_after(job) if status is OutputStatus.DONE else 0
        timings = JobTimings(wait_ns=spent, started_ns=started)
        return Completion(job.job_id, job.generation, status, logits, EngineBank.PING, timings, buffer_id=0)

    def give_back(self, completion: Completion) -> None:
        """Ends the lease."""
        with self._changed:
            if self._leases.pop(completion.job_id, None) is None:
                raise ValueError(f"job {completion.job_id}: its output buffer is not leased (given back before?)")


class _Board:
    """A configured artifact and what each lane holds; `lengths` and `released` change under the device's lock."""

    def __init__(self, session: Session, manifest: Manifest, generation: int) -> None:
        self.session, self.manifest, self.generation = session, manifest, generation
        self.lengths: Int32s = np.zeros(manifest.lanes, np.int32)
        self.released: set[int] = set()
        """Lanes to be emptied before the next job."""

    def refusal(self, job: Job) -> ReturnCode | None:
        """Why the job cannot be computed; None: it can."""
        arrays = (job.lanes, job.token_ids, job.positions)
        if not all(isinstance(array, np.ndarray) and array.dtype == np.int32 for array in arrays):
            return ReturnCode.INVALID_DTYPE
        fits = (
            all(array.ndim == 1 and len(array) for array in arrays)
            and job.generation == self.generation
            and job.profile.compiled_batch in self.manifest.compiled_batches
            and len(job.positions) == len(job.token_ids)
            and _within(job.lanes, len(self.lengths))
            and _within(job.token_ids, self.session.vocab_size)
            and _within(job.positions, self.manifest.context)
            and (self._fits_prefill(job) if job.kind is JobKind.PREFILL else self._fits_decode(job))
        )
        return None if fits else ReturnCode.INVALID_SHAPE

    def _fits_prefill(self, job: Job) -> bool:
        stored = int(self.lengths[job.lanes[0]])
        return len(job.lanes) == 1 and np.array_equal(job.positions, np.arange(stored, stored + len(job.token_ids)))

    def _fits_decode(self, job: Job) -> bool:
        rows, valid = len(job.token_ids), job.lane_valid
        return (
            len(job.lanes) == rows <= job.profile.compiled_batch
            and len(set(job.lanes.tolist())) == rows
            and bool((job.positions == self.lengths[job.lanes]).all())
            and (valid is None or (len(valid) == rows and bool(np.all(valid))))
        )

    def length_after(self, job: Job) -> Any:
        """What the job's lanes hold once it is done, int32 [lanes]."""
        return job.positions[-1:] + 1 if job.kind is JobKind.PREFILL else job.positions + 1

    def compute(self, job: Job, lengths: Int32s) -> tuple[OutputStatus, Logits | None]:
        """One `llama_decode`. Anything but success empties the job's lanes: what they hold is no longer known."""
        if job.kind is JobKind.PREFILL:
            rc, logits = self.session.prefill(int(job.lanes[0]), job.token_ids, job.positions, job.want_logits)
        else:
            rc, logits = self.session.decode(job.lanes, job.token_ids, lengths)
        if rc == 0:
            return OutputStatus.DONE, logits
        log.error("llama_decode returned %d for job %d (%s)", rc, job.job_id, job.kind)
        for lane in job.lanes.tolist():
            self.session.truncate(lane, 0)
        return (OutputStatus.ABORTED if rc == RC_ABORTED else OutputStatus.CCU_EXCEPTION), None


def _within(array: Int32s, end: int) -> bool:
    """Whether all values are in [0, end)."""
    return bool(array.min() >= 0 and array.max() < end)


def _convert(value: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ConfigError(f"{where}{path.rstrip('`')}: {message}") from None
