"""The supervisor process: it sees, lets `reconcile` decide, and does what was decided.

Its own end is harmless by construction: SIGTERM or kill -9 leave every worker and router as they are, and the next supervisor finds
them by the launcher's list and their reports. It ends for good only with its keeper.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import zmq

from calculet_core import history, wire
from calculet_core.artifact import Package, sha256_hex
from calculet_core.clock import S
from calculet_core.config import RecoveryConfig
from calculet_core.shell.death_pipe import STARTED, VARIABLE, watch_death_pipe
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.journal import Journal
from calculet_core.shell.link import Frames, Link, bind_router
from calculet_core.shell.process import is_alive, is_machines, is_shortage
from calculet_core.shell.sd_notify import sd_notify, watchdog_interval_s
from calculet_core.shell.stacks import can_dump
from calculet_core.shell.telemetry import serve_metrics
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.resets import Resets
from calculet_supervisor.shell.chaos import ChaosVerbs
from calculet_supervisor.shell.config_verbs import ConfigVerbs
from calculet_supervisor.shell.configuring import Configuring
from calculet_supervisor.shell.control import serve_control
from calculet_supervisor.shell.crashes import CrashBundles
from calculet_supervisor.shell.ground import Broken, Standing
from calculet_supervisor.shell.launchers import Launcher
from calculet_supervisor.shell.launchers.checked import LockChecked
from calculet_supervisor.shell.launchers.keeper import KeeperLauncher
from calculet_supervisor.shell.launchers.systemd import SystemdLauncher
from calculet_supervisor.shell.recovery import Recovery
from calculet_supervisor.shell.recovery_verbs import RecoveryVerbs
from calculet_supervisor.shell.reloading import may_reload
from calculet_supervisor.shell.rollout_verbs import RolloutVerbs
from calculet_supervisor.shell.rollouts import Rollouts
from calculet_supervisor.shell.sightings import Sightings
from calculet_supervisor.shell.spending import Asides, Spending
from calculet_supervisor.shell.status import outlook
from calculet_supervisor.shell.store import Memory, Store, Wanted
from calculet_supervisor.shell.sweeping import epochs_begun, sweep_dead
from calculet_supervisor.shell.telemetry import Telemetry
from calculet_supervisor.shell.time_sharing import TimeSharing
from calculet_supervisor.shell.verbs import Verbs
from calculet_supervisor.world import (
    NOTHING_SEEN,
    Abort,
    Action,
    BoardWish,
    Desired,
    Exit,
    Grant,
    Kill,
    Load,
    Note,
    Publish,
    Send,
    SetAside,
    Spawn,
    Terminate,
)

TICK_S = 0.1
"""How often time-outs are looked for; everything else is decided when it is seen."""
DUMP_S = 0.5
"""From the signal to write its stacks to SIGABRT."""
STALL_NS = 1 * S
"""Between two decisions: longer, and this process did not run."""
STORE_RETRY_S = 1.0
"""After a failed write."""
log = logging.getLogger("calculet.supervisor")


class Supervisor:
    """One supervisor; made by `serve`."""

    def __init__(
        self, fleet: Fleet, packages: dict[str, Package], store: Store, memory: Memory, broken: Mapping[str, Broken] = {}
    ) -> None:
        config, self._loop = fleet.config, asyncio.get_running_loop()
        self.fleet, self.store, self.wanted = fleet, store, dict(memory.boards)
        self._spending, self._asides = Spending(store), Asides(store)
        self.sightings = Sightings()
        self.sightings.generation = max((board.generation for board in memory.view.boards), default=0)
        self.resets = Resets({board.name: reset_limit(fleet, board.name) for board in config.boards}, _spends(memory, "reset"))
        self.reconciler = Reconciler(
            config.supervision, self.resets, random.Random(), memory.view, _spends(memory, "restart"), memory.asides,
            _fingerprint(fleet, packages, broken),
        )  # fmt: skip
        self.view = memory.view
        self.started_s = time.monotonic()
        self.reloads = False
        """It ended in order to become a new process image."""
        self.quarantined = dict(memory.quarantined)
        self.boards = tuple(board.name for board in config.boards)
        self._journal = Journal(fleet.journal("supervisor"), config.journal.max_bytes, config.journal.keep)
        self._crashes = CrashBundles(fleet)
        self._telemetry = Telemetry(self.reconciler, self.sightings, self._crashes, config)
        self.reconciler.attribution.failures = list(memory.failures)
        self.time_sharing = TimeSharing(self, memory)
        self.rollouts = Rollouts(self, packages, memory)
        self.standing = Standing(self, broken)
        self.recovery = Recovery(self, memory)
        self.configuring = Configuring(self, memory)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ended: asyncio.Future[bool] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: Publish | None = None
        self._sees = self._decision_due = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._told: dict[str, Any] = {}
        self._awake_ns = time.monotonic_ns()
        self._performers: dict[type[Any], Callable[[Any], object]] = {
            Spawn: self._spawn, Terminate: lambda action: self._launcher.stop(action.board), Abort: self._abort, Kill: self._kill,
            Load: lambda action: self.begin(self._load(action)), Grant: lambda action: self.begin(self._grant(action)),
            Send: lambda action: self.send(action.board, action.message), Publish: self._publish, Note: self.note,
            SetAside: lambda action: self.begin(self._asides.save(action.board, action.aside)),
        }  # fmt: skip

    async def run(self) -> None:
        """Supervise until a signal, or until the keeper is gone."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end, False)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._loop.set_exception_handler(self._unhandled)
        launcher = self._launcher = await self._find_launcher()
        watch_death_pipe(lambda: self._end(True))
        begun = epochs_begun(self.fleet)
        alive = await launcher.list()
        sweep_dead(self.fleet, begun, alive)
        for board, pid in alive.items():
            self.sightings.started(board, pid)
        self._link: Link = bind_router(
            self._context, self.fleet.supervisor_socket, self._from_peer, lambda: self._telemetry.bad_message("stranger"),
            lambda: self._telemetry.bad_message("oversize"),
        )
        verbs = Verbs(self)
        chaos = ChaosVerbs(self, self._journal)
        table = {**verbs.table(), **RolloutVerbs(self).table(), **RecoveryVerbs(self, verbs).table(), **chaos.table()}
        table |= ConfigVerbs(self).table()
        control = await serve_control(self.fleet.control_socket, table, lambda: self._telemetry.bad_message("control"))
        metrics_path = self.fleet.metrics_socket("supervisor")
        metrics = await serve_metrics(metrics_path, self._exposition)
        self._sees = True
        self.begin(self.rollouts.keep())
        self.begin(self.configuring.begin())
        self.begin(self.standing.stand())
        self._every(TICK_S, self._tick)
        self._every(STORE_RETRY_S, self._settle_spends)
        if watchdog := watchdog_interval_s():
            self._every(watchdog, lambda: sd_notify("WATCHDOG=1"))
        log.info("supervises boards=%d alive=%d view=%d", len(self.boards), len(self.sightings.boards), self.view.version)
        sd_notify("READY=1")
        keeper_gone = False
        try:
            keeper_gone = await self._ended
        finally:
            for task in self._tasks:
                task.cancel()
            control.close()
            metrics.close()
            self._link.close()
            self._context.destroy(linger=0)
            launcher.close()
            stale = [self.fleet.supervisor_socket, self.fleet.control_socket, metrics_path]
            for path in [*stale, self.fleet.keeper_socket] if keeper_gone else stale:
                path.unlink(missing_ok=True)
            self._journal.close()

    async def _find_launcher(self) -> LockChecked:
        """The keeper when it started this process, else systemd."""
        inner: Launcher
        if VARIABLE in os.environ:
            inner = await KeeperLauncher.connect(self.fleet.keeper_socket, self, lambda: self._end(True))
        else:
            inner = SystemdLauncher(list(self.boards), self)
        return LockChecked(inner, self.fleet, self)

    def _exposition(self) -> bytes:
        condemned = {board: self.wanted.get(board, Wanted()).condemned is not None for board in self.boards}
        is_open = self.recovery.breaker.reason is not None
        return self._telemetry.exposition(
            self.view.version, self.rollouts.live.values(), condemned, len(self.quarantined), is_open,
            self.time_sharing.residents(), self.standing,
        )  # fmt: skip

    def _end(self, keeper_gone: bool) -> None:
        if not self._ended.done():
            log.info("ends: %s", "the keeper is gone" if keeper_gone else "told to; workers live on")
            self._ended.set_result(keeper_gone)

    def _reload(self) -> None:
        if not self._ended.done() and may_reload(self.fleet.path, self.rollouts.versions):
            self.be_born_again()

    def be_born_again(self) -> None:
        """End, and come back with what the configuration's file says now."""
        self.reloads = self.under_systemd  # a keeper starts it again by itself
        self._end(False)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A bug ends this process: its successor sees everything afresh, which is better than to go on half blind."""
        error = context.get("exception") or RuntimeError(context.get("message"))
        if is_shortage(error):
            log.error("%s: %s", context.get("message"), error)
            return
        if not self._ended.done():
            self._ended.set_exception(error)

    def _every(self, period_s: float, work: Callable[[], object]) -> None:
        if not self._ended.done():
            self._loop.call_later(period_s, self._every, period_s, work)
            work()

    # ---------------------------------------------------------------- what is wanted
    def wish(self, board: str) -> BoardWish:
        """What is wanted of a configured board."""
        wanted, config = self.wanted.get(board, Wanted()), self.fleet.config
        placement, swap = self.rollouts.placement(board)
        return BoardWish(
            placement, wanted.up and wanted.condemned is None, wanted.draining, wanted.min_epoch, swap,
            config.rollout.drain_timeout_ms, config.recall.probation_weight if wanted.probation else 1.0,
            wanted.probation and not wanted.probation_reset, wanted.reset_generation, self.fleet.board(board).pool or "",
            wanted.probation,
        )  # fmt: skip

    def out(self, board: str) -> str | None:
        """Why an operator's word, or a verdict, keeps the board from serving; None: nothing does."""
        if board not in self.boards:
            return "not in the configuration any more"
        wanted = self.wanted.get(board, Wanted())
        if wanted.condemned is not None:
            return f"condemned: {wanted.condemned}"
        return "stopped" if not wanted.up else "drained" if wanted.draining else None

    def _desired(self) -> Desired:
        wishes = {board: self.wish(board) for board in self.boards}
        return Desired(wishes, self.rollouts.aliases(), self.rollouts.decided_aliases(), self.recovery.breaker.reason)

    # ---------------------------------------------------------------- what is seen
    def started(self, board: str, pid: int) -> None:
        """The launcher's word."""
        self.sightings.started(board, pid)
        self.decide_soon()

    def router_stays(self, pid: int, reason: str) -> None:
        """The launcher's word."""
        self.configuring.routers.refused(pid, reason)

    def replace_router(self, pid: int) -> bool:
        """Whether the launcher does it; else the router is to end by itself."""
        return self._launcher.replace_router(pid)

    @property
    def under_systemd(self) -> bool:
        """Else `calculet up` keeps this fleet."""
        return isinstance(self._launcher.inner, SystemdLauncher)

    def exited(self, board: str, how: Exit) -> None:
        """The launcher's word, with what the worker left behind about its end."""
        report = self.sightings.boards.get(board, NOTHING_SEEN).report
        last = self._exit_file(board)
        if last and (report is not None and last.get("epoch") == report.epoch) and how.signal is None:
            how = replace(how, code=last.get("code") if how.code is None else how.code, reason=last.get("reason"))
        epoch = report.epoch if report is not None else self.last_epoch(board)
        for path in (self.fleet.worker_socket(board, epoch), self.fleet.metrics_socket(f"worker-{board}")):
            path.unlink(missing_ok=True)
        seen = self.sightings.boards.get(board, NOTHING_SEEN)
        self._crashes.about_to_forget(board, seen.pid, seen.report)
        self.sightings.exited(board, how)
        self._decide()

    def last_epoch(self, board: str) -> int:
        """The last epoch that a worker of the board has taken; 0 when there was none."""
        with suppress(OSError, ValueError):
            return int(self.fleet.board_epoch(board).read_text())
        return 0

    def _exit_file(self, board: str) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            found = json.loads(self.fleet.board_exit(board).read_bytes())
            return found if isinstance(found, dict) else None
        return None

    def _from_peer(self, frames: Frames) -> None:
        now_ns = time.monotonic_ns()
        try:
            identity, kind, body = frames
            message = wire.decode(kind, body)
        except ValueError as error:
            log.warning("a message was ignored: %s", error)
            self._telemetry.bad_message("malformed")
            return
        if isinstance(message, wire.WorkerReport):
            if self.sightings.heard_worker(identity, message, now_ns):
                self.decide_soon()
            else:
                log.debug("board %s: a report of pid=%d was ignored: not its worker", message.board, message.pid)
        elif isinstance(message, wire.RouterReport):
            moved = self.sightings.heard_router(identity, message, now_ns)
            if moved or self.rollouts.live or message.waiting:
                self.decide_soon()
            if message.view_version < self.view.version:
                self._link.send([identity, *wire.encode(self.view)])
        else:
            log.warning("a message was ignored: %s is not for a supervisor", type(message).__name__)
            self._telemetry.bad_message("unexpected")

    # ---------------------------------------------------------------- deciding
    def decide_soon(self) -> None:
        """Once in this pass of the loop, however many reasons there are."""
        if not self._decision_due:
            self._decision_due = True
            self._loop.call_soon(self._decide)

    def _tick(self) -> None:
        self.sightings.forget_silent_routers(time.monotonic_ns(), is_alive)
        self._decide()

    def _forgive_own_stall(self) -> None:
        """Before the reports that came while this process stood still were read, workers only look silent."""
        now_ns = time.monotonic_ns()
        stood_ns, self._awake_ns = now_ns - self._awake_ns, now_ns
        if stood_ns > STALL_NS:
            log.warning("stood still for %.1f s: no worker is blamed for that", stood_ns / S)
            self.reconciler.overslept(stood_ns)

    def _decide(self) -> None:
        self._forgive_own_stall()
        self._decision_due = False
        if not self._sees or self._ended.done():
            return  # before the launcher's list, a living worker would look like none
        now_ns = time.monotonic_ns()
        desired = self._desired()
        actions: list[Action] = self.reconciler.decide(desired, self.sightings.observed(), now_ns)
        self.recovery.tick(now_ns)
        self.time_sharing.tick(now_ns)
        self.rollouts.tick(now_ns)
        self.configuring.tick(now_ns)
        for action in actions:
            self._performers[type(action)](action)
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        at_ns = self.reconciler.next_wakeup_ns()
        if at_ns is not None and (wait_ns := at_ns - time.monotonic_ns()) < TICK_S * S:
            self._wakeup = self._loop.call_later(max(0, wait_ns) / S, self._decide)
        self._tell(desired.boards)

    def _tell(self, wishes: Mapping[str, BoardWish]) -> None:
        lives, boards = self.reconciler.lives, self.sightings.boards
        told = {
            board: outlook(lives.get(board), boards.get(board, NOTHING_SEEN), self._aside(board, wish))
            for board, wish in wishes.items()
        }
        if told != self._told:
            self._told = told
            self._launcher.tell(told)
            ready = sum(board["state"] == "ready" for board in told.values())
            sd_notify(f"STATUS={ready} of {len(told)} boards ready")

    def _aside(self, board: str, wish: BoardWish) -> str | None:
        """Why nobody needs to wait for the board at a start; None: it is to serve."""
        if not wish.up:
            return self.out(board)
        return "its model is unloaded" if wish.placement is None else None

    # ---------------------------------------------------------------- doing
    def _spawn(self, action: Spawn) -> None:
        if action.automatic:
            self.begin(self._spending.save("restart", action.board))
        self._launcher.start(action.board)

    def _abort(self, action: Abort) -> None:
        log.error("board %s: aborted: %s", action.board, action.reason)
        pid = self.sightings.boards.get(action.board, NOTHING_SEEN).pid
        if pid is None or not can_dump(pid):
            self._launcher.abort(action.board)
            return
        self._launcher.dump(action.board)
        self._loop.call_later(DUMP_S, self._abort_now, action.board, pid)

    def _abort_now(self, board: str, pid: int) -> None:
        """Its stacks are written by now; unless it has gone meanwhile."""
        if self.sightings.boards.get(board, NOTHING_SEEN).pid == pid and not self._ended.done():
            self._launcher.abort(board)

    def _kill(self, action: Kill) -> None:
        log.error("board %s: killed: %s", action.board, action.reason)
        self._launcher.kill(action.board)

    async def _load(self, action: Load) -> None:
        generation, placement = await self._mint(), action.placement
        self.send(
            action.board, wire.LoadModel(action.seq, generation, placement.alias, placement.package, placement.digest)
        )

    async def _grant(self, action: Grant) -> None:
        if action.spend:
            await self._spending.save("reset", action.board)
        await self._spending.settle("reset", action.board)  # the one of an earlier try may not be saved yet
        self.send(action.board, wire.GrantReset(action.seq, await self._mint()))

    async def _mint(self) -> int:
        return await self.store.mint_generation(self.sightings.generation + 1)

    def _settle_spends(self) -> None:
        if self.store.is_astray:
            self.begin(self.store.stand_by())
        if self._spending.owes:
            self.begin(self._spending.settle_all())
        if self._asides.owes:
            self.begin(self._asides.settle_all())

    def send(self, board: str, message: wire.Message) -> bool:
        """To a board's worker, if it is connected."""
        identity = self.sightings.identities.get(board)
        if identity is not None and self.send_to(identity, message):
            return True
        log.warning("board %s: %s could not be sent", board, type(message).__name__)
        return False

    def send_to(self, identity: bytes, message: wire.Message) -> bool:
        """To a worker or router, if it is connected."""
        return self._link.send([identity, *wire.encode(message)])

    def chaos_ordered(self, fault: str) -> None:
        """An administrator has ordered a fault."""
        self._telemetry.chaos_ordered(fault)

    def _publish(self, action: Publish) -> None:
        """The latest wins; versions that nobody needs are skipped."""
        idle, self._publishing = self._publishing is None, action
        if idle:
            self.begin(self._publish_all())

    async def _publish_all(self) -> None:
        while (action := self._publishing) is not None:
            view = wire.FleetView(0, list(action.boards), list(action.aliases))
            try:
                self.view = await self.store.publish(view, self.view.version + 1, self.fleet.fleet_view)
            except Exception as error:
                log.error("the fleet view cannot be saved, and is tried again: %s", error)
                await asyncio.sleep(STORE_RETRY_S)
                continue
            self.rollouts.published(self.view)
            frames = wire.encode(self.view)
            for identity in self.sightings.routers:
                self._link.send([identity, *frames])
            self._journal.write(history.FLEET_VIEW_PUBLISHED, version=self.view.version, boards=len(self.view.boards))
            self._journal.flush()
            if self._publishing is action:
                self._publishing = None

    def note(self, note: Note) -> None:
        """Into the journal, the log and the counters. Rare and telling: written at once, so that no crash loses it."""
        self._journal.write(note.event, board=note.board, epoch=note.epoch, generation=note.generation, **note.data)
        self._journal.flush()
        self._telemetry.note(note)
        if note.event == history.FLEET_WORKER_EXITED and not note.data["commanded"]:
            self.begin(self._crashes.keep(note, self._crashes.gather(note)))
        if note.event == history.FLEET_FAULT_SEEN:
            self.recovery.fault(note)
            self.decide_soon()
        words = " ".join(f"{key}={value}" for key, value in note.data.items() if value is not None)
        log.info("board %s: %s epoch=%s %s", note.board, note.event, note.epoch, words)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside everything else; what goes wrong in it is logged."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            stack = None if is_machines(error) or isinstance(error, sqlite3.OperationalError) else error
            log.error("an action failed and will be decided again: %s", error, exc_info=stack)


def reset_limit(fleet: Fleet, board: str) -> int:
    """`max_resets_per_10min` of the board's model where its scheduler file says something, else the fleet's; the least of them."""
    schedulers = [fleet.scheduler_of(model.alias) for model in fleet.models_of(board)]
    found = [scheduler.recovery if scheduler else RecoveryConfig() for scheduler in schedulers]
    return min((own if own != RecoveryConfig() else fleet.config.recovery).max_resets_per_10min for own in found)


def _fingerprint(fleet: Fleet, packages: dict[str, Package], broken: Mapping[str, Broken]) -> str:
    """Another one: workers in quarantine are worth another try. `calculet up` is an operator's word like a changed file."""
    known = [fleet.fingerprint(), version("calculet"), os.environ.get(STARTED, "")]
    known += [package.digest for package in packages.values()]
    known += [f"{alias}: {one.reason}" for alias, one in broken.items()]
    return sha256_hex("\n".join(known).encode())


def _spends(memory: Memory, kind: str) -> dict[str, list[int]]:
    return {board: spends for (found, board), spends in memory.spends.items() if found == kind}
