"""One ZeroMQ socket on the running event loop, read through its file descriptor.

`zmq.asyncio` costs 20 us a message; this costs 1-2. ZeroMQ's descriptor is edge-triggered and shared with sending, so it is
drained when it becomes readable and again after every send. A drain stops after `DRAIN_LIMIT` messages and goes on in the next
loop pass, so that nothing else starves. A callback's exception is the callback's bug: it is logged and the link lives on.

`IMMEDIATE` keeps messages from queueing for a peer that is not there; `LINGER` 0 drops them at close. So a restarted peer never
gets what was meant for its dead predecessor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from calculet_core.errors import ConfigError
from calculet_core.shell.curve import CurveKeys, call_curve, serve_curve
from calculet_core.shell.doors import Door

DRAIN_LIMIT = 256
MAX_MESSAGE_BYTES = 64 << 20
"""A larger message is dropped and counted; twice as much, and ZeroMQ ends the connection while it arrives."""
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: combining ZeroMQ's flag enumerations costs microseconds a message."""
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_MONITORED = int(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
log = logging.getLogger("calculet.link")

Frames = list[bytes]


class Link:
    """A bound ROUTER or a connected DEALER; `on_frames` gets the frames of each message."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[Frames], object],
        endpoint: str,
        strangers: _Strangers | None = None,
        on_oversize: Callable[[], None] | None = None,
        bound: Path | None = None,
    ) -> None:
        self.endpoint, self._strangers, self._on_oversize = endpoint, strangers, on_oversize
        self._loop, self._socket, self._on_frames = asyncio.get_running_loop(), socket, on_frames
        self._recheck = self._closed = False
        self.received = 0
        """Messages that were read."""
        self.dropped = 0
        """Sends that ZeroMQ refused: no peer, or its high-water mark."""
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self._door = Door(bound, self._bind_again) if bound is not None else None
        self._later()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Hand a message to ZeroMQ; False when it cannot go now (nobody there, or the queue is full), which is counted."""
        if self._closed:
            return False
        send = self._socket.send
        try:
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], _NOW)
        except zmq.ZMQError:  # EAGAIN: full or no peer; EHOSTUNREACH: a ROUTER does not know the peer (any more)
            self.dropped += 1
            return False
        finally:
            self._later()
        return True

    def close(self) -> None:
        """Stop reading and close the socket; twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._door is not None:
            self._door.close()
        if self._strangers is not None:
            self._strangers.close()
        self._socket.close(linger=0)

    async def _bind_again(self) -> None:
        """Its file is gone. The old listener stays: ZeroMQ, told to end it, would delete the new file at some later time."""
        _bind_ipc(self._socket, self.endpoint)

    def _later(self) -> None:
        if not self._recheck and not self._closed:
            self._recheck = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._recheck = False
        receive, option = self._socket.recv_multipart, self._socket.getsockopt
        for _ in range(DRAIN_LIMIT):
            if self._closed:
                return
            try:
                if not option(_EVENTS) & _POLLIN:  # type: ignore[operator]  # asking costs 1 us, an exception 3 or 4
                    return
                frames = receive(_NOW)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                log.error("link %s: %s", self.endpoint, error)
                return
            self.received += 1
            if len(frames[-1]) > MAX_MESSAGE_BYTES:
                self._oversize(len(frames[-1]))
                continue
            try:
                self._on_frames(frames)
            except Exception:
                log.exception("link %s: a message could not be handled", self.endpoint)
        self._later()

    def _oversize(self, size: int) -> None:
        log.warning("link %s: a message of %d bytes was dropped (at most %d)", self.endpoint, size, MAX_MESSAGE_BYTES)
        if self._on_oversize is not None:
            self._on_oversize()


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    path: Path,
    on_frames: Callable[[Frames], object],
    on_stranger: Callable[[], None] | None = None,
    on_oversize: Callable[[], None] | None = None,
) -> Link:
    """Bind a ROUTER at an ipc path with mode 0600, replacing a stale socket file.

    Frames are [identity, kind, body]. A send to a peer that is gone returns False. `on_stranger` hears of every connection that
    ended without having been a ZeroMQ peer: a port scanner's, say. ZeroMQ itself lets none of its bytes through, except where they
    happen to look like messages of its first version; those arrive as frames, and are no messages of ours.

    Raises:
        OSError: the path cannot be bound.
    """
    path.unlink(missing_ok=True)
    socket = context.socket(zmq.ROUTER)
    _tune(socket)
    strangers = _Strangers(socket, on_stranger) if on_stranger is not None else None
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _bind_ipc(socket, f"ipc://{path}")
    return Link(socket, on_frames, f"ipc://{path}", strangers, on_oversize, path)


def _bind_ipc(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind, mode 0600.

    Raises:
        OSError: it cannot be bound.
    """
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror, endpoint) from None
    Path(endpoint.removeprefix("ipc://")).chmod(0o600)


def bind_router_tcp(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    keys: CurveKeys,
    on_frames: Callable[[Frames], object],
    on_stranger: Callable[[], None] | None = None,
    on_oversize: Callable[[], None] | None = None,
) -> Link:
    """Bind a ROUTER at HOST:PORT, encrypted; the link's endpoint has the real port. A `Gatekeeper` must be there already.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    _tune(socket)
    strangers = _Strangers(socket, on_stranger) if on_stranger is not None else None
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.IPV6, int(address.startswith("[")))
    serve_curve(socket, keys)
    try:
        socket.bind(f"tcp://{address}")
    except zmq.ZMQError:
        if strangers is not None:
            strangers.close()
        socket.close(linger=0)
        raise
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
    return Link(socket, on_frames, endpoint, strangers, on_oversize)


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    on_frames: Callable[[Frames], object],
    identity: bytes | None = None,
    curve: Callable[[], CurveKeys] | None = None,
    on_oversize: Callable[[], None] | None = None,
) -> Link:
    """Connect a DEALER to an ipc path or endpoint; frames are [kind, body]. ZeroMQ reconnects by itself.

    Raises:
        ConfigError: the endpoint is tcp and `curve` has no keys for it: nothing goes over a network unencrypted.
    """
    keys = None
    if endpoint.startswith("tcp://"):
        if curve is None:
            raise ConfigError(f"{endpoint}: tcp only with CURVE keys")
        keys = curve()
    socket = context.socket(zmq.DEALER)
    _tune(socket)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    address = endpoint if "://" in endpoint else f"ipc://{endpoint}"
    if keys is not None:
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        call_curve(socket, keys)
    socket.connect(address)
    return Link(socket, on_frames, address, on_oversize=on_oversize)


class _Strangers:
    """Counts connections of a bound socket that end before a handshake, through ZeroMQ's monitor of the socket."""

    def __init__(self, socket: zmq.Socket[bytes], on_stranger: Callable[[], None]) -> None:
        self._socket, self._on_stranger = socket, on_stranger
        self._loop = asyncio.get_running_loop()
        self._unknown: set[int] = set()
        """Descriptors of connections that have not shaken hands."""
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_MONITORED)
        self._fd: int = self._monitor.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)  # its descriptor tells nothing before it was read once

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _drain(self) -> None:
        while True:
            try:
                event = recv_monitor_message(self._monitor, _NOW)
            except zmq.ZMQError:
                return
            kind, descriptor = event["event"], int(event["value"])
            if kind == zmq.EVENT_ACCEPTED:
                self._unknown.add(descriptor)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._unknown.discard(descriptor)
            elif kind == zmq.EVENT_DISCONNECTED and descriptor in self._unknown:
                self._unknown.discard(descriptor)
                self._on_stranger()


def _tune(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.RCVHWM, 100_000)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
