"""Desired against observed, level-triggered: `decide(desired, observed, now_ns) -> actions`.

Each call looks at the whole fleet afresh; what it remembers (`Life`) is only what cannot be seen: when things were begun, which
commands are under way, what the budgets have left. So a crash of the supervisor is harmless: a new one sees living workers, adopts
them, and goes on. One handler per process state (`calculet_core.states.worker_process`), tried again while the state changes, says
what is done there; the commands to a living worker are one list of rules, the first that applies wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.config import SupervisionConfig
from calculet_core.errors import ExitCode
from calculet_core.faults import FAULT_POLICY, ResetRule
from calculet_core.states.model_generation import ModelState
from calculet_core.states.worker_process import ProcessEvent, ProcessState
from calculet_supervisor.attribution import Attribution
from calculet_supervisor.health import SERVING, Health
from calculet_supervisor.life import Command, Life, ResetAnswer
from calculet_supervisor.publishing import fleet_view, misplaced
from calculet_supervisor.resets import Refusal, Resets
from calculet_supervisor.restarts import Restarts
from calculet_supervisor.world import (
    NOTHING_SEEN,
    Abort,
    Action,
    BoardSeen,
    BoardWish,
    Desired,
    Exit,
    Grant,
    Kill,
    Load,
    Note,
    Observed,
    Placement,
    Publish,
    Send,
    SetAside,
    Spawn,
    Terminate,
    WorkerAside,
)

COMMAND_NS = 5 * S
"""A command without an answer for so long is taken for lost."""
ABORT_GRACE_NS = 3 * S
"""From SIGABRT to SIGKILL: time to print where it is stuck."""
RESETS = "reset"
"""A worker's step while its board is being reset."""
STOP_GRACE_NS = 8 * S
"""What a stop may take beyond the drain deadline."""

_P, _E = ProcessState, ProcessEvent
_FAILED = ModelState.FAILED.name
_UNLOADABLE = frozenset({ModelState.READY.name})
_OPERATOR_ONLY = frozenset(kind.value for kind, rule in FAULT_POLICY.items() if rule.reset is ResetRule.OPERATOR_ONLY)


