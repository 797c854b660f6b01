"""Clients that ask about tokens (`/tokenize`, `/detokenize`): each question is answered, rightly, or refused, in time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import httptools
import msgspec

from calculet_core.clock import MS, S
from simulation.http import Trouble, post_bytes

if TYPE_CHECKING:
    from simulation.clients import Clients
    from simulation.http import Accepted
    from simulation.router import RouterHost

LETTERS = "aeiontrs "
TRIES_SLACK_NS = 10 * S
"""A router's sweeps, and a router that is stopped."""


class Told(msgspec.Struct):
    """Any answer."""

    tokens: list[int] | None = None
    prompt: str | None = None
    error: Trouble | None = None


_decode = msgspec.json.Decoder(Told).decode


class Question:
    """One question. To its connection it looks like any client."""

    reads_per_s = None
    stream = False

    def __init__(self, clients: Clients, rng: random.Random) -> None:
        self._clients = clients
        self.text = "".join(rng.choices(LETTERS, k=rng.choice((3, 40, 900))))
        self.back = rng.random() < 0.5
        self.outcome: str | None = None
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)
        self._router: RouterHost | None = None

    def ask(self) -> None:
        """Once."""
        world, router = self._clients.world, self._clients.a_router()
        if router is None:
            self.outcome = "connection refused"
            return
        self._router, self._asked_ns = router, world.timeline.now
        ids = list(self.text.encode())
        path, body = ("/detokenize", {"tokens": ids}) if self.back else ("/tokenize", {"prompt": self.text})
        self._connection: Accepted = router.accept(self)
        if self.outcome is None:
            router.call(self._connection.receive, post_bytes(path, "default", {"model": world.alias, **body}))

    # ---------------------------------------------------------------- of its connection
    def read(self, data: bytes) -> None:
        """Bytes have come."""
        if self.outcome is None:
            self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Of httptools."""
        self._body += body

    def on_message_complete(self) -> None:
        """Of httptools."""
        world, told = self._clients.world, _decode(self._body)
        self.outcome = "answered" if told.error is None else told.error.code
        world.saw(f"question {self.outcome}")
        if told.error is None and (told.prompt if self.back else told.tokens) != (self.text if self.back else list(self.text.encode())):
            world.broken("questions_are_answered", f"{self.text[:40]!r} is told as {told}")
        late_ns = world.timeline.now - self._asked_ns - world.settings.router.lookup_timeout_ms * MS - TRIES_SLACK_NS
        if late_ns > 0:
            world.broken("questions_are_answered", f"{self.text[:40]!r} was answered {late_ns / S:.1f} s too late: {self.outcome}")
        if self._router is not None:
            self._router.connections.pop(self, None)
            self._router.later(0, self._connection.hang_up)

    def forget(self, connection: Accepted) -> None:
        """It is dropped as a whole."""

    def cut_off(self) -> None:
        """The router has closed the connection."""
        self.outcome = self.outcome or "cut off"
        if self._router is not None:
            self._router.connections.pop(self, None)

    def lost(self) -> None:
        """The router died."""
        self.outcome = self.outcome or "connection lost"
