"""The routers on the data socket: who they are, what one loop pass has for each, and when one counts as lost.

A router's requests end with its lease, which each of its messages renews, and with its credit: bytes that were sent and not
acknowledged are bounded, so a router that does not read cannot fill this process. A lost router that speaks again is known again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from calculet_core import wire
from calculet_core.clock import S
from calculet_worker.actions import ToRouter

CREDIT_BYTES = 8 << 20
"""Sent and not acknowledged; leases acknowledge once a second."""
FORGET_AFTER_NS = 60 * S


@dataclass(slots=True)
class Peer:
    """One router's incarnation."""

    router: int
    identity: bytes
    seen_ns: int
    lost: bool = False
    seq: int = 0
    unacked_bytes: int = 0
    unacked: deque[tuple[int, int]] = field(default_factory=deque)
    """(seq, bytes) of each tick that was sent."""
    outbox: ToRouter | None = None

    def acknowledge(self, seq: int) -> None:
        """Everything up to `seq` was read."""
        while self.unacked and self.unacked[0][0] <= seq:
            self.unacked_bytes -= self.unacked.popleft()[1]


class Routers:
    """All known routers by identity frame and by incarnation; `lease_ns` is how long one may be silent."""

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._by_identity: dict[bytes, Peer] = {}
        self._by_router: dict[int, Peer] = {}

    def introduce(self, router: int, identity: bytes, now_ns: int) -> Peer:
        """A hello or a lease names a router; the identity may be new after a reconnect."""
        peer = self._by_router.get(router)
        if peer is None:
            peer = self._by_router[router] = Peer(router, identity, now_ns)
        elif peer.identity != identity:
            self._by_identity.pop(peer.identity, None)
            peer.identity = identity
        self._by_identity[identity] = peer
        return peer

    def heard(self, identity: bytes, now_ns: int) -> Peer | None:
        """The router behind a message, its lease renewed; None for one that never introduced itself."""
        peer = self._by_identity.get(identity)
        if peer is not None:
            peer.seen_ns, peer.lost = now_ns, False
        return peer

    def add(self, message: ToRouter) -> None:
        """Join a message with what the loop pass already has for its router; nothing is kept for a lost one."""
        peer = self._by_router.get(message.router)
        if peer is None or peer.lost:
            return
        if peer.outbox is None:
            peer.outbox = message
        else:
            peer.outbox.pieces += message.pieces
            peer.outbox.accepted += message.accepted
            peer.outbox.refused += message.refused

    def overslept(self, by_ns: int) -> None:
        """This process stood still for so long, and has not read what came meanwhile: nobody was silent in that time."""
        for peer in self._by_router.values():
            peer.seen_ns += by_ns

    def lapsed(self, now_ns: int) -> list[tuple[int, str]]:
        """Routers that are lost from now on, each with the reason."""
        lost = []
        for peer in list(self._by_router.values()):
            silent_ns = now_ns - peer.seen_ns
            if peer.lost:
                if silent_ns > FORGET_AFTER_NS:
                    del self._by_router[peer.router]
                    self._by_identity.pop(peer.identity, None)
                continue
            if silent_ns > self._lease_ns:
                lost.append((peer.router, f"lease: silent for {silent_ns / S:.1f} s"))
            elif peer.unacked_bytes > CREDIT_BYTES:
                lost.append((peer.router, f"credit: {peer.unacked_bytes} bytes sent and not acknowledged"))
            else:
                continue
            peer.lost, peer.outbox = True, None
            peer.seq += 1  # should it live after all, the gap tells it that its requests here are gone
            peer.unacked.clear()
            peer.unacked_bytes = 0
        return lost

    def live(self) -> list[Peer]:
        """Routers whose lease holds."""
        return [peer for peer in self._by_router.values() if not peer.lost]

    def tick(self, peer: Peer, epoch: int, load: wire.Load) -> list[bytes]:
        """The frames of what the peer's loop pass has, numbered and counted against its credit."""
        message, peer.outbox = peer.outbox or ToRouter(peer.router), None
        peer.seq += 1
        frames = wire.encode(wire.Tick(epoch, peer.seq, message.pieces, message.accepted, message.refused, load))
        size = sum(map(len, frames))
        peer.unacked.append((peer.seq, size))
        peer.unacked_bytes += size
        return [peer.identity, *frames]
