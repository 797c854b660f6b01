"""Bfloat16, which NumPy does not have: the upper half of a float32's bits, carried as uint16.

A device may return logits in either form (`BatchProfile.logit_dtype`); everything behind the executor sees float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = np.dtype(np.uint16)
"""How an array of bfloat16 arrives."""


def widen(bits: NDArray[np.uint16], into: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The same numbers as float32, exactly; `into` is a float32 array of the same shape to use."""
    found: NDArray[np.uint32] = np.empty(bits.shape, np.uint32) if into is None else into.view(np.uint32)
    np.left_shift(bits, 16, out=found, dtype=np.uint32, casting="unsafe")
    return found.view(np.float32)


def narrow(numbers: Any) -> NDArray[np.uint16]:
    """Float32 as bfloat16 bits, rounded to the nearest, ties to even; NaN stays NaN."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    bits = numbers.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    found: NDArray[np.uint16] = np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)
    return found


class Widener:
    """Keeps a float32 array for each of a device's output buffers: a lease has both to itself."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[int, NDArray[np.float32]] = {}

    def widen(self, buffer_id: int, bits: NDArray[np.uint16]) -> NDArray[np.float32]:
        """`widen` into the buffer's own array, which is read-only to others; valid until the next completion of that buffer."""
        rows, size = bits.shape
        kept = self._kept.get(buffer_id)
        if kept is None or kept.shape[0] < rows or kept.shape[1] != size:
            kept = self._kept[buffer_id] = np.empty((rows, size), np.float32)
        found = widen(bits, kept[:rows])
        found.flags.writeable = False
        return found
