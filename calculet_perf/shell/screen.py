"""What a person sees while a run goes: bars with the time left on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from calculet_perf.plan import Plan


class Screen:
    """Progress on stderr. Use as a context."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=self.console, refresh_per_second=2, disable=quiet or not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self._whole: TaskID | None = None
        self._step: TaskID | None = None

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def whole(self, total: int, done: int = 0, name: str = "cells") -> None:
        """The run's cells, or the seconds of a stage."""
        self._whole = self._bars.add_task(name, total=total, completed=done)

    def cell_done(self, count: int = 1) -> None:
        """One cell, or so many seconds, more."""
        if self._whole is not None:
            self._bars.advance(self._whole, count)

    def step(self, name: str, total: int) -> None:
        """What is done now replaces what was done before."""
        if self._step is not None:
            self._bars.remove_task(self._step)
        self._step = self._bars.add_task(name, total=total)

    def advance(self, count: int = 1) -> None:
        """So much of the step more."""
        if self._step is not None:
            self._bars.advance(self._step, count)


def plan_lines(plan: Plan) -> list[str]:
    """The plan as a dry run prints it."""
    lines = [f"{len(plan.items)} cells, {sum(item.count for item in plan.items)} requests, about {span(plan.seconds)}"]
    for place, item in enumerate(plan.items, 1):
        lines.append(f"  {place:4d}  {item.cell.id}  round {item.round}  {item.count} requests")
    if plan.not_applicable:
        lines.append(f"{len(plan.not_applicable)} cells are not applicable:")
        lines += [f"        {lost.case}: {lost.reason}" for lost in plan.not_applicable]
    return [*lines, *cut_lines(plan)]


def cut_lines(plan: Plan) -> list[str]:
    """What is shorter than the specification asks."""
    lines = []
    if plan.shortened:
        lines.append("Shortened against the specification, labelled wherever the run appears:")
        lines += [
            f"        {cut.what}: {cut.done:g} of {cut.asked:g} {cut.unit} ({_clause(cut.clause)})" for cut in plan.shortened
        ]
    return lines


def span(seconds: float) -> str:
    """A duration for people."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _clause(clause: str) -> str:
    """Another specification's clause brings its name along."""
    return f"acceptance {clause}" if clause[:1].isdigit() else clause
