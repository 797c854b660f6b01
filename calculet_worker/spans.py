"""A worker's spans: `serve` for each attempt, with `queue`, `prefill` and `decode` below it and, if wanted, each job below these.

Made of what the engine records anyway. Pure: events in, finished spans out. Only attempts that came with a sampled `traceparent`
are followed, and never more than `most` of them: the oldest is given up (one that never ends is not remembered for ever).
"""

from __future__ import annotations

from dataclasses import dataclass

from calculet_core import history
from calculet_core.history import Event
from calculet_core.ids import request_id_text
from calculet_core.jobs import JobKind
from calculet_core.tracing import Attribute, Span, TraceContext, child_id, parse_traceparent, present
from calculet_core.wire import Submit
from calculet_worker.actions import TraceSteps

Key = tuple[int, int]


@dataclass(slots=True)
class _Attempt:
    context: TraceContext
    span_id: str
    start_ns: int
    admitted_ns: int | None = None
    first_ns: int | None = None
    lane: int | None = None


class WorkerSpans:
    """Of one board's life."""

    def __init__(self, board: str, epoch: int, most: int, jobs: bool = False) -> None:
        self._board, self._epoch, self._most, self._jobs = board, epoch, most, jobs
        self._open: dict[Key, _Attempt] = {}
        self._ended: dict[Key, _Attempt] = {}
        """Since the last job: the engine tells of a job after what came of it."""

    @property
    def open(self) -> int:
        """Attempts that have not ended."""
        return len(self._open)

    def arrived(self, message: Submit, now_ns: int) -> bool:
        """A submission came; one that its router does not trace is not followed. True when another had to be given up for it."""
        context = parse_traceparent(message.traceparent or "")
        if context is None or not context.sampled or message.epoch != self._epoch:
            return False
        full = len(self._open) >= self._most
        if full:
            del self._open[next(iter(self._open))]
        span_id = child_id(context.span_id, self._board, self._epoch)
        self._open.setdefault((message.request_id, message.attempt), _Attempt(context, span_id, now_ns))
        return full

    def trace_of(self, event: Event) -> str | None:
        """The trace that an event belongs to, for journals; ask before `see`."""
        attempt = self._open.get((event.request or 0, event.attempt or 0))
        return None if attempt is None else attempt.context.trace_id

    def see(self, event: Event) -> list[Span]:
        """The spans that this event has ended."""
        if event.request is None or event.attempt is None:
            return []
        key = (event.request, event.attempt)
        attempt = self._open.get(key)
        if attempt is None:
            return []
        if event.event == history.ATTEMPT_ADMITTED:
            attempt.admitted_ns, attempt.lane = event.t, event.data.get("lane")
            return [self._phase(attempt, "queue", attempt.start_ns, event.t, present(calculet_queued=event.data.get("queued")))]
        if event.event == history.ATTEMPT_TOKENS and attempt.first_ns is None and attempt.admitted_ns is not None:
            attempt.first_ns = event.t
            return [self._phase(attempt, "prefill", attempt.admitted_ns, event.t, {})]
        if event.event == history.ATTEMPT_DONE:
            del self._open[key]
            if self._jobs:
                self._ended[key] = attempt
            return self._done(attempt, event)
        return []

    def job(self, action: TraceSteps) -> list[Span]:
        """A span for each followed sequence's part of a device job, below the phase that it belongs to."""
        end_ns = action.logits_ready_ns + (action.sampling_ns or 0)
        phase = "decode" if action.kind is JobKind.DECODE else "prefill"
        found = []
        for row in action.rows:
            key = (row.key.request_id, row.key.attempt)
            attempt = self._open.get(key) or self._ended.get(key)
            if attempt is None:
                continue
            parent = child_id(attempt.span_id, phase)
            attributes = present(
                calculet_job=action.job_id, calculet_step=row.step, calculet_batch_compiled=action.compiled,
                calculet_batch_active=len(action.rows), calculet_engine=action.engine.name.lower(),
                calculet_kv_before=row.kv_before, calculet_kv_after=row.kv_after, calculet_status=action.status,
            )  # fmt: skip
            error = None if action.status == "done" else action.status
            span_id = child_id(attempt.span_id, "job", action.job_id)
            found.append(
                Span(
                    f"job {phase}",
                    attempt.context.trace_id,
                    span_id,
                    parent,
                    "internal",
                    action.built_ns,
                    end_ns,
                    attributes,
                    error,
                )
            )
        self._ended.clear()
        return found

    def _phase(self, attempt: _Attempt, name: str, start_ns: int, end_ns: int, attributes: dict[str, Attribute]) -> Span:
        span_id = child_id(attempt.span_id, name)
        return Span(name, attempt.context.trace_id, span_id, attempt.span_id, "internal", start_ns, end_ns, attributes)

    def _done(self, attempt: _Attempt, event: Event) -> list[Span]:
        data = event.data
        error = str(data.get("code") or data["outcome"]) if data["outcome"] != "completed" else None
        found = []
        if attempt.first_ns is not None:
            found.append(self._phase(attempt, "decode", attempt.first_ns, event.t, {}))
        elif attempt.admitted_ns is not None:
            found.append(self._phase(attempt, "prefill", attempt.admitted_ns, event.t, {}))
        else:
            found.append(self._phase(attempt, "queue", attempt.start_ns, event.t, {}))
        attributes = present(
            calculet_request__id=request_id_text(event.request or 0), calculet_attempt=event.attempt, calculet_board=self._board,
            calculet_epoch=self._epoch, calculet_generation=event.generation, calculet_lane=attempt.lane,
            calculet_outcome=data["outcome"], gen__ai_usage_input__tokens=data.get("prompt_tokens"),
            gen__ai_usage_output__tokens=data.get("tokens"), error_type=error,
        )  # fmt: skip
        context = attempt.context
        found.append(
            Span(
                "serve", context.trace_id, attempt.span_id, context.span_id, "server", attempt.start_ns, event.t, attributes, error
            )
        )
        return found
