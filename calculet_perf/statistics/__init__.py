"""What samples say, and how surely (acceptance §9). Pure: numpy arrays in, frozen records out, randomness by seed.

`quantiles` ranks and exact intervals, `summary` one cell, `bootstrap` resampling, `series` dependence in time, `throughput` the
steady window, `compare` two builds, `holm` several questions at once.

A failed request counts as infinitely slow in every quantile: a server that drops its slow requests does not become fast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
"""Samples, float64 [n]; +inf is a failure."""
