"""What searches have found, made small and kept by the seed that found it. All are clean since their bug was mended."""

from __future__ import annotations

import pytest

from simulation.mutants import FULL_DISK
from simulation.scenario import Act, Fault, Scenario, Traffic
from simulation.search import judge

FOUND = {
    "seed_14_both_banks_are_refused_for_their_types": Scenario(
        14, 12.16, 1, 2, Traffic(per_s=0.7),
        faults=(Fault(9093658791, "invalid_dtype"), Fault(10958014745, "invalid_dtype")),
        acts=(Act(2357353566, "stop", 0, 9103),), requests=frozenset(),
    ),
    "seed_84_one_bank_is_refused_for_its_shape_and_the_other_as_unavailable": Scenario(
        84, 18.0, 1, 1, Traffic(per_s=5.0, burst_every_s=None),
        faults=(Fault(1816646030, "invalid_shape"), Fault(17821989925, "unavailable", actions=26)),
        acts=(Act(1375576064, "stop", 0, 16169),), requests=frozenset(),
    ),
    "seed_5_a_reset_with_a_full_disk_and_a_supervisor_that_dies": FULL_DISK,
    "seed_2_a_supervisor_that_stood_still": Scenario(
        2, 15.0, 2, 1, Traffic(per_s=2.0), faults=(Fault(5_000_000_000, "pause_supervisor", ms=6_000),),
    ),
    "seed_3_a_worker_that_stood_still": Scenario(
        3, 20.0, 1, 1, Traffic(per_s=6.0, mean_output=40.0), faults=(Fault(8_000_000_000, "pause_worker", ms=3_900),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scenario", FOUND.values(), ids=FOUND)
def test_what_was_found_stays_mended(scenario: Scenario) -> None:
    outcome = judge(scenario)
    assert outcome.worst() is None
    assert sum(outcome.fired.values()) > 0
