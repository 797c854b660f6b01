"""A router process: the real `Dispatcher`, with links, leases and clients in virtual time.

It does what `calculet_router.shell.app` and `worker_link` do. HTTP itself is not here: a client gets the pieces that an exchange
would write, at the moment it would write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from calculet_core import wire
from calculet_core.clock import MS, S
from calculet_core.errors import CalculetError
from calculet_core.history import Event
from calculet_core.keys import KeyFile, KeyRecord, hash_key
from calculet_router import actions, events
from calculet_router.aliases import Aliases
from calculet_router.dispatch import Dispatcher
from calculet_router.fleet import Roster
from calculet_router.openai import Call
from calculet_router.shell.app import STALL_NS
from calculet_router.tenants import Tenants
from simulation.processes import Process
from simulation.scenario import TENANTS
from simulation.transport import Frames, Link

if TYPE_CHECKING:
    from simulation.world import World

BOOT_NS = (200 * MS, 600 * MS)
GREETING_NS = 20 * MS
LAST_WORDS_NS = 1 * MS
KNOCK_NS = 50 * MS
REPORT_NS = 1 * S
KEYS = KeyFile(
    1,
    tuple(
        KeyRecord(f"{number:08x}", tenant.name, hash_key(tenant.name.encode()).hex(), 0, 0) for number, tenant in enumerate(TENANTS)
    ),
)
"""Every tenant's key is its name."""


