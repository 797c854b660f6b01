"""Server-sent events out of the bytes of a stream, wherever reads cut them."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20


class EventTooLarge(Exception):
    """An event without end: the stream is not server-sent events."""


class EventParser:
    """Incremental; `feed` gives the payloads (`data:` lines joined by a newline) of the events that the bytes completed."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that are complete now. Comments and other fields are dropped.

        Raises:
            EventTooLarge: more than 16 MiB without the end of an event.
        """
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        parts = data.split(b"\n\n")
        self._rest = rest = parts.pop()
        if len(rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"no end of an event in {len(rest)} bytes")
        found = []
        for part in parts:
            if part.startswith(b"data: ") and b"\n" not in part:
                found.append(part[6:])
            else:
                lines = [line[5:].removeprefix(b" ") for line in part.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    found.append(b"\n".join(lines))
        return found

    @property
    def pending(self) -> bool:
        """Bytes of an event that has not ended."""
        return bool(self._rest.strip())
