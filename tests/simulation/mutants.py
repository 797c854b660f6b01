"""Bugs planted on purpose: each must break a promise that the checker sees, or the checker is not good enough.

A mutant patches the product's code for as long as a test runs; `provoke` is a run in which the bug shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from calculet_core.clock import S
from calculet_core.requests import SequenceState
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_core.states.request import RequestState
from calculet_router import dispatch
from calculet_router.aliases import Aliases
from calculet_router.dispatch import Dispatcher
from calculet_router.tenants import Tenants
from calculet_supervisor import reconcile
from calculet_supervisor.health import Health
from calculet_supervisor.planner import Planner
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.resets import Resets
from calculet_supervisor.restarts import Restarts, Verdict
from calculet_supervisor.shell.spending import Spending
from calculet_supervisor.shell.store import Store
from calculet_worker import engine, serving
from calculet_worker.answers import Answers
from calculet_worker.attempts import Attempts
from calculet_worker.engine import Engine
from calculet_worker.generation import Lifecycle
from calculet_worker.jobs import completion
from calculet_worker.kv import KvManager
from calculet_worker.output.sampling import RowFacts
from calculet_worker.registry import Cancelled, RequestRegistry
from calculet_worker.scheduling.fairness import FairQueue
from calculet_worker.shell.routers import Routers
from simulation.scenario import Act, Fault, Scenario, Settings, Traffic, acts_at_random, faults_at_random


class Patch(Protocol):
    """pytest's `MonkeyPatch`."""

    def setattr(self, target: Any, name: str, value: Any) -> None: ...


BUSY = Traffic(per_s=8.0, mean_output=24.0, disconnects=0.2, streams=0.7, burst_every_s=15.0, burst_size=30)

HEAVY = Traffic(per_s=14.0, mean_output=40.0, disconnects=0.1, short_deadlines=0.3, burst_every_s=10.0, burst_size=60)


def provoked(seed: int, seconds: float = 60.0, boards: int = 2, traffic: Traffic = BUSY, **every_s: float) -> Scenario:
    """A run with these faults and no others."""
    return Scenario(seed, seconds, boards, 1, traffic, Settings(check_every=1), faults_at_random(seed, seconds, boards, every_s))

FULL_DISK = Scenario(
    5, 17.25, 1, 1, Traffic(per_s=3.0), requests=frozenset([18]),
    faults=(
        Fault(3600086136, "disk_full", ms=6995), Fault(6036268632, "wait_timeout"), Fault(9197043463, "wait_timeout"),
        Fault(13393351259, "kill_supervisor"), Fault(14865367142, "wait_timeout"),
    ),
)  # fmt: skip
"""Found by a search: a reset while the disk is full, a second one, and a supervisor that dies in between."""

