"""What a killed router left open: requests that its journal saw accepted and never saw end, with what workers know of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from calculet_core import history
from calculet_core.history import Event


class Orphan(msgspec.Struct):
    """A request whose router was killed. Tokens are the sum over its attempts' ends; `model` and `tenant` are its router's word."""

    request: int
    attempt: int
    tenant: str
    model: str
    key: str | None
    label: str | None
    accepted_ns: int
    first_choice: bool
    """False: another answer to a prompt that is counted already."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ended_ns: int | None = None


def find_orphans(router: Iterable[Event], incarnation: int) -> dict[int, Orphan]:
    """From a router's journal: accepted and never ended, by others than the router `incarnation`."""
    found: dict[int, Orphan] = {}
    for event in router:
        if event.request is None or event.request >> 32 == incarnation:
            continue
        if event.event == history.REQUEST_ACCEPTED:
            data = event.data
            found[event.request] = Orphan(
                event.request, 0, str(data.get("tenant", "default")), str(data.get("model", "")), data.get("key"),
                data.get("label"), event.t, not data.get("choice"),
            )  # fmt: skip
        elif event.event == history.REQUEST_SENT and event.request in found:
            found[event.request].attempt = event.attempt or 0
        elif event.event == history.REQUEST_DONE:
            found.pop(event.request, None)
    return found


def add_attempts(orphans: dict[int, Orphan], worker: Iterable[Event]) -> None:
    """From a worker's journal: what the last attempt of each orphan has used."""
    for event in worker:
        if event.event != history.ATTEMPT_DONE or event.request not in orphans:
            continue
        orphan = orphans[event.request]
        if event.attempt == orphan.attempt:
            orphan.prompt_tokens = int(event.data.get("prompt_tokens", 0)) if orphan.first_choice else 0
            orphan.generated_tokens = int(event.data.get("tokens", 0))
            orphan.ended_ns = event.t
