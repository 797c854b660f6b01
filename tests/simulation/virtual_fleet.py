"""A fleet in virtual time: the real dispatcher, the real engines and the simulated boards, in one event queue.

What is real: the router's `Dispatcher`, every worker's `Engine`, the pure `SimBoard`. What is simulated: time, processes, links
(latency, in order, dropped when a process dies), tokenizing, clients, and a supervisor of a few lines that loads, grants resets
within a budget and starts dead workers again. Everything is decided by one seed, so that a run can be repeated exactly.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from builders_sim import a_sim_package

from calculet_core import history, wire
from calculet_core.artifact import Package
from calculet_core.budgets import WindowBudget
from calculet_core.capacity import GIB
from calculet_core.clock import MS, US, S
from calculet_core.config import RecoveryConfig, RouterConfig, TenantConfig
from calculet_core.history import Checker, Event
from calculet_core.ids import WireKey
from calculet_core.jobs import Completion, DeviceVersions, JobHandle, OutputStatus, ReturnCode
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_router import actions as router_actions
from calculet_router import events as router_events
from calculet_router.aliases import Aliases
from calculet_router.dispatch import Dispatcher
from calculet_router.fleet import Roster
from calculet_router.openai import Call, Kind
from calculet_router.tenants import Tenants
from calculet_worker import actions, events
from calculet_worker.device.base import DeviceLimits
from calculet_worker.device.sim_board import SimBoard
from calculet_worker.device.sim_rule import reference_tokens
from calculet_worker.engine import Engine

ALIAS = "toy"
RESPAWN_NS = 150 * MS
RESETS = 2
RESET_WINDOW_NS = 600 * S
ROUTER = 7


@dataclass
class Traffic:
    """What clients do."""

    per_s: float = 2.0
    prompt_tokens: tuple[int, int] = (4, 200)
    output_tokens: tuple[int, int] = (1, 32)
    disconnects: float = 0.05
    """Share of clients that leave at a random moment."""
    streams: float = 0.5


@dataclass
class Faults:
    """How often things break, as mean times between; None: never."""

    kill_s: float | None = None
    ccu_s: float | None = None
    busy_s: float | None = None
    lost_job_s: float | None = None
    """A job's completion comes long after its time limit."""
    nan_s: float | None = None

    def all_on(self) -> Faults:
        """A rough day."""
        return Faults(kill_s=900, ccu_s=700, busy_s=300, lost_job_s=1500, nan_s=1200)


@dataclass(eq=False)
class Client:
    """One call and what it got. It is the dispatcher's owner object."""

    prompt: list[int]
    max_tokens: int
    stream: bool
    request: int = 0
    text: str = ""
    outcome: str | None = None
    code: str | None = None
    answer: list[int] | None = None


@dataclass(eq=False)
class Life:
    """One process of a board's worker, with its board: what dies with a kill."""

    name: str
    epoch: int
    engine: Engine
    seq: int = 0
    alive: bool = True
    greeted: bool = False
    inbox: list[events.Event] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)
    """Submitted job -> its deadline."""
    held: list[Completion] = field(default_factory=list)
    handling: bool = False
    wakeup_ns: int | None = None


