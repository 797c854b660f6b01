"""Runs the search for the highest stable rate, with idle phase, golden and returned resources around it as in any run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from calculet_core.shell.files import read_bounded
from calculet_perf.capacity import Outcome, Search, Trial, judge
from calculet_perf.plan import Item
from calculet_perf.records import decoder, from_line
from calculet_perf.runinfo import Shortened
from calculet_perf.shell.run_dir import RunDirError
from calculet_perf.shell.runner import Runner
from calculet_perf.workloads.cells import Cell, Shape
from calculet_perf.workloads.matrix import Capacity

CAPACITY = "capacity.json"


class Result(msgspec.Struct, kw_only=True):
    """`capacity.json`, `calculet-perf-capacity/v1`."""

    schema: str = "calculet-perf-capacity/v1"
    run_id: str
    stable_qps: float | None
    """Null: no rate down to `min_qps` was stable, or the search did not end."""
    unproven: str | None
    """Why the figure is only a bound."""
    shortened: list[Shortened]
    spec: Capacity
    windows: list[Outcome]


def so_far(folder: Path, spec: Capacity) -> list[Outcome]:
    """The windows that sessions before this one finished.

    Raises:
        RunDirError: they were measured for another search.
        RecordError: the file is not what it should be.
    """
    try:
        data = read_bounded(folder / CAPACITY)
    except FileNotFoundError:
        return []
    result: Result = from_line(decoder(Result), data, CAPACITY, 1)
    if result.spec != spec:
        raise RunDirError(f"{folder} holds another search: give the options that it was started with")
    return result.windows


class CapacityRunner(Runner):
    """A run whose cells are chosen by what the ones before showed."""

    def begin(self, spec: Capacity, windows: Sequence[Outcome] = ()) -> None:
        """What to search for; before `run`.

        Args:
            windows: of sessions before this one, by time: the search goes on where they left it.

        Raises:
            RunDirError: they are of another search.
        """
        self._spec, self._search, self._windows = spec, Search(spec), list(windows)
        for outcome in windows:
            if self._search.next() != outcome.trial:
                raise RunDirError(f"{CAPACITY}: window {outcome.trial.number} is not of this search: it cannot be resumed")
            self._search.tell(outcome.passed)

    @property
    def result(self) -> Result:
        """As far as it is known."""
        return Result(
            run_id=self.info.run_id, stable_qps=self._search.best, unproven=self._search.unproven, shortened=self.info.shortened,
            spec=self._spec, windows=self._windows,
        )  # fmt: skip

    async def measure(self) -> None:
        """Window after window until the search is over."""
        while (trial := self._search.next()) is not None:
            item = Item(self._cell_of(trial), trial.number, max(2, round(trial.qps * trial.seconds)))
            records = await self.cell(trial.number, item)
            outcome = judge(trial, records, self._spec)
            self._windows.append(outcome)
            self._search.tell(outcome.passed)
            words = "stable" if outcome.passed else "; ".join(outcome.reasons)
            self.say(f"  {trial.kind} at {trial.qps:.3f}/s for {trial.seconds:g} s: {words}")
            self.put(CAPACITY, msgspec.json.encode(self.result) + b"\n")
        self.put(CAPACITY, msgspec.json.encode(self.result) + b"\n")

    def _cell_of(self, trial: Trial) -> Cell:
        spec = self._spec
        return Cell(
            id=f"capacity/q{trial.qps:.4f}/p{spec.prompt}/o{spec.output}", kind="capacity", arrival="poisson",
            shapes=(Shape(spec.prompt, spec.output),), stream=True, sampling="greedy", asked_requests=None, qps=trial.qps,
        )  # fmt: skip
