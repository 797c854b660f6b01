"""The router process: it owns the loop, performs the dispatcher's actions, and lives without a supervisor.

At start it loads the last published fleet view from its file; later the higher version wins. SIGTERM stops the listening, serves
what its connections still bring, lets streams finish within their drain time, and ends with 0; a second signal ends at once. A
listening socket that systemd passed stays open meanwhile: who connects waits for another router on it, or for the successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from calculet_core import wire
from calculet_core.applying import Standing
from calculet_core.clock import MS, S
from calculet_core.config import AdmissionConfig
from calculet_core.errors import CalculetError, ConfigError, ExitCode, ShuttingDown
from calculet_core.history import Event
from calculet_core.shell.chaos import Carrier
from calculet_core.shell.curve import read_curve_keys
from calculet_core.shell.death_pipe import watch_death_pipe
from calculet_core.shell.files import FileLock, LockHeld, read_bounded
from calculet_core.shell.fleet import Fleet, make_folders, standing_of
from calculet_core.shell.holding import Holding
from calculet_core.shell.journal import Journal
from calculet_core.shell.limits import open_limits
from calculet_core.shell.link import Frames, connect_dealer
from calculet_core.shell.listening import bind, listens_at
from calculet_core.shell.logs import keep_copy, set_level
from calculet_core.shell.process import rss_bytes
from calculet_core.shell.sd_notify import listen_fds, sd_notify, watchdog_interval_s
from calculet_core.shell.stacks import answer_dumps
from calculet_core.shell.standing import load_or_held
from calculet_core.shell.telemetry import fetch_metrics, merge_expositions, serve_metrics
from calculet_router import actions, events
from calculet_router.aliases import Aliases
from calculet_router.dispatch import Dispatcher
from calculet_router.fleet import LinkState, Roster
from calculet_router.lookups import Lookups
from calculet_router.shell.dashboard import SECOND_S, Dashboard
from calculet_router.shell.endpoints import Endpoints
from calculet_router.shell.exchange import Exchange
from calculet_router.shell.http_server import HttpServer
from calculet_router.shell.keys import LOOK_S, KeyWatch
from calculet_router.shell.recovering import RECOVERY_GRACE_S, done_of, orphans_of, record_of
from calculet_router.shell.spans import open_spans
from calculet_router.shell.telemetry import FIRST, OTHER, RouterTelemetry
from calculet_router.shell.tls import LOOK_S as TLS_LOOK_S
from calculet_router.shell.tls import open_tls
from calculet_router.shell.usage import UsageLog
from calculet_router.shell.worker_link import WorkerLink, unsent_event
from calculet_router.tenants import Tenants

REPORT_S = 1.0
KNOCK_S = 0.05
NAME_TRIES = 20
ADMIN_AGAIN_S = 1.0
"""Between two tries to take the dashboard's address."""
SPARE_FILES = 512
"""Descriptors beside those of connections."""
TICK_S = 0.1
"""How often the dispatcher hears that time passes."""
FLUSH_S = 0.2
FIRST_LINKS_S = 1.0
"""How long listening waits for the workers of the fleet-view file, so that a restart does not begin with refusals."""
GLANCE_S = 0.01
"""A look at whether something that takes milliseconds has happened."""
MAX_VIEW_BYTES = 16 << 20
NAME = re.compile(r"router(-[A-Za-z0-9][A-Za-z0-9._-]{0,23})?")
"""The prefix tells its files from those of other processes."""
OF_LOOKUPS = (events.LookupAsked, events.LookupAnswered)
OF_BOTH = (events.WorkerEnded, events.TimePassed, events.Overslept)
STALL_NS = 1 * S
"""Between two of its own ticks: longer (or half of what a worker may be silent), and this process did not run."""
log = logging.getLogger("calculet.router")


