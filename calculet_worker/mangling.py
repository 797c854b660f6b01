"""What becomes of messages while somebody spoils a link on purpose (`calculet_core.chaos.TroubleFrames`).

A link has two ways, each with a `Mangler`. What it gives back goes in that order, each after its delay. Truncated and corrupt
bodies are made so that they do not decode: a changed byte that still is a message could only be seen with a checksum, which a Unix
socket within one kernel does not need (decision 10).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from calculet_core import wire
from calculet_core.chaos import FrameTrouble, TroubleFrames

NEVER_VALID = b"\xc1"
"""The one byte that MessagePack never uses."""
TRIES = 8
Frames = list[bytes]


class Mangler:
    """One way of a link. Frames are [..., kind, body]."""

    def __init__(self, fault: TroubleFrames, rng: random.Random) -> None:
        self._fault, self._rng = fault, rng
        self._held: Frames | None = None
        self.count = 0
        """Messages that were spoiled."""

    def take(self, frames: Sequence[bytes]) -> list[tuple[float, Frames]]:
        """What goes instead of the message: (seconds later, frames), in order."""
        fault, message = self._fault, list(frames)
        if fault.trouble is FrameTrouble.SLOW:
            self.count += 1
            return [(fault.delay_ms / 1000, message)]
        if self._held is not None:
            held, self._held = self._held, None
            return [(0.0, message), (0.0, held)]
        if len(message) < 2 or self._rng.random() >= fault.rate:
            return [(0.0, message)]
        self.count += 1
        if fault.trouble is FrameTrouble.DUPLICATED:
            return [(0.0, message), (0.0, list(message))]
        if fault.trouble is FrameTrouble.REORDERED:
            self._held = message
            return []
        spoil = self._cut if fault.trouble is FrameTrouble.TRUNCATED else self._garble
        return [(0.0, [*message[:-1], spoil(message[-2], message[-1])])]

    def rest(self) -> list[tuple[float, Frames]]:
        """What is still held when the trouble is over."""
        held, self._held = self._held, None
        return [] if held is None else [(0.0, held)]

    def _cut(self, kind: bytes, body: bytes) -> bytes:
        cut = body[: self._rng.randrange(len(body))] if body else body
        return cut if not _decodes(kind, cut) else NEVER_VALID

    def _garble(self, kind: bytes, body: bytes) -> bytes:
        for _ in range(TRIES if body else 0):
            garbled = bytearray(body)
            for _ in range(1 + len(body) // 64):
                garbled[self._rng.randrange(len(body))] ^= 1 << self._rng.randrange(8)
            if not _decodes(kind, bytes(garbled)):
                return bytes(garbled)
        return NEVER_VALID + body[1:]


def _decodes(kind: bytes, body: bytes) -> bool:
    try:
        wire.decode(kind, body)
    except wire.WireError:
        return False
    return True
