"""Distributed traces: W3C Trace Context in and out, and spans as values. Pure; the exporter is `calculet_core.shell.spans`.

A request's trace is its client's when the client sent a `traceparent`, else the router's own. The router's span, the spans of its
attempts and those of the workers have ids that follow from one another (`child_id`), so that each process can name its parent
without asking, and a request that is sent again shows both attempts under one request.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
MAX_TRACEPARENT = 512
"""Longer ones are not looked at."""


class TraceContext(msgspec.Struct, frozen=True):
    """Where a request stands in a trace. `own`: the span is ours, made for this request; else the client's, only passed on."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool
    parent: str | None = None
    """The client's span, where the span is ours."""
    own: bool = False

    def text(self, span_id: str | None = None) -> str:
        """As a `traceparent`, with another span of the same trace where one is named."""
        return f"00-{self.trace_id}-{span_id or self.span_id}-{'01' if self.sampled else '00'}"


def parse_traceparent(header: bytes | str) -> TraceContext | None:
    """W3C Trace Context, level 2: None for anything that a receiver has to ignore.

    A later version may say more behind the flags; of version 00 nothing may follow.
    """
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    found = _TRACEPARENT.match(text.strip(" \t")) if len(text) <= MAX_TRACEPARENT else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def child_id(*parts: str | int) -> str:
    """A span id that follows from what it belongs to; never all zeros."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).hexdigest()
    return digest if digest.strip("0") else "1".rjust(16, "0")


def chosen(trace_id: str, ratio: float) -> bool:
    """Whether a trace of our own is recorded: decided by its id, as OpenTelemetry's TraceIdRatioBased does, so that all agree."""
    return int(trace_id[16:], 16) < round(ratio * (1 << 64))


@dataclass(frozen=True, slots=True)
class Span:
    """One finished span; times are CLOCK_MONOTONIC."""

    name: str
    trace_id: str
    span_id: str
    parent: str | None
    kind: Kind
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str | None = None
    """What went wrong; None: nothing."""


def present(**attributes: Attribute | None) -> dict[str, Attribute]:
    """Attributes that there is something to say about; `_` in a name becomes `.`, `__` stays one `_`."""
    return {
        name.replace("__", "\0").replace("_", ".").replace("\0", "_"): value
        for name, value in attributes.items()
        if value is not None
    }
