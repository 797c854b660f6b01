"""Clients: they arrive one by one and in bursts, read fast or slowly, leave, and try again; each checks what it gets.

What a client is told is written down as it would be on its connection: tokens of a stream when they come, of a whole answer at its
end. A client is the dispatcher's owner object.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.errors import CalculetError
from calculet_core.history import Event
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_router.openai import Call, Kind
from calculet_worker.device.sim_rule import TokenRule, profile_of

if TYPE_CHECKING:
    from simulation.router import RouterHost
    from simulation.world import World

GREEDY = SamplingParams(temperature=0.0)
LETTERS = b"aeiontrs"
MAX_TRIES = 3
TENANT_SHARES = ((0.6, "default"), (0.85, "gold"), (1.0, "bulk"))


class Client:
    """One client's call, with its retries. `answers` are the texts as written, by choice."""

    __slots__ = (
        "asked_at",
        "choices",
        "clients",
        "code",
        "digest",
        "done",
        "expected",
        "max_tokens",
        "number",
        "outcome",
        "pending",
        "prompt",
        "read_at",
        "read_per_s",
        "request",
        "retries",
        "router",
        "stop",
        "stream",
        "tenant",
        "timeout_ms",
        "tries",
        "unread",
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
        self.read_per_s = 3.0 if rng.random() < traffic.slow_readers else None
        self.retries = rng.random() < traffic.retries
        self.timeout_ms = rng.randrange(50, 3_000) if rng.random() < traffic.short_deadlines else None
        self.stop = rng.choice(LETTERS) if rng.random() < traffic.stops else None
        leaves = rng.expovariate(1 / 0.2) if rng.random() < traffic.disconnects else None
        if easy:
            leaves, self.timeout_ms, self.read_per_s, self.tenant, self.retries = None, None, None, "default", False
            self.max_tokens = min(self.max_tokens, traffic.max_output)
        self.tries, self.request = 0, 0
        self.router: RouterHost | None = None
        self.outcome: str | None = None
        self.code: str | None = None
        self._begin()
        if leaves is not None:
            clients.world.timeline.after(int(leaves * S), self._leave)

    def _begin(self) -> None:
        self.pending = [""] * self.choices
        self.done = [False] * self.choices
        self.unread, self.read_at = 0.0, 0
        self.digest: str | None = None
        """Of the artifact that answers; known with the first tokens."""
        self.expected: list[int] | None = None

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
        self.asked_at = world.timeline.now
        stop = StopRules(token_ids=(self.stop,) if self.stop is not None else ())
        prompt = Prompt(token_ids=self.prompt)
        call = Call(
            Kind.TEXT, world.alias, [prompt], self.choices, self.max_tokens, GREEDY, stop, self.stream, False, False, self.choices
        )
        self.router = None
        router.call(router.ask, self, call, b"Bearer " + self.tenant.encode(), self.timeout_ms)
        if self.router is None:
            self.outcome, self.code = "failed", "connection lost"
            self._again(0.5)

    def _again(self, after_s: float) -> None:
        if self.retries and self.tries < MAX_TRIES and not self.clients.quiet:
            self.clients.world.saw("client tried again")
            self.clients.world.timeline.after(int(after_s * S), self.ask)

    def _leave(self) -> None:
        if self.outcome is None and self.router is not None and self.router.alive and self.request:
            if self.router.stopped:
                self.clients.world.timeline.after(50 * MS, self._leave)
                return
            router, self.outcome = self.router, "left"
            self._forget()
            router.call(router.gone, self, "the client has disconnected")
        elif self.outcome is None:
            self.outcome = "left"

    # ---------------------------------------------------------------- what the router does with its owner
    def open(self, router: RouterHost, request: int) -> None:
        """It was given its ids."""
        self.router, self.request = router, request
        for index in range(self.choices):
            self.clients.of[request + index] = self
        router.calls[request] = self

    def deliver(self, index: int, piece: wire.Piece) -> None:
        """Tokens of one choice."""
        if self.done[index] or self.outcome is not None:
            self._broken(f"tokens of choice {index} after its end ({self.outcome})")
        text = self.pending[index] + piece.text
        if piece.finish is not None:
            self.done[index] = True
        if text and (self.stream or piece.finish is not None):
            self.pending[index] = ""
            self._write(index, piece.attempt, text)
        else:
            self.pending[index] = text
        if all(self.done):
            self._closed("completed", None)

    def restart(self, index: int) -> None:
        """The choice begins again elsewhere."""
        self.pending[index] = ""
        self.done[index] = False
        self.clients.world.saw("an answer began again")

    def fail(self, error: CalculetError) -> None:
        """The terminal is an error."""
        if self.outcome not in (None, "left"):
            self._broken(f"{error.code} after {self.outcome}")
        self._closed("failed" if self.outcome is None else self.outcome, error.code)
        self.clients.world.saw(f"client got {error.code}")
        if error.http_status in (429, 503):
            self._again((error.retry_after_s or 1.0) * 1.1)

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
        if self.read_per_s is not None and self.stream:
            now = world.timeline.now
            self.unread = max(0.0, self.unread - self.read_per_s * (now - self.read_at) / S) + len(text)
            self.read_at = now
            if self.unread > world.settings.router.max_output_buffer_bytes and self.router is not None and not all(self.done):
                router, self.unread = self.router, 0.0
                world.saw("a slow reader was dropped")
                router.later(0, self._dropped, router)

    def _dropped(self, router: RouterHost) -> None:
        if self.outcome is None:
            self.outcome, self.code = "left", "slow_reader"
            self._forget()
            router.gone(self, "the client reads too slowly", "slow_reader")

    def _closed(self, outcome: str, code: str | None) -> None:
        if outcome == "completed":
            self.reference()
            self.prompt = ()
        self.outcome, self.code = outcome, code
        self._forget()

    def lost(self) -> None:
        """The router died: the connection broke."""
        if self.outcome is None:
            self.outcome, self.code = "failed", "connection lost"
        self._forget()
        self._again(0.3)

    def _forget(self) -> None:
        if self.router is not None:
            self.router.calls.pop(self.request, None)

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


class Clients:
    """All of them; `of` finds one by request id, for as long as somebody may ask."""

    def __init__(self, world: World) -> None:
        self.world, self.traffic = world, world.scenario.traffic
        self.quiet = False
        self.of: dict[int, Client] = {}
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
        """One that listens."""
        found = [router for router in self.world.keeper.routers.values() if router.listening and not router.stopped]
        return self._rng.choice(found) if found else None

    def router_died(self, router: RouterHost) -> None:
        """Whoever was connected to it hears."""
        world = self.world
        for request in world.checker.open_at(router.incarnation):
            end = {"outcome": "cancelled", "reason": "the router died"}
            world.see(Event(history.REQUEST_DONE, world.timeline.now, request, data=end), None)
        for client in list(router.calls.values()):
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
        return [f"request {client.request:x}" for client in self.of.values() if client.outcome is None]
