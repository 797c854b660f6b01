"""Hours of production in virtual time, and a checker that is proven to see: bugs planted on purpose must be found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Faults, Traffic, VirtualFleet

from calculet_core.budgets import WindowBudget
from calculet_core.requests import SequenceState
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_core.states.request import RequestState
from calculet_router.dispatch import Dispatcher
from calculet_worker import serving
from calculet_worker.answers import Answers
from calculet_worker.kv import KvManager

ROUGH = Faults(kill_s=40, ccu_s=60, busy_s=20, lost_job_s=120, nan_s=90)
BUSY = Traffic(per_s=4.0, disconnects=0.2, streams=0.7)


def test_two_virtual_hours_with_faults_hold_every_promise() -> None:
    fleet = VirtualFleet(7, faults=Faults(kill_s=600, ccu_s=900, busy_s=300, lost_job_s=1500, nan_s=1200), traffic=Traffic(per_s=0.3))
    fleet.run(2 * 3600)
    assert fleet.checker.violations == []
    assert set(fleet.fired) == {"kill", "ccu", "busy", "lost_job", "nan"}, "every fault must have fired, or the run proves nothing"
    outcomes = [client.outcome for client in fleet.clients.values()]
    assert fleet.calls > 2_000
    assert outcomes.count("completed") > 0.9 * fleet.calls


@pytest.mark.parametrize("seed", range(6))
def test_rough_minutes_hold_every_promise(seed: int) -> None:
    fleet = VirtualFleet(seed, faults=ROUGH, traffic=BUSY).run(100)
    assert fleet.checker.violations == []
    assert {client.code for client in fleet.clients.values()} <= {
        None, "worker_lost", "bad_output", "no_ready_worker", "model_recovering", "over_capacity", "deadline_exceeded", "device_busy",
    }  # fmt: skip


def trace_of(seed: int, hash_seed: str) -> str:
    script = f"from virtual_fleet import *; print(VirtualFleet({seed}, faults=Faults().all_on(), traffic=Traffic(per_s=2)).run(60).trace_hash)"
    here = Path(__file__).resolve()
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{here.parents[1]}:{here.parent}"}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=100).stdout


def test_the_same_seed_gives_the_same_history_under_another_hash_seed() -> None:
    first = trace_of(3, "0")
    assert first == trace_of(3, "1")
    assert first != trace_of(4, "0")


# ---------------------------------------------------------------- planted bugs
def a_lost_lane_is_given_out_again(patch: pytest.MonkeyPatch) -> None:
    lose = KvManager.lose

    def bug(self: KvManager, kv: Any) -> None:
        lose(self, kv)
        kv.state, kv.reserved_len, kv.committed_len, kv.seq_id = KvSequenceState.FREE, 0, 0, -1
        self._free.append(kv.hardware_lane)

    patch.setattr(KvManager, "lose", bug)
    patch.setattr(serving.Serving, "__init__", reuse_the_manager(serving.Serving.__init__))


def reuse_the_manager(init: Callable[..., None]) -> Callable[..., None]:
    """A reset that forgets to make a new manager: what the invariant on lost lanes is there for."""
    kept: dict[int, KvManager] = {}

    def bug(self: serving.Serving, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.kv = kept.setdefault(id(self._recorder), self.kv)

    return bug


def a_cancelled_requests_lane_is_never_released(patch: pytest.MonkeyPatch) -> None:
    release = serving.Serving.release

    def bug(self: serving.Serving, seq: SequenceState, out: list[Any]) -> None:
        if seq.state is not RequestState.CANCELLED:
            release(self, seq, out)

    patch.setattr(serving.Serving, "release", bug)


def two_rows_of_a_batch_are_swapped(patch: pytest.MonkeyPatch) -> None:
    bind = serving.bind

    def bug(choice: Any, kv: Any, arrays: Any) -> Any:
        batch = bind(choice, kv, arrays)
        if len(choice.sequences) > 1:
            batch.token_ids[[0, 1]] = batch.token_ids[[1, 0]]
        return batch

    patch.setattr(serving, "bind", bug)


def a_request_is_sent_again_after_its_first_token(patch: pytest.MonkeyPatch) -> None:
    trouble = Dispatcher._trouble

    def bug(self: Dispatcher, flight: Any, *args: Any) -> None:
        flight.begun = False
        trouble(self, flight, *args)

    patch.setattr(Dispatcher, "_trouble", bug)


def the_reset_budget_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowBudget, "spend", lambda self, now_ns: True)


def a_token_is_lost_on_its_way_to_the_client(patch: pytest.MonkeyPatch) -> None:
    take, seen = Answers.take, [0]

    def bug(self: Answers, seq: SequenceState, token: int) -> Any:
        seen[0] += 1
        return take(self, seq, 65 if seen[0] % 97 == 0 else token)

    patch.setattr(Answers, "take", bug)


def a_position_is_written_twice(patch: pytest.MonkeyPatch) -> None:
    bind = serving.bind

    def bug(choice: Any, kv: Any, arrays: Any) -> Any:
        batch = bind(choice, kv, arrays)
        batch.positions[: len(choice.sequences)] -= 1
        return batch

    patch.setattr(serving, "bind", bug)


@pytest.mark.parametrize(
    ("plant", "found_by"),
    [
        (a_lost_lane_is_given_out_again, {"kv_invariants", "unknown_never_reused"}),
        (a_cancelled_requests_lane_is_never_released, {"liveness", "baseline", "no_bug"}),
        (two_rows_of_a_batch_are_swapped, {"no_crosstalk", "liveness"}),
        (a_request_is_sent_again_after_its_first_token, {"no_crosstalk", "whole_answer"}),
        (the_reset_budget_is_not_kept, {"within_budget"}),
        (a_token_is_lost_on_its_way_to_the_client, {"no_crosstalk"}),
        (a_position_is_written_twice, {"no_crosstalk", "liveness"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)  # fmt: skip
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], found_by: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert VirtualFleet(1, faults=ROUGH, traffic=BUSY).run_until_broken(found_by, seconds=200)
