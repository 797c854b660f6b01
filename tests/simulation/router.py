"""A router process: the product's `RouterApp` with its HTTP server. Clients write and read bytes; links and time are virtual."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from calculet_core.clock import MS, S
from calculet_core.keys import KeyFile, KeyRecord, hash_key
from calculet_router import actions
from calculet_router.dispatch import Dispatcher
from calculet_router.shell.app import RouterApp
from calculet_router.tenants import Tenants
from simulation.http import Accepted
from simulation.processes import Process
from simulation.scenario import TENANTS

if TYPE_CHECKING:
    from simulation.clients import Client
    from simulation.questions import Question
    from simulation.world import World

BOOT_NS = (200 * MS, 600 * MS)
KEYS = KeyFile(
    1,
    tuple(
        KeyRecord(f"{number:08x}", tenant.name, hash_key(tenant.name.encode()).hex(), 0, 0) for number, tenant in enumerate(TENANTS)
    ),
)
"""Every tenant's key is its name."""


class InOrder(dict[Any, None]):
    """A set that is gone through in the order in which things came: memory addresses decide nothing here."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class VirtualRouter(RouterApp):
    """The shell, watched: it can crash between two actions, and what a gap means only the world can judge."""

    def __init__(self, host: RouterHost) -> None:
        world = host.world
        super().__init__(world.fleet, dict.fromkeys(world.placed, world.settings.scheduler.admission), host.name)
        self._server.connections = InOrder()  # type: ignore[assignment]
        watched = {actions.LostMessages: lambda action: world.messages_lost(host, action.board, action.expected, action.got)}
        self._perform = {kind: self._guarded(host, act, watched.get(kind)) for kind, act in self._perform.items()}

    @staticmethod
    def _guarded(host: RouterHost, act: Callable[[Any], None], watch: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def perform(action: Any) -> None:
            if host.crashes:
                host.acted()
            if watch is not None:
                watch(action)
            act(action)

        return perform

    def _from_supervisor(self, frames: Any) -> None:
        host = self._loop.process  # type: ignore[attr-defined]
        host.world.tell(host.name, "view", frames)
        super()._from_supervisor(frames)


class RouterHost(Process):
    """One life of a router."""

    kind = "router"

    def __init__(self, world: World, name: str, incarnation: int, pid: int) -> None:
        super().__init__(world, name, pid)
        self.incarnation = incarnation
        self.connections: dict[Client | Question, Accepted] = {}
        """Clients whose answer is open."""
        self._factory: Callable[[], Any] | None = None
        self.stops_ns: list[int] = []
        self.later(self.rng.randrange(*BOOT_NS), self._boot)

    def _boot(self) -> None:
        self.app = VirtualRouter(self)
        self.loop.run(self.app.run(), self._ended)

    def _ended(self, code: int | None, error: BaseException | None) -> None:
        if error is not None:
            self.world.bug(self, error)
        self.world.keeper.ended(self, code=1 if code is None else code)

    def terminate(self) -> None:
        """SIGTERM: from now on it may take its drain time, and cuts nobody off before."""
        self.stops_ns.append(self.timeline.now)
        super().terminate()

    def in_no_hurry(self) -> bool:
        """It was told to stop once, and has time; so nobody's answer may be cut off."""
        config = self.world.settings.router
        return self.world.keeper.alive and len(self.stops_ns) == 1 and self.timeline.now < self.stops_ns[0] + config.drain_timeout_s * S

    # ---------------------------------------------------------------- clients
    def listens(self, factory: Callable[[], Any]) -> Any:
        """From now on they can connect."""
        self._factory = factory
        return self

    def close(self) -> None:
        """They cannot any more."""
        self._factory = None

    @property
    def listening(self) -> bool:
        """Whether they can."""
        return self._factory is not None and self.alive

    def accept(self, client: Client | Question) -> Accepted:
        """A connection of a client's."""
        assert self._factory is not None
        accepted = self.connections[client] = Accepted(self, client, self._factory())
        self.call(accepted.made)
        return accepted

    # ---------------------------------------------------------------- for who judges
    @property
    def dispatcher(self) -> Dispatcher:
        """Its decisions."""
        return self.app.dispatcher

    @property
    def tenants(self) -> Tenants:
        """Its limits."""
        return self.app.dispatcher.tenants
