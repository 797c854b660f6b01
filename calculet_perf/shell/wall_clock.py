"""How far this host's wall clock is from its time source, as the kernel knows (acceptance §2.1). Wall clocks only correlate
hosts here."""

from __future__ import annotations

import ctypes

_NANOSECONDS, _UNSYNCHRONISED, _CLOCK_ERROR = 0x2000, 0x0040, 5
_libc = ctypes.CDLL(None, use_errno=True)


class _Timex(ctypes.Structure):
    """The begin of `struct timex`; the rest is room for whatever the kernel writes."""

    _fields_ = [
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 256),
    ]  # fmt: skip


def ntp_offset_ms() -> float | None:
    """The kernel's offset from its time source; None: the clock is not synchronised, or the kernel does not tell."""
    timex = _Timex()
    timex.modes = 0  # only read
    state = int(_libc.adjtimex(ctypes.byref(timex)))
    if state < 0 or state == _CLOCK_ERROR or timex.status & _UNSYNCHRONISED:
        return None
    return float(timex.offset) / (1e6 if timex.status & _NANOSECONDS else 1e3)
