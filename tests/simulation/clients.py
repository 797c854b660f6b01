"""Clients: they arrive one by one and in bursts, read fast or slowly, leave, and try again; each checks what it gets.

What the router means to write is heard at the reply (`ObservedReply`), and written down as it would be on the connection: tokens of a
stream when they come, of a whole answer at its end. What the client reads, byte by byte, must say the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
import numpy as np

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.errors import CalculetError, ShuttingDown
from calculet_core.history import Event
from calculet_router.shell.endpoints import Reply
from calculet_worker.device.sim_rule import TokenRule, profile_of
from simulation.http import Accepted, Reading, post_bytes
from simulation.questions import Question

if TYPE_CHECKING:
    from simulation.router import RouterHost
    from simulation.world import World

LETTERS = b"aeiontrs"
MAX_TRIES = 3
READS_PER_S = 300.0
"""Bytes that a slow reader takes: a token and a half, as an event."""
HANG_UP_NS = 100_000
"""From an answer's end to the end of its connection."""
TENANT_SHARES = ((0.55, "default"), (0.8, "gold"), (0.95, "bulk"), (1.0, "metered"))


class Client:
    """One client's call, with its retries. `meant` are the texts that the router wants to write, by choice."""

    __slots__ = (
        "choices",
        "clients",
        "code",
        "connection",
        "digest",
        "done",
        "expected",
        "max_tokens",
        "meant",
        "must_be_served",
        "number",
        "outcome",
        "pending",
        "prompt",
        "reading",
        "reads_per_s",
        "refused",
        "request",
        "retries",
        "router",
        "stop",
        "stream",
        "tenant",
        "timeout_ms",
        "tries",
    )  # fmt: skip

    def __init__(self, clients: Clients, number: int, rng: random.Random, easy: bool = False) -> None:
        traffic = clients.traffic
        self.clients, self.number = clients, number
        size = rng.randint(*traffic.prompt_tokens)
        if rng.random() < 0.02:
            size = min(size * 3, 300)
        self.prompt = tuple(rng.choices(range(256), k=size))
        self.max_tokens = min(traffic.max_output, 1 + int(rng.expovariate(1 / (traffic.mean_output - 1 or 1))))
        if rng.random() < traffic.invalid:
            self.max_tokens = 600
        self.stream = rng.random() < traffic.streams
        self.choices = 2 if rng.random() < traffic.twice else 1
        share = rng.random()
        self.tenant = next(name for limit, name in TENANT_SHARES if share <= limit)
        self.reads_per_s = READS_PER_S if rng.random() < traffic.slow_readers else None
        self.retries = rng.random() < traffic.retries
        self.timeout_ms = rng.randrange(50, 3_000) if rng.random() < traffic.short_deadlines else None
        self.stop = rng.choice(LETTERS) if rng.random() < traffic.stops else None
        leaves = rng.expovariate(1 / 0.2) if rng.random() < traffic.disconnects else None
        if easy:
            leaves, self.timeout_ms, self.reads_per_s, self.tenant, self.retries = None, None, None, "default", False
            self.max_tokens = min(self.max_tokens, traffic.max_output)
        self.tries, self.request = 0, 0
        self.router: RouterHost | None = None
        self.connection: Any = None
        self.outcome: str | None = None
        self.code: str | None = None
        self._begin()
        if leaves is not None:
            self._later(int(leaves * S), self._leave)

    def _later(self, delay_ns: int, work: Callable[..., None], *args: Any) -> None:
        timeline = self.clients.world.timeline
        timeline.put(timeline.lane(f"client {self.number}"), delay_ns, work, args)

    def _begin(self) -> None:
        self.pending = [""] * self.choices
        self.meant = [""] * self.choices
        self.done = [False] * self.choices
        self.refused: str | None = None
        """Code of the error that the router wants to tell."""
        self.digest: str | None = None
        """Of the artifact that answers; known with the first tokens."""
        self.expected: list[int] | None = None
        self.reading = Reading(self.choices, self._answered)

    # ---------------------------------------------------------------- asking
    def ask(self) -> None:
        """Connect to a router and send the request."""
        world = self.clients.world
        if self.outcome == "left" or (self.clients.quiet and self.tries):
            return
        router = self.clients.a_router()
        self.tries += 1
        if router is None:
            self.outcome, self.code = "failed", "connection refused"
            self._again(0.5)
            return
        self.outcome = self.code = None
        self._begin()
        self.router, self.request = router, 0
        self.must_be_served = world.must_serve()
        body: dict[str, Any] = {
            "model": world.alias, "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0.0, "n": self.choices,
            "stream": self.stream,
        }  # fmt: skip
        if self.stop is not None:
            body["stop_token_ids"] = (self.stop,)
        self.connection = router.accept(self)
        if self.outcome is None:
            router.call(self.connection.receive, post_bytes("/v1/completions", self.tenant, body, self.timeout_ms))

    def _again(self, after_s: float) -> None:
        if self.retries and self.tries < MAX_TRIES and not self.clients.quiet:
            self.clients.world.saw("client tried again")
            self._later(int(after_s * S), self.ask)

    def _leave(self) -> None:
        if self.outcome is not None:
            return
        self.outcome = "left"
        if self.router is not None:
            self._hang_up(self.router, self.connection)

    def _hang_up(self, router: RouterHost, connection: Accepted) -> None:
        router.connections.pop(self, None)
        router.call(connection.hang_up)

    # ---------------------------------------------------------------- what is read
    def read(self, data: bytes) -> None:
        """Bytes have come."""
        if self.outcome is None:
            try:
                self.reading.feed(data)
            except (httptools.HttpParserError, msgspec.DecodeError, AssertionError) as error:
                self._lies(f"{type(error).__name__}: {error} {error.__context__!r} in {data[-200:]!r}")

    def _answered(self) -> None:
        """The answer is complete."""
        said, world = self.reading, self.clients.world
        if said.error is None and said.status == 200:
            self.outcome = "completed"
            if not all(said.finished) or said.said_done != self.stream or said.texts != self.meant:
                self._lies(f"complete, and it says {said.texts} of {self.meant}, finished {said.finished}, done {said.said_done}")
            if said.usage is not None and self.stop is None and said.usage.completion_tokens != sum(map(len, said.texts)):
                self._lies(f"{said.usage.completion_tokens} tokens are charged, {sum(map(len, said.texts))} were got")
        else:
            self.outcome, self.code = "failed", said.error.code if said.error is not None else str(said.status)
            world.saw(f"client got {self.code}")
            if self.must_be_served and said.status >= 500 and self.timeout_ms is None:
                world.checker.unserved(self.request, self.code)
            if self.code == ShuttingDown.code:
                self._hurried()
            if said.said_done or (self.request and self.code != self.refused):
                self._lies(f"it says {self.code}, {self.refused} was meant; done {said.said_done}")
            if not all(meant.startswith(text) for meant, text in zip(self.meant, said.texts, strict=True)) and any(said.texts):
                self._lies(f"before its error it says {said.texts} of {self.meant}")
        router, connection = self.router, self.connection
        if router is not None:
            self._later(HANG_UP_NS, self._hang_up, router, connection)
        if said.status in (429, 503):
            self._again((said.retry_after_s or 1.0) * 1.1)

    def forget(self, connection: Accepted) -> None:
        """Both sides have closed it: a day has many clients, and nobody asks for that any more."""
        if self.connection is connection and self.outcome is not None:
            self.connection = self.reading = None

    def cut_off(self) -> None:
        """The router has closed the connection."""
        if self.router is not None:
            self.router.connections.pop(self, None)
        if self.outcome is None:
            self.outcome, self.code = "left" if self.reads_per_s is not None else "failed", "cut off"
            if self.reads_per_s is None:
                self._hurried()

    def _hurried(self) -> None:
        """The answer was cut short by the router itself."""
        if self.router is not None and self.router.in_no_hurry():
            self.clients.world.broken("drains_politely", f"{self.router.name} has time to drain, and cuts off {self.request:x}")

    def lost(self) -> None:
        """The router died: the connection broke."""
        if self.outcome is None:
            self.outcome, self.code = "failed", "connection lost"
            self._again(0.3)

    def _lies(self, what: str) -> None:
        self.clients.world.broken("bytes_say_the_same", f"request {self.request:x}: {what}")

    # ---------------------------------------------------------------- what the router means to write
    def opened(self, request: int) -> None:
        """It was given its ids."""
        self.request = request
        for index in range(self.choices):
            self.clients.of[request + index] = self

    def deliver(self, index: int, piece: wire.Piece) -> None:
        """Tokens of one choice."""
        if self.done[index] or self.refused is not None:
            self._broken(f"tokens of choice {index} after its end")
        self.meant[index] += piece.text
        text = self.pending[index] + piece.text
        if piece.finish is not None:
            self.done[index] = True
        if text and (self.stream or piece.finish is not None):
            self.pending[index] = ""
            self._write(index, piece.attempt, text)
        else:
            self.pending[index] = text
        if all(self.done):
            self.reference()
            self.prompt = ()

    def restart(self, index: int) -> None:
        """The choice begins again elsewhere."""
        self.pending[index] = self.meant[index] = ""
        self.done[index] = False
        self.clients.world.saw("an answer began again")

    def refuse(self, error: CalculetError) -> None:
        """The terminal is an error."""
        if all(self.done) or self.refused is not None:
            self._broken(f"{error.code} after {self.refused or 'completed'}")
        self.refused = error.code

    def _write(self, index: int, attempt: int, text: str) -> None:
        world = self.clients.world
        request = self.request + index
        generation = world.checker.generation_of(request, attempt)
        digest = world.digests.get(generation or 0)
        if self.digest not in (None, digest):
            world.broken("one_artifact", f"request {self.request:x}: its choices are of {self.digest[:4]} and {(digest or '')[:4]}")
        self.digest = digest
        world.see(
            Event(history.REQUEST_TOKENS, world.timeline.now, request, attempt, generation=generation, data={"ids": list(text.encode("latin-1"))}),
            self.router,
        )  # fmt: skip

    def _broken(self, what: str) -> None:
        self.clients.world.broken("one_terminal", f"request {self.request:x}: {what}")

    # ---------------------------------------------------------------- what is right
    def reference(self) -> list[int] | None:
        """The tokens that the model gives, up to the stop; None while nobody knows which model it is."""
        if self.expected is None and self.digest is not None:
            tokens = self.clients.tokens(self.digest, self.prompt, min(self.max_tokens, self.clients.traffic.max_output))
            if self.stop is not None and self.stop in tokens:
                tokens = tokens[: tokens.index(self.stop)]
            self.expected = tokens
        return self.expected


