"""CURVE: how routers and workers speak over TCP. There, nothing goes without it.

Two key pairs in `STATE_DIR/curve`, one for all workers and one for all routers, made by `calculet keys curve`: a worker needs its
own secret and the routers' public key, a router the reverse, so neither can pass for the other. ZeroMQ encrypts, proves the worker
to the router, and asks a gatekeeper (ZAP, RFC 27) whether the router's key may come in; without one it would let in whoever knows
the worker's public key.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from calculet_core.errors import ConfigError
from calculet_core.shell.files import read_bounded, write_atomic

Role = Literal["worker", "router"]
ROLES: tuple[Role, ...] = ("worker", "router")
KEY_CHARACTERS = 40
"""Of Z85: 32 bytes."""
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"calculet"
HINT = "`calculet keys curve` makes them"
log = logging.getLogger("calculet.curve")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    peer: bytes
    """The other side's public key."""


def make_curve_keys(folder: Path) -> list[Path]:
    """Both pairs, replacing what is there; secrets get mode 0600 and the owner of the folder above. The files that were written.

    Raises:
        OSError: they cannot be written.
    """
    above = folder.parent.stat()
    owner = (above.st_uid, above.st_gid) if os.geteuid() == 0 else None
    folder.mkdir(mode=0o750, exist_ok=True)
    if owner is not None:
        os.chown(folder, *owner)
    written = []
    for role in ROLES:
        public, secret = zmq.curve_keypair()
        for path, data, mode in ((_secret(folder, role), secret, 0o600), (_public(folder, role), public, 0o640)):
            write_atomic(path, data + b"\n", mode, owner)
            written.append(path)
    return written


def read_curve_keys(folder: Path, role: Role) -> CurveKeys:
    """The keys of one side.

    Raises:
        ConfigError: one is missing, others may read the secret, or it is no such key.
    """
    other: Role = "router" if role == "worker" else "worker"
    path = _secret(folder, role)
    secret = _read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(f"{path}: mode {mode:04o} lets others at it; it must be 0600 (chmod 600)")
    public = _read(_public(folder, role))
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{path}: does not belong to {_public(folder, role).name} beside it; {HINT} anew")
    return CurveKeys(public, secret, _read(_public(folder, other)))


def _secret(folder: Path, role: Role) -> Path:
    return folder / f"{role}.secret"


def _public(folder: Path, role: Role) -> Path:
    return folder / f"{role}.public"


def _read(path: Path) -> bytes:
    try:
        key = read_bounded(path, 1024).strip()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: tcp endpoints need CURVE keys; {HINT}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        if len(key) != KEY_CHARACTERS or len(z85.decode(key)) != 32:
            raise ValueError
    except (ValueError, KeyError):
        raise ConfigError(f"{path}: not a CURVE key (40 characters of Z85)") from None
    return key


class Gatekeeper:
    """Answers ZeroMQ's question who may come in, on the running loop: `allowed` and nobody else. Bind it before any server."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: bytes, on_denied: Callable[[], None]) -> None:
        self._allowed, self._on_denied = z85.decode(allowed), on_denied
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Nobody comes in any more."""
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)

    def _drain(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._answer(frames)

    def _answer(self, frames: list[bytes]) -> None:
        """[peer, empty, version, request, domain, address, identity, mechanism, credentials...]"""
        if len(frames) < 8:
            return
        peer, empty, version, request, domain, address, _, mechanism, *credentials = frames
        welcome = (domain, mechanism) == (DOMAIN, b"CURVE") and credentials == [self._allowed]
        if not welcome:
            log.warning("a stranger from %s was denied", address.decode(errors="replace"))
            self._on_denied()
        status, text, user = (b"200", b"OK", b"router") if welcome else (b"400", b"not a router of this fleet", b"")
        self._socket.send_multipart([peer, empty, version, request, status, text, user, b""])
        self._loop.call_soon(self._drain)  # the descriptor is edge-triggered and shared with sending


def serve_curve(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a socket the encrypted side that others connect to."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


def call_curve(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a socket the encrypted side that connects."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, keys.peer
