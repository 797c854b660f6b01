"""ZeroMQ between processes of one host, as far as what a peer can see of it.

One DEALER-ROUTER connection is two pipes. While it lasts each delivers every message once and in order, after a latency. What is
under way when it breaks is lost: with a process that dies, a prefix still arrives, because it is in the kernel's buffers. A pipe
whose reader does not read (SIGSTOP, partition) fills up to its high-water mark, then sends are refused. Two pipes know nothing of
each other, so messages of different links overtake one another freely. Within a pipe nothing is doubled or reordered: a connected
stream cannot do it, and neither can this.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from math import log as _log
from typing import TYPE_CHECKING

from calculet_core.clock import MS, US

if TYPE_CHECKING:
    from simulation.processes import Process
    from simulation.world import World

Frames = list[bytes]
LATENCY_NS = 120 * US
JITTER_NS = 80 * US
"""Mean of the exponential part."""
RECONNECT_NS = (20 * MS, 500 * MS)
TRICKED = 0.3
HELD_NS = 30 * MS


class Tricks(Enum):
    """What a pipe does to every third message, about."""

    NONE = "none"
    DOUBLE = "double"
    """It arrives twice."""
    REORDER = "reorder"
    """The next one overtakes it; without a next one it is `HELD_NS` late."""
    TRUNCATE = "truncate"
    """Its last frame arrives in part."""


class Pipe:
    """One direction."""

    __slots__ = (
        "_due", "_held", "_lane", "_pumping", "_queue", "_receive", "_rng", "_timeline", "dropped", "high_water", "reader", "slow_ns", "stalled",
        "tricks", "up",
    )  # fmt: skip

    def __init__(
        self, world: World, rng: random.Random, reader: Process, receive: Callable[[Frames], None], high_water: int, name: str = ""
    ) -> None:
        self._timeline, self._rng, self.reader, self._receive, self.high_water = world.timeline, rng, reader, receive, high_water
        self._queue: deque[tuple[int, Frames]] = deque()
        self._lane = world.timeline.lane(name)
        self._due = 0
        self._pumping = False
        self.up, self.stalled, self.slow_ns, self.dropped = True, False, 0, 0
        self.tricks = Tricks.NONE
        self._held: Frames | None = None
        reader.inbound.append(self)

    def send(self, frames: Frames) -> bool:
        """False: nobody is there, or the queue is full."""
        if not self.up or len(self._queue) >= self.high_water:
            self.dropped += 1
            return False
        if self.tricks is not Tricks.NONE and self._play(frames):
            return True
        self._enqueue(frames)
        if self._held is not None:
            self._release(self._held)
        return True

    def _play(self, frames: Frames) -> bool:
        """Play a trick, maybe; whether the message is to wait."""
        if self._rng.random() > TRICKED:
            return False
        if self.tricks is Tricks.DOUBLE:
            self._enqueue(frames)
        elif self.tricks is Tricks.TRUNCATE:
            self._enqueue([*frames[:-1], frames[-1][: len(frames[-1]) // 2]])
            return True
        elif self._held is None:
            self._held = frames
            self._timeline.after(HELD_NS, self._release, frames)
            return True
        return False

    def _release(self, frames: Frames) -> None:
        if self._held is frames:
            self._held = None
            if self.up:
                self._enqueue(frames)

    def _enqueue(self, frames: Frames) -> None:
        now = self._timeline.now
        due = now + LATENCY_NS + int(JITTER_NS * -_log(1.0 - self._rng.random())) + self.slow_ns
        if due < self._due:
            due = self._due
        self._due = due
        self._queue.append((due, frames))
        if not self._pumping:
            self._pumping = True
            self._timeline.put(self._lane, due - now, self._pump, ())

    def pump(self) -> None:
        """The reader reads again."""
        if self._queue and not self._pumping:
            self._pumping = True
            self._timeline.put(self._lane, self._queue[0][0] - self._timeline.now, self._pump, ())

    def _pump(self) -> None:
        self._pumping = False
        queue, now, reader = self._queue, self._timeline.now, self.reader
        while queue and queue[0][0] <= now and not self.stalled and not reader.stopped:
            if not reader.alive:
                queue.clear()
                return
            reader.call(self._receive, queue.popleft()[1])
        if queue:
            if not self.stalled and not reader.stopped and not self._pumping:
                self._pumping = True
                self._timeline.put(self._lane, queue[0][0] - now, self._pump, ())
        elif not self.up:
            _forget(self)

    def heal(self) -> None:
        """The end of a partition."""
        self.stalled = False
        self.pump()

    def cut(self, kept_share: float = 0.0) -> int:
        """The connection breaks: a share of what is under way still arrives, the rest is lost. How much was."""
        self.up = False
        keep = int(len(self._queue) * kept_share)
        lost = len(self._queue) - keep
        while len(self._queue) > keep:
            self._queue.pop()
        return lost


class Listener:
    """A bound ROUTER, as `calculet_core.shell.link.Link` shows it."""

    def __init__(self, process: Process, path: str, on_frames: Callable[[Frames], None]) -> None:
        self.process, self.endpoint, self._path, self._on_frames = process, f"ipc://{path}", path, on_frames
        self.dropped = 0
        self._links: dict[bytes, Link] = {}
        process.listeners[path] = process.world.listeners[path] = self

    def accept(self, link: Link) -> Callable[[Frames], None]:
        """Somebody has connected; his messages go to what this returns. A newer connection takes over an identity."""
        identity = link.identity
        self._links[identity] = link

        def receive(frames: Frames) -> None:
            if self._links.get(identity) is link:
                self._on_frames([identity, *frames])

        return receive

    def send(self, frames: Frames) -> bool:
        """The first frame says to whom."""
        link = self._links.get(frames[0])
        if link is not None and link.identity == frames[0] and link.server is self.process and link.answer(frames[1:]):
            return True
        self.dropped += 1
        return False

    def close(self) -> None:
        """Nobody can connect any more, and who had is cut off."""
        if self.process.listeners.pop(self._path, None) is self:
            self.process.world.listeners.pop(self._path, None)
            for link in list(self._links.values()):
                if link.server is self.process and link.up:
                    link.cut(1.0)


class Link:
    """A DEALER that connects to a ROUTER, and connects again whenever the connection broke."""

    def __init__(
        self,
        client: Process,
        path: str,
        name: str,
        receive: Callable[[Frames], None],
        identity: bytes | None = None,
        high_water: int = 100_000,
    ) -> None:
        """`path` is where to connect, `name` how faults call the link."""
        world = client.world
        self._world, self._client, self._path, self._receive = world, client, path, receive
        self.endpoint = f"ipc://{path}"
        self.name, self._fixed, self._high_water = name, identity, high_water
        self.dropped = self.received = 0
        self._rng = world.rng(f"link {name} {client.pid}")
        self.identity = b""
        self.server: Process | None = None
        self.to_server: Pipe | None = None
        self.to_client: Pipe | None = None
        self.closed = False
        self._connections = 0
        world.links.append(self)
        client.later(self._rng.randrange(50 * US, 2 * MS), self._connect)

    @property
    def up(self) -> bool:
        """Messages can go."""
        return self.to_server is not None and self.to_server.up

    def send(self, frames: Frames) -> bool:
        """From the DEALER."""
        if self.to_server is not None and self.to_server.send(frames):
            return True
        self.dropped += 1
        return False

    def answer(self, frames: Frames) -> bool:
        """From the ROUTER."""
        return self.to_client is not None and self.to_client.send(frames)

    def _arrived(self, frames: Frames) -> None:
        self.received += 1
        self._receive(frames)

    def _connect(self) -> None:
        if self.closed or self.up:
            return
        listener = self._world.listeners.get(self._path)
        if listener is None:
            self._client.later(self._rng.randrange(*RECONNECT_NS), self._connect)
            return
        server = listener.process
        self._connections += 1
        self.identity = self._fixed or b"%s#%d.%d" % (self.name.encode(), self._client.pid, self._connections)
        self.server = server
        name = f"{self.name} {self._client.pid} {self._connections}"
        self.to_client = Pipe(self._world, self._rng, self._client, self._arrived, self._high_water, f"{name} down")
        self.to_server = Pipe(self._world, self._rng, server, listener.accept(self), self._high_water, f"{name} up")

    def cut(self, kept_share: float = 0.0) -> int:
        """Break the connection; how many messages were lost. The DEALER connects again while it lives."""
        lost = 0
        for pipe in (self.to_server, self.to_client):
            if pipe is not None and pipe.up:
                lost += pipe.cut(kept_share)
                _forget(pipe)
        if self._client.alive and not self.closed:
            self._client.later(self._rng.randrange(*RECONNECT_NS), self._connect)
        return lost

    def partition(self, stalled: bool) -> None:
        """Nothing gets through, nothing breaks; or again."""
        for pipe in (self.to_server, self.to_client):
            if pipe is not None:
                pipe.stalled = stalled
                if not stalled:
                    pipe.heal()

    def slow(self, extra_ns: int) -> None:
        """Every message takes so much longer."""
        for pipe in (self.to_server, self.to_client):
            if pipe is not None:
                pipe.slow_ns = extra_ns

    def play(self, tricks: Tricks) -> None:
        """Messages are doubled, or overtake each other."""
        for pipe in (self.to_server, self.to_client):
            if pipe is not None:
                pipe.tricks = tricks

    def close(self, kept_share: float = 0.0) -> None:
        """LINGER 0."""
        if not self.closed:
            self.closed = True
            self.cut(kept_share)
            if self in self._world.links:
                self._world.links.remove(self)

    @property
    def client(self) -> Process:
        """The DEALER's side."""
        return self._client


def _forget(pipe: Pipe) -> None:
    if pipe in pipe.reader.inbound and not pipe._queue:
        pipe.reader.inbound.remove(pipe)
