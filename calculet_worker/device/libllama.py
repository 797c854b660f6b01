"""libllama through its low-level binding: opening it, batches as numpy arrays, and a context with its lanes.

Only what one thread may do at a time is here; who may do it when is the matter of `llamacpp`. The library computes a batch in one
pass only over neighbouring lanes, so small gaps between lanes are bridged: an idle lane takes part with a row whose KV is removed
again. Removing the last tokens of a lane is exact.
"""

from __future__ import annotations

import ctypes
import logging
import os
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calculet_worker.device.base import BoardUnavailable

log = logging.getLogger(__name__)

BRIDGE_LANES = 1
"""Widest gap that is bridged: another row costs less than a second pass where the CPU has AMX, and about the same with AVX2."""

_LOG_LEVELS = {3: logging.WARNING, 4: logging.ERROR}
"""ggml's levels that are worth a line."""

Int32s = NDArray[np.int32]
Logits = NDArray[np.float32]


class UnusableImage(Exception):
    """Not a model file that this library can run."""


def load_library() -> Any:
    """The low-level binding, initialised, its log routed to ours.

    Raises:
        BoardUnavailable: it is not there, or does not load.
    """
    try:
        library: Any = import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        raise BoardUnavailable(f"the llamacpp backend is not installed ({error.name} is missing): make engine") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise BoardUnavailable(f"the llamacpp backend does not load: {error}") from None
    if not hasattr(library, "calculet_log"):
        library.calculet_log = library.llama_log_callback(_forward_log)  # kept: the library calls it for ever
        library.llama_log_set(library.calculet_log, ctypes.c_void_p(0))
        library.llama_backend_init()
    return library


def _forward_log(level: int, text: bytes, _: object) -> None:
    if level in _LOG_LEVELS and text.strip():
        log.log(_LOG_LEVELS[level], "%s", text.decode(errors="replace").strip())


def bridged(lanes: list[int], room: list[bool]) -> list[int]:
    """`lanes` (ascending) with the lanes of narrow gaps between them, where these have `room` for a token."""
    rows = lanes[:1]
    for lane in lanes[1:]:
        gap = range(rows[-1] + 1, lane)
        if len(gap) <= BRIDGE_LANES and all(room[between] for between in gap):
            rows.extend(gap)
        rows.append(lane)
    return rows


class Rows:
    """A `llama_batch` over numpy arrays of a fixed capacity."""

    def __init__(self, library: Any, capacity: int) -> None:
        self.token, self.position, self.lane = (np.zeros(capacity, np.int32) for _ in range(3))
        self.wanted = np.zeros(capacity, np.int8)
        self._one = np.ones(capacity, np.int32)
        self._lane_at = self.lane.ctypes.data + self.lane.itemsize * np.arange(capacity, dtype=np.uintp)
        self.raw = library.llama_batch()
        int32s, int8s = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self.raw.token, self.raw.pos = self.token.ctypes.data_as(int32s), self.position.ctypes.data_as(int32s)
        self.raw.n_seq_id, self.raw.logits = self._one.ctypes.data_as(int32s), self.wanted.ctypes.data_as(int8s)
        self.raw.seq_id = ctypes.cast(self._lane_at.ctypes.data, ctypes.POINTER(int32s))

    def fill(self, token: Any, position: Any, lane: Any, wanted: Any, count: int) -> None:
        """Set the first `count` rows; scalars are repeated."""
        self.token[:count], self.position[:count], self.lane[:count], self.wanted[:count] = token, position, lane, wanted
        self.raw.n_tokens = count