class ObservedReply(Reply):
    """The product's, heard."""

    __slots__ = ("_client",)

    def __init__(self, exchange: Any, call: Any) -> None:
        self._client: Client = exchange.connection.transport.client
        super().__init__(exchange, call)

    def open(self, ticket: Any) -> None:
        self._client.opened(int(ticket.name, 16))
        super().open(ticket)

    def deliver(self, index: int, piece: wire.Piece) -> None:
        router = self._client.router
        if router is not None and router.crashes:
            router.acted()
        self._client.deliver(index, piece)
        super().deliver(index, piece)

    def restart(self, index: int) -> None:
        self._client.restart(index)
        super().restart(index)

    def fail(self, error: CalculetError) -> None:
        self._client.refuse(error)
        super().fail(error)


class Clients:
    """All of them; `of` finds one by request id, for as long as somebody may ask."""

    def __init__(self, world: World) -> None:
        self.world, self.traffic = world, world.scenario.traffic
        self.quiet = False
        self.of: dict[int, Client] = {}
        self.questions: list[Question] = []
        """Those that may be open."""
        self.arrived = 0
        self._rng = world.rng("arrivals")
        self._seed = world.scenario.seed
        self._keep = world.scenario.requests
        self._rules = {
            digest: TokenRule(package.manifest, profile_of(package.manifest)) for digest, package in world.packages.items()
        }

    def begin(self) -> None:
        """From now on they come."""
        self._next()
        if self.traffic.burst_every_s is not None:
            self._next_burst()

    def _next(self) -> None:
        self.world.timeline.after(int(self._rng.expovariate(self.traffic.per_s) * S), self._arrive)

    def _arrive(self) -> None:
        if not self.quiet:
            self._next()
            self._come()

    def _next_burst(self) -> None:
        assert self.traffic.burst_every_s is not None
        self.world.timeline.after(int(self._rng.expovariate(1 / self.traffic.burst_every_s) * S), self._burst)

    def _burst(self) -> None:
        if self.quiet:
            return
        self._next_burst()
        self.world.saw("burst")
        for _ in range(self.traffic.burst_size):
            self.world.timeline.after(self._rng.randrange(200 * MS), self._come)

    def _come(self) -> None:
        number, self.arrived = self.arrived, self.arrived + 1
        if self._keep is None or number in self._keep:
            self._begin_client(Client(self, number, random.Random(f"{self._seed}/client {number}")))
            rng = random.Random(f"{self._seed}/question {number}")
            if rng.random() < self.traffic.questions:
                self.questions = [question for question in self.questions if question.outcome is None]
                self.questions.append(Question(self, rng))
                self.questions[-1].ask()

    def _begin_client(self, client: Client) -> None:
        client.ask()

    def probe(self, count: int) -> list[Client]:
        """Ordinary clients, when everything is well: all of them must be served."""
        found = []
        for _ in range(count):
            self.arrived += 1
            client = Client(self, -self.arrived, random.Random(f"{self._seed}/probe {self.arrived}"), easy=True)
            client.ask()
            found.append(client)
        return found

    def a_router(self) -> RouterHost | None:
        """One that listens. One that stands still listens, too: the kernel accepts for it, and what is written waits."""
        found = [router for router in self.world.keeper.routers.values() if router.listening]
        return self._rng.choice(found) if found else None

    def router_died(self, router: RouterHost) -> None:
        """Whoever was connected to it hears."""
        world = self.world
        for request in world.checker.open_at(router.incarnation):
            end = {"outcome": "cancelled", "reason": "the router died"}
            world.see(Event(history.REQUEST_DONE, world.timeline.now, request, data=end), None)
        for client in list(router.connections):
            client.lost()

    def tokens(self, digest: str, prompt: tuple[int, ...], count: int) -> list[int]:
        """As `calculet_worker.device.sim_rule.reference_tokens`, with the rule made once."""
        rule = self._rules[digest]
        digest, last, answer = rule.traces(np.array(prompt, np.int32), 0), prompt[-1], []
        for position in range(len(prompt), len(prompt) + count):
            last, _ = rule.next_token(digest, last)
            digest += rule.trace(last, position)
            answer.append(last)
        return answer

    def expected(self, request: int) -> list[int] | None:
        """For the checker."""
        client = self.of.get(request)
        return client.reference() if client is not None else None

    def unsettled(self) -> list[str]:
        """Whose call is open."""
        open_calls = [f"request {client.request:x}" for client in self.of.values() if client.outcome is None]
        return open_calls + [f"question {question.text[:20]!r}" for question in self.questions if question.outcome is None]
