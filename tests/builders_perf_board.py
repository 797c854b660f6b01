"""Requests whose times and tokens a simulated board gave, in virtual time: what a planted slowdown or swap looks like from outside."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from builders_device import ints
from builders_perf import a_request
from builders_sim import a_sim_package

from calculet_core.capacity import GIB
from calculet_core.clock import MS, S
from calculet_core.jobs import Completion, DeviceVersions, EngineBank, Job, JobHandle, JobKind, ReturnCode
from calculet_perf.records import Batch, RequestRecord, StepRecord
from calculet_worker.device.sim_board import SimBoard

TOKENS = 11
HOST_NS = int(0.3 * MS)
"""What the host does between two jobs."""
PROMPTS = [list(range(65, 81)), list(range(97, 113)), list(range(48, 64)), [72, 101] * 8, [33 + 3 * place for place in range(16)]]


@dataclass
class BoardRun:
    """Requests and steps of one cell, `lanes` at a time."""

    seed: int = 1
    slower: float = 1.0
    lanes: int = 1
    rounds: int = 10
    swap_in_group: int | None = None
    """In this group two lanes are given each other's token once."""
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def run(self, count: int) -> BoardRun:
        """Serve `count` requests."""
        decode_ns = {"1": int(5 * MS * self.slower), "4": int(6 * MS * self.slower)}
        self._package = a_sim_package(
            sizes=(1, 4),
            lanes=4,
            decode_ns=decode_ns,
            prefill_token_ns=int(1 * MS * self.slower),
            h2d_ns=50_000,
            d2h_ns=80_000,
            jitter=0.05,
        )
        self._board = SimBoard(DeviceVersions("sim", "S1", "0.7.6-sim", "1", "1", 2, "balanced"), 32 * GIB, seed=self.seed)
        assert self._board.configure(self._package, 1) is ReturnCode.OK
        self._now, self._jobs = 1 * S, 0
        groups = count // self.lanes
        for group in range(groups):
            self._group(group, group * self.rounds // groups)
        return self

    def _group(self, group: int, round_: int) -> None:
        start, lanes = self._now, range(self.lanes)
        ids = [f"{self.seed}-{group}-{lane}" for lane in lanes]
        samples = [(group + lane) % len(PROMPTS) for lane in lanes]
        answers = []
        for lane in lanes:
            prompt = PROMPTS[samples[lane]]
            answers.append([self._job(JobKind.PREFILL, [lane], prompt, list(range(len(prompt))), [ids[lane]], 0)[0]])
        first = self._now
        for step in range(1, TOKENS):
            given = [answer[-1] for answer in answers]
            if group == self.swap_in_group and step == 4:
                given[0], given[1] = given[1], given[0]
            position = len(PROMPTS[0]) + step - 1
            said = self._job(JobKind.DECODE, list(lanes), given, [position] * self.lanes, ids, step)
            for answer, token in zip(answers, said, strict=True):
                answer.append(token)
        for lane in lanes:
            self._board.release(lane)
            tpot_ms = (self._now - first) / MS / (TOKENS - 1)
            self.requests.append(
                a_request(
                    ids[lane], start_s=start / S, ttft_ms=(first - start) / MS, tpot_ms=tpot_ms, tokens=TOKENS, round=round_,
                    index=len(self.requests), case=f"sim/c{self.lanes}", concurrency=self.lanes, sample=f"s{samples[lane]}",
                    token_hash=f"ids:{hashlib.sha256(repr(answers[lane]).encode()).hexdigest()}",
                )
            )  # fmt: skip
        self._now += HOST_NS

    def _job(
        self, kind: JobKind, lanes: list[int], tokens: list[int], positions: list[int], ids: list[str], step: int
    ) -> list[int]:
        self._jobs += 1
        self._now += HOST_NS
        profile = self._package.manifest.profile(1 if kind is JobKind.PREFILL else len(lanes))
        job = Job(self._jobs, 1, kind, profile, ints(*lanes), ints(*tokens), ints(*positions))
        assert isinstance(self._board.submit(job, EngineBank.AUTO, self._now), JobHandle)
        due = self._board.next_done_ns()
        assert due is not None
        self._now = max(self._now, due)
        (done,) = self._board.collect(self._now)
        self._steps(done, kind, ids, step, len(lanes))
        best = [int(token) for token in done.logits.argmax(axis=1)]
        self._board.give_back(done)
        return best

    def _steps(self, done: Completion, kind: JobKind, ids: list[str], step: int, active: int) -> None:
        times: dict[str, Any] = {
            "h2d_ms": (done.timings.h2d_ns or 0) / MS, "device_wait_ms": (done.timings.wait_ns or 0) / MS, "d2h_ms": (done.timings.d2h_ns or 0) / MS,
        }  # fmt: skip
        for lane, name in enumerate(ids):
            self.steps.append(
                StepRecord(
                    request_id=name, job_id=done.job_id, seq_id=lane, kind="prefill" if kind is JobKind.PREFILL else "decode", step=step,
                    prepare_ms=HOST_NS / MS, engine=str(done.engine), output_status=str(done.status), board="sim0", generation=1,
                    batch=Batch(compiled=active, active=active), **times,
                )
            )  # fmt: skip