SWAPS = Scenario(
    3, 60.0, 2, traffic=BUSY,
    acts=(Act(8 * S, "load", 0, 1001), Act(25 * S, "rollback", 0, 0), Act(35 * S, "load", 1, 1000), Act(45 * S, "load", 0, 1000)),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One bug, and what finds it."""

    plant: Callable[[Patch], None]
    rules: frozenset[str]
    """Any of these."""
    provoke: Scenario

    @property
    def name(self) -> str:
        return self.plant.__name__


MUTANTS: list[Mutant] = []


def mutant(*rules: str, provoke: Scenario) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(plant, frozenset(rules), provoke))
        return plant

    return register


# ---------------------------------------------------------------- lanes and buffers
@mutant("kv_invariants", "unknown_never_reused", "no_bug", provoke=provoked(1, ccu_exception=10, wait_timeout=20))
def a_lost_lane_is_given_out_again(patch: Patch) -> None:
    lose, init, kept = KvManager.lose, serving.Serving.__init__, dict[int, KvManager]()

    def bug(self: KvManager, kv: Any) -> None:
        lose(self, kv)
        kv.state, kv.reserved_len, kv.committed_len, kv.seq_id = KvSequenceState.FREE, 0, 0, -1
        self._free.append(kv.hardware_lane)

    def reuse(self: serving.Serving, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.kv = kept.setdefault(id(self._recorder), self.kv)

    patch.setattr(KvManager, "lose", bug)
    patch.setattr(serving.Serving, "__init__", reuse)


@mutant("liveness", "baseline", "no_bug", provoke=provoked(1))
def a_cancelled_requests_lane_is_never_released(patch: Patch) -> None:
    release = serving.Serving.release

    def bug(self: serving.Serving, seq: SequenceState, *args: Any) -> None:
        if seq.state is not RequestState.CANCELLED:
            release(self, seq, *args)

    patch.setattr(serving.Serving, "release", bug)


@mutant("no_crosstalk", "no_bug", "kv_invariants", provoke=provoked(1, release_refused=5))
def a_lane_counts_as_free_before_the_runtime_says_so(patch: Patch) -> None:
    def bug(self: serving.Serving, lane: int, now_ns: int) -> bool:
        self.freed(lane, now_ns, [])
        return True

    patch.setattr(serving.Serving, "retry_release", bug)


@mutant("baseline", provoke=provoked(1, stale_completion=8))
def a_late_completion_is_dropped_and_its_buffer_kept(patch: Patch) -> None:
    patch.setattr(Engine, "_stale", lambda self, completion, now_ns, out: None)


@mutant("one_terminal", "no_bug", provoke=provoked(1))
def a_cancel_does_not_wait_for_the_running_job(patch: Patch) -> None:
    cancel = RequestRegistry.cancel

    def bug(self: RequestRegistry, seq: SequenceState, reason: str) -> Cancelled:
        found = cancel(self, seq, reason)
        return Cancelled.NOW if found is Cancelled.WHEN_DRAINED else found

    patch.setattr(RequestRegistry, "cancel", bug)


@mutant("baseline", provoke=provoked(1))
def what_a_cancelled_request_owed_is_never_struck_off(patch: Patch) -> None:
    drained = RequestRegistry.drained

    def bug(self: RequestRegistry, seq: SequenceState) -> None:
        before = self.cost
        drained(self, seq)
        self.cost = before

    patch.setattr(RequestRegistry, "drained", bug)


# ---------------------------------------------------------------- tokens
@mutant("no_crosstalk", "liveness", provoke=provoked(1))
def two_rows_of_a_batch_are_swapped(patch: Patch) -> None:
    bind = serving.bind

    def bug(choice: Any, kv: Any, arrays: Any) -> Any:
        batch = bind(choice, kv, arrays)
        if len(choice.sequences) > 1:
            batch.token_ids[[0, 1]] = batch.token_ids[[1, 0]]
        return batch

    patch.setattr(serving, "bind", bug)


@mutant("no_crosstalk", "liveness", provoke=provoked(1))
def a_position_is_written_twice(patch: Patch) -> None:
    bind = serving.bind

    def bug(choice: Any, kv: Any, arrays: Any) -> Any:
        batch = bind(choice, kv, arrays)
        batch.positions[: len(choice.sequences)] -= 1
        return batch

    patch.setattr(serving, "bind", bug)


@mutant("no_crosstalk", provoke=provoked(1))
def a_token_is_lost_on_its_way_to_the_client(patch: Patch) -> None:
    take, seen = Answers.take, [0]

    def bug(self: Answers, seq: SequenceState, token: int) -> Any:
        seen[0] += 1
        return take(self, seq, 65 if seen[0] % 97 == 0 else token)

    patch.setattr(Answers, "take", bug)


@mutant("no_crosstalk", provoke=provoked(1, nan_output=6, inf_output=6))
def numbers_that_are_none_are_not_noticed(patch: Patch) -> None:
    patch.setattr(completion, "row_facts", lambda logits: RowFacts(logits.argmax(axis=1), np.ones(len(logits), bool)))


@mutant("no_crosstalk", "golden_before_ready", provoke=provoked(1, bad_board=10))
def a_board_is_ready_without_golden(patch: Patch) -> None:
    patch.setattr(engine, "stages_of", lambda cases, profiles: [])


# ---------------------------------------------------------------- the router
@mutant("no_crosstalk", "whole_answer", "one_generation", provoke=provoked(1, kill_worker=8))
def a_request_is_sent_again_after_its_first_token(patch: Patch) -> None:
    trouble = Dispatcher._trouble

    def bug(self: Dispatcher, flight: Any, *args: Any) -> None:
        flight.begun = False
        trouble(self, flight, *args)

    patch.setattr(Dispatcher, "_trouble", bug)


@mutant("no_crosstalk", "whole_answer", "ends_in_time", provoke=provoked(1, traffic=HEAVY, cut_data=2))
def a_gap_in_the_numbers_is_not_noticed(patch: Patch) -> None:
    arrived = Dispatcher._tick_arrived

    def bug(self: Dispatcher, event: Any, now_ns: int, out: Any) -> None:
        worker = self.roster.find(event.board, event.epoch)
        if worker is not None:
            worker.seq = None
        arrived(self, event, now_ns, out)

    patch.setattr(Dispatcher, "_tick_arrived", bug)


@mutant("one_terminal", provoke=provoked(1))
def a_terminal_is_written_twice(patch: Patch) -> None:
    end, seen = Dispatcher._end_flight, [0]

    def bug(self: Dispatcher, flight: Any, outcome: str, data: Any, now_ns: int, out: list[Any]) -> None:
        end(self, flight, outcome, data, now_ns, out)
        seen[0] += 1
        if seen[0] % 50 == 0:
            out.append(out[-1])

    patch.setattr(Dispatcher, "_end_flight", bug)


@mutant("ends_in_time", provoke=provoked(1, 30.0, boards=1, traffic=dataclasses.replace(HEAVY, mean_output=150.0, max_output=200)))
def what_a_client_said_about_its_deadline_is_ignored(patch: Patch) -> None:
    patch.setattr(Aliases, "deadline_ms", lambda self, name, asked_ms: 600_000)


@mutant("baseline", provoke=provoked(1))
def a_tenants_actives_are_never_given_back(patch: Patch) -> None:
    patch.setattr(Tenants, "release", lambda self, tenant, requests: None)


@mutant("one_terminal", "ends_in_time", "liveness", provoke=provoked(1, kill_worker=8))
def the_requests_of_a_dead_worker_are_forgotten(patch: Patch) -> None:
    patch.setattr(Dispatcher, "_abandon", lambda self, worker, trouble, error, now_ns, out: None)
    patch.setattr(dispatch, "DEADLINE_GRACE_NS", 1 << 60)


# ---------------------------------------------------------------- fairness
@mutant("fairness", provoke=provoked(1, boards=1, traffic=HEAVY))
def waiting_requests_go_in_the_order_of_their_tenants_names(patch: Patch) -> None:
    stamp = FairQueue.stamp

    def bug(self: FairQueue, tenant: str, weight: float, prompt_tokens: int, max_new_tokens: int) -> float:
        return stamp(self, tenant, weight, prompt_tokens, max_new_tokens) + (0 if tenant != "gold" else 1e9)

    patch.setattr(FairQueue, "stamp", bug)


# ---------------------------------------------------------------- the supervisor
@mutant("within_budget", provoke=provoked(1, ccu_exception=4, boards=1))
def the_reset_budget_is_not_kept(patch: Patch) -> None:
    patch.setattr(Resets, "ask", lambda self, board, now_ns: None)


@mutant("within_budget", provoke=provoked(1, stuck_dma=1e9, kill_worker=1.2, boards=1))
def the_restart_budget_is_not_kept(patch: Patch) -> None:
    def bug(self: Restarts, code: int | None, now_ns: int) -> Verdict:
        self.failures += 1
        return Verdict(False, now_ns + 1)

    patch.setattr(Restarts, "died", bug)


@mutant("within_budget", provoke=provoked(1, ccu_exception=5, kill_supervisor=6, boards=1))
def spent_resets_are_not_saved(patch: Patch) -> None:
    spend = Store._spend
    patch.setattr(Store, "_spend", lambda self, kind, board: None if kind == "reset" else spend(self, kind, board))


@mutant("liveness", provoke=provoked(1, hang_worker=15))
def a_worker_that_hangs_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Health, "complaint", lambda self, now_ns: None)


@mutant("liveness", provoke=provoked(1, hang_worker=15))
def a_worker_that_does_not_die_of_its_abort_is_left_alone(patch: Patch) -> None:
    patch.setattr(reconcile, "ABORT_GRACE_NS", 1 << 60)


@mutant("only_the_sick_are_killed", provoke=provoked(1, pause_supervisor=10))
def a_supervisor_that_stood_still_blames_the_workers(patch: Patch) -> None:
    patch.setattr(Reconciler, "overslept", lambda self, by_ns: None)


@mutant("only_the_gone_are_lost", provoke=provoked(1, pause_worker=4))
def a_worker_that_stood_still_blames_the_routers(patch: Patch) -> None:
    patch.setattr(Routers, "overslept", lambda self, by_ns: None)


@mutant("blame_is_deserved", provoke=provoked(1, ccu_exception=10))
def a_fault_is_reported_again_after_the_reset(patch: Patch) -> None:
    was_reset = Lifecycle.was_reset

    def bug(self: Lifecycle, *args: Any) -> bool:
        fault = self.fault
        found = was_reset(self, *args)
        self.fault = fault
        return found

    patch.setattr(Lifecycle, "was_reset", bug)


@mutant("liveness", provoke=SWAPS)
def a_rollouts_next_step_is_never_taken(patch: Patch) -> None:
    patch.setattr(Planner, "decide", lambda self, *args: None)


@mutant("acts_survive", provoke=dataclasses.replace(SWAPS, faults=faults_at_random(3, 60.0, 2, {"kill_supervisor": 5})))
def a_rollout_that_has_begun_is_not_saved(patch: Patch) -> None:
    async def bug(self: Store, rollout: Any, act: Any) -> Any:
        return msgspec.structs.replace(rollout, id=self._next("rollout", 1))

    patch.setattr(Store, "open_rollout", bug)


@mutant("within_budget", provoke=FULL_DISK)
def a_spend_that_could_not_be_saved_is_forgotten(patch: Patch) -> None:
    async def save(self: Spending, kind: str, board: str) -> None:
        await self._store.spend(kind, board)

    async def settle(self: Spending, kind: str, board: str) -> None:
        return None

    patch.setattr(Spending, "save", save)
    patch.setattr(Spending, "settle", settle)


@mutant("acts_survive", provoke=dataclasses.replace(provoked(1, kill_supervisor=8), acts=acts_at_random(1, 60.0, 2, 5.0)))
def an_act_is_answered_before_it_is_saved(patch: Patch) -> None:
    async def bug(self: Store, board: str, wanted: Any, *rest: Any, **more: Any) -> Any:
        return wanted

    patch.setattr(Store, "want", bug)


@mutant("acts_take_effect", "liveness", provoke=dataclasses.replace(provoked(1), acts=acts_at_random(1, 60.0, 2, 5.0)))
def a_resume_never_reaches_the_board(patch: Patch) -> None:
    command = Reconciler._command

    def bug(self: Reconciler, board: str, life: Any, wish: Any, report: Any, now_ns: int) -> Any:
        yield from command(self, board, life, dataclasses.replace(wish, draining=report.draining or wish.draining), report, now_ns)

    patch.setattr(Reconciler, "_command", bug)


@mutant("liveness", provoke=provoked(1, kill_worker=15))
def every_view_has_the_same_version(patch: Patch) -> None:
    publish = Store._publish

    def bug(self: Store, view: Any, at_least: int) -> Any:
        return msgspec.structs.replace(publish(self, view, at_least), version=1)

    patch.setattr(Store, "_publish", bug)


@mutant("liveness", provoke=provoked(1, ccu_exception=10))
def a_granted_reset_is_never_sent(patch: Patch) -> None:
    answer = Reconciler._answer_reset

    def bug(self: Reconciler, *args: Any) -> Any:
        for action in answer(self, *args):
            if not isinstance(action, reconcile.Grant):
                yield action

    patch.setattr(Reconciler, "_answer_reset", bug)


@mutant("serves_again", "ends_in_time", provoke=provoked(1, kill_router=8))
def attempts_are_answered_to_a_router_that_is_gone(patch: Patch) -> None:
    arrived = Attempts.arrived

    def bug(self: Attempts, event: Any, *args: Any) -> None:
        seen.setdefault(id(self), event.router)
        arrived(self, msgspec.structs.replace(event, router=seen[id(self)]), *args)

    seen: dict[int, int] = {}
    patch.setattr(Attempts, "arrived", bug)
