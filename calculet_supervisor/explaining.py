"""One request's story, told from the journals of router, workers and supervisor: what was decided when, by whom, and why.

Journals hold no prompt and no answer, so neither does the story. What happened meanwhile to the boards that had the request (a
fault, a reset, a swap) is part of it. Pure: events in, lines out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from calculet_core import history
from calculet_core.clock import MS
from calculet_core.history import Event
from calculet_core.ids import request_id_text

AFTER_NS = 1_000 * MS
"""What boards do so long after the end still belongs to the story."""
OF_BOARDS = frozenset(
    {
        history.BOARD_GENERATION, history.BOARD_FAULT, history.BOARD_RESET, history.BOARD_GOLDEN, history.BOARD_LANE_LOST,
    }
)  # fmt: skip
OF_FLEET = frozenset(
    {
        history.FLEET_WORKER_STARTED, history.FLEET_WORKER_EXITED, history.FLEET_WORKER_KILLED, history.FLEET_RESET_GRANTED,
        history.FLEET_RESET_DENIED, history.FLEET_ADMIN, history.FLEET_CONDEMNED, history.FLEET_PROBATION,
        history.FLEET_QUARANTINED, history.FLEET_OVERRULED, history.FLEET_SWITCH, history.FLEET_CONFIGURED,
        history.FLEET_UNUSABLE,
    }
)  # fmt: skip
EVERYWHERE = frozenset({history.FLEET_ROLLOUT, history.FLEET_BREAKER})
"""Events that concern every board."""
OF_CHAOS = frozenset({history.CHAOS_FIRED, history.CHAOS_HEALED})
"""Faults on purpose: those of a board concern it, those of a router or the supervisor everybody."""


@dataclass(frozen=True, slots=True)
class Line:
    """`at_ns` after the request was accepted (CLOCK_MONOTONIC before that is unknown)."""

    at_ns: int
    who: str
    text: str
    event: Event


@dataclass(frozen=True, slots=True)
class Story:
    """Lines in time order, and one sentence that sums them up."""

    request: int
    summary: str
    lines: tuple[Line, ...]


def explain(request: int, own: Sequence[Event], others: Iterable[Event]) -> Story | None:
    """`own` are the request's events, `others` any events of boards and fleet; None when nothing is known of the request."""
    own = sorted(own, key=lambda event: event.t)
    if not own:
        return None
    start, end = own[0].t, own[-1].t + AFTER_NS
    boards = {event.board for event in own if event.board is not None}
    around = [event for event in others if start <= event.t <= end and _concerns(event, boards)]
    told = sorted((*own, *around), key=lambda event: event.t)
    lines = [Line(event.t - start, _who(event), _text(event), event) for event in told]
    return Story(request, _summary(request, own), tuple(lines))


def _concerns(event: Event, boards: set[str]) -> bool:
    if event.request is not None:
        return False
    if event.event in OF_CHAOS:
        return event.board is None or event.board in boards
    return event.event in EVERYWHERE or (event.board in boards and (event.event in OF_BOARDS or event.event in OF_FLEET))


def _who(event: Event) -> str:
    if event.event.startswith("request."):
        return "router"
    if event.event in OF_CHAOS:
        return str(event.data.get("process"))
    return "supervisor" if event.event.startswith("fleet.") else event.board or "worker"


def _summary(request: int, own: Sequence[Event]) -> str:
    accepted = next((event for event in own if event.event == history.REQUEST_ACCEPTED), None)
    done = next((event for event in own if event.event == history.REQUEST_DONE), None)
    sent = [event for event in own if event.event == history.REQUEST_SENT]
    what = f"{request_id_text(request)}"
    if accepted is not None:
        what += f", model {accepted.data.get('model')}, tenant {accepted.data.get('tenant')}"
        what += f", trace {accepted.data['trace']}" if accepted.data.get("trace") else ""
    tries = f"{len(sent)} attempt{'s' if len(sent) != 1 else ''} ({', '.join(str(event.board) for event in sent)})"
    if done is None:
        return f"{what}: not ended as far as the journals go; {tries}"
    took = f" after {(done.t - own[0].t) / MS:.1f} ms"
    code = f" ({done.data['code']})" if done.data.get("code") else ""
    return f"{what}: {done.data.get('outcome')}{code}{took}, {done.data.get('tokens')} tokens; {tries}"


def _text(event: Event) -> str:
    teller = _TEXTS.get(event.event)
    return teller(event, event.data) if teller is not None else f"{event.event} {_rest(event.data)}".rstrip()


def _rest(data: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in data.items() if value is not None)


def _admitted(event: Event, data: dict[str, Any]) -> str:
    waited = data.get("wait_ns")
    wait = f" after waiting {waited / MS:.1f} ms" if waited is not None else ""
    size = f"prompt {data.get('prompt_tokens')}, up to {data.get('max_new_tokens')} tokens"
    return f"admitted to lane {data.get('lane')}{wait}: {size}"


def _done(event: Event, data: dict[str, Any]) -> str:
    parts = [str(data.get("outcome"))]
    parts += [f"{name} {data[name]}" for name in ("code", "finish", "reason") if data.get(name)]
    parts += [f"{data[name]} {name}" for name in ("tokens",) if data.get(name) is not None]
    if data.get("suspected_poison"):
        parts.append("suspected of killing its workers")
    return f"ended: {', '.join(parts)}"


def _trouble(event: Event, data: dict[str, Any]) -> str:
    why = f"{data.get('reason')} ({data.get('code')}: {data.get('message')})"
    return f"attempt {event.attempt} on {event.board} came to nothing: {why}"