class RouterApp:
    """One router, called `name`; several may serve a fleet. `run` returns the exit code."""

    def __init__(self, fleet: Fleet, admissions: dict[str, AdmissionConfig], name: str = FIRST) -> None:
        config = fleet.config.router
        self.fleet, self.config, self.name = fleet, config, name
        self._supervised = self._report_due = False
        self._began_s = time.time()
        self.incarnation = secrets.randbits(32) or 1
        limited = [tenant.name for tenant in fleet.config.tenants if tenant.max_active or tenant.requests_per_s]
        grace_ns = 3 * config.lease_interval_ms * MS + int(RECOVERY_GRACE_S * S)
        self._limits = open_limits(fleet.limits("active"), limited, grace_ns)
        tenants = Tenants(fleet.config.tenants, config.require_keys, self._limits)
        self._keys = KeyWatch(fleet.keys, tenants.take_keys)
        self._tls = open_tls(fleet, config.tls)
        self._scheme = "http" if self._tls is None else "https"
        self._at = f"{self._scheme}://{config.listen}"
        self.dispatcher = Dispatcher(self.incarnation, config, Roster(), Aliases(admissions), tenants)
        self.lookups = Lookups(config, self.dispatcher.roster, self.dispatcher.aliases, tenants)
        self.telemetry = RouterTelemetry(config, name)
        journal = fleet.config.journal
        self.journal = Journal(fleet.journal(name), journal.max_bytes, journal.keep)
        self.spans = open_spans(fleet.config.tracing, name, self.journal)
        self._write = self.journal.append if self.spans is None else self.spans.append
        self.usage = UsageLog(fleet.usage, fleet.config.usage)
        self._counted_usage = [0, 0]
        self._shown_tenants: set[str] = set()
        self._dashboard: Dashboard | None = None
        self.draining = self.closed = False
        self._holding = Holding(fleet, "router")
        self._tasks: set[asyncio.Task[None]] = set()
        self._chaos = Carrier(name, self.journal) if fleet.config.chaos.enabled else None
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[tuple[str, int], WorkerLink] = {}
        self._stop = asyncio.Event()
        self._hurry = False
        self._signals = 0
        self._awake_ns = time.monotonic_ns()
        self._stall_ns = min(STALL_NS, min(config.worker_silence_ms, config.accept_timeout_ms) * MS // 2)
        self._told_changes = -1
        """Of the roster, when the supervisor last heard whom this router reaches."""
        self._listening = False
        self._server = HttpServer(config, Endpoints(self).handle, self._reader_gone, self.telemetry.limited, self.count_error)
        self._supervisor = connect_dealer(
            self._context, str(fleet.supervisor_socket), self._from_supervisor, b"router-%08x" % self.incarnation
        )
        self._perform: dict[type[Any], Callable[[Any], None]] = {
            actions.Opened: lambda action: action.owner.open(action.ticket),
            actions.Admitted: lambda action: action.owner.admit(),
            actions.Restart: lambda action: action.owner.restart(action.index),
            actions.Fail: lambda action: action.owner.fail(action.error),
            actions.Told: lambda action: action.owner.tell(action.body),
            actions.Send: self._send,
            actions.OpenLink: self._open_link,
            actions.CloseLink: self._close_link,
            actions.Ended: self._ended,
            actions.Resent: lambda action: self.telemetry.resend(action.reason),
            actions.Parked: lambda action: self._report_soon(),
            actions.Unparked: self._unparked,
            actions.Held: self._held,
            actions.Ignored: lambda action: self.telemetry.count(
                "calculet_router_bad_messages", action.count, reason=action.reason
            ),
            actions.LostMessages: self._messages_lost,
        }

    # ---------------------------------------------------------------- life
    async def run(self) -> int:
        """Serve until told to stop.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        sockets = self._sockets()
        raise_file_limit(self.config.max_connections + SPARE_FILES)
        for name in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(name, self._signalled)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload, None)
        watch_death_pipe(self._keeper_gone)
        self._load_view()
        metrics = await serve_metrics(self.fleet.metrics_socket(self.name), self._own_exposition)
        self._every(TICK_S, lambda: self.feed(events.TimePassed()))
        self._every(FLUSH_S, self._settle)
        self._every(LOOK_S, self._keys.look)
        self._every(SECOND_S, self._limits.sweep)
        if self._tls:
            self._every(TLS_LOOK_S, self._tls.look)
        self._every(REPORT_S, self._report)
        self._knock()
        if watchdog := watchdog_interval_s():
            self._every(watchdog, lambda: sd_notify("WATCHDOG=1"))
        self._recovery = self._loop.create_task(self._recover_usage())
        await self._first_links()
        await self._server.listen(sockets, self._tls.context if self._tls else None)
        log.info("listening at=%s router=%08x", self._url(sockets), self.incarnation)
        self._listening = True
        self._report()
        opening = self._loop.create_task(self._open_dashboard())
        self._tasks.add(opening)
        opening.add_done_callback(self._tasks.discard)
        sd_notify("READY=1")
        tune_gc()
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            metrics.close()
            self.fleet.metrics_socket(self.name).unlink(missing_ok=True)
            self._close()
        return ExitCode.OK

    def _sockets(self) -> list[socket.socket]:
        inherited = [fd for fds in listen_fds().values() for fd in fds]
        if inherited:
            found = [socket.socket(fileno=fd) for fd in inherited]
            for sock in found:
                sock.setblocking(False)
            if not listens_at(found[0], self.config.listen):
                self._at = self._url(found)
                log.warning("the socket that was passed listens at %s, router.listen says %s", self._url(found), self.config.listen)
            return found
        try:
            return [bind(self.config.listen)]
        except OSError as error:
            why = "is in use by another process" if error.errno == 98 else error.strerror
            raise ConfigError(f"{self.fleet.path}: $.router.listen: {self.config.listen} {why}") from None

    async def _open_dashboard(self) -> None:
        """On an address of its own; one that is taken is no reason not to serve: another router of the fleet may have it, whose
        place is taken when it has ended."""
        said = False
        while self.config.admin_listen is not None:
            try:
                sock = bind(self.config.admin_listen)
                break
            except OSError as error:
                if not said:
                    log.warning("no dashboard yet: %s: %s (router.admin_listen)", self.config.admin_listen, error.strerror)
                said = True
                await asyncio.sleep(ADMIN_AGAIN_S)
        else:
            return
        if self._stop.is_set():
            sock.close()
            return
        self._dashboard = Dashboard(self)
        await self._dashboard.listen(sock)
        self._every(SECOND_S, self._dashboard.tick)
        log.info("dashboard at=http://%s:%d", *sock.getsockname()[:2])

    def _url(self, sockets: list[socket.socket]) -> str:
        host, port = sockets[0].getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    def _load_view(self) -> None:
        try:
            data = read_bounded(self.fleet.fleet_view, MAX_VIEW_BYTES)
            self.feed(events.ViewPublished(msgspec.json.decode(data, type=wire.FleetView)))
        except FileNotFoundError:
            log.info("no fleet view yet at %s", self.fleet.fleet_view)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the fleet view at %s cannot be used: %s", self.fleet.fleet_view, error)

    async def _first_links(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LINKS_S):
                while LinkState.CONNECTING in self.dispatcher.roster.links().values() and not self._stop.is_set():
                    await asyncio.sleep(GLANCE_S)

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("second signal: ending at once, calls=%d", self.dispatcher.calls)
            self._hurry = True
        self._stop.set()

    def _keeper_gone(self) -> None:
        log.warning("the keeper is gone")
        self._hurry = True
        self._stop.set()

    async def _drain(self) -> None:
        """Streams may finish, and open connections may bring what was on its way; what is left at the end is cancelled and told."""
        self.draining = True
        self._report()
        sd_notify("STOPPING=1")
        log.info("draining calls=%d", self.dispatcher.calls)
        self._server.stop_listening()
        deadline_s = self._loop.time() + self.config.drain_timeout_s
        while not self._hurry and (not self._server.drained() or self.dispatcher.calls) and self._loop.time() < deadline_s:
            await asyncio.sleep(GLANCE_S)
        self.closed = True
        for connection in list(self._server.connections):
            if connection.exchange is not None and connection.exchange.owner is not None:
                owner = connection.exchange.owner
                self.feed(events.ClientGone(owner, "the router is shutting down", ShuttingDown.code))
                owner.fail(ShuttingDown("the router is shutting down"))
        await asyncio.sleep(0)  # what was said last is written at the end of the loop's pass
        self._server.drained(over=True)
        await asyncio.sleep(GLANCE_S)

    def _close(self) -> None:
        self._server.abort()
        for task in self._tasks:
            task.cancel()
        if self._dashboard is not None:
            self._dashboard.close()
        for link in self._links.values():
            link.close()
        self._supervisor.close()
        self._context.destroy(linger=0)
        self._recovery.cancel()
        self.usage.close()
        self.journal.close()
        self._limits.close()
        if self.spans is not None:
            self.spans.close()

    def _every(self, seconds: float, act: Callable[[], object]) -> None:
        def again() -> None:
            try:
                act()
            except Exception:
                log.exception("a periodic task failed")
            self._loop.call_later(seconds, again)

        again()

    # ---------------------------------------------------------------- decisions and what they want
    def feed(self, event: events.Event) -> None:
        """Tell the dispatcher, and do what it wants."""
        perform, write, now_ns, kind = self._perform, self._write, time.monotonic_ns(), type(event)
        if (slept_ns := now_ns - self._awake_ns) > self._stall_ns:
            self._woke(slept_ns, now_ns)
        if kind is events.TimePassed:
            self._awake_ns = now_ns
        found = (self.lookups if kind in OF_LOOKUPS else self.dispatcher).handle(event, now_ns)
        if kind in OF_BOTH:
            found += self.lookups.handle(event, now_ns)
        if self.dispatcher.roster.changes != self._told_changes:
            self._report_soon()
        for action in found:
            if isinstance(action, actions.Deliver):
                action.owner.deliver(action.index, action.piece)
            elif isinstance(action, Event):
                write(action)
            else:
                perform[type(action)](action)

    def _woke(self, slept_ns: int, now_ns: int) -> None:
        """Before anything is judged: what was said meanwhile counts, and everybody hears that we are back."""
        log.warning("stood still for %.1f s: no worker is blamed for that", slept_ns / S)
        self._awake_ns = now_ns
        self.feed(events.Overslept(slept_ns))
        self._load_view()
        self._report()
        for link in list(self._links.values()):
            link.renew()

    def _send(self, action: actions.Send) -> None:
        link, message = self._links.get((action.board, action.epoch)), action.message
        if link is not None:
            link.send(message)
        elif (unsent := unsent_event(action.board, action.epoch, message)) is not None:
            self._loop.call_soon(self.feed, unsent)

    def _open_link(self, action: actions.OpenLink) -> None:
        view = action.view
        log.info("board %s: connecting epoch=%d endpoint=%s", view.board, view.epoch, view.endpoint)
        try:
            link = WorkerLink(
                self._context, view, self.incarnation, self.config.lease_interval_ms / 1000, self.feed, self._bad_message,
                lambda: read_curve_keys(self.fleet.curve, "router", self.name),
            )
        except (zmq.ZMQError, ConfigError) as error:
            log.error("board %s: cannot connect to %s: %s", view.board, view.endpoint, error)
            return
        self._links[view.board, view.epoch] = link

    def _close_link(self, action: actions.CloseLink) -> None:
        if link := self._links.pop((action.board, action.epoch), None):
            link.close()

    def _messages_lost(self, action: actions.LostMessages) -> None:
        log.error("board %s: messages lost, expected seq=%d got=%d", action.board, action.expected, action.got)
        self.telemetry.count("calculet_router_lost_messages")

    def _ended(self, action: actions.Ended) -> None:
        model = action.alias if self.dispatcher.aliases.known(action.alias) else OTHER
        self.telemetry.ended(action, model, self.dispatcher.inflight + action.choices)
        if action.request is not None:
            self.usage.append(action)
        elif action.trace is not None and action.error is not None and self.spans is not None:
            self.spans.refused(
                action.trace, action.error, action.accepted_ns, action.ended_ns, model=action.alias, tenant=action.tenant,
                label=action.label,
            )  # fmt: skip

    def _unparked(self, action: actions.Unparked) -> None:
        self.telemetry.collectors("calculet_router_model_wait_seconds", model=action.alias).observe(action.waited_ns / S)
        self._report_soon()

    def _held(self, action: actions.Held) -> None:
        self.telemetry.count("calculet_router_held_requests", outcome="reached" if action.reached else "refused")

    def _bad_message(self, reason: str) -> None:
        self.telemetry.count("calculet_router_bad_messages", reason=reason)

    # ---------------------------------------------------------------- HTTP
    def _reader_gone(self, exchange: Exchange, reason: str, code: str | None) -> None:
        if exchange.owner is None:
            return
        self.telemetry.count("calculet_router_slow_readers" if code else "calculet_router_disconnects")
        self.feed(events.ClientGone(exchange.owner, reason, code))

    def count_lookup(self, kind: str, outcome: str) -> None:
        """The end of a question about tokens."""
        self.telemetry.count("calculet_router_lookups", kind=kind, outcome=outcome)

    def count_error(self, error: CalculetError) -> None:
        """An error that never became a call."""
        self.telemetry.error(error)

    # ---------------------------------------------------------------- supervisor
    def _from_supervisor(self, frames: Frames) -> None:
        try:
            kind, body = frames
            message = wire.decode(kind, body)
        except (wire.WireError, ValueError):
            self._bad_message("malformed")
            return
        if isinstance(message, wire.FleetView):
            self._supervised = True
            self.feed(events.ViewPublished(message))
            self._report()
        elif isinstance(message, wire.TakeConfiguration):
            self._reload(message.live)
        elif isinstance(message, wire.RetireRouter):
            log.info("told to end and be started again")
            self._stop.set()
        elif isinstance(message, wire.Disturb) and self._chaos is not None:
            self._chaos.take(message)
        else:
            self._bad_message("unexpected")

    # ---------------------------------------------------------------- another configuration
    def _reload(self, wanted: str | None) -> None:
        """The supervisor's word, or SIGHUP (`wanted` None: whatever the file says)."""
        task = self._loop.create_task(self._take_configuration(wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_configuration(self, wanted: str | None) -> None:
        """Tenants, keys' aliases, deadlines and limits, at once and together; requests that run are not touched."""
        standing = await self._holding.read(wanted)
        if standing is not None:
            self.fleet = replace(self.fleet, config=standing.fleet)
            fresh, old = standing.fleet.router, self.config
            at_start = {name: getattr(old, name) for name in ("listen", "admin_listen", "tls", "lease_interval_ms")}
            config = self.config = msgspec.structs.replace(fresh, **at_start)
            set_level(standing.fleet.log.level)
            raise_file_limit(config.max_connections + SPARE_FILES)
            self._server.take_config(config)
            self.dispatcher.take_config(config)
            self.lookups.take_config(config)
            self.telemetry.take_limits(config)
            self.dispatcher.aliases.take_configured(admissions_of(standing))
            self.dispatcher.tenants.take_configs(standing.fleet.tenants, config.require_keys)
        self._report()

    def _knock(self) -> None:
        """Until the supervisor has answered for the first time, it is told more often that we are here."""
        if not self._supervised:
            self._report()
            self._loop.call_later(KNOCK_S, self._knock)

    def _report_soon(self) -> None:
        """Once in this pass of the loop: who waits for a model's turn, or which boards are reached, has changed."""
        if not self._report_due:
            self._report_due = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._report_due = False
        telemetry, roster = self.telemetry, self.dispatcher.roster
        self._told_changes = roster.changes
        report = wire.RouterReport(
            self.incarnation, os.getpid(), wire.PROTOCOL, max(0, roster.version), self._at,
            self.dispatcher.inflight, telemetry.requests, telemetry.failed, telemetry.resent, rss_bytes(), roster.links(),
            self.dispatcher.tally.reports(), self.dispatcher.parking.waits(), self._holding.start, self._holding.live,
            self._holding.error, roster.reached() if self._listening and not self.draining else None, self.name, self._began_s,
            self.draining,
        )  # fmt: skip
        self._supervisor.send(wire.encode(report))

    # ---------------------------------------------------------------- metrics and journal
    def _settle(self) -> None:
        self._count_usage()
        self.telemetry.settle()
        self.usage.flush()
        self.journal.flush()

    def _count_usage(self) -> None:
        """Carry the usage log's sums over to the counters."""
        now = [self.usage.written, self.usage.lost]
        for name, value, before in zip(("records", "lost"), now, self._counted_usage, strict=True):
            if value > before:
                self.telemetry.count(f"calculet_router_usage_{name}", value - before)
        self._counted_usage = now

    async def _recover_usage(self) -> None:
        """Account for what a killed predecessor left open, once workers have given up on it."""
        await asyncio.sleep(3 * self.config.lease_interval_ms / 1000 + RECOVERY_GRACE_S)
        orphans = await asyncio.to_thread(orphans_of, self.fleet, self.name, self.incarnation)
        for orphan in orphans:
            self.usage.add(record_of(orphan, time.time()))
            self.journal.append(done_of(orphan, time.monotonic_ns()))
        if orphans:
            log.warning("usage of %d requests of a router that was killed was recovered", len(orphans))
            self.telemetry.count("calculet_router_usage_recovered", len(orphans))

    def _own_exposition(self) -> bytes:
        self._count_usage()
        self.telemetry.settle()
        collectors, links = self.telemetry.collectors, list(self.dispatcher.roster.links().values())
        collectors("calculet_router_inflight").set(self.dispatcher.inflight)
        collectors("calculet_router_open_lookups").set(len(self.lookups))
        collectors("calculet_router_connections").set(len(self._server.connections))
        collectors("calculet_router_streams").set(self._server.streams)
        collectors("calculet_router_body_bytes").set(self._server.body_bytes)
        for alias in self.dispatcher.aliases.views():
            waiting = self.dispatcher.parking.count(alias.alias)
            if alias.parks or waiting:
                collectors("calculet_router_waiting_model", model=alias.alias).set(waiting)
        tenants = self.dispatcher.tenants
        for tenant in self._shown_tenants.difference(tenants.active):
            collectors.forget("calculet_router_tenant_active", tenant=tenant)
        self._shown_tenants = set(tenants.active)
        for tenant, active in tenants.active.items():
            collectors("calculet_router_tenant_active", tenant=tenant).set(active)
        collectors("calculet_router_keys").set(tenants.accepted_keys(time.time()))
        collectors("calculet_router_keys_version").set(tenants.keys_version)
        collectors("calculet_router_keys_usable").set(self._keys.usable)
        collectors("calculet_router_tls_expiry_timestamp_seconds").set(self._tls.expires_s if self._tls else 0)
        collectors("calculet_router_tls_usable").set(self._tls is None or self._tls.usable)
        collectors("calculet_router_view_version").set(max(0, self.dispatcher.roster.version))
        for state in LinkState:
            collectors("calculet_router_workers", state=state.value).set(links.count(state.value))
        return collectors.exposition()

    async def exposition(self) -> bytes:
        """The whole fleet's metrics; a process that does not answer is missing."""
        names = ["supervisor", *(f"worker-{board.name}" for board in self.fleet.config.boards)]
        paths = [self.fleet.metrics_socket(name) for name in names]
        paths += sorted(set(self.fleet.run_dir.glob("m-router*.sock")) - {self.fleet.metrics_socket(self.name)})
        others = await asyncio.gather(*map(fetch_metrics, paths))
        return merge_expositions([self._own_exposition(), *others])



def admissions_of(standing: Standing) -> dict[str, AdmissionConfig]:
    """Alias -> its deadlines."""
    return {
        alias: AdmissionConfig() if scheduler is None else scheduler.admission for alias, scheduler in standing.schedulers.items()
    }


def raise_file_limit(wanted: int) -> None:
    """Every connection is a descriptor; the usual soft limit of 1024 is below `max_connections`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        log.warning("only %d open files are allowed: fewer than router.max_connections needs (%d)", hard, wanted)
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def tune_gc() -> None:
    """What lives now lives on; young collections become rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def serve(config: Path, name: str = FIRST) -> int:
    """Run the router `name` for a fleet file until it is told to stop; the exit code.

    Raises:
        ConfigError: the file, a scheduler file, the name or the address cannot be used.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name: {name!r} cannot be a router's name: router, or router-NAME")
    fleet = load_or_held(config)
    if fleet.held is not None:
        log.error("the configuration cannot be used, what was in force goes on: %s", fleet.held)
    admissions = admissions_of(standing_of(fleet))
    make_folders(fleet)
    set_level(fleet.config.log.level)
    keep_copy(name, fleet.log(name))
    answer_dumps(fleet.stacks(name), f"{name} pid {os.getpid()}")
    lock = await _own_name(fleet, name)
    try:
        return await RouterApp(fleet, admissions, name).run()
    finally:
        if lock is not None:
            lock.release()


async def _own_name(fleet: Fleet, name: str) -> FileLock | None:
    """The name's lock; None when another router has it. Who looks whether this one lives has it for an instant, too."""
    for _ in range(NAME_TRIES):
        try:
            return FileLock(fleet.router_lock(name))
        except LockHeld as error:
            held = error
            await asyncio.sleep(KNOCK_S)
    log.warning("another router of this fleet is called %s, and both write its journal: %s", name, held)
    return None
