"""The worker's side of tracing: what arrives and what the engine records becomes spans, and journals name the trace."""

from __future__ import annotations

from calculet_core.config import TracingConfig
from calculet_core.history import Event
from calculet_core.shell.spans import SpanSender, open_sender
from calculet_core.wire import Submit
from calculet_worker.actions import TraceSteps
from calculet_worker.spans import WorkerSpans


class Spans:
    """Of one board's life."""

    def __init__(self, sender: SpanSender, config: TracingConfig, board: str, epoch: int) -> None:
        self._sender = sender
        self._spans = WorkerSpans(board, epoch, config.max_queue, config.jobs)

    def arrived(self, message: Submit, now_ns: int) -> None:
        """A submission that its router traces."""
        if self._spans.arrived(message, now_ns):
            SpanSender.lost_by_process += 1

    def recorded(self, event: Event) -> None:
        """What the engine recorded; an attempt's events get the id of its trace."""
        if event.request is None:
            return
        if (trace := self._spans.trace_of(event)) is not None:
            event.data["trace"] = trace
            self._sender.add(self._spans.see(event))

    def steps(self, action: TraceSteps) -> None:
        """A device job with the sequences in it."""
        self._sender.add(self._spans.job(action))

    def close(self) -> None:
        """Send what is left."""
        self._sender.close()


def open_spans(config: TracingConfig, board: str, epoch: int) -> Spans | None:
    """None while tracing is off.

    Raises:
        ConfigError: the extra is not installed.
    """
    sender = open_sender(config, "calculet-worker", **{"service.instance.id": f"{board}/{epoch}"})
    return None if sender is None else Spans(sender, config, board, epoch)
