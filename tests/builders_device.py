"""Devices for the contract suite: the backends under test, and a driver that submits one job at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from builders_sim import a_sim_package
from builders_smollm2 import needs_engine, smollm2_package
from numpy.typing import NDArray

from calculet_core.artifact import Package
from calculet_core.batches import InactiveMode
from calculet_core.clock import S
from calculet_core.config import BoardConfig
from calculet_core.jobs import Completion, EngineBank, Job, JobHandle, JobKind, OutputStatus, ReturnCode
from calculet_worker.device import open_device
from calculet_worker.device.base import Device
from calculet_worker.device.faults import FaultPlan
from calculet_worker.device.faulty import FaultyDevice
from calculet_worker.device.sim_rule import reference_tokens

LIMIT_NS = 30 * S


@dataclass(frozen=True)
class Backend:
    """A device that the suite runs over, with a package for it."""

    name: str
    package: Callable[[], Package]
    open: Callable[[], Device]
    reference: Callable[[list[int], int], list[int]] | None = None
    """Tokens that an honest run gives, where they can be known without the device."""


@cache
def quick_package() -> Package:
    """Simulated; its steps take 0.2 ms, prompts 20 us a token, and two jobs do not hinder each other."""
    return a_sim_package(decode_ns={"8": 200_000}, prefill_token_ns=20_000, jitter=0.0, overlap=1.0)


def open_sim() -> Device:
    return open_device(BoardConfig(name="sim0", device="sim", options={"reset_ms": 1}))


def open_llamacpp() -> Device:
    return open_device(BoardConfig(name="cpu0", device="llamacpp", options={"threads": 1}))


def quick_reference(prompt: list[int], count: int) -> list[int]:
    return reference_tokens(quick_package().manifest, prompt, count)


BACKENDS = [
    pytest.param(Backend("sim", quick_package, open_sim, quick_reference), id="sim"),
    pytest.param(Backend("faulty", quick_package, lambda: FaultyDevice(open_sim(), FaultPlan()), quick_reference), id="faulty-without-faults"),
    pytest.param(Backend("llamacpp", lambda: smollm2_package(8, 512), open_llamacpp), id="llamacpp", marks=[pytest.mark.engine, needs_engine]),
]


class Board:
    """A device with its package, driven by one thread: each call submits one job and waits for it."""

    def __init__(self, device: Device, package: Package, generation: int = 1) -> None:
        self.device, self.package, self.generation = device, package, generation
        self.length: dict[int, int] = {}
        self._jobs = 0

    def configure(self) -> Board:
        assert self.device.configure(self.package, self.generation) == ReturnCode.OK
        return self

    # ---------------------------------------------------------------- jobs
    def prefill_job(self, lane: int, prompt: list[int], start: int = 0, **changes: Any) -> Job:
        self._jobs += 1
        positions = np.arange(start, start + len(prompt), dtype=np.int32)
        fields = {"lanes": ints(lane), "token_ids": ints(*prompt), "positions": positions}
        return Job(self._jobs, self.generation, JobKind.PREFILL, self.package.manifest.profile(1), **{**fields, **changes})

    def decode_job(self, tokens: dict[int, int], batch: int | None = None, **changes: Any) -> Job:
        """One step of the lanes in the order given; rows left over are inactive, and hold what no device may use."""
        self._jobs += 1
        manifest = self.package.manifest
        profile = manifest.profile(batch or min(size for size in manifest.compiled_batches if size >= len(tokens)))
        compact = profile.inactive_policy is not None and profile.inactive_policy.mode is InactiveMode.COMPACT
        idle = 0 if compact else profile.compiled_batch - len(tokens)
        fields = {
            "lanes": ints(*tokens, *[-1] * idle), "token_ids": ints(*tokens.values(), *[-1] * idle),
            "positions": ints(*[self.length.get(lane, 0) for lane in tokens], *[-1] * idle),
            "lane_valid": np.array([1] * len(tokens) + [0] * idle, np.uint8),
        }  # fmt: skip
        return Job(self._jobs, self.generation, JobKind.DECODE, profile, **{**fields, **changes})

    def submit(self, job: Job, engine: EngineBank = EngineBank.AUTO) -> None:
        answer = self.device.submit(job, engine)
        assert isinstance(answer, JobHandle), answer
        assert answer.job_id == job.job_id

    def wait(self) -> Completion:
        done = self.device.wait_any(LIMIT_NS)
        assert isinstance(done, Completion), done
        return done

    def run(self, job: Job) -> NDArray[np.float32] | None:
        """Submit, wait, give back; a copy of the logits."""
        self.submit(job)
        done = self.wait()
        assert (done.job_id, done.generation, done.status) == (job.job_id, job.generation, OutputStatus.DONE)
        logits = None if done.logits is None else np.array(done.logits)
        self.device.give_back(done)
        return logits

    # ---------------------------------------------------------------- sequences
    def prefill(self, lane: int, prompt: list[int], cuts: tuple[int, ...] = ()) -> int:
        """The greedy token after the prompt, which is submitted in pieces that end at `cuts`."""
        start, logits = 0, None
        for end in (*cuts, len(prompt)):
            last = end == len(prompt)
            logits = self.run(self.prefill_job(lane, prompt[start:end], start, want_logits=last))
            assert (logits is not None) == last
            start = end
        self.length[lane] = len(prompt)
        assert logits is not None
        return int(logits[0].argmax())

    def decode(self, tokens: dict[int, int], batch: int | None = None) -> dict[int, int]:
        """One step: lane -> its greedy token."""
        logits = self.run(self.decode_job(tokens, batch))
        assert logits is not None
        for lane in tokens:
            self.length[lane] = self.length.get(lane, 0) + 1
        return {lane: int(logits[row].argmax()) for row, lane in enumerate(tokens)}

    def generate(self, lane: int, prompt: list[int], count: int, batch: int | None = None) -> list[int]:
        """Greedy tokens of a prompt that is alone on the board."""
        answer = [self.prefill(lane, prompt)]
        while len(answer) < count:
            answer.append(self.decode({lane: answer[-1]}, batch)[lane])
        return answer

    def release(self, *lanes: int) -> None:
        for lane in lanes:
            assert self.device.release(lane) == ReturnCode.OK
            self.length.pop(lane, None)


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def a_prompt(length: int, seed: int = 0) -> list[int]:
    """Ids that every vocabulary here has."""
    return [int(token) for token in np.random.default_rng(seed).integers(32, 255, length)]
