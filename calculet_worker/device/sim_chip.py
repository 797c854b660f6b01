"""A simulated chip's warmth: busy share -> power -> temperature -> throttling, with hysteresis."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PowerMode:
    """Of one chip. Profiles state times at 1000 MHz."""

    frequency_mhz: float
    idle_w: float
    busy_w: float


POWER_MODES = {
    "eco": PowerMode(800.0, 5.0, 16.0),
    "balanced": PowerMode(1000.0, 6.0, 25.0),
    "performance": PowerMode(1200.0, 7.0, 38.0),
}
NOMINAL_MHZ, THROTTLED_MHZ = 1000.0, 600.0
THROTTLE_C, RECOVERED_C = 85.0, 80.0
KELVIN_PER_WATT, WARM_UP_S = 1.4, 60.0
BEHIND_C = 2.0
"""Each chip gets the air that the one before it has warmed."""


class Chip:
    """First-order: the temperature nears what its power sustains, 63 % of the way in `WARM_UP_S`."""

    __slots__ = ("_ambient_c", "_mode", "power_w", "temperature_c", "throttled")

    def __init__(self, ambient_c: float, mode: PowerMode) -> None:
        self._ambient_c, self._mode = ambient_c, mode
        self.power_w = mode.idle_w
        self.temperature_c = ambient_c + KELVIN_PER_WATT * mode.idle_w
        self.throttled = False

    @property
    def frequency_mhz(self) -> float:
        """Now."""
        return THROTTLED_MHZ if self.throttled else self._mode.frequency_mhz

    def live(self, seconds: float, busy: float) -> None:
        """So many seconds pass, a share `busy` of them computing."""
        mode = self._mode
        self.power_w = mode.idle_w + (mode.busy_w - mode.idle_w) * busy * self.frequency_mhz / mode.frequency_mhz
        target = self._ambient_c + KELVIN_PER_WATT * self.power_w
        self.temperature_c = target + (self.temperature_c - target) * math.exp(-seconds / WARM_UP_S)
        self.throttled = self.temperature_c >= (RECOVERED_C if self.throttled else THROTTLE_C)