class WorkerLink:
    """One life of a worker as this router reaches it."""

    def __init__(self, router: RouterHost, view: wire.BoardView) -> None:
        self.board, self.epoch, self._router = view.board, view.epoch, router
        self._acked, self._closed, self._watched = 0, False, 0
        self._outbox: list[wire.Submit | wire.Cancel] = []
        identity = b"r%08x-%08x" % (router.incarnation, view.epoch & 0xFFFFFFFF)
        world = router.world
        self.link = Link(
            world, router, lambda: world.find_worker(view.board, view.epoch), f"data {view.board}", _accept, self._on_frames,
            identity, world.settings.high_water,
        )  # fmt: skip
        router.later(0, self._greet)

    def send(self, message: wire.Submit | wire.Cancel) -> None:
        """At the end of this loop pass."""
        if not self._outbox:
            self._router.later(0, self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        for message in outbox:
            sent = not self._closed and self.link.send(wire.encode(message))
            if not sent and isinstance(message, wire.Submit):
                self._router.feed(events.Unsent(self.board, self.epoch, message.request_id, message.attempt))

    def close(self) -> None:
        self._closed = True
        self.link.close()

    def _hello(self) -> bool:
        return self.link.send(wire.encode(wire.RouterHello(self._router.incarnation, self._router.pid)))

    def _greet(self) -> None:
        if self._closed:
            return
        lease_ns = self._router.world.settings.router.lease_interval_ms * MS
        taken = self._hello()
        self._router.later(lease_ns if taken else GREETING_NS, self._renew if taken else self._greet)

    def _renew(self) -> None:
        if self._closed:
            return
        self.renew()
        self._router.later(self._router.world.settings.router.lease_interval_ms * MS, self._renew)

    def renew(self) -> None:
        if not self._closed:
            self._hello()
            self.link.send(wire.encode(wire.Lease(self._router.incarnation, self.epoch, self._acked)))

    def _on_frames(self, frames: Frames) -> None:
        if self._closed:
            return
        message = wire.decode(*frames)
        if isinstance(message, wire.Tick):
            self._acked = message.seq
            self._router.feed(events.TickArrived(self.board, self.epoch, message))
        elif isinstance(message, wire.WorkerHello):
            self._router.feed(events.HelloArrived(self.board, self.epoch, message))
            if not self._closed and (message.board, message.epoch) == (self.board, self.epoch):
                self._watch(message.pid)

    def _watch(self, pid: int) -> None:
        worker = self._router.world.find_worker(self.board, self.epoch)
        if pid != self._watched and worker is not None and worker.pid == pid:
            self._watched = pid
            worker.watchers.append(lambda: self._router.later(LAST_WORDS_NS, self._ended))

    def _ended(self) -> None:
        if not self._closed:
            self._router.feed(events.WorkerEnded(self.board, self.epoch, "died"))


class RouterHost(Process):
    """One life of a router."""

    def __init__(self, world: World, name: str, incarnation: int, pid: int) -> None:
        super().__init__(world, name, pid)
        self.incarnation = incarnation
        self.rng = world.rng(f"router {incarnation}")
        self.listening = False
        self.calls: dict[int, Any] = {}
        """By id of the owner: clients whose answer is open."""
        self.later(self.rng.randrange(*BOOT_NS), self._boot)

    def _boot(self) -> None:
        settings = self.world.settings
        tenants = self.tenants = Tenants(settings.tenants, self.timeline.now)
        tenants.take_keys(KEYS)
        aliases = Aliases({self.world.alias: settings.scheduler.admission})
        self.dispatcher = Dispatcher(self.incarnation, settings.router, Roster(), aliases, tenants)
        self._links: dict[tuple[str, int], WorkerLink] = {}
        self._supervised = False
        self._awake_ns = self.timeline.now
        self._requests = 0
        self._load_view()
        self._supervisor = Link(
            self.world, self, self.world.find_supervisor, f"control {self.name}", _accept, self._from_supervisor,
            b"router-%08x" % self.incarnation,
        )  # fmt: skip
        self.listening = True
        self.later(0, self._tick)
        self.later(0, self._report_often)
        self.later(0, self._knock)

    def _load_view(self) -> None:
        if self.world.disk.file is not None:
            self.feed(events.ViewPublished(msgspec.json.decode(self.world.disk.file, type=wire.FleetView)))

    # ---------------------------------------------------------------- the dispatcher
    def feed(self, event: events.Event) -> None:
        """Tell the dispatcher, and do what it wants."""
        now = self.timeline.now
        if (slept := now - self._awake_ns) > STALL_NS:
            self.world.saw("router stood still")
            self._awake_ns = now
            self.feed(events.Overslept(slept))
            self._load_view()
            self._report()
            for link in list(self._links.values()):
                link.renew()
        if isinstance(event, events.TimePassed):
            self._awake_ns = now
        for action in self.dispatcher.handle(event, self.timeline.now):
            if self._crash_after is not None:
                self.acted()
            if isinstance(action, actions.Deliver):
                action.owner.deliver(action.index, action.piece)
            elif isinstance(action, Event):
                self.world.see(action, self)
            else:
                self._perform(action)

    def _perform(self, action: Any) -> None:
        match action:
            case actions.Opened(owner=owner, ticket=ticket):
                owner.open(self, int(ticket.name, 16))
            case actions.Send(board=board, epoch=epoch, message=message):
                self._send(board, epoch, message)
            case actions.OpenLink(view=view):
                self._links[view.board, view.epoch] = WorkerLink(self, view)
            case actions.CloseLink(board=board, epoch=epoch):
                if link := self._links.pop((board, epoch), None):
                    link.close()
            case actions.Restart(owner=owner, index=index):
                owner.restart(index)
            case actions.Fail(owner=owner, error=error):
                owner.fail(error)
            case actions.Ended(outcome=outcome):
                self._requests += 1
                self.world.saw(f"call {outcome}")
            case actions.Resent(reason=reason):
                self.world.saw(f"resent: {reason}")
            case actions.Parked() | actions.Unparked():
                self.later(0, self._report)
            case actions.Ignored(reason=reason):
                self.world.saw(f"router ignored: {reason}")
            case actions.LostMessages(board=board, expected=expected, got=got):
                self.world.saw("router saw a gap")
                self.world.messages_lost(self, board, expected, got)

    def _send(self, board: str, epoch: int, message: wire.Submit | wire.Cancel) -> None:
        link = self._links.get((board, epoch))
        if link is not None:
            link.send(message)
        elif isinstance(message, wire.Submit):
            self.later(0, self.feed, events.Unsent(board, epoch, message.request_id, message.attempt))

    def ask(self, owner: Any, call: Call, authorization: bytes, timeout_ms: int | None) -> None:
        """A parsed call, from whoever holds the key."""
        identity = self.tenants.identify(authorization, self.timeline.time())
        assert not isinstance(identity, CalculetError), identity
        self.feed(events.CallArrived(owner, call, 0, identity, timeout_ms))

    def gone(self, owner: Any, reason: str, code: str | None = None) -> None:
        """A client left, or was dropped."""
        self.feed(events.ClientGone(owner, reason, code))

    # ---------------------------------------------------------------- the supervisor
    def _from_supervisor(self, frames: Frames) -> None:
        message = wire.decode(*frames)
        assert isinstance(message, wire.FleetView), message
        self._supervised = True
        self.world.tracer(self.name, "view", message)
        self.feed(events.ViewPublished(message))
        self._report()

    def _knock(self) -> None:
        if not self._supervised:
            self._report()
            self.later(KNOCK_NS, self._knock)

    def _report_often(self) -> None:
        self._report()
        self.later(REPORT_NS, self._report_often)

    def _report(self) -> None:
        roster = self.dispatcher.roster
        report = wire.RouterReport(
            self.incarnation, self.pid, wire.PROTOCOL, max(0, roster.version), f"http://{self.name}", self.dispatcher.inflight,
            self._requests, 0, 0, 0, roster.links(), waiting=self.dispatcher.parking.waits(),
        )  # fmt: skip
        self._supervisor.send(wire.encode(report))

    def _tick(self) -> None:
        self.feed(events.TimePassed())
        self.later(self.world.settings.router_tick_ns, self._tick)


def _accept(server: Any, link: Link) -> Any:
    return server.accept(link)