class ThreadPool:
    """The threads that compute, kept from one `llama_decode` to the next; without one ggml starts and ends them at each.

    After a job they look for the next one for about as long as the host needs from one job to the next, and then sleep.
    """

    THREADS_AT, POLL_AT = 512, 520
    """Bytes into `ggml_threadpool_params`, which the binding does not declare: the number of threads, and how long they look."""
    POLL_DEFAULT, POLL = 50, 1
    """In 131,072 pauses of the processor, one to three milliseconds."""

    def __init__(self, ggml: Any, raw: int) -> None:
        self._ggml, self._raw = ggml, raw

    @classmethod
    def attach(cls, library: Any, context: Any, threads: int) -> ThreadPool | None:
        """One for this context; None where one thread computes, or the library is not as we know it: then ggml sees to itself."""
        ggml = library._lib  # looks into the libraries that it brought along, too
        known = ("ggml_threadpool_params_init", "ggml_threadpool_new", "ggml_threadpool_free", "llama_attach_threadpool")
        if threads < 2 or not all(hasattr(ggml, name) for name in known):
            return None
        parameters = (ctypes.c_uint32 * 256)()
        ggml.ggml_threadpool_params_init(ctypes.byref(parameters), ctypes.c_int(threads))
        if (parameters[cls.THREADS_AT // 4], parameters[cls.POLL_AT // 4]) != (threads, cls.POLL_DEFAULT):
            log.warning("ggml's thread pool is not as it was known: its threads start anew for each job")
            return None
        parameters[cls.POLL_AT // 4] = cls.POLL
        ggml.ggml_threadpool_new.restype = ctypes.c_void_p
        raw = ggml.ggml_threadpool_new(ctypes.byref(parameters))
        if not raw:
            return None
        ggml.llama_attach_threadpool(ctypes.c_void_p(context), ctypes.c_void_p(raw), ctypes.c_void_p(raw))
        return cls(ggml, raw)

    def free(self) -> None:
        """End the threads; the context must be gone."""
        self._ggml.ggml_threadpool_free(ctypes.c_void_p(self._raw))


class Session:
    """A model and its context. One thread at a time."""

    def __init__(self, library: Any, image: bytes, lanes: int, context: int, micro_batch: int, threads: int) -> None:
        """Load and allocate; seconds.

        Raises:
            UnusableImage: the library cannot load it; its own words are in the log.
            MemoryError: no room for a context of that size.
        """
        self._library = library
        self._views: dict[tuple[int, int], Logits] = {}
        parameters = library.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = library.llama_model_load_from_file(image, parameters)
        if not self.model:
            raise UnusableImage(f"{os.fsdecode(image)}: llama.cpp cannot load it")
        parameters = library.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = lanes * context, lanes
        parameters.n_batch, parameters.n_ubatch = max(context, micro_batch), micro_batch
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified, parameters.no_perf = False, True
        parameters.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = library.llama_init_from_model(self.model, parameters)
        if not self.context:
            library.llama_model_free(self.model)
            raise MemoryError(f"llama.cpp cannot make a context of {lanes} lanes of {context} tokens")
        self._pool = ThreadPool.attach(library, self.context, threads)
        self._memory = library.llama_get_memory(self.context)
        self.lanes, self.lane_context = library.llama_n_seq_max(self.context), library.llama_n_ctx_seq(self.context)
        self.vocab_size: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self._rows = Rows(library, max(context, lanes))

    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position, float16."""
        library, model = self._library, self.model
        head = library.llama_model_n_embd(model) // library.llama_model_n_head(model)
        return int(2 * 2 * head * library.llama_model_n_head_kv(model) * library.llama_model_n_layer(model))

    def prefill(self, lane: int, token_ids: Int32s, positions: Int32s, want_logits: bool) -> tuple[int, Logits | None]:
        """`llama_decode`'s return code and the last token's logits, float32 [1, vocabulary]."""
        count = len(token_ids)
        self._rows.fill(token_ids, positions, lane, 0, count)
        self._rows.wanted[count - 1] = want_logits
        rc = int(self._library.llama_decode(self.context, self._rows.raw))
        return rc, self._logits(1) if rc == 0 and want_logits else None

    def decode(self, lanes: Int32s, token_ids: Int32s, lengths: Int32s) -> tuple[int, Logits | None]:
        """`llama_decode`'s return code and logits, float32 [rows, vocabulary]; `lengths` is what every lane of the board holds.

        The logits are a view of the library's buffer when `lanes` ascend, else a copy in their order.
        """
        members = lanes.tolist()
        ascending = sorted(members)
        laid = bridged(ascending, (lengths < self.lane_context).tolist())
        bridges = sorted(set(laid) - set(members))
        if laid == members:
            self._rows.fill(token_ids, lengths[lanes], lanes, 1, len(members))
        else:
            token_of = dict(zip(members, token_ids.tolist(), strict=True))
            tokens = [token_of.get(lane, token_ids[0]) for lane in laid]
            self._rows.fill(tokens, lengths[laid], laid, [lane in token_of for lane in laid], len(laid))
        rc = int(self._library.llama_decode(self.context, self._rows.raw))
        for lane in bridges:
            self.truncate(lane, int(lengths[lane]))
        if rc != 0:
            return rc, None
        logits = self._logits(len(members))
        return rc, logits if ascending == members else logits[np.searchsorted(ascending, members)]

    def truncate(self, lane: int, length: int) -> None:
        """Remove what a lane holds from position `length` on."""
        self._library.llama_memory_seq_rm(self._memory, lane, length, -1)

    def free(self) -> None:
        """Give the memory back; nobody may look at logits any more."""
        self._views.clear()
        self._library.llama_free(self.context)
        if self._pool is not None:
            self._pool.free()
        self._library.llama_model_free(self.model)

    def _logits(self, rows: int) -> Logits:
        """Read-only view of the library's output buffer. Making one takes longer than a sampler should wait, so they are kept."""
        address = ctypes.cast(self._library.llama_get_logits(self.context), ctypes.c_void_p).value or 0
        view = self._views.get((address, rows))
        if view is None:
            flat = (ctypes.c_float * (rows * self.vocab_size)).from_address(address)
            view = np.ctypeslib.as_array(flat).reshape(rows, self.vocab_size)
            view.flags.writeable = False
            self._views[address, rows] = view
        return view
