"""Usage that a killed router took with it: found in its journal and the workers', once those have ended its requests.

Runs in a thread some seconds after the start. Only lines that can matter are decoded, of journals' newest two files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from calculet_core import history
from calculet_core.clock import S
from calculet_core.history import Event
from calculet_core.ids import request_id_text
from calculet_core.shell.fleet import Fleet
from calculet_core.usage import UsageRecord
from calculet_router.recovery import Orphan, add_attempts, find_orphans
from calculet_router.shell.usage import utc

CODE = "router_lost"
"""Of requests whose router was killed."""
OF_REQUESTS = tuple(f'"{name}"'.encode() for name in (history.REQUEST_ACCEPTED, history.REQUEST_SENT, history.REQUEST_DONE))
OF_ATTEMPTS = (f'"{history.ATTEMPT_DONE}"'.encode(),)
_decode = msgspec.json.Decoder(Event).decode


def orphans_of(fleet: Fleet, name: str, incarnation: int) -> list[Orphan]:
    """Requests of earlier routers of this name that nobody has accounted for; others on the socket have their own journals."""
    orphans = find_orphans(_events(fleet.journal(name), OF_REQUESTS), incarnation)
    if orphans:
        for board in fleet.config.boards:
            add_attempts(orphans, _events(fleet.journal(f"worker-{board.name}"), OF_ATTEMPTS))
    return list(orphans.values())


def record_of(orphan: Orphan, wall_s: float) -> UsageRecord:
    """Its usage record; `wall_s` is when it was recovered, UTC seconds."""
    seconds = 0.0 if orphan.ended_ns is None else max(0.0, round((orphan.ended_ns - orphan.accepted_ns) / S, 3))
    return UsageRecord(
        utc(wall_s), request_id_text(orphan.request), orphan.tenant, orphan.model, "failed", orphan.prompt_tokens,
        orphan.generated_tokens, seconds, orphan.key, CODE, 1, orphan.label, True,
    )  # fmt: skip


def done_of(orphan: Orphan, now_ns: int) -> Event:
    """Its end for the router's journal, so that it is found only once."""
    data = {
        "outcome": "failed", "code": CODE, "prompt_tokens": orphan.prompt_tokens, "tokens": orphan.generated_tokens,
        "recovered": True,
    }  # fmt: skip
    return Event(history.REQUEST_DONE, now_ns, orphan.request, orphan.attempt, data=data)


def _events(journal: Path, names: tuple[bytes, ...]) -> Iterator[Event]:
    for path in (journal.with_name(f"{journal.name}.1"), journal):
        if not path.exists():
            continue
        with path.open("rb") as file:
            for line in file:
                if any(name in line for name in names):
                    try:
                        yield _decode(line)
                    except msgspec.DecodeError:
                        continue
