"""Planted bugs where two models take turns on one board."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from calculet_router.flights import Flight
from calculet_router.parking import Parking
from calculet_supervisor.shell import time_sharing
from calculet_supervisor.shell.time_sharing import TimeSharing
from calculet_supervisor.turns import next_turn
from calculet_worker import generation
from simulation.mutants import Patch, mutant
from simulation.scenario import turns


@mutant("keeps_its_turn", provoke=turns(1, faults=False))
def a_turn_ends_before_its_time(patch: Patch) -> None:
    def bug(config: Any, *seen: Any) -> Any:
        return next_turn(msgspec.structs.replace(config, min_residence_s=0.5), *seen)

    patch.setattr(time_sharing, "next_turn", bug)


@mutant("waits_its_turn", "nobody_notices", "ends_in_time", "liveness", provoke=turns(1, faults=False))
def nobody_hears_who_waits_for_a_turn(patch: Patch) -> None:
    patch.setattr(TimeSharing, "waits", lambda self: {})


@mutant("waits_its_turn", "nobody_notices", "ends_in_time", provoke=turns(1, faults=False))
def the_last_who_waits_is_never_sent(patch: Patch) -> None:
    everybody = Parking.all

    def bug(self: Parking) -> Iterator[Flight]:
        yield from list(everybody(self))[:-1]

    patch.setattr(Parking, "all", bug)


@mutant("empty_is_empty", provoke=turns(1))
def memory_that_stays_in_use_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(generation, "residue", lambda after, empty_bytes, tolerance_bytes: None)
