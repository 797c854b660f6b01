"""Several questions at once: with twenty gated numbers, one in twenty false alarms is one alarm in every comparison (Holm 1979)."""

from __future__ import annotations

from collections.abc import Sequence


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the given order; each at most 1."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    result, floor = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - place) * p_values[index]))
        result[index] = floor
    return result
