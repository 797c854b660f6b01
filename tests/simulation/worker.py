"""A worker process: the real `Engine` and the real `Routers`, with a device thread, links and timers in virtual time.

It does what `calculet_worker.shell.app` does, in the same order; a loop pass is one event with all that follows from it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from calculet_core import wire
from calculet_core.clock import MS, US
from calculet_core.errors import ExitCode
from calculet_core.ids import WireKey
from calculet_core.jobs import DeviceCounters
from calculet_worker import actions, events
from calculet_worker.engine import Engine
from calculet_worker.shell.app import STALL_NS
from calculet_worker.shell.routers import Routers
from simulation.device import DRAM_BYTES, ArmedPlan, DeviceThread
from simulation.processes import Process
from simulation.transport import Frames, Link

if TYPE_CHECKING:
    from simulation.world import World

BOOT_NS = (250 * MS, 900 * MS)
"""Interpreter, imports, lock, epoch."""
MIN_REPORT_GAP_NS = 20 * MS
MAX_REPORT_GAP_NS = 1000 * MS
FLUSH_GRACE_NS = 50 * MS
HOUSEKEEPING_NS = 500 * MS
TOKENIZE_NS = 60 * US
VERIFY_NS = 20 * MS
COMMANDS = (
    wire.LoadModel, wire.UnloadModel, wire.DrainBoard, wire.ResumeBoard, wire.GrantReset, wire.DenyReset, wire.StopWorker,
)  # fmt: skip


class WorkerHost(Process):
    """One life of a board's worker."""

    def __init__(self, world: World, board: str, epoch: int, pid: int) -> None:
        super().__init__(world, board, pid)
        self.board, self.epoch = board, epoch
        self.rng = world.rng(f"worker {board} {epoch}")
        self.booted = False
        later = self.rng.randrange(*BOOT_NS)
        self.later(later, self._boot)

    def _boot(self) -> None:
        world, settings = self.world, self.world.settings
        self.plan = ArmedPlan()
        self.thread = DeviceThread(self, world.hardware[self.board], self.plan, self.tell)
        self.device = self.thread.device
        self.engine = Engine(
            self.board, self.epoch, self.pid, f"ipc://w-{self.board}-{self.epoch}", self.device.limits(), settings.recovery,
            self.epoch, settings.tenants, DRAM_BYTES,
        )  # fmt: skip
        self.routers = Routers(3 * settings.router.lease_interval_ms * MS)
        self._peers: dict[bytes, Link] = {}
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._wakeup_ns: int | None = None
        self._report_due = False
        self._reported_ns, self._retry_ns = 0, MIN_REPORT_GAP_NS
        self.exiting = False
        self._flush_due = False
        self._checked = 0
        self._performers: dict[type[Any], Any] = {
            actions.SubmitJob: lambda action: self._events.append(self.thread.submit(action)),
            actions.GiveBack: lambda action: self.device.give_back(action.completion),
            actions.ReleaseLane: self._release_lane,
            actions.Tokenize: self._tokenize,
            actions.ToRouter: self._to_router,
            actions.VerifyPackage: lambda action: self.later(VERIFY_NS, self._verified, action),
            actions.ConfigureDevice: self._configure,
            actions.UnconfigureDevice: self.thread.perform,
            actions.ResetDevice: self.thread.perform,
            actions.Announce: self._announce,
            actions.Record: self._record,
            actions.Exit: lambda action: self._end(action.code, action.reason),
        }
        self.booted = True
        self._supervisor = Link(
            world, self, world.find_supervisor, f"control {self.board}", _accept_at_supervisor, self._from_supervisor
        )
        period = world.settings.supervision.heartbeat_ms * MS
        self._kept_ns = self.timeline.now
        self.later(0, self._heartbeat, period)
        self.later(0, self._housekeeping)
        for fault in world.armed.pop(self.board, []):
            self.plan.arm(fault)

    # ---------------------------------------------------------------- the engine
    def tell(self, event: events.Event) -> None:
        """Tell the engine, do what it wants, and tell it what came of that."""
        pending = self._events
        pending.append(event)
        if self._handling or self.exiting:
            return
        self._handling = True
        engine, performers, now = self.engine, self._performers, self.timeline.now
        try:
            while pending and not self.exiting:
                for action in engine.handle(pending.popleft(), now):
                    if self._crash_after is not None:
                        self.acted()
                    performers[type(action)](action)
        except Exception as error:
            self.world.bug(self, error)
            self._end(ExitCode.BUG, f"bug: {error}")
            return
        finally:
            self._handling = False
        self._checked += 1
        if self._checked >= self.world.settings.check_every:
            self._checked = 0
            self._check_lanes()
        at = engine.next_wakeup_ns()
        if at is not None and at != self._wakeup_ns:
            self._wakeup_ns = at
            self.later(at - now, self._wake, at)
        if self._flush_due:
            self._flush()

    def _check_lanes(self) -> None:
        serving = self.engine.serving
        if serving is not None and (broken := serving.kv.invariants()):
            self.world.broken("kv_invariants", f"{self.board}: {broken}")

    def _wake(self, at: int) -> None:
        if self._wakeup_ns == at:
            self._wakeup_ns = None
            self.tell(events.TimeCame())

    # ---------------------------------------------------------------- actions
    def _release_lane(self, action: actions.ReleaseLane) -> None:
        self._events.append(events.LaneReleased(action.generation, action.lane, int(self.device.release(action.lane))))

    def _tokenize(self, action: actions.Tokenize) -> None:
        ids = np.array(action.prompt.token_ids, np.int32)
        self.later(TOKENIZE_NS + 200 * len(ids), self.tell, events.Tokenized(action.key, ids))

    def _verified(self, action: actions.VerifyPackage) -> None:
        world = self.world
        package = world.packages[action.digest]
        self.tell(events.PackageVerified(action.generation, package, world.vocabulary, world.settings.scheduler))

    def _configure(self, action: actions.ConfigureDevice) -> None:
        self.world.digests[action.generation] = action.package.digest
        self.thread.perform(action)

    def _to_router(self, action: actions.ToRouter) -> None:
        self.routers.add(action)
        self._flush_due = True

    def _flush(self) -> None:
        self._flush_due = False
        load = None
        for peer in self.routers.live():
            if peer.outbox is not None:
                load = load or self.engine.load()
                self._send(peer.identity, self.routers.tick(peer, self.epoch, load)[1:])

    def _send(self, identity: bytes, frames: Frames) -> None:
        link = self._peers.get(identity)
        if link is None or not link.up or not link.answer(frames):
            self.world.saw("worker could not send")

    def _record(self, action: actions.Record) -> None:
        self.world.see(action.event, self)

    def _announce(self, _: actions.Announce) -> None:
        for peer in self.routers.live():
            self._send(peer.identity, wire.encode(self.engine.hello()))
        if not self._report_due:
            self._report_due = True
            self.later(max(0, self._reported_ns + MIN_REPORT_GAP_NS - self.timeline.now), self._report_now)

    def _end(self, code: int, reason: str) -> None:
        if self.exiting:
            return
        self.exiting = True
        if code != ExitCode.BUG:
            self._flush()
            self._report()
            self.later(FLUSH_GRACE_NS, self._gone, code, reason)
        else:
            self._gone(code, reason)

    def _gone(self, code: int, reason: str) -> None:
        self.world.keeper.ended(self, code=code, reason=reason)

    # ---------------------------------------------------------------- routers
    def accept(self, link: Link) -> Any:
        """A router has connected."""
        self._peers[link.identity] = link
        return lambda frames: self._from_router(link.identity, link, frames)

    def _from_router(self, identity: bytes, link: Link, frames: Frames) -> None:
        if self._peers.get(identity) is not link:
            return
        message, now = wire.decode(*frames), self.timeline.now
        if isinstance(message, wire.RouterHello | wire.Lease):
            self.routers.introduce(message.router, identity, now)
        peer = self.routers.heard(identity, now)
        if peer is None:
            self.world.saw("worker heard an unknown router")
        elif isinstance(message, wire.Submit):
            self.tell(events.RequestArrived(peer.router, message))
        elif isinstance(message, wire.Cancel):
            self.tell(events.CancelAsked(WireKey(message.request_id, message.attempt, message.epoch), message.reason))
        elif isinstance(message, wire.Lease):
            peer.acknowledge(message.acked_seq)
        elif isinstance(message, wire.RouterHello):
            self._send(identity, wire.encode(self.engine.hello()))

    # ---------------------------------------------------------------- supervisor
    def _from_supervisor(self, frames: Frames) -> None:
        message = wire.decode(*frames)
        assert isinstance(message, COMMANDS), message
        self.world.tracer(self.name, "command", message)
        self.tell(events.CommandArrived(message))

    def _report_now(self) -> None:
        if self._report_due:
            self._report()

    def _report(self) -> None:
        self._report_due = False
        now = self._reported_ns = self.timeline.now
        if self._supervisor.send(wire.encode(self.engine.report(now))):
            self._retry_ns = MIN_REPORT_GAP_NS
        else:
            self._retry_ns = min(self._retry_ns * 2, MAX_REPORT_GAP_NS)
            self._report_due = True
            self.later(self._retry_ns, self._report_now)

    @property
    def serves(self) -> bool:
        """Ready for requests."""
        return self.booted and self.engine.life.refusal() is None and not self.engine.control.stopping

    def board_counters(self) -> DeviceCounters:
        """The silicon's own count."""
        return self.thread.board.counters()

    def terminate(self) -> None:
        """SIGTERM drains."""
        if not self.booted:
            self.world.keeper.ended(self, signal=15)
            return
        timeout_ms = self.world.settings.supervision.drain_timeout_ms
        seq = self.engine.report(self.timeline.now).command_seq + 1
        self.tell(events.CommandArrived(wire.StopWorker(seq, timeout_ms)))

    # ---------------------------------------------------------------- in time
    def _housekeeping(self) -> None:
        self.later(HOUSEKEEPING_NS, self._housekeeping)
        now = self.timeline.now
        if now - self._kept_ns > STALL_NS:
            self.world.saw("worker stood still")
            self.routers.overslept(now - self._kept_ns)
        self._kept_ns = now
        free = self.engine.free_lanes
        if free is not None:
            full = free > 0 and not self.device.can_allocate(free)
            self.tell(events.CountersRead(self.device.counters().pending, full))
        for router, reason in self.routers.lapsed(now):
            self.world.saw(f"worker lost a router: {reason.split(':')[0]}")
            self.world.checker.router_lost(self, router)
            self.tell(events.RouterLost(router, reason))

    def _heartbeat(self, period_ns: int) -> None:
        self.later(period_ns, self._heartbeat, period_ns)
        self._report()
        load = None
        for peer in self.routers.live():
            load = load or self.engine.load()
            self._send(peer.identity, self.routers.tick(peer, self.epoch, load)[1:])


def _accept_at_supervisor(server: Any, link: Link) -> Any:
    return server.accept(link)
