"""What is promised of a fleet, checked as the history goes by and once more when everything has settled.

`calculet_core.history.Checker` knows the promises that any history can show. Here are those that need to see the world: who waited
when a lane was given away, what an operator was told, what the device still holds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from calculet_core import history
from calculet_core.applying import decode, digest_of, leaves_of
from calculet_core.clock import MS, S
from calculet_core.history import Event, Violation
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_supervisor.resets import WINDOW_NS
from simulation.shares import FairShares, TenantLimits

if TYPE_CHECKING:
    from simulation.router import RouterHost
    from simulation.worker import WorkerHost
    from simulation.world import World

COMMAND_SLACK_NS = 30 * S
RECONNECT_SLACK_NS = 3 * S
DEADLINE_SLACK_NS = 3 * S
"""The router's grace and its sweeps, and a router that was paused is late by its pause."""


class FleetChecker:
    """Feed events with `see`; `violations` is what was broken."""

    def __init__(self, world: World) -> None:
        self._world = world
        settings = world.settings
        self.core = history.Checker(history.Budgets(), world.clients_expected)
        self.violations: list[Violation] = self.core.violations
        self._generations: dict[tuple[int, int], int] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._accepted: dict[int, int] = {}
        self._ready: dict[str, int] = {}
        self._restarts: dict[str, list[int]] = defaultdict(list)
        self._resets: dict[str, list[int]] = defaultdict(list)
        self._unsaved: dict[str, list[int]] = defaultdict(list)
        """Restarts whose spend is not on the disk yet."""
        self._classes = {tenant.name: tenant.traffic_class for tenant in settings.tenants}
        self._limits = TenantLimits(settings.tenants)
        self._tenant_of: dict[int, str] = {}
        """Of requests that have not ended."""
        self._unbilled: set[int] = set()
        """Calls that were let in, by their first request."""
        self._weights = {tenant.name: tenant.weight for tenant in settings.tenants}
        self._capped = {tenant.name for tenant in settings.tenants if tenant.max_active is not None}
        self._shares: dict[tuple[str, int, int], FairShares] = {}
        self.fair_looks = 0
        self._troubled_ns: dict[str, int] = {}
        self._pauses_ns: list[tuple[int, int]] = []
        self._faults: set[tuple[str | None, int | None, int | None, str]] = set()
        self._acts: dict[str, tuple[bool, bool]] = {}
        """Board -> (up, draining) as operators were told."""
        self._applied: tuple[int, str] | None = None
        self._rollouts: set[int] = set()
        self._unsure: Counter[str] = Counter()
        """Acts under way by board, whose answers may be lost."""
        self._handlers = {
            history.REQUEST_ACCEPTED: self._request_accepted,
            history.REQUEST_DONE: self._request_done,
            history.REQUEST_SENT: self._request_sent,
            history.ATTEMPT_ADMITTED: self._attempt_admitted,
            history.ATTEMPT_DONE: self._attempt_done,
            history.BOARD_GENERATION: self._generation_state,
            history.FLEET_WORKER_EXITED + ".truth": self._exited,
            history.BOARD_RESET: self._reset,
            history.FLEET_WORKER_KILLED: self._killed,
            history.BOARD_FAULT: lambda event, source: self._faults.add((event.board, event.epoch, event.generation, event.data["kind"])),
            history.FLEET_FAULT_SEEN: self._fault_seen,
            history.BOARD_IDLE: self._idle,
        }

    def see(self, event: Event, source: Any) -> None:
        """Take one event."""
        self.core.see(event)
        if handler := self._handlers.get(event.event):
            handler(event, source)

    def broken(self, rule: str, message: str) -> None:
        """Something that only the world can know."""
        self.violations.append(Violation(rule, message, self._world.timeline.now))

    def rules(self) -> set[str]:
        """Names of what was broken."""
        return {violation.rule for violation in self.violations}

    # ---------------------------------------------------------------- requests
    def open_at(self, incarnation: int) -> list[int]:
        """Requests that this life of a router has accepted and not ended."""
        return [request for request in self._accepted if request >> 32 == incarnation]

    def generation_of(self, request: int, attempt: int) -> int | None:
        """Which generation an attempt was admitted by."""
        return self._generations.get((request, attempt))

    def _alive(self) -> list[int]:
        """Incarnations of the routers that run."""
        return [router.incarnation for router in self._world.keeper.routers.values()]

    def _request_accepted(self, event: Event, source: Any) -> None:
        request = event.request or 0
        self._accepted[request] = event.t
        name = event.data["tenant"]
        if unkept := self._limits.accepted(request >> 32, name, event.t, "choice" not in event.data, self._alive()):
            self.broken("tenant_limits", f"{source.name}: {unkept}")
        self._tenant_of[request] = name
        if "choice" not in event.data:
            self._unbilled.add(request)

    def _request_sent(self, event: Event, router: RouterHost) -> None:
        request = event.request or 0
        self._sent[request, event.attempt or 0] = event.generation or 0
        if self._world.scenario.pools:
            self._check_pool(request, event.board or "", router)

    def _check_pool(self, request: int, board: str, router: RouterHost) -> None:
        """A request goes to its class's pool (of none: boards without one) as long as a board there serves and has not refused it."""
        pools, flight = self._world.pools, router.dispatcher._flights.get(request)
        if flight is None:
            return  # it has failed in the same breath
        wanted = self._classes[self._tenant_of[request]]
        if pools[board] == wanted:
            self._world.saw("a request went to its pool")
            return
        self._world.saw("a request went to another pool")
        alias = flight.ongoing.alias
        for worker in router.dispatcher.roster.workers.values():
            if pools[worker.board] == wanted and worker.key not in flight.refusals and worker.serves(alias.alias, alias.digest):
                self.broken("pool_first", f"request {request:x} of class {wanted} was sent to {board}, and {worker.board} could have it")

    def _request_done(self, event: Event, source: Any) -> None:
        request = event.request or 0
        accepted_ns = self._accepted.pop(request, None)
        if (name := self._tenant_of.pop(request, None)) is not None:
            self._limits.ended(request >> 32, name)
        client = self._world.clients.of.get(request)
        if accepted_ns is None or client is None:
            return
        for attempt in range(1, (event.attempt or 0) + 1):
            self._generations.pop((request, attempt), None)
        limit_ms = self._world.settings.scheduler.admission.deadline_default_ms if client.timeout_ms is None else client.timeout_ms
        late_ns = event.t - accepted_ns - limit_ms * MS - DEADLINE_SLACK_NS - self._paused_ns(accepted_ns)
        if late_ns > 0:
            self.broken("ends_in_time", f"request {request:x} ended {late_ns / S:.1f} s after its deadline and its grace")

    def billed(self, action: Any) -> None:
        """A record of the usage log: one for each call that was let in."""
        request = int(action.request, 16)
        if request not in self._unbilled:
            self.broken("billed_once", f"call {request:x} is billed, and it was not let in or was billed before")
        self._unbilled.discard(request)

    def paused(self, from_ns: int, for_ns: int) -> None:
        """A router was stopped for so long."""
        self._pauses_ns.append((from_ns, for_ns))

    def _paused_ns(self, since_ns: int) -> int:
        return sum(for_ns for from_ns, for_ns in self._pauses_ns if from_ns + for_ns >= since_ns) if self._pauses_ns else 0

    def _attempt_admitted(self, event: Event, worker: WorkerHost) -> None:
        key = (event.request or 0, event.attempt or 0)
        self._generations[key] = event.generation or 0
        if (sent := self._sent.get(key)) not in (None, event.generation):
            self.broken("sent_is_served", f"{worker.board}: {key[0]:x} was sent to generation {sent}, and {event.generation} took it")
        client = self._world.clients.of.get(key[0])
        serving = worker.engine.serving
        if client is None or serving is None or client.tenant in self._capped:
            return
        place = (worker.board, worker.epoch, event.generation or 0)
        waiting: dict[str, float] = {}
        for seq in serving.fair.waiting():
            if seq.tenant in self._weights and seq.tenant not in self._capped:
                waiting[seq.tenant] = max(waiting.get(seq.tenant, 0), seq.prompt_tokens + seq.max_new_tokens)
        shares = self._shares.get(place)
        if shares is None:
            self._shares = {other: kept for other, kept in self._shares.items() if other[0] != worker.board}
            shares = self._shares[place] = FairShares(self._weights)
        cost = event.data["prompt_tokens"] + event.data["max_new_tokens"]
        before = shares.looks
        if unfair := shares.admitted(client.tenant, cost, waiting):
            self.broken("fairness", f"{worker.board}: {unfair}")
        self.fair_looks += shares.looks - before

    def _attempt_done(self, event: Event, worker: WorkerHost) -> None:
        request = event.request or 0
        client = self._world.clients.of.get(request)
        if client is None or event.data["outcome"] == "refused" or (request, event.attempt or 0) in self._generations:
            return
        shares = self._shares.get((worker.board, worker.epoch, event.generation or 0))
        if shares is not None and client.tenant not in self._capped:
            shares.left(client.tenant, len(client.prompt) + client.max_tokens)

    # ---------------------------------------------------------------- budgets
    def _generation_state(self, event: Event, source: Any) -> None:
        board = event.board or ""
        if event.data.get("state") == "READY":
            self._ready.setdefault(board, event.t)
        elif event.data.get("state") not in ("DRAINING",):
            self._forgive(board, event.t)

    def _exited(self, event: Event, source: Any) -> None:
        self._forgive(event.board or "", event.t)
        self._troubled_ns[event.board or ""] = event.t

    def _forgive(self, board: str, now_ns: int) -> None:
        """A stable period makes the restart budget whole again."""
        since = self._ready.pop(board, None)
        if since is not None and now_ns - since >= (self._world.settings.supervision.restart.stable_after_s - 1) * S:
            self._restarts[board].clear()

    def operator_restarted(self, board: str) -> None:
        """An operator's word bypasses the restart budget."""
        self._restarts[board].clear()

    def restarted(self, board: str) -> None:
        """A supervisor starts a worker again of its own accord."""
        config, now = self._world.settings.supervision.restart, self._world.timeline.now
        self._forgive(board, now)
        self._spend(self._restarts[board], now, int(config.window_s * S), config.max_restarts, f"restarts of {board}")

        self._unsaved[board].append(now)

    def saved(self, kind: str, board: str) -> None:
        """A spend was committed."""
        if kind == "restart" and self._unsaved[board]:
            self._unsaved[board].pop(0)

    def supervisor_died(self) -> None:
        """A worker is started although its spend cannot be saved: its successor knows nothing of that one."""
        for board, times in self._unsaved.items():
            self._restarts[board] = [at for at in self._restarts[board] if at not in times]
        self._unsaved.clear()

    def _reset(self, event: Event, source: Any) -> None:
        """What counts is what really happened to the board. Commands may be under way for some seconds."""
        board, limit = event.board or "", self._world.settings.recovery.max_resets_per_10min
        if event.generation:  # an empty board is reset when it comes back on probation: an operator's word, beside the budget
            self._spend(self._resets[board], event.t, WINDOW_NS - COMMAND_SLACK_NS, limit, f"resets of {board}")

    def _spend(self, spends: list[int], now_ns: int, window_ns: int, limit: int, what: str) -> None:
        spends[:] = [at for at in spends if at > now_ns - window_ns] + [now_ns]
        if len(spends) > limit:
            self.broken("within_budget", f"{len(spends)} {what} within {window_ns / S:g} s, {limit} allowed")

    # ---------------------------------------------------------------- who is blamed, who is replaced
    def _fault_seen(self, event: Event, source: Any) -> None:
        """What counts against a board, and an artifact, has happened there, in that generation."""
        if (event.board, event.epoch, event.generation, event.data["fault"]) not in self._faults:
            self.broken("blame_is_deserved", f"{event.board}: {event.data['fault']} of generation {event.generation} never happened")

    def troubled(self, name: str, until_ns: int) -> None:
        """A process (a worker by its board), or a data link, has a fault until then; a worker's control link counts as the worker."""
        self._troubled_ns[name] = max(until_ns, self._troubled_ns.get(name, 0))

    def router_lost(self, worker: WorkerHost, incarnation: int) -> None:
        """A worker takes a router for gone: it is, or something has kept them apart."""
        router = next((one for one in self._world.keeper.routers.values() if one.incarnation == incarnation), None)
        if router is None:
            return
        now, lease_ns = self._world.timeline.now, 3 * self._world.settings.router.lease_interval_ms * MS
        well_ns = now - max(self._troubled_ns.get(router.name, 0), self._troubled_ns.get(f"data {worker.board}", 0))
        if well_ns > lease_ns + RECONNECT_SLACK_NS:
            self.broken("only_the_gone_are_lost", f"{worker.board} has cancelled the requests of {router.name}, which is well")

    def _killed(self, event: Event, source: Any) -> None:
        """A worker that reports on a good link is never taken for silent, whatever happened to the one who listens."""
        board, limit_ms = event.board or "", self._world.settings.supervision.heartbeat_timeout_ms
        worker = self._world.keeper.workers.get(board)
        if worker is None or worker.epoch != event.epoch or not event.data["reason"].startswith("no heartbeat"):
            return  # it has died meanwhile, or it hangs
        well_ns = event.t - self._troubled_ns.get(board, 0)
        if well_ns > limit_ms * MS + RECONNECT_SLACK_NS:
            self.broken("only_the_sick_are_killed", f"{board}: {event.data['reason']}, and it has been well for {well_ns / S:.1f} s")

    # ---------------------------------------------------------------- the device
    def _idle(self, event: Event, worker: WorkerHost) -> None:
        """Nothing runs: the device must agree, apart from what is held back on purpose, or done and not heard of yet."""
        device, thread, counters = worker.device, worker.thread, worker.board_counters()
        held = len(device._held) + len(device._stale) + len(device._due) + len(thread.board.done) + thread.on_their_way
        if counters.left > held:
            self.broken("baseline", f"{worker.board}: idle, and the device still leases {counters.left} buffers")

    # ---------------------------------------------------------------- operators
    def acknowledged(self, board: str, up: bool, draining: bool) -> None:
        """An operator was told that this is wanted from now on."""
        self._acts[board] = (up, draining)
        self._unsure[board] -= 1

    def asked(self, board: str) -> None:
        """An act is under way: until it is answered nobody knows what came of it."""
        self._unsure[board] += 1

    def refused(self, board: str) -> None:
        """It was not done."""
        self._unsure[board] -= 1

    def begun(self, rollout: int) -> None:
        """An operator was told that a rollout has begun."""
        self._rollouts.add(rollout)

    def applied(self, version: int, digest: str) -> None:
        """An operator was told that this configuration is in force."""
        self._applied = (version, digest)

    def remembered(self, memory: Any) -> None:
        """A supervisor has read its store, configuration and all."""
        self.recalled(memory.boards)
        told, kept = self._applied, memory.applied
        if told is None:
            return
        found = None if kept is None else (kept.version, digest_of(leaves_of(decode(kept.body))))
        if found is None or found[0] < told[0] or (found[0] == told[0] and found != told):
            self.broken("acts_survive", f"operators were told that configuration {told} is in force, the store has {found}")

    def unserved(self, request: int, code: str) -> None:
        """A client whose call failed while nothing happened but applies."""
        self.broken("nobody_notices", f"request {request:x} failed with {code} while a configuration was applied")

    def recalled(self, wanted: dict[str, Any]) -> None:
        """A supervisor has read its store."""
        for board, (up, draining) in self._acts.items():
            found = wanted.get(board)
            if self._unsure[board]:
                continue
            if found is None or (found.up, found.draining) != (up, draining):
                self.broken("acts_survive", f"{board}: operators were told up={up} draining={draining}, the store has {found}")

    # ---------------------------------------------------------------- the end
    def finish(self) -> None:
        """Everything has settled."""
        world = self._world
        self.core.finish()
        for board, worker in world.keeper.workers.items():
            if not worker.booted:
                continue
            engine, serving = worker.engine, worker.engine.serving
            if len(engine.attempts.registry):
                self.broken("baseline", f"{board}: {len(engine.attempts.registry)} requests are left")
            if engine.attempts.tokenizing:
                self.broken("baseline", f"{board}: {engine.attempts.tokenizing} prompts are with the tokenizer")
            if serving is None or engine.life.state.name != "READY":
                continue
            busy = {state.name: serving.kv.count(state) for state in KvSequenceState if state is not KvSequenceState.FREE}
            if any(busy.values()) or serving.kv.reserved_tokens:
                self.broken("baseline", f"{board}: lanes {busy}, {serving.kv.reserved_tokens} tokens reserved")
            if serving.buffers.leased or serving.buffers.quarantined or worker.board_counters().left:
                self.broken("baseline", f"{board}: leases {serving.buffers.leased}, quarantined {serving.buffers.quarantined}, "
                                        f"device {worker.board_counters().left}")  # fmt: skip
            if engine.attempts.registry.cost:
                self.broken("baseline", f"{board}: the registry still counts {engine.attempts.registry.cost} tokens of cost")
        alive = {router.incarnation for router in world.keeper.routers.values()}
        if unbilled := [f"{request:x}" for request in sorted(self._unbilled) if request >> 32 in alive]:
            self.broken("billed_once", f"calls were never billed: {unbilled[:8]}")
        for router in world.keeper.routers.values():
            if router.listening and router.dispatcher.inflight:
                self.broken("baseline", f"{router.name}: {router.dispatcher.inflight} requests in flight")
            if router.listening and len(router.app.lookups):
                self.broken("baseline", f"{router.name}: {len(router.app.lookups)} questions are open")
            actives = router.tenants.active if router.listening else {}
            if any(actives.values()):
                self.broken("baseline", f"{router.name}: tenants' actives are {actives}")
        self._check_acts()

    def _check_acts(self) -> None:
        world, supervisor = self._world, self._world.keeper.supervisor
        if supervisor is None or not supervisor.serving:
            return
        self.recalled(supervisor.wanted)
        assert supervisor.store is not None
        kept = {rollout.id: rollout for rollout in supervisor.store.look(lambda store: store._rollouts(1_000))}
        for number in sorted(self._rollouts):
            if number not in kept or not kept[number].over:
                self.broken("acts_survive", f"rollout {number} was begun, and the store has {kept.get(number)}")
        for board, (up, draining) in self._acts.items():
            worker = world.keeper.workers.get(board)
            if self._unsure[board]:
                continue
            if worker is None or not worker.booted:
                continue
            life = worker.engine.life
            if not up:
                self.broken("acts_take_effect", f"{board}: stopped by an operator, and its worker lives")
            elif life.state.name == "READY" and life.draining != draining:
                self.broken("acts_take_effect", f"{board}: draining is {life.draining}, {draining} was asked for")
