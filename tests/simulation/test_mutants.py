"""Mutation check: every bug that is planted on purpose is found, by a rule that names it."""

from __future__ import annotations

import pytest

from simulation import mutants_shells, mutants_turns
from simulation.mutants import MUTANTS, Mutant
from simulation.world import World


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    world = World(mutant.provoke)
    found = world.run_until_broken(set(mutant.rules))
    assert found, f"not found; what was: {world.checker.rules()}"


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 15
    assert {mutant.plant.__module__ for mutant in MUTANTS} >= {mutants_shells.__name__, mutants_turns.__name__}