class VirtualFleet:
    """Run it with `run(seconds)`; `checker.violations` tells what was broken."""

    def __init__(self, seed: int, boards: int = 2, faults: Faults = Faults(), traffic: Traffic = Traffic(), package: Package | None = None) -> None:
        self.rng = random.Random(seed)
        self.now, self._order, self._heap = 1 * S, itertools.count(), list[tuple[int, int, Callable[[], None]]]()
        self.package = package or a_sim_package()
        self.vocabulary = [bytes([b]) for b in range(256)] + [b""] * (self.package.manifest.tokenizer.vocab_size - 256)
        self.faults, self.traffic = faults, traffic
        self.clients: dict[int, Client] = {}
        self.calls = 0
        self.fired: dict[str, int] = {}
        self._trace = hashlib.sha256()
        self.checker = Checker(history.Budgets(resets=RESETS, reset_window_ns=RESET_WINDOW_NS), self._expected)
        self.dispatcher = Dispatcher(ROUTER, RouterConfig(), Roster(), Aliases({}), Tenants([TenantConfig(name="default")], self.now))
        self.names = [f"board{index}" for index in range(boards)]
        self.hardware: dict[str, SimBoard] = {}
        self.armed: dict[str, set[str]] = {name: set() for name in self.names}
        self.lives: dict[str, Life] = {}
        self._epochs = dict.fromkeys(self.names, 0)
        self._budgets = {name: WindowBudget(RESETS, RESET_WINDOW_NS) for name in self.names}
        self._generation = self._view = 0
        self._command = 0
        self._quiet = False
        for name in self.names:
            self._spawn(name, automatic=False)
        for kind in ("kill", "ccu", "busy", "lost_job", "nan"):
            self._schedule_fault(kind)
        self._sweep()
        self.after(self._gap(traffic.per_s), self._arrive)

    # ---------------------------------------------------------------- time
    def after(self, delay_ns: int, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + max(0, delay_ns), next(self._order), work))

    def run_until_broken(self, rules: set[str], seconds: float) -> set[str]:
        """Which of the rules were broken first, within so many seconds and the settling after them."""
        end = self.now + int(seconds * S)
        while self.now < end and not self.broken(rules):
            self._run_until(self.now + S)
        return self.broken(rules) or self.run(0).broken(rules)

    def broken(self, rules: set[str]) -> set[str]:
        return rules & {violation.rule for violation in self.checker.violations}

    def run(self, seconds: float, quiet_s: float = 700.0) -> VirtualFleet:
        """Traffic and faults for so long, then neither until everything has settled (at most `quiet_s`)."""
        self._run_until(self.now + int(seconds * S))
        self._quiet = True
        end = self.now + int(quiet_s * S)
        while self.now < end and not self.settled():
            self._run_until(min(end, self.now + S))
        if not self.settled():
            self._broken("liveness", f"not settled {quiet_s:g} s after the last fault: {self.unsettled()}")
        self.checker.finish()
        return self

    def _run_until(self, end_ns: int) -> None:
        while self._heap and self._heap[0][0] <= end_ns:
            at, _, work = heapq.heappop(self._heap)
            self.now = at
            work()
        self.now = end_ns

    def settled(self) -> bool:
        return not self.unsettled()

    def unsettled(self) -> list[str]:
        """What has not come to rest."""
        left = [f"request {client.request:x}" for client in self.clients.values() if client.outcome is None]
        for name, life in self.lives.items():
            report = life.engine.report(self.now)
            busy = {state: count for state, count in report.lanes.items() if count and state not in ("FREE", "UNKNOWN")}
            condemned = report.condemned is not None
            if not condemned and (report.state != "READY" or busy or report.waiting or report.inflight):
                left.append(f"{name}: {report.state} {busy} waiting={report.waiting} inflight={report.inflight}")
        return left

    @property
    def trace_hash(self) -> str:
        """Of the whole history: equal for equal seeds."""
        return self._trace.hexdigest()

    def see(self, event: Event) -> None:
        self._trace.update(repr((event.event, event.t, event.request, event.attempt, event.board, event.generation, event.data)).encode())
        self.checker.see(event)

    def _broken(self, rule: str, message: str) -> None:
        self.checker.violations.append(history.Violation(rule, message, self.now))

    def _gap(self, per_s: float) -> int:
        return int(self.rng.expovariate(per_s) * S)

    def _expected(self, request: int) -> list[int] | None:
        """Tokens that the model gives; `answer` is filled at the first question."""
        client = self.clients.get(request)
        if client is not None and client.answer is None:
            client.answer = reference_tokens(self.package.manifest, client.prompt, client.max_tokens)
        return client.answer if client else None

    # ---------------------------------------------------------------- clients
    def _arrive(self) -> None:
        if self._quiet:
            return
        self.after(self._gap(self.traffic.per_s), self._arrive)
        rng = self.rng
        prompt = [rng.randrange(256) for _ in range(rng.randint(*self.traffic.prompt_tokens))]
        client = Client(prompt, rng.randint(*self.traffic.output_tokens), rng.random() < self.traffic.streams)
        sampling = SamplingParams(temperature=0.0)
        call = Call(Kind.TEXT, ALIAS, [Prompt(token_ids=tuple(prompt))], 1, client.max_tokens, sampling, StopRules(), client.stream, False, False, 1)
        self.calls += 1
        self._dispatch(router_events.CallArrived(client, call, 0))
        if rng.random() < self.traffic.disconnects:
            self.after(int(rng.uniform(0, 2) * S), lambda: self._leave(client))

    def _leave(self, client: Client) -> None:
        if client.outcome is None:
            client.outcome = "left"
            self._dispatch(router_events.ClientGone(client, "client left"))

    # ---------------------------------------------------------------- the router
    def _dispatch(self, event: router_events.Event) -> None:
        for action in self.dispatcher.handle(event, self.now):
            self._route(action)

    def _route(self, action: Any) -> None:
        match action:
            case router_actions.Opened(owner=client, ticket=ticket):
                client.request = int(ticket.name, 16)
                self.clients[client.request] = client
            case router_actions.Send(board=board, epoch=epoch, message=message):
                self._to_worker(board, epoch, message)
            case router_actions.OpenLink(view=view):
                self.after(self._latency(), lambda: self._greet(view.board, view.epoch))
            case router_actions.Deliver(owner=client, piece=piece):
                self._deliver(client, piece)
            case router_actions.Restart(owner=client):
                client.text = ""
            case router_actions.Fail(owner=client, error=error):
                client.outcome, client.code = "failed", error.code
            case Event():
                self.see(action)
            case router_actions.LostMessages():
                self._broken("no_lost_message", f"{action.board}: expected {action.expected}, got {action.got}")

    def _deliver(self, client: Client, piece: wire.Piece) -> None:
        if client.outcome is not None:
            self._broken("one_terminal", f"tokens for request {client.request:x} after {client.outcome}")
        client.text += piece.text
        if client.stream and piece.text:
            self._show(client, piece.text)
        if piece.finish is not None:
            client.outcome = "completed"
            if not client.stream:
                self._show(client, client.text)

    def _show(self, client: Client, text: str) -> None:
        self.see(Event(history.REQUEST_TOKENS, self.now, client.request, data={"ids": list(text.encode("latin-1"))}))

    def _to_worker(self, board: str, epoch: int, message: wire.Submit | wire.Cancel) -> None:
        life = self.lives.get(board)
        if life is None or life.epoch != epoch or not life.alive:
            if isinstance(message, wire.Submit):
                self.after(0, lambda: self._dispatch(router_events.Unsent(board, epoch, message.request_id, message.attempt)))
            return
        kind, body = wire.encode(message)
        self.after(self._latency(), lambda: self._worker_gets(life, wire.decode(kind, body)))

    def _worker_gets(self, life: Life, message: Any) -> None:
        if isinstance(message, wire.Submit):
            self.tell(life, events.RequestArrived(ROUTER, message))
        else:
            key = WireKey(message.request_id, message.attempt, message.epoch)
            self.tell(life, events.CancelAsked(key, message.reason))

    def _latency(self) -> int:
        return 150 * US

    def _sweep(self) -> None:
        self.after(100 * MS, self._sweep)
        self._dispatch(router_events.TimePassed())

    # ---------------------------------------------------------------- workers
    def _spawn(self, name: str, automatic: bool = True) -> None:
        self._epochs[name] += 1
        epoch = self._epochs[name]
        self.hardware[name] = SimBoard(DeviceVersions("sim", name, chips=2, power_mode="balanced"), 32 * GIB, seed=epoch)
        engine = Engine(
            name, epoch, 1000 + epoch, f"sim://{name}/{epoch}", DeviceLimits(1, 2, False), RecoveryConfig(), epoch,
            (TenantConfig(name="default"),), 32 * GIB,
        )  # fmt: skip
        life = self.lives[name] = Life(name, epoch, engine)
        self.see(Event(history.FLEET_WORKER_STARTED, self.now, board=name, epoch=epoch, data={"automatic": automatic}))
        self._command_to(life, wire.LoadModel(self._next_command(), self._next_generation(), ALIAS, "/package", self.package.digest))

    def tell(self, life: Life, event: events.Event) -> None:
        """An event for the engine, with all that follows from it at this moment."""
        if not life.alive:
            return
        life.inbox.append(event)
        if life.handling:
            return
        life.handling = True
        try:
            while life.inbox and life.alive:
                for action in life.engine.handle(life.inbox.pop(0), self.now):
                    self._perform(life, action)
        except Exception as error:  # what ends a real worker with exit code 70
            self._broken("no_bug", f"{life.name}: {type(error).__name__}: {error}")
            self._die(life, "bug")
        finally:
            life.handling = False
        serving = life.engine.serving
        if life.alive and serving is not None and (broken := serving.kv.invariants()):
            self._broken("kv_invariants", f"{life.name}: {broken}")
        at = life.engine.next_wakeup_ns() if life.alive else None
        if at is not None and at != life.wakeup_ns:
            life.wakeup_ns = at
            self.after(at - self.now, lambda: self._wake(life, at))

    def _wake(self, life: Life, at: int) -> None:
        if life.wakeup_ns == at:
            life.wakeup_ns = None
            self.tell(life, events.TimeCame())

    def _perform(self, life: Life, action: actions.Action) -> None:
        match action:
            case actions.SubmitJob():
                self._submit(life, action)
            case actions.GiveBack(completion=completion):
                self.hardware[life.name].give_back(completion)
            case actions.ReleaseLane(generation=generation, lane=lane):
                life.inbox.append(events.LaneReleased(generation, lane, int(self.hardware[life.name].release(lane))))
            case actions.Tokenize(key=key, prompt=prompt):
                ids = np.array(prompt.token_ids, np.int32)
                self.after(80 * US, lambda: self.tell(life, events.Tokenized(key, ids)))
            case actions.ToRouter():
                self._tick(life, action)
            case actions.VerifyPackage(generation=generation):
                self.after(20 * MS, lambda: self.tell(life, events.PackageVerified(generation, self.package, self.vocabulary, None)))
            case actions.ConfigureDevice(generation=generation, package=package):
                self.after(50 * MS, lambda: self._configure(life, generation, package))
            case actions.UnconfigureDevice(generation=generation):
                rc = int(self.hardware[life.name].reset_configuration())
                self.after(MS, lambda: self.tell(life, events.DeviceUnconfigured(generation, rc)))
            case actions.ResetDevice():
                self.hardware[life.name].reset()
                life.waiting.clear()
                self.after(200 * MS, lambda: self.tell(life, events.DeviceReset(0)))
            case actions.Announce():
                self._announce(life)
            case actions.Record(event=event):
                self.see(event)
            case actions.Exit():
                self._die(life, "exit")

    def _configure(self, life: Life, generation: int, package: Package) -> None:
        if not life.alive:
            return
        rc = self.hardware[life.name].configure(package, generation)
        inspection = self.hardware[life.name].inspect() if rc == ReturnCode.OK else None
        self.tell(life, events.DeviceConfigured(generation, int(rc), inspection))

    def _submit(self, life: Life, action: actions.SubmitJob) -> None:
        board, job = self.hardware[life.name], action.job
        if self._fires(life, "busy"):
            life.inbox.append(events.JobRefused(job.job_id, ReturnCode.DEVICE_BUSY))
            return
        answer = board.submit(job, action.engine, self.now)
        if not isinstance(answer, JobHandle):
            life.inbox.append(events.JobRefused(job.job_id, int(answer)))
            return
        life.inbox.append(events.JobSubmitted(job.job_id, answer.engine))
        life.waiting[job.job_id] = action.deadline_ns
        due = board.next_done_ns()
        assert due is not None
        self.after(due - self.now, lambda: self._collect(life))
        self.after(action.deadline_ns - self.now, lambda: self._overdue(life, job.job_id, action.deadline_ns))

    def _overdue(self, life: Life, job_id: int, deadline_ns: int) -> None:
        if life.waiting.get(job_id) == deadline_ns:
            del life.waiting[job_id]
            self.tell(life, events.JobLost(job_id, ReturnCode.TIMEOUT))

    def _collect(self, life: Life) -> None:
        if not life.alive:
            return
        for completion in self.hardware[life.name].collect(self.now):
            if self._fires(life, "lost_job") and completion.job_id in life.waiting:
                late = life.waiting[completion.job_id] - self.now + self.rng.randrange(1, 20) * S
                self.after(late, lambda done=completion: self._late(life, done))  # type: ignore[misc]
                continue
            life.waiting.pop(completion.job_id, None)
            self.tell(life, events.JobCompleted(self._spoiled(life, completion)))

    def _late(self, life: Life, completion: Completion) -> None:
        self.tell(life, events.JobCompleted(completion))

    def _spoiled(self, life: Life, completion: Completion) -> Completion:
        status, logits = completion.status, completion.logits
        if self._fires(life, "ccu"):
            status = OutputStatus.CCU_EXCEPTION
        if logits is not None and self._fires(life, "nan"):
            logits = np.full_like(logits, np.nan)
        return Completion(
            completion.job_id, completion.generation, status, logits, completion.engine, completion.timings, completion.buffer_id
        )

    def _tick(self, life: Life, action: actions.ToRouter) -> None:
        life.seq += 1
        tick = wire.Tick(life.epoch, life.seq, action.pieces, action.accepted, action.refused, life.engine.load())
        kind, body = wire.encode(tick)
        self.after(self._latency(), lambda: self._router_gets(life, wire.decode(kind, body)))

    def _router_gets(self, life: Life, message: Any) -> None:
        if not life.alive:
            return  # what was on the wire of a killed process is lost with it
        if isinstance(message, wire.Tick):
            self._dispatch(router_events.TickArrived(life.name, life.epoch, message))
        else:
            self._dispatch(router_events.HelloArrived(life.name, life.epoch, message))

    def _greet(self, name: str, epoch: int) -> None:
        life = self.lives[name]
        if life.alive and life.epoch == epoch:
            life.greeted = True
            hello = life.engine.hello()
            self.after(self._latency(), lambda: self._router_gets(life, hello))
            self.after(500 * MS, lambda: self._heartbeat(life))

    def _heartbeat(self, life: Life) -> None:
        if life.alive:
            life.seq += 1
            tick = wire.Tick(life.epoch, life.seq, [], [], [], life.engine.load())
            self.after(self._latency(), lambda: self._router_gets(life, tick))
            self.after(500 * MS, lambda: self._heartbeat(life))

    # ---------------------------------------------------------------- the supervisor, in a few lines
    def _announce(self, life: Life) -> None:
        if life.greeted:
            hello = life.engine.hello()
            self.after(self._latency(), lambda: self._router_gets(life, hello))
        self.after(MS, lambda: self._reported(life))

    def _reported(self, life: Life) -> None:
        if not life.alive:
            return
        report = life.engine.report(self.now)
        self._publish()
        if report.state == "FAILED":
            self.after(S, lambda: self._die(life, "failed to load"))
        if report.wants_reset and not report.condemned:
            if self._budgets[life.name].spend(self.now):
                self.see(Event(history.FLEET_RESET_GRANTED, self.now, board=life.name))
                self._command_to(life, wire.GrantReset(self._next_command(), self._next_generation()))
            else:
                self.see(Event(history.FLEET_RESET_DENIED, self.now, board=life.name))
                self._command_to(life, wire.DenyReset(self._next_command(), "the budget is spent"))
                self._restart_when_affordable(life)

    def _restart_when_affordable(self, life: Life) -> None:
        """An operator comes once the window allows it, and restarts the worker."""
        wait = self._budgets[life.name].next_ns(self.now) - self.now + 1
        self.after(wait, lambda: self._die(life, "operator"))

    def _publish(self) -> None:
        self._view += 1
        boards = []
        for name, life in self.lives.items():
            if life.alive:
                report = life.engine.report(self.now)
                boards.append(
                    wire.BoardView(
                        name, life.epoch, 1, report.endpoint, report.state, report.generation, report.digest, report.alias, report.draining
                    )
                )
        alias = wire.AliasView(ALIAS, self.package.digest, self.package.manifest.context, 0)
        self._dispatch(router_events.ViewPublished(wire.FleetView(self._view, boards, [alias])))

    def _command_to(self, life: Life, command: Any) -> None:
        self.after(MS, lambda: self.tell(life, events.CommandArrived(command)))

    def _next_command(self) -> int:
        self._command += 1
        return self._command

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _die(self, life: Life, reason: str) -> None:
        """The process is gone: its memory, its messages under way, its board's state."""
        if not life.alive:
            return
        life.alive = False
        self.see(Event(history.FLEET_WORKER_EXITED, self.now, board=life.name, epoch=life.epoch, data={"reason": reason}))
        self.after(US * 100, lambda: self._dispatch(router_events.WorkerEnded(life.name, life.epoch, reason)))
        self.after(MS, self._publish)
        self.after(RESPAWN_NS, lambda: self._spawn(life.name))

    # ---------------------------------------------------------------- faults
    def _schedule_fault(self, kind: str) -> None:
        mean_s = getattr(self.faults, f"{kind}_s")
        if mean_s is not None:
            self.after(self._gap(1 / mean_s), lambda: self._arm(kind))

    def _arm(self, kind: str) -> None:
        if self._quiet:
            return
        name = self.rng.choice(self.names)
        if kind == "kill":
            self.fired["kill"] = self.fired.get("kill", 0) + 1
            self._die(self.lives[name], "killed")
        else:
            self.armed[name].add(kind)
        self._schedule_fault(kind)

    def _fires(self, life: Life, kind: str) -> bool:
        if kind not in self.armed[life.name] or self._quiet:
            return False
        self.armed[life.name].discard(kind)
        self.fired[kind] = self.fired.get(kind, 0) + 1
        return True

