"""One board's decisions: `Engine.handle(event, now_ns) -> actions`, without any input or output of its own.

The engine composes the parts, each of which owns its state: attempts (routers' requests), the lifecycle (the model generation),
control (commands), and for each generation a `Serving` (lanes, queues, jobs, answers). One table leads an event to its method;
then the pump expires what is late, gives lanes to who waits and submits the next job. The order of actions is part of the contract:
buffers go back and the next job goes out before any text is made for clients, which then happens while the device computes. A
job's end is followed to its consequences here, because only here requests, generation and lanes meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from calculet_core import history, wire
from calculet_core.config import RecoveryConfig, TenantConfig
from calculet_core.errors import CalculetError, DeviceBusy, ExitCode
from calculet_core.faults import FAULT_POLICY, FaultKind, Response, fault_of_code
from calculet_core.jobs import Completion, ReturnCode
from calculet_core.limits import Limits, LocalLimits
from calculet_core.requests import SequenceState
from calculet_core.states.model_generation import ModelState
from calculet_worker import events, views
from calculet_worker.actions import Action, Announce, GiveBack, TraceSteps
from calculet_worker.answers import Outbox
from calculet_worker.attempts import Attempts
from calculet_worker.control import Control
from calculet_worker.device.base import DeviceLimits
from calculet_worker.generation import RUNS_JOBS, Lifecycle
from calculet_worker.golden import Trial, golden_stage, internal_request, prompt_of, stages_of
from calculet_worker.jobs.completion import STALE, Faulty, Partial, Stale, judge
from calculet_worker.jobs.durations import Durations, backoff_ns
from calculet_worker.jobs.inflight import InflightJob
from calculet_worker.jobs.pingpong import Degraded, PingPong
from calculet_worker.jobs.recovery import RecoveryPlan, plan_for, plan_for_failed_golden, plan_for_worn_out
from calculet_worker.records import Recorder
from calculet_worker.scheduling.admission import RejectInvalid
from calculet_worker.scheduling.arbiter import Turn
from calculet_worker.serving import Lasting, Serving
from calculet_worker.views import EngineGauges

Actions = list[Action]
_NOTHING_FOLLOWS = frozenset({events.RequestArrived, events.JobSubmitted})
"""After these the pump would find what it found before: a prompt comes back from the tokenizer as an event of its own, and a job
that was taken was sent by a pump that has just looked at everything, and held back nothing but the text."""


class Engine:
    """`limits` are the device's, `dram_bytes` the board's; `fleet_recovery` holds where the alias's scheduler says nothing else.

    With a `stopwatch` (nanoseconds of CLOCK_MONOTONIC) steps are traced. `limits_of_waiting` is the ledger of what tenants let wait
    on all boards, in prompt tokens; None: this board is alone.
    """

    def __init__(
        self,
        board: str,
        epoch: int,
        pid: int,
        endpoint: str,
        limits: DeviceLimits,
        fleet_recovery: RecoveryConfig,
        seed: int,
        tenants: tuple[TenantConfig, ...],
        dram_bytes: int,
        stopwatch: Callable[[], int] | None = None,
        limits_of_waiting: Limits | None = None,
    ) -> None:
        self.board, self.epoch, self.pid, self.endpoint, self.limits = board, epoch, pid, endpoint, limits
        self._recorder = Recorder(board, epoch)
        self._outbox = Outbox()
        self.life = Lifecycle(self._recorder, dram_bytes, fleet_recovery, limits.unconfigures)
        self.attempts = Attempts(epoch, self.life, self._recorder, self._outbox, self._internal_ended)
        self.pingpong = PingPong()
        self.control = Control(self.life, self.attempts, self.pingpong)
        registry = self.attempts.registry
        waiting: Limits = LocalLimits() if limits_of_waiting is None else limits_of_waiting
        self._lasting = Lasting(limits, tenants, registry, self._outbox, self._recorder, self.pingpong, stopwatch, seed, waiting)
        self.trial: Trial | None = None
        """Golden or warm-up that runs."""
        self.steps = 0
        """Jobs that ended: must grow while jobs are in flight."""
        self._last_job = self._last_internal = 0
        self._measured: tuple[str, Durations] | None = None
        """Digest of an artifact, and how long its jobs take: the same after a reset."""
        self._traces: list[TraceSteps] = []
        """Written after the next job has gone out."""
        self._busy_tries = 0
        self._busy_until_ns: int | None = None
        self._idle = True
        self._handlers: dict[type[Any], Callable[[Any, int, Actions], None]] = {
            events.RequestArrived: self._request_arrived,
            events.Tokenized: self.attempts.tokenized,
            events.TokenizingFailed: lambda e, now, out: self.attempts.tokenizing_failed(e.key, e.error, now, out),
            events.CancelAsked: lambda e, now, out: self.attempts.cancel(e.key, e.reason, now, out),
            events.RouterLost: lambda e, now, out: self.attempts.router_lost(e.router, e.reason, now, out),
            events.JobSubmitted: self._job_submitted,
            events.JobRefused: self._job_refused,
            events.JobCompleted: self._job_completed,
            events.JobLost: self._job_lost,
            events.LaneReleased: self._lane_released,
            events.CommandArrived: lambda e, now, out: self.control.command(e.command, now, out),
            events.PackageVerified: self.life.verified,
            events.DeviceConfigured: self._device_configured,
            events.DeviceUnconfigured: self._device_unconfigured,
            events.DeviceReset: self._device_reset,
            events.CountersRead: self._counters_read,
            events.TenantsChanged: self._tenants_changed,
            events.TimeCame: lambda e, now, out: None,
        }

    # ---------------------------------------------------------------- public
    def handle(self, event: events.Event, now_ns: int) -> Actions:
        """Decide what follows from an event; `now_ns` is the host's CLOCK_MONOTONIC and never goes back."""
        out: Actions = []
        kind = type(event)
        self._handlers[kind](event, now_ns, out)
        if kind in _NOTHING_FOLLOWS and not self.pingpong.unsaid:
            self._recorder.flush(out)
            self._outbox.flush(out)
        else:
            self._pump(now_ns, out)
        return out

    def next_wakeup_ns(self) -> int | None:
        """When `TimeCame` is due, if nothing else happens."""
        serving = self.serving
        times = [self.attempts.deadlines.next_ns(), self.control.next_wakeup_ns(), self.life.retry_ns, self._busy_until_ns]
        if serving is not None:
            times += [serving.hold_ns, serving.next_release_ns()]
        return min((time for time in times if time is not None), default=None)

    def report(self, now_ns: int) -> wire.WorkerReport:
        """The heartbeat; what only the device or the process knows is left at its defaults."""
        return views.report_of(self)

    def hello(self) -> wire.WorkerHello:
        """Who this worker is, for routers."""
        return views.hello_of(self)

    def load(self) -> wire.Load:
        """For a router's choice among workers."""
        return views.load_of(self)

    def gauges(self, now_ns: int) -> EngineGauges:
        """What metrics show that no record tells."""
        return views.gauges_of(self, now_ns)

    @property
    def free_lanes(self) -> int | None:
        """Lanes that our accounting would give away now; None while the board does not serve."""
        serving = self.serving
        return serving.kv.free_lanes if serving is not None and self.life.state is ModelState.READY else None

    @property
    def serving(self) -> Serving | None:
        """The present generation's machinery."""
        return self.attempts.serving

    # ---------------------------------------------------------------- the pump
    def _pump(self, now_ns: int, out: Actions) -> None:
        self.attempts.expire(now_ns, out)
        self.life.retry(now_ns, out)
        self.control.expire(now_ns, out)
        if self._busy_until_ns is not None and now_ns >= self._busy_until_ns:
            self._busy_until_ns = None
        serving, submitted = self.serving, False
        if serving is not None:
            serving.hold_ns = None  # where jobs may start they say anew how long they wait
            serving.release_again(now_ns, out)
            while self.trial is not None and self.trial.stage_over:
                self._advance_trial(serving, self.trial, now_ns, out)
            runs = self.life.state in RUNS_JOBS and self.control.jobs_may_start
            serving.admits = runs and self.trial is None
            if runs:
                serving.admit(self.trial is not None, now_ns, out)
                submitted = self._busy_until_ns is None and self._submit_jobs(serving, now_ns, out)
        self._note_idle(now_ns)
        if (changed := self.pingpong.changed()) is not None:
            self._note_pingpong(*changed, now_ns, out)
        self._recorder.flush(out)
        if self._traces:
            out += self._traces
            self._traces.clear()
        if not submitted:
            self._outbox.flush(out)
        self.control.advance(now_ns, out)

    def _submit_jobs(self, serving: Serving, now_ns: int, out: Actions) -> bool:
        submitted = False
        while (submit := serving.next_job(self._last_job + 1, self.attempts.tokenizing, now_ns)) is not None:
            self._last_job += 1
            out.append(submit)
            submitted = True
        return submitted

    def _note_idle(self, now_ns: int) -> None:
        """Record once when nothing is left: then lanes, KV and leases are back at their baseline."""
        if len(self.attempts.registry):
            self._idle = False
            return
        serving = self.serving
        if self._idle or serving is None or not self.attempts.nothing_runs():
            return
        self._idle = True
        kv = serving.kv
        data = {"lanes_busy": kv.busy_lanes, "kv_reserved": kv.reserved_tokens, "leases": serving.buffers.leased}
        self._recorder.of_board(history.BOARD_IDLE, now_ns, serving.generation, data)

    def _note_pingpong(self, reason: Degraded | None, detail: str, now_ns: int, out: Actions) -> None:
        limit = self.serving.inflight.limit if self.serving else 1
        data = {"limit": limit, "reason": reason.value if reason else None, "detail": detail}
        self._recorder.of_board(history.BOARD_PINGPONG, now_ns, self.life.generation, data)
        out.append(Announce())

    # ---------------------------------------------------------------- requests
    def _request_arrived(self, event: events.RequestArrived, now_ns: int, out: Actions) -> None:
        self.attempts.arrived(event, self.control.refusal(), now_ns, out)

    def _tenants_changed(self, event: events.TenantsChanged, now_ns: int, out: Actions) -> None:
        """For this generation, and those that come."""
        self._lasting = replace(self._lasting, tenants=event.tenants)
        if self.serving is not None:
            self.serving.fair.take_tenants(event.tenants)

    # ---------------------------------------------------------------- jobs
    def _job_submitted(self, event: events.JobSubmitted, now_ns: int, out: Actions) -> None:
        serving = self.serving
        entry = serving.inflight.get(event.job_id) if serving else None
        if serving is not None and entry is not None:
            self._busy_tries = 0
            if len(serving.inflight) > 1:
                self.pingpong.took_second()
            serving.submitted(entry, event.engine)

    def _job_refused(self, event: events.JobRefused, now_ns: int, out: Actions) -> None:
        serving = self.serving
        entry = serving.inflight.get(event.job_id) if serving else None
        if serving is None or entry is None:
            return
        serving.refused(entry)
        waiting = [seq for seq in entry.sequences if not (seq.terminal or seq.cancelled)]
        for seq in entry.sequences:
            if seq in waiting:
                serving.requeue(seq, now_ns)
            else:
                self.attempts.drained(seq, now_ns, out)
        kind = fault_of_code(event.rc)
        self._job_record(entry, f"refused_{kind.value}", 0, now_ns, out, rc=event.rc)
        if FAULT_POLICY[kind].response is Response.BACK_OFF:
            self._back_off(serving, waiting, now_ns, out)
        else:
            self._fault(plan_for(kind, f"job {event.job_id} was refused (rc {event.rc})"), waiting, now_ns, out)

    def _back_off(self, serving: Serving, waiting: list[SequenceState], now_ns: int, out: Actions) -> None:
        """rc 17: a bounded number of pauses that double; never a reset."""
        executor = serving.config.executor
        if len(serving.inflight):
            self.pingpong.refused_second()
        self._busy_tries += 1
        if self._busy_tries > executor.busy_max_tries:
            tries, self._busy_tries = self._busy_tries, 0
            self.attempts.fail_all(waiting, DeviceBusy(f"the device was busy {tries} times in a row"), now_ns, out)
        else:
            self._busy_until_ns = now_ns + backoff_ns(executor, self._busy_tries)

    def _job_completed(self, event: events.JobCompleted, now_ns: int, out: Actions) -> None:
        completion, serving = event.completion, self.serving
        entry = serving.inflight.get(completion.job_id) if serving else None
        verdict = judge(completion, entry, serving.vocab_size, serving.isolated, event.facts) if serving else STALE
        if serving is None or entry is None or isinstance(verdict, Stale):
            self._stale(completion, now_ns, out)
            return
        if not isinstance(verdict, Faulty) and (wrong := serving.mismatch(entry)) is not None:
            verdict = Faulty(FaultKind.OTHER, f"job {completion.job_id}: {wrong}")
        self.steps += 1
        serving.inflight.pop(completion.job_id)
        if entry.engine is not None and completion.engine is not entry.engine:
            engines = f"taken by {entry.engine.name}, its output came from {completion.engine.name}"
            self.pingpong.other_engine(f"job {completion.job_id} was {engines}")
        spent_ns = serving.account(entry, completion, now_ns)
        if entry.traced and isinstance(verdict, Faulty):
            self._trace(entry, event, None, now_ns, out)
        if isinstance(verdict, Faulty):
            self._faulty_output(serving, entry, completion, verdict, now_ns, out)
            return
        result = "ok"
        if isinstance(verdict, Partial):
            result = verdict.kind.value
            self._lanes_failed(serving, entry, verdict, now_ns, out)
        commit = serving.commit_decode if entry.turn is Turn.DECODE else serving.commit_prefill
        ended = commit(entry, verdict.logits, verdict.best, spent_ns, now_ns) if entry.sequences else []
        self._give_back(serving, completion, out)
        if entry.traced:
            self._trace(entry, event, serving.answers.sampling_ns, now_ns, out)
        if entry.prefill_last and entry.sequences and entry.sequences[0].generated_tokens:
            self._recorder.of_attempt(history.ATTEMPT_TOKENS, now_ns, entry.sequences[0], {"n": 1})
        for seq, reason in ended:
            if reason is None:
                self.attempts.drained(seq, now_ns, out)
            elif isinstance(reason, CalculetError):
                self.attempts.fail(seq, reason, now_ns, out)
                serving.release(seq, now_ns, out)
            else:
                self.attempts.finish(seq, reason, now_ns, out)
        self._job_record(entry, result, spent_ns, now_ns, out, completion)
        if isinstance(verdict, Partial) and serving.worn_out:
            self._fault(plan_for_worn_out(verdict.kind, verdict.detail), [], now_ns, out)

    def _lanes_failed(self, serving: Serving, entry: InflightJob, verdict: Partial, now_ns: int, out: Actions) -> None:
        """A fault that is proven to be some lanes' alone: their requests fail, their KV is Unknown, and the rest of the job stands
        (scheduling §7.4). Whether the board is sound golden says."""
        plan = plan_for(verdict.kind, verdict.detail).confined()
        self.life.faulted(plan, False, now_ns, out)
        for seq in verdict.failed:
            if seq.terminal or seq.cancelled:
                self.attempts.drained(seq, now_ns, out, release=False)
            else:
                self.attempts.fail(seq, plan.error(), now_ns, out, release=False)
            serving.lose(serving.lane_of(seq).hardware_lane, now_ns, out)
        entry.sequences = verdict.others
        self._retest(serving)

    def _retest(self, serving: Serving) -> None:
        """Run golden before anything new is let in, unless it runs already."""
        if self.trial is None and self.life.state in (ModelState.READY, ModelState.DRAINING) and self.life.package is not None:
            self.trial = Trial([golden_stage(self.life.package.golden, serving.profiles[:1])])

    def _faulty_output(
        self, serving: Serving, entry: InflightJob, completion: Completion, verdict: Faulty, now_ns: int, out: Actions
    ) -> None:
        self._give_back(serving, completion, out)
        self._job_record(entry, verdict.kind.value, 0, now_ns, out)
        plan = plan_for(verdict.kind, verdict.detail)
        if plan.response is Response.FAIL_BATCH_AND_RETEST:
            self._bad_numbers(serving, entry, plan, now_ns, out)
        else:
            self._fault(plan, entry.sequences, now_ns, out)

    def _bad_numbers(
        self, serving: Serving, entry: InflightJob, plan: RecoveryPlan, now_ns: int, out: Actions
    ) -> None:
        """Only this batch fails. The job's end is proven, so its lanes can be released; golden decides about the board."""
        self.life.faulted(plan, False, now_ns, out)
        for seq in entry.sequences:
            serving.kv.commit(serving.lane_of(seq))
            if seq.terminal or seq.cancelled:
                self.attempts.drained(seq, now_ns, out)
            else:
                self.attempts.fail(seq, plan.error(), now_ns, out)
                serving.release(seq, now_ns, out)
        self._retest(serving)

    def _job_lost(self, event: events.JobLost, now_ns: int, out: Actions) -> None:
        """Nobody knows whether it runs on: its buffers are quarantined and its lanes lost."""
        serving = self.serving
        entry = serving.inflight.get(event.job_id) if serving else None
        if serving is None or entry is None:
            return
        kind = fault_of_code(event.rc)
        if not FAULT_POLICY[kind].kv_lost:
            kind = FaultKind.WAIT_TIMEOUT  # whatever the code, the job was submitted and its end was not seen
        self._job_record(entry, kind.value, 0, now_ns, out)
        self._fault(plan_for(kind, f"job {event.job_id} was lost (rc {event.rc})"), entry.sequences, now_ns, out)

    def _stale(self, completion: Completion, now_ns: int, out: Actions) -> None:
        """Too late: its buffers are freed, and nothing else comes of it (scheduling §4)."""
        serving = self.serving
        out.append(GiveBack(completion))
        if serving is not None and serving.buffers.holds(completion.job_id):
            serving.buffers.give_back(completion.job_id)
        data = {"status": completion.status.value}
        self._recorder.of_board(history.BOARD_STALE, now_ns, completion.generation, data, completion.job_id)

    def _give_back(self, serving: Serving, completion: Completion, out: Actions) -> None:
        out.append(GiveBack(completion))
        serving.buffers.give_back(completion.job_id)

    def _job_record(
        self,
        entry: InflightJob,
        result: str,
        spent_ns: int,
        now_ns: int,
        out: Actions,
        completion: Completion | None = None,
        rc: int = 0,
    ) -> None:
        job, serving = entry.job, self.serving
        data: dict[str, Any] = {
            "kind": job.kind.value, "queue": entry.turn.label, "result": result, "rows": len(entry.sequences),
            "compiled": job.profile.compiled_batch, "ns": spent_ns, "since": entry.built_ns, "waited_ns": entry.waited_ns,
        }  # fmt: skip
        if rc:
            data["rc"] = rc
        if completion is not None and serving is not None:
            data["engine"] = completion.engine.name.lower()
            data["timings"] = completion.timings
            if serving.inflight.most > 1:
                data["overlap_ns"] = serving.inflight.overlap_ns(completion.timings)
        self._recorder.of_board(history.BOARD_JOB, now_ns, job.generation, data, job.job_id)

    def _trace(
        self, entry: InflightJob, event: events.JobCompleted, sampling_ns: int | None, now_ns: int, out: Actions
    ) -> None:
        job, completion = entry.job, event.completion
        steps = TraceSteps(
            job.job_id, job.generation, job.kind, completion.engine, completion.status.value, completion.timings,
            job.profile.compiled_batch, entry.built_ns, event.arrived_ns, now_ns, sampling_ns if job.want_logits else None,
            entry.traced, event.bf16_ns,
        )  # fmt: skip
        self._traces.append(steps)

    def _lane_released(self, event: events.LaneReleased, now_ns: int, out: Actions) -> None:
        serving = self.serving
        if serving is None or event.generation != serving.generation or not serving.releasing(event.lane):
            return
        if event.rc == ReturnCode.OK:
            serving.freed(event.lane, now_ns, out)
        elif event.rc != ReturnCode.DEVICE_BUSY or not serving.retry_release(event.lane, now_ns):
            kind = fault_of_code(event.rc)
            kind = kind if FAULT_POLICY[kind].kv_lost else FaultKind.OTHER
            self._fault(plan_for(kind, f"lane {event.lane} could not be released (rc {event.rc})"), [], now_ns, out)

    def _counters_read(self, event: events.CountersRead, now_ns: int, out: Actions) -> None:
        serving = self.serving
        if serving is not None:
            serving.device_full = event.full
            self.pingpong.counted(event.pending, len(serving.inflight) + serving.buffers.quarantined)

    # ---------------------------------------------------------------- faults
    def _fault(self, plan: RecoveryPlan, sequences: list[SequenceState], now_ns: int, out: Actions) -> None:
        """The generation stops: every request fails, and what nobody knows any more is lost (architecture: a board fails)."""
        serving = self.serving
        assert serving is not None
        leaving = self.control.leaving
        self.trial = None
        self._busy_until_ns, self._busy_tries = None, 0
        self.pingpong.faulted(plan.kind is FaultKind.WAIT_TIMEOUT, plan.detail)
        self.life.faulted(plan, leaving is not None and leaving.expired, now_ns, out)
        lost, own = FAULT_POLICY[plan.kind].kv_lost, set(sequences)
        for seq in self.attempts.registry.live():
            error = plan.error() if seq in own else plan.bystander_error()
            self.attempts.fail(seq, error, now_ns, out, release=not lost)
        if lost:
            serving.lose_all(now_ns, out)
        if self.control.stopping:
            self.control.exit(ExitCode.BOARD_UNAVAILABLE, f"the board had a fault while stopping: {plan.detail}", out)

    # ---------------------------------------------------------------- the generation
    def _device_configured(self, event: events.DeviceConfigured, now_ns: int, out: Actions) -> None:
        life = self.life
        if not life.configured(event, now_ns, out):
            return
        assert life.package is not None and life.scheduler is not None
        if self._measured is None or self._measured[0] != life.package.digest:
            self._measured = (life.package.digest, Durations(life.scheduler.executor))
        self.attempts.serving = serving = Serving(
            life.generation, life.package, life.vocabulary, life.scheduler, self._measured[1], self._lasting
        )
        self.trial = Trial(stages_of(life.package.golden, serving.profiles))

    def _advance_trial(self, serving: Serving, trial: Trial, now_ns: int, out: Actions) -> None:
        """Begin the next stage when one is over; at the end the board is Ready, or it is not."""
        if not trial.done and not self.control.stopping:
            stage = trial.next_stage()
            if self.life.state is ModelState.WARMING:
                serving.use_stage(stage)
            self.life.step = trial.label
            for case, tokens in stage.cases:
                self._last_internal += 1
                request = internal_request(self._last_internal, self.epoch, case, tokens, now_ns)
                seq = self.attempts.registry.create(request, self.life.generation, now_ns)
                assert seq is not None
                trial.started(seq, case, tokens)
                if isinstance(size := serving.admission.size(len(case.prompt_token_ids), tokens), RejectInvalid):
                    self.attempts.fail(seq, size.error, now_ns, out)
                else:
                    serving.wait(seq, prompt_of(case), tokens, first=True)
            return
        self.trial = None
        serving.use(serving.profiles)
        if self.control.stopping:
            return
        self.life.golden(trial.failure is None, trial.failure, now_ns, out)
        if trial.failure is not None and self.life.state in (ModelState.READY, ModelState.DRAINING):
            self._fault(plan_for_failed_golden(trial.failure), [], now_ns, out)

    def _internal_ended(self, seq: SequenceState, failure: str | None) -> None:
        if self.trial is None:
            return
        if failure is None:
            self.trial.finished(seq)
        else:
            self.trial.failed(seq, failure)

    def _device_unconfigured(self, event: events.DeviceUnconfigured, now_ns: int, out: Actions) -> None:
        self.life.unconfigured(event, now_ns, out)
        if event.rc == ReturnCode.OK:
            self.attempts.serving = None

    def _device_reset(self, event: events.DeviceReset, now_ns: int, out: Actions) -> None:
        if self.life.was_reset(event, now_ns, out):
            self.attempts.serving = None
        elif self.life.recovery.restart_on_unknown_dma:
            self.control.exit(ExitCode.BOARD_UNAVAILABLE, self.life.condemned or "the reset failed", out)
