"""Requests whose model takes turns with another on its board and is not there now: they wait, in the order of their arrival.

`RequestState.WAITING_MODEL` is this wait, through the same table that workers use: a request's life begins anew with each attempt,
so what was refused by a board that changes its model comes back here. Nothing of such a request is anywhere but here, so no
worker's end and no switch can lose it; it ends like any other with its deadline, its client, or its answer.

Here waits, too, for a moment, what no board can take while one is about to be reached (`router.reach_wait_ms`): the fleet's view
and a worker's own word travel apart, so a router may know of nobody for some milliseconds although somebody serves.
"""

from __future__ import annotations

from collections.abc import Iterator

from calculet_core.errors import CalculetError, OverCapacity
from calculet_core.states.request import REQUEST, RequestEvent, RequestState
from calculet_core.wire import ModelWait
from calculet_router.flights import Flight

WAITING = RequestState.WAITING_MODEL


class Parking:
    """All that wait, by alias; only the dispatcher writes."""

    def __init__(self) -> None:
        self._flights: dict[str, dict[int, Flight]] = {}

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._flights)

    def count(self, alias: str) -> int:
        """How many wait for it."""
        return len(self._flights.get(alias, ()))

    def refusal(self, alias: str, limit: int) -> CalculetError | None:
        """429 once `limit` requests wait; None: there is room for one more."""
        if self.count(alias) < limit:
            return None
        who = f"{limit} requests wait for {alias!r}, whose board serves another model"
        return OverCapacity(f"{who} (time_shared.max_waiting_requests)")

    def add(self, flight: Flight, now_ns: int) -> bool:
        """It waits from now on; True when it is the first one for its alias."""
        alias = flight.ongoing.alias.alias
        flight.state, flight.parked_ns = REQUEST.next(REQUEST.initial, RequestEvent.AWAIT_MODEL), now_ns
        waiting = self._flights.setdefault(alias, {})
        waiting[flight.request_id] = flight
        return len(waiting) == 1

    def leave(self, flight: Flight, event: RequestEvent) -> bool:
        """It waits no more, because of `event`; False: it did not wait."""
        if flight.state is not WAITING:
            return False
        flight.state = REQUEST.next(flight.state, event)
        alias = flight.ongoing.alias.alias
        waiting = self._flights[alias]
        del waiting[flight.request_id]
        if not waiting:
            del self._flights[alias]
        return True

    def all(self) -> Iterator[Flight]:
        """Everybody, alias by alias, first come first; the parking may change meanwhile."""
        for waiting in list(self._flights.values()):
            yield from list(waiting.values())

    def waits(self) -> dict[str, ModelWait]:
        """For the supervisor, which decides whose turn it is."""
        found = {}
        for alias, waiting in self._flights.items():
            since = [flight.parked_ns for flight in waiting.values() if not flight.held_until_ns]
            if since:
                found[alias] = ModelWait(len(since), min(since))
        return found
