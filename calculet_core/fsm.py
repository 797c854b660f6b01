"""One table, one door: a state changes only through `machine.next(state, event)`.

A `Machine` is a frozen transition table that knows its initial and terminal states. Building one checks what a reader would:
every state can be reached, terminal states have no way out, and non-terminal ones have one. Diagrams and tests follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class InvalidTransitionError(Exception):
    """An event that a state has no row for; names machine, state and event."""

    def __init__(self, machine: str, state: Enum, event: Enum) -> None:
        super().__init__(f"{machine}: no transition from {state.name} on {event.name}")
        self.machine, self.state, self.event = machine, state, event


class Machine(Generic[S, E]):
    """A transition table over two enums.

    Raises:
        ValueError: a state is unreachable, a terminal state has a row, or a non-terminal one has none.
    """

    __slots__ = ("_table", "initial", "name", "states", "terminal")

    def __init__(self, name: str, initial: S, table: Mapping[tuple[S, E], S], terminal: frozenset[S] = frozenset()) -> None:
        self.name, self.initial, self.terminal = name, initial, terminal
        self.states: tuple[S, ...] = tuple(type(initial))
        self._table = dict(table)
        self._check()

    def next(self, state: S, event: E) -> S:
        """The state after `event`.

        Raises:
            InvalidTransitionError: the table has no such row.
        """
        try:
            return self._table[state, event]
        except KeyError:
            raise InvalidTransitionError(self.name, state, event) from None

    def can(self, state: S, event: E) -> bool:
        """Whether the table has a row for it."""
        return (state, event) in self._table

    def rows(self) -> Mapping[tuple[S, E], S]:
        """The whole table, for tests and diagrams."""
        return dict(self._table)

    def mermaid(self) -> str:
        """The table as a Mermaid state diagram."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial.name}"]
        lines += [f"    {a.name} --> {b.name}: {event.name.lower()}" for (a, event), b in self._table.items()]
        lines += [f"    {state.name} --> [*]" for state in self.states if state in self.terminal]
        return "\n".join(lines) + "\n"

    def _check(self) -> None:
        reached, todo = {self.initial}, [self.initial]
        while todo:
            state = todo.pop()
            for (source, _), target in self._table.items():
                if source == state and target not in reached:
                    reached.add(target)
                    todo.append(target)
        if missing := [state.name for state in self.states if state not in reached]:
            raise ValueError(f"{self.name}: unreachable states {missing}")
        sources = {source for source, _ in self._table}
        if bad := [state.name for state in self.states if (state in sources) == (state in self.terminal)]:
            raise ValueError(f"{self.name}: {bad} must either be terminal or have a way out, not both")
