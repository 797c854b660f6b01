"""What searches have found, made small and kept by the seed that found it. All are clean since their bug was mended."""

from __future__ import annotations

import pytest

from simulation.mutants import FULL_DISK
from simulation.scenario import Act, Fault, Scenario, Traffic
from simulation.search import judge

BUSY = Traffic(per_s=8.0, mean_output=40.0, burst_every_s=None)
FOUND = {
    "seed_14_both_banks_are_refused_for_their_types": Scenario(
        14, 12.0, 1, 2, BUSY, faults=(Fault(9093658791, "invalid_dtype"), Fault(9093658792, "invalid_dtype")),
    ),
    "seed_84_one_bank_is_refused_for_its_shape_and_the_other_as_unavailable": Scenario(
        84, 12.0, 1, 1, BUSY, faults=(Fault(9021829925, "invalid_shape"), Fault(9021829926, "unavailable")),
    ),
    "seed_1002439_a_job_was_done_and_not_fetched_when_the_board_failed": Scenario(
        1002439, 11.9, 1, 1, BUSY, faults=(Fault(10960927000, "pause_worker", ms=892), Fault(11215542000, "ccu_exception")),
    ),
    "seed_72_a_submission_that_came_twice_was_refused_twice": Scenario(
        72, 10.73, 1, 1, Traffic(per_s=5.0, burst_every_s=10.0, burst_size=10),
        faults=(Fault(5881479139, "partition_data", ms=4803), Fault(7217463446, "double_data", ms=2436)),
        acts=(Act(10204451075, "load", 0, 13501),),
    ),
    "seed_5_a_reset_with_a_full_disk_and_a_supervisor_that_dies": FULL_DISK,
    "seed_2_a_supervisor_that_stood_still": Scenario(
        2, 15.0, 2, 1, Traffic(per_s=2.0), faults=(Fault(5_000_000_000, "pause_supervisor", ms=6_000),),
    ),
    "seed_3_a_worker_that_stood_still": Scenario(
        3, 20.0, 1, 1, Traffic(per_s=6.0, mean_output=40.0), faults=(Fault(8_000_000_000, "pause_worker", ms=3_900),),
    ),
    "seed_22_a_routers_first_tick_is_truncated": Scenario(
        22, 5.0, 1, 1, Traffic(per_s=6.0, streams=1.0, disconnects=0.0, burst_every_s=None),
        faults=(Fault(1_200_000_000, "truncate_data", ms=600),),
    ),
    "seed_20_a_routers_first_tokens_are_truncated": Scenario(
        20, 5.0, 1, 1, Traffic(per_s=6.0, streams=1.0, disconnects=0.0, burst_every_s=None),
        faults=(Fault(1_500_000_000, "truncate_data", ms=600),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scenario", FOUND.values(), ids=FOUND)
def test_what_was_found_stays_mended(scenario: Scenario) -> None:
    outcome = judge(scenario)
    assert outcome.worst() is None
    assert sum(outcome.fired.values()) > 0
