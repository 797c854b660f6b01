"""The worker process: one board, one device, one event loop that owns all of the engine's state.

Everything reaches the engine as an event on the loop's thread, and its actions are performed in the order given. What a loop pass
has for a router leaves as one message at the end of the pass, after the next job went to the device. Nothing that may block
runs here: the device has its thread, prompts and packages have theirs. A bug in the engine ends the process with exit code 70:
routers send its requests elsewhere, and the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.config import BoardConfig
from calculet_core.errors import ArtifactError, ConfigError, ExitCode
from calculet_core.ids import WireKey
from calculet_core.shell.curve import Gatekeeper, allowed_routers, read_curve_keys
from calculet_core.shell.death_pipe import watch_death_pipe
from calculet_core.shell.files import FileLock, LockHeld, next_number, write_atomic
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.holding import Holding
from calculet_core.shell.journal import Journal, LineFile
from calculet_core.shell.limits import open_limits
from calculet_core.shell.link import MAX_MESSAGE_BYTES, Frames, Link, bind_router, bind_router_tcp, connect_dealer
from calculet_core.shell.logs import set_level
from calculet_core.shell.packages import load_keys
from calculet_core.shell.process import in_words, is_machines, is_shortage
from calculet_core.shell.stacks import keep_stacks
from calculet_core.shell.telemetry import serve_metrics
from calculet_worker.actions import (
    Action,
    Announce,
    ConfigureDevice,
    Exit,
    GiveBack,
    Record,
    ReleaseLane,
    ResetDevice,
    SubmitJob,
    Tokenize,
    ToRouter,
    TraceSteps,
    UnconfigureDevice,
    VerifyPackage,
)
from calculet_worker.device import FAULTS_OPTION, open_device
from calculet_worker.device.base import BoardUnavailable, Device
from calculet_worker.engine import Engine
from calculet_worker.events import (
    CancelAsked,
    CommandArrived,
    CountersRead,
    Event,
    JobSubmitted,
    LaneReleased,
    PackageVerified,
    RequestArrived,
    RouterLost,
    TenantsChanged,
    TimeCame,
)
from calculet_worker.rehearsal import Rehearsal
from calculet_worker.shell.chaos import WorkerChaos
from calculet_worker.shell.executor import Executor, SynchronousExecutor
from calculet_worker.shell.loading import verify
from calculet_worker.shell.lookups import Lookups
from calculet_worker.shell.prompts import Prompts
from calculet_worker.shell.reporting import Reporter
from calculet_worker.shell.routers import Peer, Routers
from calculet_worker.shell.spans import open_spans
from calculet_worker.shell.telemetry import Telemetry
from calculet_worker.shell.tokenizing import PromptTokenizer
from calculet_worker.shell.tracing import Tracer

SWITCH_INTERVAL_S = 0.0005
"""A thread that wants the interpreter waits no longer for a busy one."""
HOUSEKEEPING_S = 0.2
"""Leases, credit, journal."""
STALL_NS = 1 * S
"""Between two rounds of it: longer, and this process did not run."""
GC_THRESHOLDS = (20_000, 20, 100)
"""Young objects before they are looked through: the default, 700, does that every few steps, on the way to the next job."""
BURST_NS = MS // 2
"""Jobs that end at once are followed by the next one for so long before the loop goes on."""
HEARD_LATE_NS = MS // 4
"""Between the device thread's word and the loop's ear."""
WARM_FOR_NS = 1 * MS
"""After an event was handled the processor counts as warm for so long."""
MIN_REPORT_GAP_S = 0.02
FLUSH_GRACE_S = 0.05
"""For ZeroMQ's own thread to write the last messages before the sockets close."""
STUCK_AFTER_S = 2.0
"""How long the device thread may take to end."""
DRAIN_GRACE_S = 5.0
"""Beyond the drain deadline, before the process ends without the engine's word."""
COMMANDS = (
    wire.LoadModel, wire.UnloadModel, wire.DrainBoard, wire.ResumeBoard, wire.SetPingPong, wire.GrantReset, wire.DenyReset,
    wire.StopWorker,
)  # fmt: skip
DRAM_UNIT = 1 << 30
log = logging.getLogger("calculet.worker")


