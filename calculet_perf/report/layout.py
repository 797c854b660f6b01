"""What a report consists of before it is drawn: sections of words, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from calculet_perf.comparison import CellDelta
from calculet_perf.report.drawing import Figure, number
from calculet_perf.report.model import CellReport

MOST_LINES = 200
"""Lines of one table in HTML and PDF; `report.json` has all of them, and the section says so."""
WORDS = {
    "pass": "passed",
    "fail": "FAILED",
    "insufficient_evidence": "not shown",
    "not_asked": "not asked",
    "undecided": "undecided",
    "better": "better",
    "worse": "worse",
}
"""Results in words, for a table's first column."""


@dataclass(frozen=True, slots=True)
class Table:
    """`numeric`: columns that are aligned to the right. A row may have a state for its first cell."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: frozenset[int] = frozenset()
    states: Sequence[str] = field(default_factory=list)
    """pass, fail, insufficient_evidence, better, worse... by row; empty: none."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what follows it."""

    id: str
    title: str
    lead: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def more(count: int) -> list[str]:
    """What a table left out."""
    return [f"{count - MOST_LINES:,} more are in report.json"] if count > MOST_LINES else []


def cell_name(cell: CellReport) -> str:
    """Id and stratum."""
    return f"{cell.cell} [{cell.stratum}]" if cell.stratum else cell.cell


def number_name(metric: str, quantile: str | None) -> str:
    """A metric with its quantile."""
    return "tokens/s" if metric == "tokens_per_s" else f"{metric.upper()} {(quantile or '').upper()}"


def percent(value: float | None) -> str:
    """With its sign."""
    return "unbounded" if value is None else f"{value:+.1f} %"


def interval(delta: CellDelta) -> str:
    """A change's 95 % interval."""
    ends: Sequence[float | None] = (delta.low_pct, delta.high_pct)
    return " to ".join("∞" if end is None else f"{end:+.1f}" for end in ends)


def span(low: float | None, high: float | None) -> str:
    """An interval of one number; a side that nothing bounds is open."""
    if low is None and high is None:
        return "unbounded"
    return f"{number(low) if low is not None else '-∞'} – {number(high) if high is not None else '∞'}"
