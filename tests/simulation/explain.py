"""A run as a story: one line for each thing that happened, for a person who wants to know why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from calculet_core import wire
from calculet_core.history import Event
from calculet_core.ids import request_id_text
from simulation.timeline import START_NS


class Story:
    """A tracer that keeps or prints lines; `about` limits it to lines in which one of the words occurs."""

    def __init__(self, say: Callable[[str], None], about: tuple[str, ...] = (), from_s: float = 0.0) -> None:
        self._say, self._about, self._from_s = say, about, from_s
        self._clock: Callable[[], int] = lambda: 0

    def follow(self, clock: Callable[[], int]) -> None:
        """Whose time it is."""
        self._clock = clock

    def __call__(self, where: str, what: str, detail: Any) -> None:
        seconds = (self._clock() - START_NS) / 1e9
        if seconds < self._from_s:
            return
        line = f"{seconds:11.6f}  {where:<11} {what:<24} {_words(detail)}".rstrip()
        if not self._about or "VIOLATION" in line or any(word in line for word in self._about):
            self._say(line)


def _words(detail: Any) -> str:
    if isinstance(detail, Event):
        return _event(detail)
    if isinstance(detail, wire.FleetView):
        boards = (f"{b.board}/{b.epoch} {b.state}{' draining' if b.draining else ''} g{b.generation}" for b in detail.boards)
        return f"v{detail.version}: " + ", ".join(boards)
    if isinstance(detail, msgspec.Struct):
        fields = {name: getattr(detail, name) for name in detail.__struct_fields__ if name not in ("package", "digest", "alias")}
        return f"{type(detail).__name__} " + " ".join(f"{name}={value}" for name, value in fields.items())
    return str(detail)


def _event(event: Event) -> str:
    parts = []
    if event.request is not None:
        parts.append(f"{request_id_text(event.request)}.{event.attempt}")
    for name in ("board", "epoch", "generation", "job"):
        if (value := getattr(event, name)) is not None:
            parts.append(f"{name}={value}")
    return " ".join([*parts, *(f"{name}={value}" for name, value in event.data.items() if value is not None)])