class Worker:
    """One life of a board's worker; `run` ends with the process's exit code and the reason."""

    def __init__(self, fleet: Fleet, board: BoardConfig, epoch: int, device: Device, keys: Sequence[Ed25519PublicKey]) -> None:
        config = fleet.config
        self._fleet, self._board, self._epoch, self._device, self._keys = fleet, board, epoch, device, keys
        self._data_path = fleet.worker_socket(board.name, epoch)
        limited = [tenant.name for tenant in config.tenants if tenant.max_waiting_tokens]
        self._limits = open_limits(fleet.limits("waiting"), limited, 0)
        self._engine = Engine(
            board.name, epoch, os.getpid(), f"ipc://{self._data_path}", device.limits(), config.recovery,
            int.from_bytes(os.urandom(8), "little"), config.tenants, int(board.dram_gib * DRAM_UNIT),
            time.monotonic_ns if config.trace.steps or (config.tracing.endpoint and config.tracing.jobs) else None, self._limits,
        )  # fmt: skip
        self._routers = Routers(3 * config.router.lease_interval_ms * MS)
        self._journal = Journal(fleet.journal(f"worker-{board.name}"), config.journal.max_bytes, config.journal.keep)
        armed = config.fault_injection and FAULTS_OPTION in board.options
        tenants = [tenant.name for tenant in config.tenants]
        self._telemetry = Telemetry(board.name, self._engine, device, tenants, armed)
        self._reporter = Reporter(device)
        self._holding = Holding(fleet, "worker", board.name)
        trace = config.trace
        steps = LineFile(fleet.step_trace(board.name), trace.max_bytes, trace.keep) if trace.steps else None
        self._tracer = Tracer(steps, board.name, epoch) if steps is not None else None
        self._spans = open_spans(config.tracing, board.name, epoch)
        self._tokenizer: PromptTokenizer | None = None
        self._events: deque[Event] = deque()
        self._handling = self._flushing = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_ns: int | None = None
        self._report_due: asyncio.TimerHandle | None = None
        self._reported_s, self._retry_s = 0.0, MIN_REPORT_GAP_S
        self._burst_until_ns = 0
        self._kept_ns = self._handled_ns = time.monotonic_ns()
        self._rehearsal: Rehearsal | None = None
        self._stop_asked = False
        self._gatekeeper: Gatekeeper | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._performers: dict[type[Any], Callable[[Any], None]] = {
            SubmitJob: self._submit, GiveBack: self._give_back, ReleaseLane: self._release_lane, Tokenize: self._tokenize,
            ToRouter: self._to_router, VerifyPackage: self._verify_package, ConfigureDevice: self._device_work,
            UnconfigureDevice: self._device_work, ResetDevice: self._device_work, Announce: self._announce,
            Record: self._record if self._spans is None else self._record_traced, TraceSteps: self._trace, Exit: self._exit,
        }  # fmt: skip

    async def run(self) -> tuple[int, str]:
        """Serve until an exit is due."""
        loop = self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[int, str]] = loop.create_future()
        loop.set_exception_handler(self._unhandled)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, signal.Signals(number).name)
        threading.excepthook = lambda args: loop.call_soon_threadsafe(self._bug, args.exc_value)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        chaos = self._chaos = self._make_chaos() if self._fleet.config.chaos.enabled else None
        heard = chaos.way(self._from_router) if chaos is not None else self._from_router
        executor = SynchronousExecutor if self._board.synchronous else Executor
        self._executor = executor(
            self._device, lambda event: loop.call_soon_threadsafe(self._handle, event),
            lambda: loop.call_soon_threadsafe(self._rehearse, time.monotonic_ns()),
        )  # fmt: skip
        self._data: Link = self._bind(context, heard)
        self._engine.endpoint = self._data.endpoint
        self._say = chaos.way(self._data.send) if chaos is not None else self._data.send
        self._prompts = Prompts(self._fleet.config.constraints, self._handle, self._telemetry.compiled)
        self._telemetry.watch(self._prompts.constraints)
        self._lookups = Lookups(self._epoch, self._prompts.pool, self._say)
        self._supervisor: Link = connect_dealer(context, str(self._fleet.supervisor_socket), self._from_supervisor)
        metrics_path = self._fleet.metrics_socket(f"worker-{self._board.name}")
        metrics = await serve_metrics(metrics_path, self._exposition)
        watch_death_pipe(lambda: self._end(ExitCode.OK, "the keeper is gone"))
        ticking = [loop.create_task(self._every(HOUSEKEEPING_S, self._housekeeping))]
        ticking.append(loop.create_task(self._every(self._fleet.config.supervision.heartbeat_ms / 1000, self._heartbeat)))
        log.info("epoch=%d pid=%d device=%s: waits for commands", self._epoch, os.getpid(), self._board.device)
        try:
            code, reason = await self._ended
            if code != ExitCode.BUG:
                self._flush()
                self._report()
                await asyncio.sleep(FLUSH_GRACE_S)
            return code, reason
        finally:
            for task in (*ticking, *self._tasks):
                task.cancel()
            metrics.close()
            self._data.close()
            if self._gatekeeper is not None:
                self._gatekeeper.close()
            self._supervisor.close()
            context.destroy(linger=0)
            for path in (self._data_path, metrics_path):
                path.unlink(missing_ok=True)
            self._prompts.close()
            if not await loop.run_in_executor(None, self._executor.stop, STUCK_AFTER_S):
                log.error("the device thread is stuck in the device; the process ends without it")
            self._journal.close()
            self._limits.close()
            if self._tracer is not None:
                self._tracer.close(time.monotonic_ns())
            if self._spans is not None:
                self._spans.close()

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], from_router: Callable[[Frames], object]) -> Link:
        """Where routers come in: a Unix socket, or TCP with CURVE and a gatekeeper."""
        heard = (
            from_router,
            lambda: self._bad("stranger", "not a ZeroMQ peer"),
            lambda: self._bad("oversize", f"above {MAX_MESSAGE_BYTES} bytes"),
        )
        if self._board.listen is None:
            return bind_router(context, self._data_path, *heard)
        keys = read_curve_keys(self._fleet.curve, "worker")
        self._gatekeeper = Gatekeeper(
            context, lambda: allowed_routers(self._fleet.curve), lambda: self._bad("denied", "no key of this fleet's routers")
        )
        try:
            return bind_router_tcp(context, self._board.listen, keys, *heard)
        except zmq.ZMQError as error:
            raise ConfigError(f"board {self._board.name}: cannot listen on {self._board.listen}: {error}") from None

    # ---------------------------------------------------------------- the engine
    def _handle(self, event: Event) -> None:
        """Tell the engine, perform what it wants, and tell it what came of that, until nothing is left."""
        self._events.append(event)
        if self._handling or self._ended.done():
            return
        self._handling = True
        try:
            self._burst_until_ns = time.monotonic_ns() + BURST_NS
            while self._events:
                for action in self._engine.handle(self._events.popleft(), time.monotonic_ns()):
                    self._perform(action)
            self._set_wakeup()
        except Exception as error:
            self._bug(error)
        finally:
            self._handling = False
            self._handled_ns = time.monotonic_ns()

    def _rehearse(self, asked_ns: int) -> None:
        """A step should end soon: run a tick on scratch data, unless something real has just warmed the processor, or is due.
        If it is heard late it waited for a busy processor, which is not cold: the tick would only make the step's end wait."""
        now_ns = time.monotonic_ns()
        warm = now_ns - self._handled_ns <= WARM_FOR_NS or now_ns - asked_ns > HEARD_LATE_NS
        if self._rehearsal is not None and not self._events and not warm:
            self._rehearsal.tick(now_ns)

    def _perform(self, action: Action) -> None:
        self._performers[type(action)](action)

    def _set_wakeup(self) -> None:
        """Have the timer come no later than the engine wants. One that comes too early finds nothing due and is set anew then:
        nearly every request moves the next deadline, and hardly any deadline comes."""
        at_ns = self._engine.next_wakeup_ns()
        if at_ns is None or (self._wakeup_ns is not None and self._wakeup_ns <= at_ns):
            return
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._wakeup_ns = at_ns
        self._wakeup = self._loop.call_later(max(0, at_ns - time.monotonic_ns()) / S, self._time_came)

    def _time_came(self) -> None:
        self._wakeup = self._wakeup_ns = None
        at_ns = self._engine.next_wakeup_ns()
        if at_ns is not None and at_ns <= time.monotonic_ns():
            self._handle(TimeCame())
        else:  # not yet, or the loop, which counts in milliseconds, came early
            self._set_wakeup()

    def _bug(self, error: BaseException | None) -> None:
        log.critical("a bug ends this worker", exc_info=error)
        self._end(ExitCode.BUG, f"bug: {type(error).__name__}: {error}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if is_shortage(context.get("exception")):
            log.error("%s: %s", context.get("message"), context["exception"])
            return
        self._bug(context.get("exception") or RuntimeError(context.get("message")))

    def _end(self, code: int, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result((code, reason))

    # ---------------------------------------------------------------- actions
    def _submit(self, action: SubmitJob) -> None:
        if self._tracer is None:
            self._events.append(self._executor.submit(action))
        else:
            start_ns, job_id = time.monotonic_ns(), action.job.job_id
            answer = self._executor.submit(action)
            if isinstance(answer, JobSubmitted):
                self._tracer.submitted(job_id, start_ns, time.monotonic_ns())
            self._events.append(answer)
        if action.brief and (ended := self._executor.look()) is not None:
            if time.monotonic_ns() < self._burst_until_ns:
                self._events.append(ended)
            else:  # others' turn: routers, timers, what is to be sent
                self._loop.call_soon(self._handle, ended)

    def _trace(self, action: TraceSteps) -> None:
        if self._tracer is not None:
            self._tracer.steps(action)
        if self._spans is not None:
            self._spans.steps(action)

    def _give_back(self, action: GiveBack) -> None:
        self._device.give_back(action.completion)

    def _release_lane(self, action: ReleaseLane) -> None:
        self._events.append(LaneReleased(action.generation, action.lane, int(self._device.release(action.lane))))

    def _tokenize(self, action: Tokenize) -> None:
        assert self._tokenizer is not None, "a request was let in before a package was verified"
        if (event := self._prompts.start(action, self._tokenizer)) is not None:
            self._events.append(event)

    def _to_router(self, action: ToRouter) -> None:
        self._routers.add(action)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _verify_package(self, action: VerifyPackage) -> None:
        self._begin(self._verify(action))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _verify(self, action: VerifyPackage) -> None:
        answer: PackageVerified
        answer, tokenizer = await asyncio.to_thread(
            verify, self._fleet, self._board, self._keys, self._device.versions(), action
        )
        self._tokenizer = tokenizer or self._tokenizer
        self._handle(answer)

    def _device_work(self, action: ConfigureDevice | UnconfigureDevice | ResetDevice) -> None:
        self._executor.perform(action)
        if isinstance(action, ConfigureDevice) and not self._device.limits().on_host:
            self._rehearsal = Rehearsal(action.package.manifest.lanes, time.monotonic_ns())

    def _announce(self, _: Announce) -> None:
        for peer in self._routers.live():
            self._greet(peer)
        if self._report_due is None:
            wait_s = max(0.0, self._reported_s + MIN_REPORT_GAP_S - self._loop.time())
            self._report_due = self._loop.call_later(wait_s, self._report)

    def _record(self, action: Record) -> None:
        self._telemetry.count(action.event)
        if action.event.event != history.BOARD_JOB:  # one for every step: counted, not kept
            self._journal.append(action.event)

    def _record_traced(self, action: Record) -> None:
        assert self._spans is not None
        self._spans.recorded(action.event)
        self._record(action)

    def _exit(self, action: Exit) -> None:
        self._end(action.code, action.reason)

    # ---------------------------------------------------------------- routers
    def _from_router(self, frames: Frames) -> None:
        try:
            identity, kind, body = frames
            message = wire.decode(kind, body)
        except ValueError as error:
            self._bad("malformed", str(error))
            return
        now_ns = time.monotonic_ns()
        if isinstance(message, wire.RouterHello | wire.Lease):
            self._routers.introduce(message.router, identity, now_ns)
        peer = self._routers.heard(identity, now_ns)
        if peer is None:
            self._bad("unknown_router", type(message).__name__)
        elif isinstance(message, wire.Submit):
            if self._spans is not None and message.traceparent is not None:
                self._spans.arrived(message, now_ns)
            self._handle(RequestArrived(peer.router, message))
        elif isinstance(message, wire.Lookup):
            self._lookups.ask(identity, message, self._tokenizer, self._engine.hello().digest)
        elif isinstance(message, wire.Cancel):
            self._handle(CancelAsked(WireKey(message.request_id, message.attempt, message.epoch), message.reason))
        elif isinstance(message, wire.Lease):
            peer.acknowledge(message.acked_seq)
        elif isinstance(message, wire.RouterHello):
            self._greet(peer)
        else:
            self._bad("unexpected", type(message).__name__)

    def _greet(self, peer: Peer) -> None:
        self._send(peer, [peer.identity, *wire.encode(self._reporter.introduce(self._engine.hello(), peer.seq))])

    def _flush(self) -> None:
        """One tick for each router that something is there for."""
        self._flushing = False
        for peer in self._routers.live():
            if peer.outbox is not None:
                self._send(peer, self._routers.tick(peer, self._epoch, self._engine.load()))
        if self._tracer is not None:
            self._tracer.flushed(time.monotonic_ns())

    def _send(self, peer: Peer, frames: Frames) -> None:
        if not self._say(frames):
            log.warning("router %08x: a message could not be sent", peer.router)

    # ---------------------------------------------------------------- supervisor
    def _from_supervisor(self, frames: Frames) -> None:
        try:
            kind, body = frames
            message = wire.decode(kind, body)
        except ValueError as error:
            self._bad("malformed", str(error))
            return
        if isinstance(message, COMMANDS):
            self._handle(CommandArrived(message))
        elif isinstance(message, wire.TakeConfiguration):
            self._begin(self._take_configuration(message))
        elif isinstance(message, wire.Disturb) and self._chaos is not None:
            self._chaos.take(message)
        else:
            self._bad("unexpected", type(message).__name__)

    async def _take_configuration(self, order: wire.TakeConfiguration) -> None:
        """What can be taken live; the report says how it went."""
        standing = await self._holding.read(order.live)
        if standing is not None:
            tenants = standing.fleet.tenants
            set_level(standing.fleet.log.level)
            self._telemetry.take_tenants(tenant.name for tenant in tenants)
            self._handle(TenantsChanged(tenants))
        self._report()

    def _report(self) -> None:
        """Now; again soon when nobody is connected, less and less so."""
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        self._reported_s = self._loop.time()
        report = self._reporter.complete(self._engine.report(time.monotonic_ns()), self._data.dropped, self._holding)
        if self._supervisor.send(wire.encode(report)):
            self._retry_s = MIN_REPORT_GAP_S
        else:
            self._retry_s = min(self._retry_s * 2, 1.0)
            self._report_due = self._loop.call_later(self._retry_s, self._report)

    # ---------------------------------------------------------------- in time
    async def _every(self, period_s: float, work: Callable[[], None]) -> None:
        while True:
            try:
                work()
            except Exception as error:
                self._bug(error)
            await asyncio.sleep(period_s)

    def _heartbeat(self) -> None:
        """The supervisor's heartbeat, and the routers': a tick that may carry nothing but the load."""
        self._report()
        for peer in self._routers.live():
            self._send(peer, self._routers.tick(peer, self._epoch, self._engine.load()))

    def _housekeeping(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._kept_ns > STALL_NS:
            log.warning("stood still for %.1f s: no router is blamed for that", (now_ns - self._kept_ns) / S)
            self._routers.overslept(now_ns - self._kept_ns)
        self._kept_ns = now_ns
        for router, reason in self._routers.lapsed(now_ns):
            log.warning("router %08x is lost: %s", router, reason)
            self._handle(RouterLost(router, reason))
        self._read_counters()
        self._journal.flush()
        if self._tracer is not None:
            self._tracer.flush(time.monotonic_ns())

    def _read_counters(self) -> None:
        """The device's own view of what the engine accounts for."""
        free = self._engine.free_lanes
        if free is not None:
            full = free > 0 and not self._device.can_allocate(free)
            self._handle(CountersRead(self._device.counters().pending, full))

    def _exposition(self) -> bytes:
        return self._telemetry.exposition(time.monotonic_ns(), self._executor.busy_ns())

    # ---------------------------------------------------------------- edges
    def _make_chaos(self) -> WorkerChaos:
        chaos = WorkerChaos(self._board.name, self._epoch, self._journal)
        chaos.around(self._performers)
        return chaos

    def _asked_to_stop(self, name: str) -> None:
        """The first signal drains, the second ends at once."""
        if self._stop_asked:
            self._end(ExitCode.OK, f"{name} again")
            return
        self._stop_asked = True
        deadline_ms = self._fleet.config.supervision.drain_timeout_ms
        log.info("%s: draining for %d ms at most", name, deadline_ms)
        self._loop.call_later(deadline_ms / 1000 + DRAIN_GRACE_S, self._end, ExitCode.OK, f"{name}: the drain did not end")
        seq = self._engine.report(time.monotonic_ns()).command_seq + 1
        self._handle(CommandArrived(wire.StopWorker(seq, deadline_ms)))

    def _bad(self, reason: str, detail: str) -> None:
        log.debug("a message was ignored: %s: %s", reason, detail)
        self._telemetry.bad_message(reason)


def serve(fleet: Fleet, board: BoardConfig) -> tuple[int, str]:
    """Take the board, serve it, and leave its exit class behind.

    Raises:
        LockHeld: another process has the board.
        BoardUnavailable: the device cannot be opened.
        ConfigError: a trusted key, the board's options or its scheduler file are wrong.
    """
    lock = FileLock(fleet.board_lock(board.name))
    exit_path = fleet.board_exit(board.name)
    exit_path.unlink(missing_ok=True)
    epoch = next_number(fleet.board_epoch(board.name))
    keep_stacks(fleet.stacks(f"worker-{board.name}"), f"board {board.name} epoch {epoch} pid {os.getpid()}")
    code, reason = ExitCode.BUG, "it did not start"
    try:
        keys = load_keys([fleet.resolve(path) for path in fleet.config.trusted_keys])
        worker = Worker(fleet, board, epoch, open_device(board, fleet.config.fault_injection), keys)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.freeze()  # a full collection over all that was imported takes longer than a decode step
        gc.set_threshold(*GC_THRESHOLDS)
        code, reason = uvloop.new_event_loop().run_until_complete(worker.run())
    except Exception as error:
        code, reason = exit_code_of(error), str(error)
        raise
    finally:
        try:
            write_atomic(exit_path, json.dumps({"code": code, "reason": reason, "epoch": epoch}).encode() + b"\n")
        except OSError as error:  # the code of the process tells most of it
            log.warning("what it ended of cannot be left: %s", in_words(error))
        lock.release()
    return code, reason


def exit_code_of(error: Exception) -> int:
    """The exit code for what stopped a worker from starting."""
    if isinstance(error, ConfigError | ArtifactError):
        return ExitCode.CONFIG
    if isinstance(error, BoardUnavailable | LockHeld) or is_machines(error):
        return ExitCode.UNAVAILABLE
    return ExitCode.BUG
