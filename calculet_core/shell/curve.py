"""CURVE: how routers and workers speak over TCP. There, nothing goes without it.

Two key pairs in `STATE_DIR/curve`, one for all workers and one for all routers, made by `calculet keys curve`: a worker needs its
own secret and the routers' public key, a router the reverse, so neither can pass for the other. ZeroMQ encrypts, proves the worker
to the router, and asks a gatekeeper (ZAP, RFC 27) whether the router's key may come in; without one it would let in whoever knows
the worker's public key.

A router may have a pair of its own, `routers/NAME.{secret,public}`, and then uses that one. The gatekeeper looks for each newcomer
who is allowed now: the routers' common key, where it is there, and every `routers/*.public`. So one router is let in or shut out
by a file, and no other has to be restarted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from calculet_core.errors import ConfigError
from calculet_core.ids import SUCCESSOR
from calculet_core.shell.files import read_bounded, write_atomic

Role = Literal["worker", "router"]
ROLES: tuple[Role, ...] = ("worker", "router")
ROUTERS = "routers"
"""The folder of routers' own pairs."""
ROUTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
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
    """The workers' public key; of a worker nothing: its gatekeeper asks `allowed_routers`."""


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


def make_router_keys(folder: Path, name: str) -> list[Path]:
    """A pair for the router of that name alone, replacing its own, as `make_curve_keys` does; the others' stay.

    Raises:
        ConfigError: the folder has no workers' key, or the name cannot be a file's.
        OSError: they cannot be written.
    """
    if not ROUTER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a router: letters, digits, '-' and '_', at most 64")
    _read(_public(folder, "worker"))
    above = folder.stat()
    owner = (above.st_uid, above.st_gid) if os.geteuid() == 0 else None
    own = folder / ROUTERS
    own.mkdir(mode=0o750, exist_ok=True)
    if owner is not None:
        os.chown(own, *owner)
    public, secret = zmq.curve_keypair()
    paths = [own / f"{name}.secret", own / f"{name}.public"]
    write_atomic(paths[0], secret + b"\n", 0o600, owner)
    write_atomic(paths[1], public + b"\n", 0o640, owner)
    return paths


def allowed_routers(folder: Path) -> frozenset[bytes]:
    """The public keys, in Z85, that a worker lets in now.

    Raises:
        ConfigError: there is none, or one of them is no such key.
    """
    found = [path for path in (_public(folder, "router"), *sorted((folder / ROUTERS).glob("*.public"))) if path.exists()]
    return frozenset(map(_read, found or [_public(folder, "router")]))


def read_curve_keys(folder: Path, role: Role, name: str | None = None) -> CurveKeys:
    """The keys of one side; of the router `name` its own where it has some.

    Raises:
        ConfigError: one is missing, others may read the secret, or it is no such key.
    """
    path, public_path = _secret(folder, role), _public(folder, role)
    if role == "router" and name is not None:
        for known in (name.removesuffix(SUCCESSOR), name):
            if (own := folder / ROUTERS / f"{known}.secret").exists():
                path, public_path = own, own.with_suffix(".public")
    secret = _read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(f"{path}: mode {mode:04o} lets others at it; it must be 0600 (chmod 600)")
    public = _read(public_path)
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{path}: does not belong to {public_path.name} beside it; {HINT} anew")
    if role == "worker":
        allowed_routers(folder)
        return CurveKeys(public, secret, b"")
    return CurveKeys(public, secret, _read(_public(folder, "worker")))


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
    """Answers ZeroMQ's question who may come in, on the running loop: whom `allowed` names when it is asked (Z85), and nobody else.
    Bind it before any server."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], allowed: Callable[[], frozenset[bytes]], on_denied: Callable[[], None]
    ) -> None:
        self._allowed, self._on_denied = allowed, on_denied
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
        welcome = (domain, mechanism) == (DOMAIN, b"CURVE") and len(credentials) == 1 and self._knows(credentials[0])
        if not welcome:
            log.warning("a stranger from %s was denied", address.decode(errors="replace"))
            self._on_denied()
        status, text, user = (b"200", b"OK", b"router") if welcome else (b"400", b"not a router of this fleet", b"")
        self._socket.send_multipart([peer, empty, version, request, status, text, user, b""])
        self._loop.call_soon(self._drain)  # the descriptor is edge-triggered and shared with sending


    def _knows(self, key: bytes) -> bool:
        try:
            return z85.encode(key) in self._allowed()
        except (ConfigError, ValueError) as error:
            log.error("who may come in cannot be told, so nobody may: %s", error)
            return False


def serve_curve(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a socket the encrypted side that others connect to."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


def call_curve(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a socket the encrypted side that connects."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, keys.peer