def _sent(event: Event, data: dict[str, Any]) -> str:
    return f"sent to {event.board} (attempt {event.attempt}, epoch {event.epoch}, generation {event.generation})"


def _moved(event: Event, data: dict[str, Any]) -> str:
    was, now = str(data.get("was"))[:12], str(data.get("digest"))[:12]
    return f"begins anew with artifact {now}: no board serves {was} to it"


def _golden(event: Event, data: dict[str, Any]) -> str:
    return "golden cases passed" if data.get("passed") else f"golden cases failed: {data.get('detail')}"


def _exited(event: Event, data: dict[str, Any]) -> str:
    signal, code = data.get("signal"), data.get("code")
    how = f"killed by signal {signal}" if signal else "the worker ended" if code is None else f"the worker ended with code {code}"
    if data.get("reason"):
        how += f" ({data['reason']})"
    if data.get("commanded"):
        return f"{how}, as it was told"
    if data.get("quarantined"):
        return f"{how}; not started again: its restart budget is spent"
    wait = data.get("retry_in_ms")
    return f"{how}; started again" + (f" in {wait} ms" if wait else "")


def _started(event: Event, data: dict[str, Any]) -> str:
    return f"the worker runs as pid {data.get('pid')}" + (", started by itself" if data.get("automatic") else "")


def _reset_answer(event: Event, data: dict[str, Any]) -> str:
    fault = f" after {data['fault']}" if data.get("fault") else ""
    if data.get("reason"):
        return f"no reset{fault}: {data['reason']}"
    return f"a reset{fault}; {data.get('left')} left in the budget"


def _admin(event: Event, data: dict[str, Any]) -> str:
    detail = f" ({data['detail']})" if data.get("detail") else ""
    return f"{data.get('verb')} by uid {data.get('uid')}{detail}"


def _configured(event: Event, data: dict[str, Any]) -> str:
    if "changes" not in data:
        who = f"router {data['router']} is replaced" if "router" in data else "restarted"
        return f"{who} for configuration version {data.get('version')}" if data.get("version") else who
    by = f" by uid {data['uid']}" if data.get("uid") is not None else ""
    return f"configuration version {data.get('version')} was applied{by}: {', '.join(data['changes'])}"


def _unusable(event: Event, data: dict[str, Any]) -> str:
    if data.get("over"):
        return f"the {data.get('what')} is mended, and is used"
    return f"the {data.get('what')} cannot be used, what was in force goes on: {data.get('reason')}"


def _chaos(event: Event, data: dict[str, Any]) -> str:
    over = " is over" if event.event == history.CHAOS_HEALED else ""
    count = f", {data['count']} messages were spoiled" if data.get("count") is not None else ""
    return f"on purpose: {data.get('fault')}{over}{count} (order {data.get('order')})"


def _waits(event: Event, data: dict[str, Any]) -> str:
    if data.get("for") == "link":
        return f"waits a moment: a board that serves {data.get('model')} is about to be reached"
    return f"waits for its turn: another model has the board of {data.get('model')}"


_TEXTS: dict[str, Callable[[Event, dict[str, Any]], str]] = {
    history.REQUEST_ACCEPTED: lambda event, data: f"accepted: {_rest(data)}",
    history.REQUEST_SENT: _sent,
    history.REQUEST_TROUBLE: _trouble,
    history.REQUEST_MOVED: _moved,
    history.REQUEST_WAITING: _waits,
    history.REQUEST_TOKENS: lambda event, data: f"{data.get('n')} tokens were passed on",
    history.REQUEST_DONE: _done,
    history.ATTEMPT_ADMITTED: _admitted,
    history.ATTEMPT_TOKENS: lambda event, data: f"{data.get('n')} tokens generated",
    history.ATTEMPT_DONE: _done,
    history.BOARD_LANE_BOUND: lambda event, data: f"lane {data.get('lane')} is its own",
    history.BOARD_LANE_FREE: lambda event, data: f"lane {data.get('lane')} is free again",
    history.BOARD_LANE_LOST: lambda event, data: f"lane {data.get('lane')} is lost until the generation ends",
    history.BOARD_GENERATION: lambda event, data: f"generation {event.generation} is {data.get('state')}",
    history.BOARD_FAULT: lambda event, data: f"fault: {data.get('kind')}: {data.get('detail')}",
    history.BOARD_RESET: lambda event, data: f"the board was reset (rc {data.get('rc')})",
    history.BOARD_GOLDEN: _golden,
    history.FLEET_WORKER_EXITED: _exited,
    history.FLEET_WORKER_STARTED: _started,
    history.FLEET_WORKER_ADOPTED: lambda event, data: f"the worker, pid {data.get('pid')}, was found alive",
    history.FLEET_WORKER_KILLED: lambda event, data: f"the worker gets {data.get('signal')}: {data.get('reason')}",
    history.FLEET_RESET_GRANTED: _reset_answer,
    history.FLEET_RESET_DENIED: _reset_answer,
    history.FLEET_ADMIN: _admin,
    history.FLEET_SWITCH: lambda event, data: f"turn of {data.get('alias')} after {data.get('was')}: {data.get('reason')}",
    history.FLEET_CONFIGURED: _configured,
    history.FLEET_UNUSABLE: _unusable,
    history.CHAOS_FIRED: _chaos,
    history.CHAOS_HEALED: _chaos,
    history.FLEET_ROLLOUT: lambda event, data: f"rollout {data.get('rollout')} of {data.get('alias')}: {data.get('text')}",
}  # fmt: skip


def words(event: Event) -> str:
    """Any event in words, for `calculet events`."""
    return _text(event)
