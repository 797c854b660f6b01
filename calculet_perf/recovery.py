"""Resets and reconfigurations of boards and how long each took to serve again, from journals (acceptance §16)."""

from __future__ import annotations

from collections.abc import Iterable

from calculet_core.history import BOARD_GENERATION, BOARD_RESET, FLEET_WORKER_STARTED, Event
from calculet_perf.evidence import Reset


def resets(events: Iterable[Event]) -> list[Reset]:
    """Every reset, and every configuration after a board's first, with the time until it was Ready.

    Args:
        events: of all processes of the fleet, by time.
    """
    found: list[Reset] = []
    waiting: dict[str, list[int]] = {}
    served: set[str] = set()
    for event in events:
        board, state = event.board or "", event.data.get("state")
        if event.event == BOARD_RESET:
            waiting.setdefault(board, []).append(len(found))
            found.append(Reset(board=board, at_ns=event.t, kind="reset", recovery_ms=None, source="journal"))
        elif event.event == FLEET_WORKER_STARTED and board in served and board not in waiting:
            waiting.setdefault(board, []).append(len(found))
            found.append(Reset(board=board, at_ns=event.t, kind="restart", recovery_ms=None, source="journal"))
        elif event.event == BOARD_GENERATION and state == "CONFIGURING" and board in served and board not in waiting:
            waiting.setdefault(board, []).append(len(found))
            found.append(Reset(board=board, at_ns=event.t, kind="reconfigure", recovery_ms=None, source="journal"))
        elif event.event == BOARD_GENERATION and state == "READY":
            served.add(board)
            for index in waiting.pop(board, []):
                reset = found[index]
                found[index] = Reset(
                    board=board, at_ns=reset.at_ns, kind=reset.kind, recovery_ms=(event.t - reset.at_ns) / 1e6, source="journal"
                )
    return found
