"""More planted bugs: in what the shells do, in the front door, and against faults of links, the keeper and operators' signals."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from calculet_core import wire
from calculet_core.applying import holds
from calculet_core.errors import CalculetError
from calculet_router import events
from calculet_router.dispatch import Dispatcher
from calculet_router.fleet import Roster
from calculet_router.lookups import Lookups
from calculet_router.shell.app import RouterApp
from calculet_router.shell.connection import Connection
from calculet_router.shell.exchange import Exchange
from calculet_router.shell.worker_link import WorkerLink
from calculet_router.sse import DONE, error_event
from calculet_router.tenants import Tenants
from calculet_supervisor.shell.configuring import Configuring
from calculet_supervisor.shell.sightings import Sightings
from calculet_supervisor.shell.store import Memory, Store
from calculet_supervisor.world import NOTHING_SEEN
from calculet_worker.shell.app import Worker
from simulation.mutants import BUSY, HEAVY, Patch, mutant, provoked
from simulation.scenario import Traffic, acts_at_random, applies

POOLED = dataclasses.replace(provoked(1, boards=3), pools=("latency", "throughput", None))
ACTS = acts_at_random(1, 60.0, 2, 5.0)
APPLYING = applies(0)


# ---------------------------------------------------------------- pools and tenants
@mutant("pool_first", provoke=POOLED)
def a_requests_class_is_ignored(patch: Patch) -> None:
    patch.setattr(Roster, "pools", lambda self, alias, digest, traffic_class: (self.eligible(alias, digest), []))


@mutant("pool_first", provoke=dataclasses.replace(POOLED, faults=provoked(1, boards=3, kill_worker=10).faults))
def pools_are_remembered_after_a_board_came_back(patch: Patch) -> None:
    pools, kept = Roster.pools, dict[Any, Any]()

    def bug(self: Roster, *key: Any) -> Any:
        found = kept.get((id(self), *key))
        if found is None or not (found[0] or found[1]):
            found = kept[id(self), *key] = pools(self, *key)
        return tuple([worker for worker in part if self.find(*worker.key) is worker] for part in found)

    patch.setattr(Roster, "pools", bug)


@mutant("tenant_limits", provoke=provoked(1, traffic=HEAVY))
def a_tenants_actives_have_no_limit(patch: Patch) -> None:
    def bug(self: Tenants, tenant: Any, requests: int, now_ns: int) -> CalculetError | None:
        self.active[tenant.name] += requests
        return None

    patch.setattr(Tenants, "admit", bug)


@mutant("tenant_limits", provoke=provoked(1, traffic=HEAVY))
def a_tenants_rate_has_no_limit(patch: Patch) -> None:
    patch.setattr(Tenants, "take_rate", lambda self, tenant, now_ns: None)


# ---------------------------------------------------------------- the front door
@mutant("bytes_say_the_same", provoke=provoked(1))
def an_event_is_lost_on_its_way_to_the_connection(patch: Patch) -> None:
    stream, seen = Exchange.stream, [0]

    def bug(self: Exchange, data: bytes) -> None:
        seen[0] += 1
        if seen[0] % 60:
            stream(self, data)

    patch.setattr(Exchange, "stream", bug)


@mutant("bytes_say_the_same", provoke=provoked(1, kill_worker=4))
def a_stream_that_failed_ends_like_one_that_did_not(patch: Patch) -> None:
    fail = Exchange.fail

    def bug(self: Exchange, error: CalculetError, headers: bytes = b"") -> None:
        if self._started and not self.finished:
            self.stream(error_event(error) + DONE)
            self.end_stream()
        else:
            fail(self, error, headers)

    patch.setattr(Exchange, "fail", bug)


@mutant("output_is_bounded", provoke=provoked(1, traffic=dataclasses.replace(BUSY, slow_readers=0.3, streams=1.0)))
def a_reader_that_is_too_slow_is_waited_for(patch: Patch) -> None:
    patch.setattr(Connection, "pause_writing", lambda self: None)


@mutant("billed_once", provoke=provoked(1))
def a_call_whose_client_left_is_not_billed(patch: Patch) -> None:
    ended = RouterApp._ended

    def bug(self: RouterApp, action: Any) -> None:
        ended(self, msgspec.structs.replace(action, request=None) if action.outcome == "cancelled" else action)

    patch.setattr(RouterApp, "_ended", bug)


@mutant("drains_politely", provoke=provoked(1, traffic=HEAVY, stop_router=6))
def a_router_that_is_to_stop_is_in_a_hurry(patch: Patch) -> None:
    signalled = RouterApp._signalled

    def bug(self: RouterApp) -> None:
        self._hurry = True
        signalled(self)

    patch.setattr(RouterApp, "_signalled", bug)


@mutant("ends_with_its_keeper", provoke=provoked(1, kill_keeper=15))
def a_router_outlives_its_keeper(patch: Patch) -> None:
    patch.setattr(RouterApp, "_keeper_gone", lambda self: None)


@mutant("no_bug", provoke=provoked(1))
def a_periodic_task_fails_and_only_the_log_knows(patch: Patch) -> None:
    def bug(self: RouterApp) -> None:
        raise RuntimeError("planted")

    patch.setattr(RouterApp, "_settle", bug)


# ---------------------------------------------------------------- questions
CURIOUS = dataclasses.replace(BUSY, questions=0.5)


@mutant("questions_are_answered", provoke=provoked(1, traffic=CURIOUS))
def a_question_gets_anothers_answer(patch: Patch) -> None:
    answered, last = Lookups._answered, list[Any]()

    def bug(self: Lookups, event: Any, out: Any) -> None:
        last.append(event.answer)
        other = msgspec.structs.replace(last.pop(0) if len(last) > 1 else event.answer, request_id=event.answer.request_id)
        answered(self, msgspec.structs.replace(event, answer=other), out)

    patch.setattr(Lookups, "_answered", bug)


@mutant("liveness", provoke=provoked(3, traffic=CURIOUS, kill_worker=8))
def a_dead_workers_questions_are_forgotten(patch: Patch) -> None:
    handle = Lookups.handle

    def bug(self: Lookups, event: Any, now_ns: int) -> Any:
        return [] if isinstance(event, events.WorkerEnded | events.TimePassed) else handle(self, event, now_ns)

    patch.setattr(Lookups, "handle", bug)


# ---------------------------------------------------------------- links
@mutant("only_the_gone_are_lost", provoke=provoked(1, traffic=Traffic(per_s=0.2, burst_every_s=None)))
def a_router_does_not_renew_its_lease(patch: Patch) -> None:
    renew = WorkerLink._renew

    def bug(self: WorkerLink) -> None:
        send, self._link.send = self._link.send, lambda frames: True  # type: ignore[method-assign]
        try:
            renew(self)
        finally:
            self._link.send = send  # type: ignore[method-assign]

    patch.setattr(WorkerLink, "_renew", bug)


@mutant("no_crosstalk", "whole_answer", "no_bug", provoke=provoked(1, double_data=4))
def a_message_that_came_twice_is_taken_twice(patch: Patch) -> None:
    arrived = Dispatcher._tick_arrived

    def bug(self: Dispatcher, event: Any, now_ns: int, out: Any) -> None:
        worker = self.roster.find(event.board, event.epoch)
        if worker is not None:
            worker.seq = event.tick.seq - 1
        arrived(self, event, now_ns, out)

    patch.setattr(Dispatcher, "_tick_arrived", bug)


@mutant("no_bug", provoke=provoked(1, truncate_data=5))
def a_message_that_is_none_is_not_expected(patch: Patch) -> None:
    def bug(self: Worker, frames: Any) -> None:
        _, kind, body = frames
        wire.decode(kind, body)
        from_router(self, frames)

    from_router = Worker._from_router
    patch.setattr(Worker, "_from_router", bug)


@mutant("acts_survive", provoke=dataclasses.replace(provoked(1, kill_keeper=12), acts=ACTS))
def what_operators_wanted_is_forgotten_with_the_keeper(patch: Patch) -> None:
    recall = Store._recall

    def bug(self: Store) -> Memory:
        return dataclasses.replace(recall(self), boards={})

    patch.setattr(Store, "_recall", bug)


# ---------------------------------------------------------------- applying a configuration
@mutant("nobody_notices", provoke=applies(3))
def the_next_board_restarts_before_routers_reach_the_last_one(patch: Patch) -> None:
    patch.setattr(Sightings, "unreached_by", lambda self, board: [])
    patch.setattr(Dispatcher, "_may_hold", lambda self, flight, now_ns: False)


@mutant("nobody_notices", provoke=APPLYING)
def all_boards_restart_at_once(patch: Patch) -> None:
    def bug(self: Configuring) -> str | None:
        boards = self._supervisor.sightings.boards
        for board, wanted in self._started.items():
            report = boards.get(board, NOTHING_SEEN).report
            if report is not None and board not in self._restarting and holds(report.config_start, wanted) is False:
                return None if self._is_tried(board) else board
        return None

    patch.setattr(Configuring, "_next_restart", bug)


@mutant("acts_survive", provoke=APPLYING)
def what_was_applied_is_forgotten(patch: Patch) -> None:
    recall = Store._recall

    def bug(self: Store) -> Memory:
        return dataclasses.replace(recall(self), applied=None)

    patch.setattr(Store, "_recall", bug)


@mutant("liveness", provoke=applies(7))
def nobody_is_told_what_can_be_taken_live(patch: Patch) -> None:
    patch.setattr(Configuring, "_tell_live", lambda self, now_ns: None)
