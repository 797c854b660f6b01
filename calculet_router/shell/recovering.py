"""Usage that a killed router took with it: found in its journal and the workers', once those have ended its requests.

Runs in a thread some seconds after the start. Only lines that can matter are decoded, of journals' newest two files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec

from calculet_core import history
from calculet_core.clock import S
from calculet_core.history import Event
from calculet_core.ids import request_id_text
from calculet_core.shell.files import lock_holder
from calculet_core.shell.fleet import Fleet
from calculet_core.usage import UsageRecord
from calculet_router.recovery import Orphan, add_attempts, find_orphans
from calculet_router.shell.usage import utc

RECOVERY_GRACE_S = 2.0
"""Beyond the lease of a killed router, before its requests are looked for in journals and no longer count as active."""
CODE = "router_lost"
"""Of requests whose router was killed."""
OF_REQUESTS = tuple(f'"{name}"'.encode() for name in (history.REQUEST_ACCEPTED, history.REQUEST_SENT, history.REQUEST_DONE))
OF_ENDS = (f'"{history.REQUEST_DONE}"'.encode(),)
OF_ATTEMPTS = (f'"{history.ATTEMPT_DONE}"'.encode(),)
_decode = msgspec.json.Decoder(Event).decode


def orphans_of(fleet: Fleet, name: str, incarnation: int) -> list[Orphan]:
    """Requests that nobody has accounted for: of earlier routers of this name, and of routers of other names that are no more.
    Those that live have their own journals."""
    journals = [fleet.journal(name), *_ended(fleet, name)]
    orphans = find_orphans(chain.from_iterable(_events(journal, OF_REQUESTS) for journal in journals), incarnation)
    if orphans:
        for journal in fleet.log_dir.glob("router*.jsonl"):  # whoever accounts for another's writes it into its own
            for event in _events(journal, OF_ENDS):
                if event.request is not None and event.event == history.REQUEST_DONE:
                    orphans.pop(event.request, None)
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


def _ended(fleet: Fleet, name: str) -> list[Path]:
    """Journals of other routers that live no more, and for so long that workers have given up on them, too."""
    rested_s = 3 * fleet.config.router.lease_interval_ms / 1000 + RECOVERY_GRACE_S
    found = []
    for lock in fleet.state_dir.glob("router*.lock"):
        journal = fleet.journal(lock.stem)
        with suppress(OSError):
            if lock.stem != name and time.time() - journal.stat().st_mtime > rested_s and lock_holder(lock) is None:
                found.append(journal)
    return found


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