class Reconciler:
    """Decides for all boards. `published` is the last fleet view that was committed; spends are monotonic nanoseconds; `asides` are
    workers that an earlier supervisor left in quarantine, `fingerprint` stands for the configuration as it is now."""

    def __init__(
        self,
        config: SupervisionConfig,
        resets: Resets,
        rng: random.Random,
        published: wire.FleetView,
        restart_spends: Mapping[str, Iterable[int]] = {},
        asides: Mapping[str, WorkerAside] = {},
        fingerprint: str = "",
    ) -> None:
        self._config, self._resets, self._rng, self._spends = config, resets, rng, restart_spends
        self._asides, self._fingerprint = dict(asides), fingerprint
        self._published = published
        self.lives: dict[str, Life] = {}
        self.attribution = Attribution()
        self._frozen: str | None = None
        self._handlers: dict[ProcessState, Callable[[str, Life, BoardWish | None, BoardSeen, int], Iterator[Action]]] = {
            _P.ABSENT: self._absent,
            _P.STARTING: self._starting,
            _P.UP: self._up,
            _P.STOPPING: self._stopping,
            _P.BACKOFF: self._waiting,
            _P.QUARANTINED: self._waiting,
        }

    def decide(self, desired: Desired, observed: Observed, now_ns: int) -> list[Action]:
        """What to do now about every difference. The caller does it all, in this order."""
        actions: list[Action] = []
        self._frozen = desired.frozen
        for board in (*desired.boards, *(board for board in observed.boards if board not in desired.boards)):
            wish, seen = desired.boards.get(board), observed.boards.get(board, NOTHING_SEEN)
            life = self._life(board, wish, seen, now_ns)
            actions += self._exited(board, life, seen, now_ns)
            self._operators_word(life, wish)
            state = None
            while state is not life.state:
                state = life.state
                actions += self._handlers[state](board, life, wish, seen, now_ns)
            actions += self._remember(board, life, now_ns)
        actions += self._publish(desired, observed)
        return actions

    def overslept(self, by_ns: int) -> None:
        """The caller stood still for so long (stopped, swapped out, a paused machine): before the next decision nobody's silence
        is counted for that time, else it would kill workers that were well all along."""
        for life in self.lives.values():
            life.health.overslept(by_ns)
            if life.state is _P.STOPPING:
                life.since_ns += by_ns

    def next_wakeup_ns(self) -> int | None:
        """When a waiting worker is due; None when nothing waits. Time-outs are found by regular calls."""
        return min((life.retry_ns for life in self.lives.values() if life.retry_ns is not None), default=None)

    def _life(self, board: str, wish: BoardWish | None, seen: BoardSeen, now_ns: int) -> Life:
        life = self.lives.get(board)
        if life is None:
            restarts = Restarts(self._config.restart, self._rng, self._spends.get(board, ()))
            life = Life(restarts, Health(self._config, now_ns), wish.min_epoch if wish else 0, exits=seen.exits)
            self.lives[board] = life
            if (aside := self._asides.pop(board, None)) is not None:
                self._recall(life, aside, seen, now_ns)
        return life

    def _recall(self, life: Life, aside: WorkerAside, seen: BoardSeen, now_ns: int) -> None:
        """An earlier supervisor's quarantine goes on, unless the configuration was changed since."""
        life.aside = aside
        if aside.config != self._fingerprint:
            return
        life.restarts.half_opened()
        if seen.pid is None:
            life.enter(_E.SPAWN, now_ns)
            life.enter(_E.GIVE_UP, now_ns)
            life.retry_ns, life.why = aside.retry_ns, aside.why

    def _remember(self, board: str, life: Life, now_ns: int) -> Iterator[Action]:
        """What a successor has to know of a worker whose budget is spent: changes only."""
        aside = life.aside
        if life.state is _P.QUARANTINED:
            aside = WorkerAside(life.why or "", life.retry_ns, self._fingerprint)
        elif not life.restarts.half_open:
            aside = None
        elif aside is not None and aside.retry_ns is not None and aside.retry_ns <= now_ns:  # its one try has begun
            again_ns = now_ns + int(self._config.restart.half_open_after_s * S)
            aside = WorkerAside(aside.why, again_ns, self._fingerprint)
        if aside != life.aside:
            life.aside = aside
            yield SetAside(board, aside)

    # ---------------------------------------------------------------- edges
    def _exited(self, board: str, life: Life, seen: BoardSeen, now_ns: int) -> Iterator[Action]:
        """Account for an exit that was not dealt with yet."""
        if seen.exits == life.exits:
            return
        life.exits = seen.exits
        if life.state not in (_P.STARTING, _P.UP, _P.STOPPING):
            return
        how = seen.last_exit or Exit()
        unloads = life.command is not None and life.command.verb == "unload"
        asked_from_outside = life.state is _P.UP and how.code == ExitCode.OK and (unloads or life.health.serving_ns is not None)
        commanded = life.state is _P.STOPPING or asked_from_outside
        data = {"code": how.code, "signal": how.signal, "reason": how.reason, "commanded": commanded}
        if commanded:
            life.enter(_E.EXITED, now_ns)
            life.retry_ns = None
        else:
            verdict = life.restarts.died(how.code, now_ns)
            life.enter(_E.GIVE_UP if verdict.quarantine else _E.DIED, now_ns)
            life.retry_ns = verdict.retry_ns
            life.why = how.words() if life.aborted_ns is None else f"{life.why} ({how.words()})"
            data |= {"failures": life.restarts.failures, "quarantined": verdict.quarantine}
            data["retry_in_ms"] = None if verdict.retry_ns is None else (verdict.retry_ns - now_ns) // MS
        life.command = life.aborted_ns = life.failed_ns = None
        yield Note(history.FLEET_WORKER_EXITED, board, life.epoch or None, data=data)

    def _operators_word(self, life: Life, wish: BoardWish | None) -> None:
        """A restart that an operator asked for bypasses the budget."""
        if wish is not None and wish.min_epoch > life.min_epoch:
            life.min_epoch = wish.min_epoch
            life.restarts.forgive()
            if life.state in (_P.BACKOFF, _P.QUARANTINED):
                life.retry_ns, life.why = None, None
                life.enter(_E.FORGET, life.since_ns)

    # ---------------------------------------------------------------- one handler per process state
    def _absent(self, board: str, life: Life, wish: BoardWish | None, seen: BoardSeen, now_ns: int) -> Iterator[Action]:
        if seen.pid is not None:
            life.enter(_E.SPAWN, now_ns)
            life.begin(Health(self._config, now_ns), now_ns, spawned=False, automatic=False)
        elif wish is not None and wish.up:
            yield self._spawn(board, life, _E.SPAWN, now_ns, automatic=False)

    def _starting(self, board: str, life: Life, wish: BoardWish | None, seen: BoardSeen, now_ns: int) -> Iterator[Action]:
        report = seen.report
        if report is not None:
            life.enter(_E.HELLO, now_ns)
            life.epoch, life.seq, life.why = report.epoch, report.command_seq, None
            name = history.FLEET_WORKER_STARTED if life.spawned else history.FLEET_WORKER_ADOPTED
            yield Note(name, board, report.epoch, data={"pid": report.pid, "automatic": life.automatic})
        elif (wish is None or not wish.up) and seen.pid is not None:
            life.enter(_E.STOP, now_ns)
            yield Terminate(board)
        else:
            yield from self._replace_if(life.health.complaint(now_ns), board, life, now_ns)

    def _up(self, board: str, life: Life, wish: BoardWish | None, seen: BoardSeen, now_ns: int) -> Iterator[Action]:
        report = seen.report
        if report is None:
            return
        life.health.hear(report, seen.report_ns, now_ns)
        if life.health.serving_ns is not None:
            life.restarts.serving(life.health.serving_ns, now_ns)
        if fault := self.attribution.see(report):
            data = {"fault": fault, "detail": report.fault_detail, "digest": report.digest}
            yield Note(history.FLEET_FAULT_SEEN, board, report.epoch, report.generation, data)
            return  # whoever judges faults has the first word: the breaker may open
        complaint = life.health.complaint(now_ns)
        if complaint is not None or life.aborted_ns is not None:
            yield from self._replace_if(complaint, board, life, now_ns)
        elif wish is None or not wish.up or report.epoch < wish.min_epoch:
            life.enter(_E.STOP, now_ns)
            yield Send(board, wire.StopWorker(self._next_seq(life, report), self._config.drain_timeout_ms))
        else:
            yield from self._command(board, life, wish, report, now_ns)

    def _stopping(self, board: str, life: Life, wish: BoardWish | None, seen: BoardSeen, now_ns: int) -> Iterator[Action]:
        limit_ms = self._config.drain_timeout_ms + STOP_GRACE_NS // MS
        late = now_ns - life.since_ns > limit_ms * MS
        yield from self._replace_if(f"it did not stop within {limit_ms} ms" if late else None, board, life, now_ns)

    def _waiting(self, board: str, life: Life, wish: BoardWish | None, seen: BoardSeen, now_ns: int) -> Iterator[Action]:
        if wish is None or not wish.up:
            life.enter(_E.FORGET, now_ns)
            life.retry_ns, life.why = None, None
            life.restarts.forgive()
        elif life.retry_ns is not None and now_ns >= life.retry_ns:
            life.restarts.spend(now_ns, half_open=life.state is _P.QUARANTINED)
            yield self._spawn(board, life, _E.RETRY, now_ns, automatic=True)

    def _spawn(self, board: str, life: Life, event: ProcessEvent, now_ns: int, *, automatic: bool) -> Spawn:
        life.enter(event, now_ns)
        life.begin(Health(self._config, now_ns), now_ns, spawned=True, automatic=automatic)
        return Spawn(board, automatic)

    def _replace_if(self, complaint: str | None, board: str, life: Life, now_ns: int) -> Iterator[Action]:
        """Abort a sick worker; kill it when it does not die of that."""
        if life.aborted_ns is None:
            if complaint is not None:
                life.aborted_ns, life.why = now_ns, complaint
                yield Note(history.FLEET_WORKER_KILLED, board, life.epoch or None, data={"reason": complaint, "signal": "SIGABRT"})
                yield Abort(board, complaint)
        elif now_ns - life.aborted_ns >= ABORT_GRACE_NS:
            life.aborted_ns, reason = now_ns, f"{life.why}, and the abort did not end it"
            yield Note(history.FLEET_WORKER_KILLED, board, life.epoch or None, data={"reason": reason, "signal": "SIGKILL"})
            yield Kill(board, reason)

    # ---------------------------------------------------------------- commands to a living worker
    def _command(self, board: str, life: Life, wish: BoardWish, report: wire.WorkerReport, now_ns: int) -> Iterator[Action]:
        """One command at a time, and none twice in a row before its time: a refusal is not answered by asking again at once."""
        empty = report.state == ModelState.UNLOADED.name
        if self._reset_ordered(wish, report):
            if report.load_step != RESETS and self._may_send(life, "forced reset", report, now_ns):
                yield self._force_reset(board, life, report, now_ns)
        elif wish.prove and empty and report.resets == 0 and self._resets.allowed(board):
            if report.condemned is None and report.load_step != RESETS and self._may_send(life, "proof", report, now_ns):
                yield from self._prove(board, life, report, now_ns)
        elif report.wants_reset or self._window_reopened(life, report, now_ns):
            if self._frozen is None and self._may_send(life, "reset", report, now_ns):
                yield from self._answer_reset(board, life, report, now_ns)
        elif misplaced(wish, report) and (report.state in _UNLOADABLE or (wish.placement is None and report.state == _FAILED)):
            if self._may_send(life, "unload", report, now_ns):
                yield Send(board, wire.UnloadModel(self._begin(life, "unload", report, now_ns), report.generation, wish.drain_ms))
        elif wish.placement is not None and self._load_is_due(life, wish, wish.placement, report, now_ns):
            verb = f"load {wish.placement.digest}"
            if self._may_send(life, verb, report, now_ns):
                life.load_digest = wish.placement.digest
                yield Load(board, self._begin(life, verb, report, now_ns), wish.placement)
        elif report.state in SERVING and report.draining != wish.draining:
            verb = "drain" if wish.draining else "resume"
            if self._may_send(life, verb, report, now_ns):
                seq = self._begin(life, verb, report, now_ns)
                yield Send(board, wire.DrainBoard(seq) if wish.draining else wire.ResumeBoard(seq))

    def _load_is_due(
        self, life: Life, wish: BoardWish, placement: Placement, report: wire.WorkerReport, now_ns: int
    ) -> bool:
        """An empty board is loaded; a load that failed is tried again after a long while, another artifact at once. What is
        condemned, or what the policy leaves to an operator, is left to an operator."""
        idle = report.state == ModelState.UNLOADED.name
        if report.state != _FAILED and not (idle and report.command_error is not None):
            life.failed_ns = None
            return idle
        if life.failed_ns is None:
            life.failed_ns = now_ns
        if report.condemned is not None:
            return False
        if wish.swap and placement.digest != (life.load_digest if idle else report.digest):
            return True
        if report.fault in _OPERATOR_ONLY or self._frozen is not None:
            return False
        return now_ns >= life.failed_ns + int(self._config.restart.half_open_after_s * S)

    def _reset_ordered(self, wish: BoardWish, report: wire.WorkerReport) -> bool:
        """An operator's word, good for one generation."""
        failed = report.state in (_FAILED, ModelState.RECOVERING.name)
        return failed and 0 < wish.reset_generation == report.generation

    def _force_reset(self, board: str, life: Life, report: wire.WorkerReport, now_ns: int) -> Grant:
        """A reset that no budget refuses, though it counts in it."""
        self._resets.ask(board, now_ns)
        life.reset = ResetAnswer(report.epoch, report.generation, None, now_ns)
        return Grant(board, self._begin(life, "forced reset", report, now_ns), spend=True)

    def _prove(self, board: str, life: Life, report: wire.WorkerReport, now_ns: int) -> Iterator[Action]:
        """A board that comes back is reset once, out of the budget; while that is spent it waits empty. A life that dies before its
        reset is done leaves it to the next one."""
        waits = life.reset is not None and life.reset.reason is not None and now_ns < life.reset.next_ns
        if waits and life.reset is not None and life.reset.generation == report.generation:
            return
        granted, spend, note = self._decide_reset(board, life, report, now_ns)
        yield from note
        if granted:
            yield Grant(board, self._begin(life, "proof", report, now_ns), spend=spend)

    def _window_reopened(self, life: Life, report: wire.WorkerReport, now_ns: int) -> bool:
        """Whether a board that was condemned for want of budget may have its reset after all."""
        answer = life.reset
        if answer is None or answer.reason is None or report.state != ModelState.FAILED.name:
            return False
        return (answer.epoch, answer.generation) == (report.epoch, report.generation) and now_ns >= answer.next_ns

    def _answer_reset(self, board: str, life: Life, report: wire.WorkerReport, now_ns: int) -> Iterator[Action]:
        """One decision, and one spend, per generation; an answer that got lost is sent again without a second spend."""
        granted, spend, note = self._decide_reset(board, life, report, now_ns)
        yield from note
        seq = self._begin(life, "reset", report, now_ns)
        if granted:
            yield Grant(board, seq, spend=spend)
        else:
            assert life.reset is not None and life.reset.reason is not None
            yield Send(board, wire.DenyReset(seq, life.reset.reason))

    def _decide_reset(
        self, board: str, life: Life, report: wire.WorkerReport, now_ns: int
    ) -> tuple[bool, bool, tuple[Note, ...]]:
        """(whether the budget grants a reset, whether that was spent now, what to tell)."""
        answer = life.reset
        known = answer is not None and (answer.epoch, answer.generation) == (report.epoch, report.generation)
        if answer is not None and known and (answer.reason is None or now_ns < answer.next_ns):
            return answer.reason is None, False, ()
        refusal = self._resets.ask(board, now_ns)
        answer = life.reset = _answer(report, refusal, now_ns)
        name = history.FLEET_RESET_GRANTED if refusal is None else history.FLEET_RESET_DENIED
        data = {"fault": report.fault, "reason": answer.reason, "left": self._resets.left(board, now_ns)}
        return refusal is None, refusal is None, (Note(name, board, report.epoch, report.generation, data),)

    def _may_send(self, life: Life, verb: str, report: wire.WorkerReport, now_ns: int) -> bool:
        last = life.command
        if last is None or now_ns >= last.until_ns:
            return True
        return report.command_seq >= last.seq and (last.verb, last.generation) != (verb, report.generation)

    def _begin(self, life: Life, verb: str, report: wire.WorkerReport, now_ns: int) -> int:
        seq = self._next_seq(life, report)
        life.command = Command(seq, verb, report.generation, now_ns + COMMAND_NS)
        return seq

    def word(self, board: str, report: wire.WorkerReport, make: Callable[[int], wire.SetPingPong]) -> Send:
        """An operator's word to a worker that reports, outside what is wanted of boards; `make` gets its number.

        Raises:
            KeyError: nothing is known of the board.
        """
        return Send(board, make(self._next_seq(self.lives[board], report)))

    def _next_seq(self, life: Life, report: wire.WorkerReport) -> int:
        life.seq = max(life.seq, report.command_seq) + 1
        return life.seq

    # ---------------------------------------------------------------- the view
    def _publish(self, desired: Desired, observed: Observed) -> Iterator[Action]:
        """A new view whenever its content changes."""
        boards, aliases = fleet_view(desired, observed, self.lives, self._published)
        if list(boards) != self._published.boards or list(aliases) != self._published.aliases:
            self._published = wire.FleetView(0, list(boards), list(aliases))
            yield Publish(boards, aliases)


def _answer(report: wire.WorkerReport, refusal: Refusal | None, now_ns: int) -> ResetAnswer:
    if refusal is None:
        return ResetAnswer(report.epoch, report.generation, None, now_ns)
    return ResetAnswer(report.epoch, report.generation, refusal.reason, refusal.next_ns)


