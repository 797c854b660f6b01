"""The router's decisions: who gets a request, what becomes of it when a worker fails it, and when the client hears of what.

A *call* is what one client asked; each of its choices is a *flight*: a request with its own id, of which one attempt at a time is
with one worker. Every admission must be answered within a deadline, every request ends at its own deadline whatever the worker
does, and what does not match (request, attempt, worker's life) is dropped. `retry` has the table of what follows a failed attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from calculet_core import history
from calculet_core.clock import MS, S
from calculet_core.config import RouterConfig, TenantConfig
from calculet_core.errors import (
    CalculetError,
    DeadlineExceeded,
    NoReadyWorker,
    OverCapacity,
    Unsupported,
    WorkerLost,
    error_from_code,
)
from calculet_core.history import Event as Entry
from calculet_core.ids import make_request_id, request_id_text
from calculet_core.requests import SamplingParams
from calculet_core.states.request import RequestEvent
from calculet_core.tracing import TraceContext
from calculet_core.wire import AliasView, Cancel, ErrorInfo, Piece, Submit
from calculet_router import actions, events
from calculet_router.actions import Action, Deliver, Send, Ticket
from calculet_router.aliases import Aliases
from calculet_router.balance import Balance, estimate_cost
from calculet_router.fleet import LinkState, Roster, Worker
from calculet_router.flights import Flight, Ongoing
from calculet_router.openai import Call
from calculet_router.parking import WAITING, Parking
from calculet_router.retry import RETRY, Trouble, last_word
from calculet_router.spans import attempt_span
from calculet_router.tenants import Identity, Tenants
from calculet_router.versions import Tally

DEADLINE_GRACE_NS = 2 * S
"""The worker enforces deadlines; a worker that cannot is given so much longer, then the client gets its 504."""
DEADLINE_SWEEP_NS = 250 * MS
MAX_COUNTER = 1 << 32
MAX_MOVES = 4
"""From one artifact of its alias to another, before anything of an answer was written."""

Out = list[Action]


class Dispatcher:
    """`incarnation` makes this router's request ids unique; `roster`, `aliases` and `tenants` are its alone."""

    def __init__(self, incarnation: int, config: RouterConfig, roster: Roster, aliases: Aliases, tenants: Tenants) -> None:
        self.roster, self.aliases, self.tenants = roster, aliases, tenants
        self._incarnation, self._config = incarnation, config
        self._balance = Balance()
        self.tally = Tally()
        self.parking = Parking()
        self._looked = 0
        """The roster's changes after which the parking was looked through."""
        self._counter = 0
        self._calls: dict[Any, Ongoing] = {}
        self._flights: dict[int, Flight] = {}
        self._next_sweep_ns = 0
        self._handlers: dict[type[Any], Callable[[Any, int, Out], None]] = {
            events.CallArrived: self._call_arrived,
            events.ClientGone: self._client_gone,
            events.ViewPublished: self._view_published,
            events.HelloArrived: self._hello_arrived,
            events.TickArrived: self._tick_arrived,
            events.WorkerEnded: self._worker_ended,
            events.Unsent: self._unsent,
            events.TimePassed: self._time_passed,
            events.Overslept: self._overslept,
        }

    def take_config(self, config: RouterConfig) -> None:
        """Other limits from now on."""
        self._config = config

    def handle(self, event: events.Event, now_ns: int) -> Out:
        """Decide; `now_ns` is CLOCK_MONOTONIC."""
        out: Out = []
        self._handlers[type(event)](event, now_ns, out)
        if self.parking and self._looked != self.roster.changes:
            self._unpark(now_ns, out)
        return out

    @property
    def inflight(self) -> int:
        """Requests (choices) that have not ended."""
        return len(self._flights)

    def running_tokens(self) -> int:
        """Tokens generated for requests that have not ended; looks at each."""
        return sum(flight.generated for flight in self._flights.values())

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def ready(self) -> int:
        """Boards that can take a request now."""
        names = [view.alias for view in self.aliases.views()]
        return sum(len(self.roster.eligible(name, view.digest)) for name in names for view in self.aliases.versions(name))

    # ---------------------------------------------------------------- calls
    def _call_arrived(self, event: events.CallArrived, now_ns: int, out: Out) -> None:
        call, owner = event.call, event.owner
        first_id = self._mint(call.choices)
        trace = event.trace
        ticket = Ticket(request_id_text(first_id), event.created_s)
        if trace is not None:
            ticket.headers = b"traceparent: %b\r\n" % trace.text().encode()
        out.append(actions.Opened(owner, ticket))
        identity = event.identity or self.tenants.anonymous
        tenant = identity.tenant
        if error := self.tenants.forbids(tenant, call.model):
            self._refuse(event, identity, error, now_ns, out)
            return
        alias = self._version(call.model)
        if isinstance(alias, CalculetError):
            self._refuse(event, identity, alias, now_ns, out)
            return
        error = self._over_limits(tenant, call.choices, now_ns)
        ticket.headers += self.tenants.headers(tenant, now_ns)
        if error:
            self._refuse(event, identity, error, now_ns, out)
            return
        deadline_ns = now_ns + self.aliases.deadline_ms(alias.alias, event.timeout_ms) * MS
        asked = event.timeout_ms is not None
        ongoing = Ongoing(owner, call, ticket, alias, identity, now_ns, deadline_ns, asked, call.choices, label=event.label)
        ongoing.trace = trace
        self._calls[owner] = ongoing
        sampling = _with_defaults(call, alias)
        for index in range(call.choices):
            request_id = first_id + index
            flight = Flight(ongoing, request_id, index, call.prompts[index // call.n], _seeded(call, sampling, index))
            ongoing.flights.append(flight)
            self._flights[request_id] = flight
            data: dict[str, Any] = {"model": alias.alias, "tenant": tenant.name}
            if identity.key is not None:
                data["key"] = identity.key
            if event.label is not None:
                data["label"] = event.label
            if trace is not None:
                data |= _traced(trace)
            if choice := index % call.n:
                data["choice"] = choice
            out.append(
                Entry(history.REQUEST_ACCEPTED, now_ns, request_id, None, None, None, None, None, data, float(event.created_s))
            )
        for flight in ongoing.flights:
            if flight.worker is None and not self._send(flight, now_ns, out):
                return

    def _version(self, name: str) -> AliasView | CalculetError:
        """The artifact of a new request; the alias's other one where nobody serves the first."""
        found = self.aliases.pick(name)
        if isinstance(found, CalculetError) or self.roster.eligible(found.alias, found.digest):
            return found
        return next((view for view in self.aliases.versions(name) if self.roster.eligible(view.alias, view.digest)), found)

    def _mint(self, count: int) -> int:
        """The first of `count` ids in a row."""
        if self._counter + count > MAX_COUNTER:
            self._counter = 0
        first = make_request_id(self._incarnation, self._counter)
        self._counter += count
        return first

    def _over_limits(self, tenant: TenantConfig, requests: int, now_ns: int) -> CalculetError | None:
        limit = self._config.max_inflight_requests
        if len(self._flights) + requests > limit:
            return OverCapacity(f"{len(self._flights)} of {limit} requests are in flight (router.max_inflight_requests)")
        return self.tenants.admit(tenant, requests, now_ns)

    def _refuse(self, event: events.CallArrived, identity: Identity, error: CalculetError, now_ns: int, out: Out) -> None:
        """Before anything was sent or recorded."""
        out.append(actions.Fail(event.owner, error))
        tenant = identity.tenant.name
        out.append(
            actions.Ended(
                event.call.model, "failed", error, 0, 0, now_ns, None, now_ns, tenant, identity.key, label=event.label,
                trace=event.trace,
            )
        )  # fmt: skip

    def _client_gone(self, event: events.ClientGone, now_ns: int, out: Out) -> None:
        ongoing = self._calls.get(event.owner)
        if ongoing is not None:
            data: dict[str, Any] = {"reason": event.reason}
            if event.code is not None:
                data["code"] = event.code
            self._close(ongoing, "cancelled", event.reason, data, now_ns, out)
            out.append(self._ended(ongoing, "cancelled", None, now_ns))

    def _fail(self, ongoing: Ongoing, error: CalculetError, now_ns: int, out: Out, suspected_poison: bool = False) -> None:
        """The client's terminal is an error; what still runs of the call is cancelled."""
        data: dict[str, Any] = {"code": error.code}
        if suspected_poison:
            data["suspected_poison"] = True
        self._close(ongoing, "failed", error.code, data, now_ns, out)
        out.append(actions.Fail(ongoing.owner, error))
        out.append(self._ended(ongoing, "failed", error, now_ns))

    def _close(self, ongoing: Ongoing, outcome: str, reason: str, data: dict[str, Any], now_ns: int, out: Out) -> None:
        for flight in ongoing.flights:
            if not flight.done:
                self._release(flight, reason, out)
                self._end_flight(flight, outcome, data, now_ns, out)
        self._forget(ongoing)

    def _forget(self, ongoing: Ongoing) -> None:
        del self._calls[ongoing.owner]
        self.tenants.release(ongoing.identity.tenant, ongoing.call.choices)

    def _end_flight(self, flight: Flight, outcome: str, data: dict[str, Any] | None, now_ns: int, out: Out) -> None:
        """Journal one request's terminal, once. Its tokens are counted whatever the client saw."""
        flight.done = True
        event = RequestEvent.CANCEL if outcome == "cancelled" else RequestEvent.FAIL
        if self.parking.leave(flight, event) and flight.held_until_ns:
            out.append(actions.Held(False))
        request_id, attempt = flight.request_id, flight.attempt
        del self._flights[request_id]
        if flight.generated:
            tokens = {"n": flight.generated}
            out.append(Entry(history.REQUEST_TOKENS, now_ns, request_id, attempt, None, None, None, None, tokens))
        fields = {"outcome": outcome, "prompt_tokens": flight.prompt_tokens, "tokens": flight.generated}
        if data:
            fields.update(data)
        out.append(Entry(history.REQUEST_DONE, now_ns, request_id, attempt, None, None, None, None, fields))

    def _ended(self, ongoing: Ongoing, outcome: str, error: CalculetError | None, now_ns: int) -> actions.Ended:
        """The call's sums; a prompt counts once however often it was answered. Nobody looks at the flights any more."""
        prompts = generated = 0
        for flight in ongoing.flights:
            generated += flight.generated
            if flight.index % ongoing.call.n == 0:
                prompts += flight.prompt_tokens
        ongoing.flights = []
        if self.aliases.mixed:
            failed = error is not None and error.http_status >= 500
            self.tally.add(ongoing.alias.digest, failed, ongoing.accepted_ns, ongoing.first_ns, now_ns, generated)
        identity = ongoing.identity
        return actions.Ended(
            ongoing.alias.alias, outcome, error, prompts, generated, ongoing.accepted_ns, ongoing.first_ns, now_ns,
            identity.tenant.name, identity.key, ongoing.ticket.name, ongoing.call.choices, ongoing.label,
        )  # fmt: skip

    # ---------------------------------------------------------------- attempts
    def _send(self, flight: Flight, now_ns: int, out: Out) -> bool:
        """Start the next attempt; False when nobody is left, which ends the call."""
        ongoing = flight.ongoing
        alias, call = ongoing.alias, ongoing.call
        first, others = self.roster.pools(alias.alias, alias.digest, ongoing.identity.tenant.traffic_class or "")
        if call.constraint is not None:
            first, others = _constraining(first), _constraining(others)
        worker = self._balance.choose(first, flight.refusals) or self._balance.choose(others, flight.refusals)
        if worker is None:
            if (other := self._elsewhere(ongoing)) is not None:
                return self._move(ongoing, other, now_ns, out)
            if call.constraint is not None and not flight.refusals and self.roster.eligible(alias.alias, alias.digest):
                message = "no board here can keep answers to schemas or tools"
                self._fail(ongoing, Unsupported(message, param=call.constraint.param), now_ns, out)
                return False
            if (error := self._park(flight, now_ns, out)) is None:
                return True
            self._fail(ongoing, error, now_ns, out)
            return False
        if self.parking.leave(flight, RequestEvent.QUEUE):
            waited_ns = now_ns - flight.parked_ns
            out.append(actions.Held(True) if flight.held_until_ns else actions.Unparked(alias.alias, waited_ns))
        flight.attempt += 1
        flight.worker, flight.accepted, flight.sent_ns = worker, False, now_ns
        flight.cost = estimate_cost(flight.prompt, call.max_new_tokens)
        worker.unanswered += flight.cost
        worker.flights[flight.request_id] = flight
        view, tenant = worker.view, ongoing.identity.tenant
        ongoing.ticket.digest = view.digest
        submit = Submit(
            flight.request_id, flight.attempt, worker.epoch, view.generation, view.digest, alias.alias, tenant.name, tenant.weight,
            flight.prompt, call.max_new_tokens, flight.sampling, call.stop, ongoing.deadline_ns, ongoing.deadline_asked,
            ongoing.accepted_ns, echo=call.scored or (call.echo and flight.prompt.token_ids is not None),
            traceparent=None if ongoing.trace is None else _traceparent(ongoing.trace, flight), constraint=call.constraint,
        )  # fmt: skip
        out.append(Send(worker.board, worker.epoch, submit))
        out.append(
            Entry(history.REQUEST_SENT, now_ns, flight.request_id, flight.attempt, worker.board, worker.epoch, view.generation)
        )
        return True

    def _park(self, flight: Flight, now_ns: int, out: Out) -> CalculetError | None:
        """Let it wait for its model's turn, or for a board that is about to be reached; or why the call ends instead."""
        alias = flight.ongoing.alias.alias
        limit, refused = self.aliases.parks(alias), last_word(flight.refusals.values(), alias)
        if refused.http_status == 429:
            return refused
        if not limit:
            if not self._may_hold(flight, now_ns):
                return refused
            if flight.state is WAITING:
                return None
            flight.held_until_ns = flight.held_until_ns or now_ns + self._config.reach_wait_ms * MS
        elif flight.state is WAITING:
            flight.held_until_ns = 0  # its model takes turns since
            return None
        elif (full := self.parking.refusal(alias, limit)) is not None:
            return full
        else:
            flight.refusals = {}  # the worker that said no serves another model now, and may serve this one later
            flight.held_until_ns = 0
        if not self.parking:  # nobody else is to be looked at again before the next change
            self._looked = self.roster.changes
        if self.parking.add(flight, now_ns) and limit:
            out.append(actions.Parked(alias))
        ongoing = flight.ongoing
        waits = all(other.accepted or other.done or other.state is WAITING for other in ongoing.flights)
        if limit and ongoing.call.stream and waits:
            out.append(actions.Admitted(ongoing.owner))
        data = {"model": alias, "for": "turn" if limit else "link"}
        out.append(
            Entry(history.REQUEST_WAITING, now_ns, flight.request_id, flight.attempt or None, None, None, None, None, data)
        )
        return None

    def _may_hold(self, flight: Flight, now_ns: int) -> bool:
        """Whether a board may take it in a moment, and it has not waited for that long enough."""
        if not self._config.reach_wait_ms or 0 < flight.held_until_ns <= now_ns:
            return False
        alias = flight.ongoing.alias.alias
        return self.roster.near(alias, [view.digest for view in self.aliases.versions(alias)], flight.refusals)

    def _unpark(self, now_ns: int, out: Out) -> None:
        """Send on whose model is there now; end whose model will not come."""
        self._looked = self.roster.changes
        for flight in self.parking.all():
            if flight.done or flight.state is not WAITING:
                continue
            alias = flight.ongoing.alias.alias
            if flight.held_until_ns or any(self.roster.eligible(alias, view.digest) for view in self.aliases.versions(alias)):
                self._send(flight, now_ns, out)
            elif not self.aliases.parks(alias):
                self._fail(flight.ongoing, last_word((), alias), now_ns, out)

    def _elsewhere(self, ongoing: Ongoing) -> AliasView | None:
        """What else the alias stands for, for a call of which nothing has been written: its artifact may have left every board."""
        if ongoing.moves >= MAX_MOVES or any(flight.begun or flight.done for flight in ongoing.flights):
            return None
        full = {key for flight in ongoing.flights for key, error in flight.refusals.items() if error.http_status == 429}
        for view in self.aliases.versions(ongoing.alias.alias):
            others = self.roster.eligible(view.alias, view.digest) if view.digest != ongoing.alias.digest else []
            if any(worker.key not in full for worker in others):
                return view
        return None

    def _move(self, ongoing: Ongoing, alias: AliasView, now_ns: int, out: Out) -> bool:
        """The whole call begins anew with another artifact, so that no answer, and no choice of it, mixes two."""
        if self.aliases.mixed and any(flight.losses for flight in ongoing.flights):
            self.tally.add(ongoing.alias.digest, True, ongoing.accepted_ns, None, now_ns, 0)
        for flight in ongoing.flights:
            data = {"digest": alias.digest, "was": ongoing.alias.digest}
            out.append(Entry(history.REQUEST_MOVED, now_ns, flight.request_id, flight.attempt, None, None, None, None, data))
        ongoing.alias, ongoing.first_ns = alias, None
        ongoing.moves += 1
        base = _with_defaults(ongoing.call, alias)
        for flight in ongoing.flights:
            self._release(flight, "its model was replaced", out)
            flight.refusals = {key: error for key, error in flight.refusals.items() if error.http_status == 429}
            flight.sampling = _seeded(ongoing.call, base, flight.index)
            if flight.generated:
                flight.generated = 0
                out.append(actions.Restart(ongoing.owner, flight.index))
        return all(flight.worker is not None or self._send(flight, now_ns, out) for flight in ongoing.flights)

    def _release(self, flight: Flight, cancel_reason: str | None, out: Out) -> None:
        """End the attempt: its worker owes nothing for it any more; with a reason the worker is told to stop."""
        worker = flight.worker
        if worker is None:
            return
        flight.worker = None
        worker.flights.pop(flight.request_id, None)
        if flight.accepted:
            worker.settled = max(0.0, worker.settled - flight.cost)
        else:
            worker.unanswered -= flight.cost
        if cancel_reason is not None:
            cancel = Cancel(flight.request_id, flight.attempt, worker.epoch, cancel_reason)
            out.append(Send(worker.board, worker.epoch, cancel))

    def _trouble(self, flight: Flight, trouble: Trouble, error: CalculetError, now_ns: int, out: Out) -> None:
        """An attempt came to nothing: send the request again, or end the call with `error`."""
        rule, worker, ongoing = RETRY[trouble], flight.worker, flight.ongoing
        if worker is not None:
            data = {"reason": trouble.value, "code": error.code, "message": error.message}
            board, epoch = worker.key
            out.append(
                Entry(history.REQUEST_TROUBLE, now_ns, flight.request_id, flight.attempt, board, epoch, None, None, data)
            )
        self._release(flight, trouble.value if rule.cancels else None, out)
        if rule.excludes_worker and worker is not None:
            flight.refusals[worker.key] = error
        flight.losses += rule.spends_resend
        if flight.begun:
            self._fail(ongoing, error, now_ns, out)
        elif flight.losses > self._config.max_resends:
            message = f"{flight.losses} workers were lost with this request; it is not sent again"
            self._fail(ongoing, WorkerLost(message), now_ns, out, suspected_poison=True)
        else:
            if flight.generated:
                flight.generated = 0
                out.append(actions.Restart(ongoing.owner, flight.index))
            if self._send(flight, now_ns, out):
                out.append(actions.Resent(trouble.value))

    def _abandon(self, worker: Worker, trouble: Trouble, error: CalculetError, now_ns: int, out: Out) -> None:
        """Every attempt on the worker came to nothing. A flight may end meanwhile, with its call."""
        for flight in list(worker.flights.values()):
            if flight.worker is worker:
                self._trouble(flight, trouble, error, now_ns, out)

    # ---------------------------------------------------------------- workers
    def _view_published(self, event: events.ViewPublished, now_ns: int, out: Out) -> None:
        change = self.roster.take(event.view, now_ns)
        if change is None:
            return
        self.aliases.take(event.view.aliases)
        opened, ended = change
        for worker in ended:
            worker.link = LinkState.LOST
            out.append(actions.CloseLink(worker.board, worker.epoch))
        out.extend(actions.OpenLink(worker.view) for worker in opened)
        for worker in ended:
            self._abandon(worker, Trouble.WORKER_LOST, _lost(worker, "was replaced"), now_ns, out)

    def _hello_arrived(self, event: events.HelloArrived, now_ns: int, out: Out) -> None:
        worker, hello = self.roster.find(event.board, event.epoch), event.hello
        if worker is None or (hello.board, hello.epoch) != worker.key:
            out.append(actions.Ignored("foreign", 1))
            return
        worker.heard_ns = now_ns
        if worker.seq is None:
            worker.seq = hello.seq  # requests go there from now on: a first tick that is lost must not look like none
        hello = msgspec.structs.replace(hello, seq=None)
        if worker.hello != hello or worker.link is not LinkState.UP:
            worker.hello, worker.link = hello, LinkState.UP
            self.roster.changed()

    def _worker_ended(self, event: events.WorkerEnded, now_ns: int, out: Out) -> None:
        worker = self.roster.find(event.board, event.epoch)
        if worker is None:
            return
        worker.link = LinkState.LOST
        self.roster.changed()
        out.append(actions.CloseLink(worker.board, worker.epoch))
        self._abandon(worker, Trouble.WORKER_LOST, _lost(worker, event.reason), now_ns, out)

    def _unsent(self, event: events.Unsent, now_ns: int, out: Out) -> None:
        worker, flight = self.roster.find(event.board, event.epoch), self._flights.get(event.request_id)
        if worker is not None and worker.link is LinkState.UP:
            worker.link = LinkState.SUSPECT
            self.roster.changed()
        if flight is not None and flight.attempt == event.attempt and flight.worker is not None:
            error = NoReadyWorker(f"the link to {event.board} is down")
            self._trouble(flight, Trouble.UNSENT, error, now_ns, out)

    def _tick_arrived(self, event: events.TickArrived, now_ns: int, out: Out) -> None:
        worker, tick = self.roster.find(event.board, event.epoch), event.tick
        if worker is None or tick.epoch != worker.epoch:
            out.append(actions.Ignored("foreign", 1))
            return
        worker.heard_ns = now_ns
        if worker.link is LinkState.SUSPECT and worker.hello is not None:
            worker.link = LinkState.UP
            self.roster.changed()
        if tick.seq == worker.seq:
            out.append(actions.Ignored("duplicate", 1))  # nothing is missing, and nothing in it is new
            return
        if worker.seq is not None and tick.seq != worker.seq + 1:
            out.append(actions.LostMessages(worker.board, worker.epoch, worker.seq + 1, tick.seq))
            self._abandon(worker, Trouble.MESSAGE_LOST, _lost(worker, "lost messages"), now_ns, out)
        worker.seq = tick.seq
        late = 0
        for answer in tick.accepted:
            flight = worker.flights.get(answer.request_id)
            if flight is None or flight.attempt != answer.attempt:
                late += 1
            elif not flight.accepted:
                flight.prompt_tokens = answer.prompt_tokens
                self._accept(flight, worker, float(answer.prompt_tokens + answer.max_new_tokens), out)
        for refusal in tick.refused:
            flight = worker.flights.get(refusal.request_id)
            if flight is None or flight.attempt != refusal.attempt:
                late += 1
                continue
            error = _error(refusal.error)
            if refusal.retryable:
                self._trouble(flight, Trouble.REFUSED, error, now_ns, out)
            else:
                self._release(flight, None, out)
                self._fail(flight.ongoing, error, now_ns, out)
        late += self._pieces(worker, tick.pieces, now_ns, out)
        if tick.load is not None:
            worker.settled = tick.load.cost
        if late:
            out.append(actions.Ignored("late", late))
        if not worker.listed and not worker.flights:
            out.extend(actions.CloseLink(gone.board, gone.epoch) for gone in self.roster.unlisted())

    def _accept(self, flight: Flight, worker: Worker, cost: float, out: Out) -> None:
        flight.accepted = True
        worker.unanswered -= flight.cost
        worker.settled += cost
        flight.cost = cost
        ongoing = flight.ongoing
        if ongoing.call.stream and all(other.accepted or other.done for other in ongoing.flights):
            out.append(actions.Admitted(ongoing.owner))

    # ---------------------------------------------------------------- tokens
    def _pieces(self, worker: Worker, pieces: list[Piece], now_ns: int, out: Out) -> int:
        """The hot loop: one message of a worker, all its lanes. Returns how many came too late."""
        late, flights, deliver = 0, worker.flights, out.append
        for piece in pieces:
            flight = flights.get(piece.request_id)
            if flight is None or flight.attempt != piece.attempt:
                late += 1
                continue
            if not flight.accepted:
                self._accept(flight, worker, flight.cost, out)
            ongoing = flight.ongoing
            flight.generated += piece.tokens
            if not flight.begun and piece.error is None:
                if ongoing.first_ns is None and piece.tokens:
                    ongoing.first_ns = now_ns
                if ongoing.call.stream and (piece.text or piece.logprobs or piece.calls):
                    flight.begun = True
            if piece.finish is not None or piece.error is not None:
                self._piece_ended(flight, piece, now_ns, out)
            else:
                deliver(Deliver(ongoing.owner, flight.index, piece))
        return late

    def _piece_ended(self, flight: Flight, piece: Piece, now_ns: int, out: Out) -> None:
        ongoing, usage = flight.ongoing, piece.usage
        if usage is not None:
            flight.prompt_tokens, flight.generated = usage.prompt_tokens, usage.completion_tokens
        if piece.error is not None:
            error = _error(piece.error)
            if error.retryable:
                self._trouble(flight, Trouble.FAILED, error, now_ns, out)
            else:
                self._release(flight, None, out)
                self._fail(ongoing, error, now_ns, out)
            return
        self._release(flight, None, out)
        out.append(Deliver(ongoing.owner, flight.index, piece))
        self._end_flight(flight, "completed", None, now_ns, out)
        ongoing.left -= 1
        if ongoing.left == 0:
            self._forget(ongoing)
            out.append(self._ended(ongoing, "completed", None, now_ns))

    # ---------------------------------------------------------------- time
    def _overslept(self, event: events.Overslept, now_ns: int, out: Out) -> None:
        """What workers said meanwhile is unread: neither their silence nor their answers are late. Clients' deadlines run on."""
        self.roster.overslept(event.by_ns)
        for flight in self._flights.values():
            if not flight.accepted:
                flight.sent_ns += event.by_ns

    def _time_passed(self, event: events.TimePassed, now_ns: int, out: Out) -> None:
        late_ns = now_ns - self._config.accept_timeout_ms * MS
        for flight in [one for one in self._flights.values() if not one.accepted and one.sent_ns <= late_ns]:
            if flight.worker is not None:
                unanswered = NoReadyWorker(f"{flight.worker.board} did not answer in time")
                self._trouble(flight, Trouble.UNANSWERED, unanswered, now_ns, out)
        for flight in self.parking.all() if self.parking else ():
            if 0 < flight.held_until_ns <= now_ns and not flight.done:
                self._send(flight, now_ns, out)
        for worker in self.roster.silent(now_ns, self._config.worker_silence_ms * MS):
            error = _lost(worker, "fell silent")
            for flight in list(worker.flights.values()):
                if flight.worker is worker and not flight.begun:
                    self._trouble(flight, Trouble.SILENT, error, now_ns, out)
        if now_ns >= self._next_sweep_ns:
            self._next_sweep_ns = now_ns + DEADLINE_SWEEP_NS
            limit_ns = now_ns - DEADLINE_GRACE_NS
            for ongoing in [one for one in self._calls.values() if one.deadline_ns < limit_ns]:
                seconds = (ongoing.deadline_ns - ongoing.accepted_ns) / S
                self._fail(ongoing, DeadlineExceeded(f"the request did not finish within {seconds:g} s"), now_ns, out)


def _constraining(workers: list[Worker]) -> list[Worker]:
    """Those that can hold an answer to a constraint; an older worker would not even see it."""
    return [worker for worker in workers if worker.hello is not None and worker.hello.constrains]


def _lost(worker: Worker, what: str) -> WorkerLost:
    return WorkerLost(f"the worker of {worker.board} {what}")


def _error(info: ErrorInfo) -> CalculetError:
    return error_from_code(info.code, info.message, info.param, info.retry_after_s)


def _traced(trace: TraceContext) -> dict[str, Any]:
    """What a journal says of a call's trace: its id, and the span that is made of the events, if one is."""
    data: dict[str, Any] = {"trace": trace.trace_id}
    if trace.own and trace.sampled:
        data["span"] = trace.span_id
        if trace.parent is not None:
            data["parent"] = trace.parent
    return data


def _traceparent(trace: TraceContext, flight: Flight) -> str:
    """For the worker: below this attempt's span where we make one, else below the client's."""
    return trace.text(attempt_span(trace.span_id, flight.request_id, flight.attempt) if trace.own else None)


def _with_defaults(call: Call, alias: AliasView) -> SamplingParams:
    """What the client did not say is as the model's makers recommend, where the artifact states it."""
    stated = {name: value for name in call.unsaid if (value := getattr(alias, name)) is not None}
    return msgspec.structs.replace(call.sampling, **stated) if stated else call.sampling


def _seeded(call: Call, sampling: SamplingParams, index: int) -> SamplingParams:
    """The answers to one prompt differ although the client gave one seed: the k-th draws with seed + k."""
    if sampling.seed is None or call.n == 1:
        return sampling
    place = index % call.n
    seed = (sampling.seed + place + (1 << 63)) % (1 << 64) - (1 << 63)
    return msgspec.structs.replace(sampling, seed=seed)
