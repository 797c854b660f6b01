"""Figures as a few plain shapes, drawn by two backends: SVG in the HTML report, and the PDF.

A shape has a role, not a colour: the page's style gives roles their colours in light, dark and print; the PDF has its own table.
Coordinates are points from the upper left corner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape


@dataclass(frozen=True, slots=True)
class Line:
    """From a to b."""

    x1: float
    y1: float
    x2: float
    y2: float
    role: str


@dataclass(frozen=True, slots=True)
class Path:
    """An open line through points."""

    points: tuple[tuple[float, float], ...]
    role: str


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled box; `title` shows when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    role: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    role: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """`anchor`: start, middle or end; y is the baseline."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    role: str = "label"
    size: float = 10.0


Shape = Line | Path | Rect | Dot | Text


@dataclass(slots=True)
class Figure:
    """A drawing with its title and what it says, for people who cannot see it."""

    title: str
    description: str
    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Draw on top."""
        self.shapes += shapes


def svg(figure: Figure) -> str:
    """One SVG element without outer references; roles are classes."""
    parts = [
        f'<svg viewBox="0 0 {figure.width:g} {figure.height:g}" role="img" class="figure" style="max-width:{figure.width:g}px">',
        f"<title>{escape(figure.title)}</title><desc>{escape(figure.description)}</desc>",
    ]
    parts += [_svg_shape(shape) for shape in figure.shapes]
    return "".join([*parts, "</svg>"])


def _svg_shape(shape: Shape) -> str:
    match shape:
        case Line(x1, y1, x2, y2, role):
            return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{role}"/>'
        case Path(points, role):
            coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            return f'<polyline points="{coordinates}" class="{role}"/>'
        case Rect(x, y, width, height, role, title):
            return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{role}">{_tip(title)}</rect>'
        case Dot(x, y, radius, role, title):
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{role}">{_tip(title)}</circle>'
        case Text(x, y, text, anchor, role, size):
            return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{role}" font-size="{size:g}">{escape(text)}</text>'


def _tip(title: str) -> str:
    return f"<title>{escape(title)}</title>" if title else ""


# ---------------------------------------------------------------- scales
@dataclass(frozen=True, slots=True)
class Scale:
    """Values to points; logarithmic where `log`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value is; outside ones stop at the edge."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round values within."""
        if self.log:
            low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if high - low <= 2 else (1,)
            values = [step * 10.0**power for power in range(low, high + 1) for step in steps]
            return [value for value in values if self.low <= value <= self.high]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / wanted
        unit = 10 ** math.floor(math.log10(raw))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step) + 1)]


def linear(values: Sequence[float], begin: float, end: float, zero: bool = False) -> Scale:
    """A scale over finite values with some room; from 0 when `zero`."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(low, 0.0) if zero else low
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low if zero and low == 0 else low - room, high + room, begin, end)


def logarithmic(values: Sequence[float], begin: float, end: float) -> Scale:
    """A logarithmic scale over positive values with some room."""
    positive = [value for value in values if value > 0] or [1.0, 10.0]
    return Scale(min(positive) / 1.25, max(positive) * 1.25, begin, end, log=True)


def number(value: float | None) -> str:
    """Three significant digits without an exponent for usual sizes; a dash where there is nothing."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "unbounded"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
