"""What the journals of a fleet's processes add to a run's evidence (acceptance §14.1, §16): resets and reconfigurations with the
time until the board served again, workers that died, and promises that the fleet's history shows broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from calculet_core.history import (
    BOARD_GENERATION,
    BOARD_RESET,
    FLEET_ROLLOUT,
    FLEET_WORKER_EXITED,
    FLEET_WORKER_KILLED,
    FLEET_WORKER_STARTED,
    Event,
    check,
)
from calculet_core.states.rollout import ROLLOUT, RolloutState
from calculet_perf.evidence import Reset, Swaps


@dataclass(frozen=True, slots=True)
class History:
    """Of the time of a run; promises are of all that the journals hold."""

    resets: list[Reset]
    deaths: list[str]
    """Workers that ended without being told to, or were killed for hanging."""
    broken: list[str]
    swaps: Swaps


def history(events: Sequence[Event], begin_wall: float | None, end_wall: float | None) -> History:
    """Read journals.

    Args:
        events: of all processes of the fleet, by time.
        begin_wall: when the run began and ended, UTC seconds; None: open. Clocks of two hosts may disagree by a second.
    """

    def within(event: Event) -> bool:
        if event.wall is None:
            return True
        return (begin_wall is None or event.wall >= begin_wall - 1) and (end_wall is None or event.wall <= end_wall + 1)

    during = {id(event) for event in events if within(event)}
    times = {(event.board or "", event.t) for event in events if id(event) in during}
    return History(
        resets=[reset for reset in resets(events) if (reset.board, reset.at_ns) in times],
        deaths=[text for event in events if id(event) in during and (text := _death(event))],
        broken=[f"{violation.rule}: {violation.message}" for violation in check(events, require_done=False)],
        swaps=swaps([event for event in events if id(event) in during]),
    )


def swaps(events: Iterable[Event]) -> Swaps:
    """What became of every rollout of which the events tell anything, by its last word."""
    verbs: dict[str, str] = {}
    states: dict[str, RolloutState] = {}
    for event in events:
        if event.event == FLEET_ROLLOUT:
            name = str(event.data.get("rollout"))
            verbs[name] = str(event.data.get("verb"))
            states[name] = RolloutState[str(event.data.get("state"))]
    done = [name for name, state in states.items() if state is RolloutState.DONE]
    back = [name for name, state in states.items() if state is RolloutState.ROLLED_BACK]
    return Swaps(
        loads=sum(verbs[name] == "load" for name in done),
        rollbacks=len(back) + sum(verbs[name] == "rollback" for name in done),
        refused=sum(state is RolloutState.REFUSED for state in states.values()),
        unfinished=[f"rollout {name}: {state.name}" for name, state in states.items() if state not in ROLLOUT.terminal],
    )


def _death(event: Event) -> str | None:
    if event.event == FLEET_WORKER_KILLED:
        return f"{event.board}: killed: {event.data.get('reason')}"
    if event.event == FLEET_WORKER_EXITED and not event.data.get("commanded"):
        code, signal = event.data.get("code"), event.data.get("signal")
        return f"{event.board}: the worker ended by itself: " + (f"signal {signal}" if signal else f"code {code}")
    return None


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
