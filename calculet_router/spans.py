"""A router's spans, made of the events that go into its journal: one span a call, one below it for each attempt of each choice.
Calls that were refused at the door are in no journal; they get their one span from `refused_span`.

Pure: events in, finished spans out. Only calls that the router traces have `span` in their `request.accepted`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from calculet_core import history
from calculet_core.errors import CalculetError
from calculet_core.history import Event
from calculet_core.ids import request_id_text
from calculet_core.tracing import Span, TraceContext, child_id, present


@dataclass(slots=True)
class _Attempt:
    number: int
    board: str | None
    epoch: int | None
    generation: int | None
    start_ns: int


@dataclass(slots=True)
class _Call:
    """Of one HTTP request; its choices are requests of their own."""

    trace_id: str
    span_id: str
    parent: str | None
    start_ns: int
    request: int
    model: str
    tenant: str
    label: str | None
    open: set[int] = field(default_factory=set)
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens: int = 0
    choices: int = 0
    sent: int = 0
    outcome: str = ""
    error: str | None = None


class RouterSpans:
    """`see` every event in order."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}
        self._of: dict[int, _Call] = {}

    @property
    def open(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def see(self, event: Event) -> list[Span]:
        """The spans that this event has ended."""
        request = event.request
        if event.event == history.REQUEST_ACCEPTED:
            self._accepted(event)
            return []
        call = self._of.get(request) if request is not None else None
        if call is None or request is None:
            return []
        if event.event == history.REQUEST_SENT:
            call.sent += 1
            call.attempts[request] = _Attempt(event.attempt or 0, event.board, event.epoch, event.generation, event.t)
        elif event.event == history.REQUEST_TROUBLE:
            return self._attempt_over(call, request, event.t, str(event.data.get("code") or event.data.get("reason")))
        elif event.event == history.REQUEST_MOVED:
            return self._attempt_over(call, request, event.t, "moved")
        elif event.event == history.REQUEST_DONE:
            return self._done(call, request, event)
        return []

    def _accepted(self, event: Event) -> None:
        data = event.data
        if "span" not in data or event.request is None:
            return
        call = self._calls.get(data["span"])
        if call is None:
            call = self._calls[data["span"]] = _Call(
                data["trace"], data["span"], data.get("parent"), event.t, event.request, data["model"], data["tenant"],
                data.get("label"),
            )  # fmt: skip
        call.choices += 1
        call.open.add(event.request)
        self._of[event.request] = call

    def _attempt_over(self, call: _Call, request: int, now_ns: int, error: str | None) -> list[Span]:
        attempt = call.attempts.pop(request, None)
        if attempt is None:
            return []
        attributes = present(
            calculet_request__id=request_id_text(request), calculet_attempt=attempt.number, calculet_board=attempt.board,
            calculet_epoch=attempt.epoch, calculet_generation=attempt.generation, error_type=error,
        )  # fmt: skip
        span_id = attempt_span(call.span_id, request, attempt.number)
        return [Span("attempt", call.trace_id, span_id, call.span_id, "client", attempt.start_ns, now_ns, attributes, error)]

    def _done(self, call: _Call, request: int, event: Event) -> list[Span]:
        data: dict[str, Any] = event.data
        error = str(data.get("code") or data["outcome"]) if data["outcome"] != "completed" else None
        found = self._attempt_over(call, request, event.t, error)
        call.prompt_tokens = max(call.prompt_tokens, data["prompt_tokens"])
        call.tokens += data["tokens"]
        call.outcome, call.error = data["outcome"], call.error or error
        call.open.discard(request)
        del self._of[request]
        if not call.open:
            del self._calls[call.span_id]
            found.append(self._whole(call, event.t))
        return found

    def _whole(self, call: _Call, now_ns: int) -> Span:
        attributes = present(
            gen__ai_request_model=call.model, gen__ai_usage_input__tokens=call.prompt_tokens,
            gen__ai_usage_output__tokens=call.tokens, calculet_request__id=request_id_text(call.request),
            calculet_tenant=call.tenant, calculet_label=call.label,
            calculet_choices=call.choices, calculet_attempts=call.sent, calculet_outcome=call.outcome, error_type=call.error,
        )  # fmt: skip
        return Span("request", call.trace_id, call.span_id, call.parent, "server", call.start_ns, now_ns, attributes, call.error)


def refused_span(
    trace: TraceContext, error: CalculetError, start_ns: int, end_ns: int, model: str | None, tenant: str | None, label: str | None
) -> Span:
    """Of a call that was refused before it became one: its body, its key, its model or a limit. Times are CLOCK_MONOTONIC."""
    attributes = present(
        http_response_status__code=error.http_status, gen__ai_request_model=model, calculet_tenant=tenant, calculet_label=label,
        calculet_outcome="refused", calculet_param=error.param, error_type=error.code,
    )  # fmt: skip
    return Span("request", trace.trace_id, trace.span_id, trace.parent, "server", start_ns, end_ns, attributes, error.code)


def attempt_span(span_id: str, request: int, attempt: int) -> str:
    """The span of an attempt, which the worker's spans have as their parent."""
    return child_id(span_id, request, attempt)
