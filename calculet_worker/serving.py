"""Everything that lives as long as one generation: lanes, queues, turns, jobs and answers, and how a sequence moves among them.

The engine decides what happens to requests; this part knows where they are. Ends of jobs come in as logits, and go out as the
sequences that are thereby over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calculet_core import history
from calculet_core.artifact import LANE_FAULT_ISOLATION, Package
from calculet_core.batches import BatchProfile
from calculet_core.capacity import CapacityBudget
from calculet_core.clock import MS, US
from calculet_core.config import SchedulerConfig, TenantConfig
from calculet_core.errors import CalculetError
from calculet_core.jobs import Completion, EngineBank, Job, JobKind
from calculet_core.limits import Limits
from calculet_core.requests import FinishReason, SequenceState
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_core.states.request import RequestState
from calculet_worker.actions import Action, ReleaseLane, SubmitJob, TracedRow
from calculet_worker.answers import Answers, Outbox
from calculet_worker.device.base import DeviceLimits
from calculet_worker.golden import Stage
from calculet_worker.jobs.buffers import Buffers
from calculet_worker.jobs.durations import Durations, backoff_ns
from calculet_worker.jobs.inflight import Inflight, InflightJob
from calculet_worker.jobs.pingpong import PingPong
from calculet_worker.kv import KvManager
from calculet_worker.output.sampling import NO_TOKEN
from calculet_worker.records import INTERNAL, Recorder
from calculet_worker.registry import RequestRegistry
from calculet_worker.scheduling.admission import AdmissionController, DrainRate, QueueState
from calculet_worker.scheduling.arbiter import Arbiter, Turn
from calculet_worker.scheduling.decode import DecodeQueue, bind
from calculet_worker.scheduling.fairness import FairQueue
from calculet_worker.scheduling.prefill import PrefillQueues, proven_cut
from calculet_worker.scheduling.profiles import usable_profiles
from calculet_worker.scheduling.selection import POLICIES

POLICY = "edf"
NEVER_NS = 1 << 62
PROMPT_TURNS = (Turn.SHORT, Turn.MEDIUM, Turn.LONG)
REHEARSE_FROM = 4
"""Times `executor.rehearse_ahead_us`: a processor does not get cold in a shorter step."""
BRIEF_NS = 50 * US
"""To wake the device thread and to be woken by it costs more than that."""
_DECODE_RUNNING = RequestState.DECODE_RUNNING
_UPDATING = KvSequenceState.UPDATING
_RUNNING = (RequestState.PREFILL_RUNNING, _DECODE_RUNNING)


class Ended(NamedTuple):
    """A sequence that a job's result brought to its end; `reason` None: it was cancelled, or had failed, while the job ran.

    An error: its constraint allows no token.
    """

    seq: SequenceState
    reason: FinishReason | CalculetError | None


@dataclass(frozen=True, slots=True)
class Lasting:
    """What outlives generations; `seed` is for requests that bring none."""

    limits: DeviceLimits
    tenants: tuple[TenantConfig, ...]
    registry: RequestRegistry
    outbox: Outbox
    recorder: Recorder
    pingpong: PingPong
    stopwatch: Callable[[], int] | None
    """Given while steps are traced: nanoseconds for measuring, never for deciding."""
    seed: int
    limits_of_waiting: Limits
    """The ledger of the prompt tokens that tenants let wait, on all boards."""


class Serving:
    """One generation's machinery; a new generation gets a new one."""

    def __init__(
        self,
        generation: int,
        package: Package,
        vocabulary: Sequence[bytes],
        config: SchedulerConfig,
        durations: Durations,
        lasting: Lasting,
    ) -> None:
        manifest, limits = package.manifest, lasting.limits
        self.generation, self.config = generation, config
        self.vocab_size = manifest.tokenizer.vocab_size
        self._registry, self._recorder, self._pingpong = lasting.registry, lasting.recorder, lasting.pingpong
        admission = config.admission
        max_tokens = admission.max_kv_tokens or manifest.lanes * manifest.context
        max_sequences = admission.max_sequences or manifest.lanes
        self.kv = KvManager(generation, manifest.lanes, manifest.context, max_tokens, max_sequences)
        self.profiles = usable_profiles(manifest, config.batch.profiles)
        self._prefill_profile = manifest.profile(1)
        self.buffers = Buffers(limits.output_buffers, self.profiles[-1].compiled_batch)
        self.inflight = Inflight(config.executor, limits.max_inflight, limits.output_buffers, lasting.pingpong)
        lasting.pingpong.serve(config.executor, package.digest)
        self.durations = durations
        self.arbiter = Arbiter(config.queues)
        queues = config.queues
        self.fair = FairQueue(
            lasting.tenants, config.fairness.cost_decode_weight, queues.medium_prefill_max_tokens, queues.max_long_prefills,
            lasting.limits_of_waiting,
        )  # fmt: skip
        cut = proven_cut(manifest, config.executor.max_prefill_tokens_per_job)
        self.prefill = PrefillQueues(config.queues, cut)
        self.decode = DecodeQueue(generation, self.profiles, config.batch, POLICIES[POLICY], durations.decode_ns)
        self.drain_rate = DrainRate()
        budget = CapacityBudget(
            max_sequences, max_tokens, admission.max_waiting_requests, admission.max_waiting_prompt_tokens, self.inflight.most
        )
        self.admission = AdmissionController(budget, manifest.context, self.vocab_size, self.drain_rate)
        self.isolated = LANE_FAULT_ISOLATION in manifest.abilities
        """The artifact proves that a lane's fault is that lane's alone."""
        self.tracing = lasting.stopwatch is not None
        self.answers = Answers(lasting.outbox, vocabulary, manifest.tokenizer.eos_token_ids, lasting.seed, lasting.stopwatch)
        self.device_full = False
        """The device's hint denies a lane that our accounting calls free: admission waits until it agrees, or all are free."""
        self.hold_ns: int | None = None
        """A step that waits for more sequences is due then."""
        self.no_buffer_ns: int | None = None
        """Since when something is ready and no output buffer is free for it."""
        self.admits = False
        """Whether waiting requests are given lanes at the end of the event that is being handled."""
        self._positions = np.arange(manifest.context, dtype=np.int32)
        self._positions.flags.writeable = False
        self._ready = [0, 0, 0, 0]
        self._prompts_first = False
        self._owners: dict[int, SequenceState] = {}
        """Lane -> the sequence that holds it, until the lane is free or lost."""
        self._released_ns: dict[int, int] = {}
        """Lane -> when the runtime was first asked to free it."""
        self._cancelled_ns: dict[int, int] = {}
        """Lane -> when its sequence's cancel came."""
        self._releases: dict[int, tuple[int, int]] = {}
        """Lane -> (tries, when to ask again) where the runtime was busy."""
        self._queued: set[int] = set()
        """Waiting sequences that found no lane free for them."""
        self._polls = limits.polls
        self._rehearse_ahead_ns = 0 if limits.on_host else config.executor.rehearse_ahead_us * US
        self._starved_ns = config.fairness.starvation_after_ms * MS

    # ---------------------------------------------------------------- waiting and admission
    def queue_state(self, seq: SequenceState, prompt_tokens: int, max_new_tokens: int) -> QueueState:
        """The queue as a request of that size finds it."""
        fair = self.fair
        room = self.kv.can_reserve(prompt_tokens + max_new_tokens) and not (self.device_full and self.kv.busy_lanes)
        free = room and self.admits and fair.head() is None and fair.may_start(seq.tenant, prompt_tokens)
        return QueueState(free, len(fair), fair.tokens, lambda: fair.take_quota(seq, prompt_tokens))

    def wait(
        self, seq: SequenceState, token_ids: Any, max_new_tokens: int, first: bool = False, queued: bool = False
    ) -> None:
        """The request joins the waiting queue; `first` goes before all others. `queued`: no lane is free for it now."""
        if queued:
            self._queued.add(seq.seq_id)
        request = seq.request
        stamp = 0.0 if first else self.fair.stamp(request.tenant, request.weight, len(token_ids), max_new_tokens)
        self._registry.queue(seq, token_ids, max_new_tokens, stamp)
        self.fair.push(seq)

    def admit(self, internal_only: bool, now_ns: int, out: list[Action]) -> None:
        """Give lanes to waiting requests in fair order. One that does not fit yet is not overtaken: it would never fit."""
        fair, kv = self.fair, self.kv
        if self.device_full and kv.busy_lanes:
            return
        while kv.free_lanes and (seq := fair.head()) is not None:
            if internal_only and seq.request.router != INTERNAL:
                return
            lane = kv.reserve(seq.seq_id, seq.prompt_tokens + seq.max_new_tokens)
            if lane is None:
                return
            fair.take(seq)
            self._registry.admit(seq, lane.hardware_lane, now_ns)
            self._owners[lane.hardware_lane] = seq
            queued = seq.seq_id in self._queued
            self._queued.discard(seq.seq_id)
            self.drain_rate.departed(now_ns, queued)
            self.answers.open(seq)
            self.prefill.push(seq)
            data = {
                "prompt_tokens": seq.prompt_tokens, "max_new_tokens": seq.max_new_tokens, "lane": lane.hardware_lane,
                "wait_ns": now_ns - seq.waiting_since_ns, "tenant": seq.tenant, "queued": queued,
            }  # fmt: skip
            if now_ns - seq.waiting_since_ns > self._starved_ns:
                data["starved"] = True
            self._recorder.of_attempt(history.ATTEMPT_ADMITTED, now_ns, seq, data)
            self._recorder.of_lane(history.BOARD_LANE_BOUND, now_ns, seq, lane.hardware_lane)

    # ---------------------------------------------------------------- the next job
    def next_job(self, job_id: int, arriving: int, now_ns: int) -> SubmitJob | None:
        """Whose turn it is, as a job; None when nothing is due or nothing more may be in flight.

        `arriving` requests are known and not tokenized yet.
        """
        self.hold_ns = None
        if not self.inflight.has_room:
            return None
        if self.buffers.free < 1:
            if self.no_buffer_ns is None and (len(self.decode) or any(self.prefill.depths.values())):
                self.no_buffer_ns = now_ns
            return None
        self.no_buffer_ns = None
        ready, depths = self._ready, self.prefill.depths
        ready[Turn.DECODE] = len(self.decode)
        ready[Turn.SHORT], ready[Turn.MEDIUM], ready[Turn.LONG] = depths[Turn.SHORT], depths[Turn.MEDIUM], depths[Turn.LONG]
        if ready[Turn.DECODE]:
            self.hold_ns = self._hold(ready, arriving, now_ns)
            if self.hold_ns is not None or (self._prompts_first and (any(ready[1:]) or len(self.inflight))):
                ready[Turn.DECODE] = 0
        turn = self.arbiter.choose(ready)
        if turn is None:
            return None
        entry = self._decode_job(job_id, now_ns) if turn is Turn.DECODE else self._prefill_job(job_id, turn, now_ns)
        if entry is None:
            return None
        if self.tracing:
            entry.traced = [_traced(seq, entry) for seq in entry.sequences if seq.request.router != INTERNAL]
        self.arbiter.take(turn, entry.expected_ns or 0)
        limit_ns = self.durations.limit_ns(entry.expected_ns) + self.inflight.expected_ns()
        self.inflight.add(entry)
        brief = self._polls and entry.expected_ns is not None and self.inflight.expected_ns() <= BRIEF_NS
        return SubmitJob(entry.job, entry.bank, now_ns + limit_ns, self._rehearse_ns(entry, now_ns), brief)

    def _hold(self, ready: list[int], arriving: int, now_ns: int) -> int | None:
        """Until when decode waits for those who can join the step within its window (scheduling §7.2.4); None: the step is due.

        They are the sequences of a job in flight; prompts that should be in KV before the window ends, whose turns then go first,
        and only theirs: no step waits for a long prompt; and where no prompt is ready, requests on their way to a free lane. When
        nobody is there to join, a short step goes at once (§7.2.5): nobody waits for whom nobody knows.
        """
        until = self.decode.hold_until_ns(now_ns)
        if until is None or len(self.inflight):
            return until
        if not any(ready[1:]):
            return until if arriving and self.kv.free_lanes else None
        late = [turn for turn in PROMPT_TURNS if ready[turn] and not self._in_kv_within(turn, until - now_ns)]
        if all(turn in late for turn in PROMPT_TURNS if ready[turn]):
            return None
        for turn in late:
            ready[turn] = 0
        return until

    def _in_kv_within(self, turn: Turn, time_ns: int) -> bool:
        """Whether the next prompt of the queue should be in KV after that time, by what prompts took so far."""
        tokens = self.prefill.rest(turn)
        expected_ns = None if tokens is None else self.durations.prefill_ns(tokens)
        return expected_ns is not None and expected_ns <= time_ns

    def _rehearse_ns(self, entry: InflightJob, now_ns: int) -> int | None:
        ahead_ns = self._rehearse_ahead_ns
        if not ahead_ns or entry.expected_ns is None or entry.expected_ns < REHEARSE_FROM * ahead_ns:
            return None
        return now_ns + self.inflight.expected_ns() - ahead_ns

    def _decode_job(self, job_id: int, now_ns: int) -> InflightJob | None:
        choice = self.decode.choose(now_ns)
        if choice is None:
            return None
        batch = bind(choice, self.kv, self.buffers.lease(job_id))
        self._registry.start_decode(choice.sequences)
        job = Job(
            job_id, self.generation, JobKind.DECODE, choice.profile, batch.lanes, batch.token_ids, batch.positions, batch.lane_valid
        )
        expected_ns = self.durations.decode_ns(choice.profile.compiled_batch)
        bank = self.inflight.next_bank()
        return InflightJob(job, Turn.DECODE, choice.sequences, expected_ns, bank, now_ns, waited_ns=choice.waited_ns)

    def _prefill_job(self, job_id: int, turn: Turn, now_ns: int) -> InflightJob:
        part = self.prefill.take(turn)
        seq = part.seq
        lanes = self.buffers.lease(job_id).lanes[:1]
        lanes[0] = seq.hardware_lane
        self._registry.start_prefill(seq)
        tokens, positions = seq.prompt_token_ids[part.start : part.end], self._positions[part.start : part.end]
        job = Job(
            job_id, self.generation, JobKind.PREFILL, self._prefill_profile, lanes, tokens, positions, want_logits=part.last
        )
        expected_ns = self.durations.prefill_ns(part.end - part.start)
        return InflightJob(job, turn, [seq], expected_ns, self.inflight.next_bank(), now_ns, part.end, part.last)

    def submitted(self, entry: InflightJob, engine: EngineBank) -> None:
        """The device took the job: its lanes are Updating (scheduling §9.2)."""
        entry.engine = engine
        lanes, submit = self.kv.lanes, self.kv.submit
        if entry.turn is Turn.DECODE:
            for seq in entry.sequences:
                submit(lanes[seq.hardware_lane], 1)  # type: ignore[index]
        else:
            submit(self.lane_of(entry.sequences[0]), len(entry.job.token_ids))

    def refused(self, entry: InflightJob) -> None:
        """The device did not take it: nothing ran, its buffers are free."""
        self.inflight.pop(entry.job.job_id)
        self.buffers.give_back(entry.job.job_id)
        self.arbiter.settle(entry.turn, entry.expected_ns or 0, 0)

    def requeue(self, seq: SequenceState, now_ns: int) -> None:
        """A sequence of a refused job is ready again."""
        self._registry.requeue(seq, now_ns)
        (self.prefill if seq.state is RequestState.PREFILL_READY else self.decode).push(seq)

    # ---------------------------------------------------------------- a job's end
    def account(self, entry: InflightJob, completion: Completion, now_ns: int) -> int:
        """Learn from what the job took, in nanoseconds of device time where the device tells it, and charge its class."""
        spent_ns = completion.timings.wait_ns
        if spent_ns is None:
            spent_ns = now_ns - entry.built_ns
        self.arbiter.settle(entry.turn, entry.expected_ns or 0, spent_ns)
        if entry.turn is Turn.DECODE:
            batch = entry.job.profile.compiled_batch
            self.durations.saw_decode(batch, spent_ns)
            if self.inflight.most > 1:
                self._pingpong.saw_step(batch, spent_ns, entry.together)
        else:
            self.durations.saw_prefill(len(entry.job.token_ids), spent_ns)
        return spent_ns

    def mismatch(self, entry: InflightJob) -> str | None:
        """Whether each row's request, generation, sequence and lane still are those that the job was sent with (scheduling §7.4);
        in words what is not. Nothing of an output that fails this may be used: it would be another sequence's."""
        lanes, generation, length_of = self.kv.lanes, self.generation, entry.job.lanes.tolist()
        for seq, lane in zip(entry.sequences, length_of, strict=False):
            kv = lanes[lane] if 0 <= lane < len(lanes) else None
            if (
                kv is None
                or kv.seq_id != seq.seq_id
                or kv.state is not _UPDATING
                or seq.hardware_lane != lane
                or seq.generation != generation
                or self._owners.get(lane) is not seq
            ):
                where = f"sequence {seq.seq_id} of generation {seq.generation} on lane {seq.hardware_lane}"
                return f"{where}: the job wrote lane {lane}, {kv}"
        return None

    def commit_decode(self, entry: InflightJob, logits: Any, best: Any, spent_ns: int, now_ns: int) -> list[Ended]:
        """A decode step succeeded: KV grows, each row's token is drawn, and what goes on is ready again."""
        kv, answers, decode, registry = self.kv, self.answers, self.decode, self._registry
        lanes, commit, done, take, push = kv.lanes, kv.commit, registry.on_decode_complete, answers.take, decode.push
        ended: list[Ended] = []
        sequences = entry.sequences
        for seq, token in zip(sequences, answers.draw(sequences, logits, best), strict=True):
            sequence = lanes[seq.hardware_lane]  # type: ignore[index]
            commit(sequence)
            if seq.cancelled or seq.state is not _DECODE_RUNNING:
                ended.append(Ended(seq, None))
                continue
            if token == NO_TOKEN:
                ended.append(Ended(seq, answers.dead_end(seq)))
                continue
            virtual_finish = seq.virtual_finish_time + 1.0 / seq.request.weight
            done(seq, sequence.committed_len, token, virtual_finish, spent_ns, now_ns)
            reason = take(seq, token)
            if reason is None:
                push(seq)
            else:
                ended.append(Ended(seq, reason))
        return ended

    def commit_prefill(self, entry: InflightJob, logits: Any, best: Any, spent_ns: int, now_ns: int) -> list[Ended]:
        """A prompt, or a part of it, is in KV; with its last part the first token is drawn."""
        seq = entry.sequences[0]
        sequence = self.lane_of(seq)
        self.kv.commit(sequence)
        if seq.cancelled or seq.terminal:
            return [Ended(seq, None)]
        if not entry.prefill_last:
            self._registry.on_prefill_part(seq, sequence.committed_len, spent_ns, now_ns)
            self.prefill.push(seq)
            return []
        token = self.answers.draw([seq], logits, best)[0]
        if token == NO_TOKEN:
            return [Ended(seq, self.answers.dead_end(seq))]
        self.fair.prefilled(seq)
        start = self.decode.virtual_time
        self._registry.on_prefill_complete(seq, sequence.committed_len, token, start, spent_ns, now_ns)
        reason = self.answers.take(seq, token)
        if reason is not None:
            return [Ended(seq, reason)]
        self.decode.push(seq)
        return []

    # ---------------------------------------------------------------- lanes
    def lane_of(self, seq: SequenceState) -> Any:
        """The KV record of an admitted sequence."""
        assert seq.hardware_lane is not None
        return self.kv.lanes[seq.hardware_lane]

    def leave(self, seq: SequenceState, state: RequestState) -> bool:
        """Take a sequence that has just ended in `state` out of its queue; whether its lane may be released now."""
        if state in _RUNNING:
            return False
        if state is RequestState.WAITING_ADMISSION:
            self.fair.remove(seq)
            self._queued.discard(seq.seq_id)
        elif state is RequestState.PREFILL_READY:
            self.prefill.removed(seq)
        elif state is RequestState.DECODE_READY:
            self.decode.removed(seq)
        return seq.hardware_lane is not None

    def cancel_came(self, seq: SequenceState, now_ns: int) -> None:
        """Remember when, for the time until the lane is free."""
        if seq.hardware_lane is not None:
            self._cancelled_ns.setdefault(seq.hardware_lane, now_ns)

    def release(self, seq: SequenceState, now_ns: int, out: list[Action]) -> None:
        """Ask the runtime to free the sequence's lane."""
        sequence = self.lane_of(seq)
        self._released_ns[sequence.hardware_lane] = now_ns
        self.kv.release(sequence)
        out.append(ReleaseLane(self.generation, sequence.hardware_lane))

    def retry_release(self, lane: int, now_ns: int) -> bool:
        """The runtime was too busy to free the lane: ask again later, a bounded number of times."""
        tries = self._releases.get(lane, (0, 0))[0] + 1
        self._releases[lane] = (tries, now_ns + backoff_ns(self.config.executor, tries))
        return tries <= self.config.executor.busy_max_tries

    def release_again(self, now_ns: int, out: list[Action]) -> None:
        """Ask for lanes whose pause is over."""
        for lane, (tries, due_ns) in self._releases.items():
            if due_ns <= now_ns and self.releasing(lane):
                self._releases[lane] = (tries, NEVER_NS)
                out.append(ReleaseLane(self.generation, lane))

    def next_release_ns(self) -> int | None:
        """When a lane is to be asked for again."""
        return min((due_ns for _, due_ns in self._releases.values() if due_ns < NEVER_NS), default=None)

    def freed(self, lane: int, now_ns: int, out: list[Action]) -> None:
        """The runtime confirmed."""
        self.kv.confirm_free(self.kv.lanes[lane])
        seq = self._owners.pop(lane)
        self._releases.pop(lane, None)
        self._registry.released(seq)
        data = {"free_ns": now_ns - self._released_ns.pop(lane, now_ns)}
        if (since := self._cancelled_ns.pop(lane, None)) is not None:
            data["since_cancel_ns"] = now_ns - since
        self._recorder.of_lane(history.BOARD_LANE_FREE, now_ns, seq, lane, data)

    def lose(self, lane: int, now_ns: int, out: list[Action]) -> None:
        """Nobody knows what the lane holds: it ends with this generation."""
        self.kv.lose(self.kv.lanes[lane])
        seq = self._owners.pop(lane)
        self._cancelled_ns.pop(lane, None)
        self._released_ns.pop(lane, None)
        self._releases.pop(lane, None)
        self._recorder.of_lane(history.BOARD_LANE_LOST, now_ns, seq, lane)

    def lose_all(self, now_ns: int, out: list[Action]) -> None:
        """A fault: every held lane is lost, and jobs in flight keep their buffers for good."""
        for entry in self.inflight.pop_all():
            self.buffers.quarantine(entry.job.job_id)
        for lane in list(self._owners):
            self.lose(lane, now_ns, out)

    @property
    def worn_out(self) -> bool:
        """Lost lanes have left too little for the largest request that admission lets in."""
        return not self.kv.could_reserve(self.admission.limit)

    def releasing(self, lane: int) -> bool:
        """Whether the runtime was asked to free the lane and has not confirmed."""
        return self.kv.lanes[lane].state is KvSequenceState.RELEASING

    def use(self, profiles: tuple[BatchProfile, ...]) -> None:
        """The profiles for decode steps from now on."""
        self._prompts_first = self.inflight.alone = False
        self.decode.use(profiles)

    def use_stage(self, stage: Stage) -> None:
        """The profiles of a golden or warm-up stage; steps wait for all prompts, so that they are full."""
        self._prompts_first, self.inflight.alone = True, stage.alone
        self.decode.use(stage.profiles, tightly=stage.shrinking)


def _traced(seq: SequenceState, entry: InflightJob) -> TracedRow:
    request, before, draws = seq.request, seq.kv_length, entry.turn is Turn.DECODE or entry.prefill_last
    written = 1 if entry.turn is Turn.DECODE else len(entry.job.token_ids)
    return TracedRow(
        request.key, seq.seq_id, seq.generated_tokens, request.accepted_ns, seq.admitted_ns, seq.ready_since_ns, before,
        before + written, draws,
    )  # fmt: skip
