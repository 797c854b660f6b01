"""Ticks on scratch data, so that the real one finds the processor warm.

Between two jobs the actor sleeps for as long as a step takes, and a processor that has slept is slow: the same tick needs several
times its CPU time (docs/benchmarks.md). So shortly before a step should end the shell runs a tick of this stand-in: a whole
`Engine` of its own with a small made-up model, whose sequences decode for ever. It is the very code that is about to run, on data
that nobody sees: nothing of it is sent, recorded or counted. It runs once for a step, as long as a tick takes; nothing spins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calculet_core import wire
from calculet_core.artifact import CapacityInfo, GoldenCase, Manifest, Package, TokenizerInfo
from calculet_core.batches import BatchProfile, InactiveLanePolicy, InactiveMode, KvLayout
from calculet_core.clock import S
from calculet_core.config import BatchConfig, ExecutorConfig, RecoveryConfig, SchedulerConfig, TenantConfig
from calculet_core.jobs import Completion, EngineBank, Job, JobKind, JobTimings, OutputStatus, ReturnCode
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_worker import actions, events
from calculet_worker.device.base import DeviceLimits, Inspection
from calculet_worker.engine import Engine

MAX_LANES = 16
"""What is warm for so many rows is warm for more."""
VOCABULARY = 64
TOKEN, EOS = 7, 63
CONTEXT = 1 << 10
ALIAS = "rehearsal"


class Rehearsal:
    """A stand-in with `lanes` sequences that decode together; `now_ns` is any clock that does not go back."""

    def __init__(self, lanes: int, now_ns: int) -> None:
        self.lanes = max(1, min(lanes, MAX_LANES))
        self._package = _package(self.lanes)
        limits = DeviceLimits(1, 1, False)
        self._engine = Engine("rehearsal", 1, 0, "", limits, RecoveryConfig(), 1, (TenantConfig("default"),), 1 << 40)
        self._logits: Any = np.zeros((self.lanes, VOCABULARY), np.float32)
        self._logits[:, TOKEN] = 1.0
        self._todo: list[events.Event] = []
        self._job: Job | None = None
        self._number = self.ticks = 0
        profiles = tuple(profile.compiled_batch for profile in self._package.manifest.profiles)
        scheduler = SchedulerConfig(
            "calculet-scheduler/v1", ALIAS, batch=BatchConfig(profiles=profiles), executor=ExecutorConfig(max_inflight=1)
        )
        self._tell(events.CommandArrived(wire.LoadModel(1, 1, ALIAS, "", "")), now_ns)
        self._tell(events.PackageVerified(1, self._package, [b"x"] * VOCABULARY, scheduler), now_ns)
        manifest = self._package.manifest
        found = Inspection(manifest.profiles, manifest.lanes, manifest.context, VOCABULARY, None)
        self._tell(events.DeviceConfigured(1, ReturnCode.OK, found), now_ns)
        while self._job is not None:  # golden and warm-up
            self._complete(now_ns)
        self._fill(now_ns)
        while self._job is None or self._job.kind is JobKind.PREFILL or len(self._job.token_ids) < self.lanes:
            self._complete(now_ns)

    def tick(self, now_ns: int) -> None:
        """Complete the step that is out: its tokens are drawn and committed, the next step is built, and text is made."""
        self._complete(now_ns)
        self.ticks += 1
        if len(self._engine.attempts.registry) < self.lanes:
            self._fill(now_ns)

    # ---------------------------------------------------------------- the stand-in's board and router
    def _fill(self, now_ns: int) -> None:
        for _ in range(self.lanes - len(self._engine.attempts.registry)):
            self._number += 1
            request = wire.Submit(
                request_id=self._number, attempt=0, epoch=1, generation=1, digest=self._package.digest, alias=ALIAS,
                tenant="default", weight=1.0, prompt=Prompt(token_ids=(TOKEN,)),
                max_new_tokens=CONTEXT - 1 - 29 * self._number % (CONTEXT // 2),  # so that they do not end all at once
                sampling=SamplingParams(temperature=0.0), stop=StopRules(ignore_eos=True), deadline_ns=now_ns + 10**6 * S,
                deadline_asked=False, accepted_ns=now_ns,
            )  # fmt: skip
            self._tell(events.RequestArrived(1, request), now_ns)

    def _complete(self, now_ns: int) -> None:
        job, self._job = self._job, None
        assert job is not None, "a stand-in that decodes for ever always has a job"
        rows = 1 if job.kind is JobKind.PREFILL else len(job.token_ids)
        completion = Completion(
            job.job_id, job.generation, OutputStatus.DONE, self._logits[:rows], EngineBank.AUTO, JobTimings(wait_ns=1), 0
        )
        self._tell(events.JobCompleted(completion, now_ns), now_ns)

    def _tell(self, event: events.Event, now_ns: int) -> None:
        todo = self._todo
        todo.append(event)
        while todo:
            for action in self._engine.handle(todo.pop(0), now_ns):
                if isinstance(action, actions.SubmitJob):
                    self._job = action.job
                    todo.append(events.JobSubmitted(action.job.job_id, EngineBank.AUTO))
                elif isinstance(action, actions.ReleaseLane):
                    todo.append(events.LaneReleased(1, action.lane, ReturnCode.OK))
                elif isinstance(action, actions.Tokenize):
                    todo.append(events.Tokenized(action.key, np.array([TOKEN], np.int32)))


def _package(lanes: int) -> Package:
    policy = InactiveLanePolicy(InactiveMode.COMPACT, "none", False, False)
    layout = KvLayout("none", "none", 1)
    sizes = (1, lanes) if lanes > 1 else (1,)
    manifest = Manifest(
        schema="calculet-artifact/v1", name=ALIAS, version="1", backend=ALIAS, image="image", image_sha256="0" * 64, files={},
        profiles=tuple(
            BatchProfile(f"b{size}", size, CONTEXT, "int32", "float32", layout, policy if size > 1 else None) for size in sizes
        ),
        context=CONTEXT, lanes=lanes, tokenizer=TokenizerInfo("bytes", VOCABULARY, eos_token_ids=(EOS,)),
        capacity=CapacityInfo(1, 1, 1), golden="golden.jsonl",
    )  # fmt: skip
    golden = GoldenCase("one", [TOKEN], [TOKEN], [1.0])
    return Package(None, manifest, "0" * 64, (golden,))  # type: ignore[arg-type]  # it is nowhere
