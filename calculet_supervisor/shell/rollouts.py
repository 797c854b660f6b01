"""Rollouts as they happen: the shell around `planner`. What is wanted of boards and aliases follows from what is committed, alone.

Each alias has at most one rollout under way. Its next step is planned whenever something is seen, committed on the store's thread,
and only then believed; a commit that fails (a full disk) is tried again and nothing follows from it meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from calculet_core import history, wire
from calculet_core.artifact import Package
from calculet_core.config import boards_of
from calculet_core.errors import ArtifactError, ConfigError
from calculet_core.shell.packages import read_package
from calculet_core.shell.standing import goes_on
from calculet_core.states.model_generation import ModelState
from calculet_core.states.rollout import RolloutEvent, RolloutState
from calculet_core.states.worker_process import ProcessState
from calculet_supervisor.canary import Canary, Opinion
from calculet_supervisor.planner import BoardFacts, Planner, unfit
from calculet_supervisor.rollout import AliasVersion, Artifact, Rollout, advance, refuse, verified
from calculet_supervisor.shell.artifacts import artifacts_of, recall, remember
from calculet_supervisor.shell.examining import Context, Unfit, artifact_of, examine
from calculet_supervisor.shell.sightings import ROUTER_SILENCE_NS
from calculet_supervisor.shell.store import Act, Memory
from calculet_supervisor.world import NOTHING_SEEN, Note, Placement

if TYPE_CHECKING:
    from calculet_supervisor.shell.app import Supervisor

RETRY_S = 1.0
log = logging.getLogger("calculet.rollouts")


@dataclass(frozen=True, slots=True)
class _Shown:
    """Where routers were told that an alias is, since which version of the view."""

    digest: str | None
    other: str | None
    share: float
    version: int


class Rollouts:
    """All aliases of one supervisor: what they stand for, and what is under way."""

    def __init__(self, supervisor: Supervisor, packages: Mapping[str, Package], memory: Memory) -> None:
        self._supervisor, self._fleet = supervisor, supervisor.fleet
        self.artifacts = artifacts_of(supervisor.fleet)
        self.live: dict[str, Rollout] = {alias: found for alias, found in memory.rollouts.items() if alias in packages}
        """By alias; one whose alias is not in the configuration any more rests."""
        self.versions: dict[str, list[AliasVersion]] = {alias: list(found) for alias, found in memory.versions.items()}
        self._configured = dict(packages)
        self._packages: dict[str, Package] = {package.digest: package for package in packages.values()}
        self.gone: dict[str, str] = {}
        """Digest -> what is wrong: it was loaded, and only its manifest is known."""
        self._created = {view.digest: view.created for view in memory.view.aliases}
        self._planner = Planner(supervisor.fleet.config.rollout)
        self._canaries: dict[int, Canary] = {}
        self._busy: set[str] = set()
        """Aliases whose next step is being committed or examined."""
        self._disk = asyncio.Lock()
        self._locks: dict[str, asyncio.Lock] = {alias: asyncio.Lock() for alias in packages}
        self._shown: dict[str, _Shown] = {}
        self._knows_routers_ns = time.monotonic_ns() + ROUTER_SILENCE_NS
        self.published(memory.view)
        for artifact in self._needed():
            self._read(artifact)

    def _needed(self) -> list[Artifact]:
        found = [rollout.green for rollout in self.live.values()] + [rollout.blue for rollout in self.live.values()]
        found += [self.current(alias) for alias in self._configured]
        return [artifact for artifact in found if artifact is not None]

    def _read(self, artifact: Artifact) -> None:
        """Read a manifest that is not known yet.

        Raises:
            ConfigError: a package that serves, or that is being moved to, is gone.
        """
        if artifact.digest in self._packages:
            return
        try:
            found = read_package(Path(artifact.package))
        except ArtifactError as error:
            remembered = recall(self._fleet, artifact.digest)
            if remembered is None or not goes_on(self._fleet):
                raise ConfigError(f"{artifact} was loaded and its package is gone: {error}") from None
            found = dataclasses.replace(remembered, root=Path(artifact.package))
            self.gone[artifact.digest] = f"{artifact} was loaded and its package is gone: {error}"
        if found.digest != artifact.digest:
            raise ConfigError(f"{artifact.package}: holds {found.digest[:12]}, not {artifact.digest[:12]} that was loaded")
        self._packages[artifact.digest] = found

    def place_of(self, digest: str) -> Path:
        """Where the package of a digest that is known is to be."""
        return self._packages[digest].root

    # ---------------------------------------------------------------- what follows from what is committed
    def decided(self, alias: str) -> AliasVersion | None:
        """An operator's last word on the alias, unless the configuration has had a newer one since."""
        versions = self.versions.get(alias)
        if versions and versions[-1].configured == self._configured[alias].digest:
            return versions[-1]
        return None

    def current(self, alias: str) -> Artifact | None:
        """What the alias stands for, rollouts that are under way apart; None: it is unloaded."""
        version = self.decided(alias)
        return version.artifact if version is not None else artifact_of(self._configured[alias])

    def previous(self, alias: str) -> Artifact | None:
        """What a rollback goes to."""
        version = self.decided(alias)
        return version.previous if version is not None else None

    def placement(self, board: str) -> tuple[Placement | None, bool]:
        """What the board shall hold, and whether another artifact must leave it for that."""
        sharing = self._supervisor.time_sharing
        alias = sharing.alias_of(board)
        rollout = self.staged(alias)
        artifact = rollout.wanted(board) if rollout is not None else self.current(alias)
        placed = Placement(alias, artifact.package, artifact.digest) if artifact is not None else None
        return placed, rollout is not None or self.decided(alias) is not None or sharing.shares(board)

    def aliases(self) -> tuple[wire.AliasView, ...]:
        """For the view; an alias that is unloaded is not in it."""
        return tuple(filter(None, (self._alias(alias) for alias in self._configured)))

    def decided_aliases(self) -> frozenset[str]:
        """Those that follow a committed word, not what boards happen to serve."""
        return frozenset(alias for alias in self._configured if self.staged(alias) or self.decided(alias))

    def digest_of(self, alias: str) -> str | None:
        """What the alias stands for, rollouts that are under way apart."""
        current = self.current(alias)
        return current.digest if current is not None else None

    def staged(self, alias: str) -> Rollout | None:
        """The alias's rollout, once it moves boards."""
        rollout = self.live.get(alias)
        return rollout if rollout is not None and RolloutState[rollout.state] >= RolloutState.STAGING else None

    def _alias(self, alias: str) -> wire.AliasView | None:
        rollout = self.staged(alias)
        serving = rollout.serving if rollout is not None else self.current(alias)
        if serving is None:
            return None
        view = msgspec.structs.replace(self._view(alias, serving), parks=self._supervisor.time_sharing.parks(alias))
        if rollout is None or rollout.share == 0 or rollout.green is None:
            return view
        return msgspec.structs.replace(view, other=self._view(alias, rollout.green), share=rollout.share)

    def _view(self, alias: str, artifact: Artifact) -> wire.AliasView:
        manifest = self._packages[artifact.digest].manifest
        level = max(("C0", *(proof.level for proof in manifest.abilities.values() if proof.evidence)))
        created = self._created.setdefault(artifact.digest, int(time.time()))
        return wire.AliasView(
            alias, artifact.digest, manifest.context, created, manifest.image_sha256, list(manifest.compiled_batches),
            level, manifest.backend, f"{manifest.name} {manifest.version}", manifest.sampling.temperature, manifest.sampling.top_p,
        )  # fmt: skip

    def resident(self) -> dict[str, Package]:
        """Board -> the package that it holds or shall hold."""
        found = {}
        for board in self._fleet.config.boards:
            placed, _ = self.placement(board.name)
            if placed is not None:
                found[board.name] = self._packages[placed.digest]
        return found

    # ---------------------------------------------------------------- what is seen
    def facts(self, boards: tuple[str, ...], alias: str | None = None) -> dict[str, BoardFacts]:
        """For the planner. `alias`: a board that another model has for now does not serve it."""
        return {board: self._facts(board, alias) for board in boards}

    def _facts(self, board: str, alias: str | None) -> BoardFacts:
        supervisor = self._supervisor
        seen, life = supervisor.sightings.boards.get(board, NOTHING_SEEN), supervisor.reconciler.lives.get(board)
        report, exits = seen.report, seen.exits
        out = supervisor.out(board)
        if out is None and report is not None and report.condemned is not None:
            out = f"condemned: {report.condemned}"
        if out is None and life is not None and life.state is ProcessState.QUARANTINED:
            out = f"its restart budget is spent: {life.why}"
        if report is None:
            return BoardFacts(out=out, exits=exits, unknown=seen.pid is not None)
        if alias is not None and report.generation and report.alias != alias and supervisor.time_sharing.shares(board):
            return BoardFacts(out=out, exits=exits)
        digest = report.digest if report.generation else None
        failed = digest if report.state == ModelState.FAILED.name else None
        if report.state == ModelState.UNLOADED.name and report.command_error is not None and life is not None:
            failed = life.load_digest
        trouble = (report.command_error or report.condemned or report.fault_detail or report.fault) if failed else None
        serves = report.state == ModelState.READY.name and not report.draining and out is None
        reached = not supervisor.sightings.unreached_by(board)
        return BoardFacts(digest, report.state, serves, out, trouble, failed, exits, reached)

    def published(self, view: wire.FleetView) -> None:
        """A view was committed: since when routers can know where each alias is."""
        found = {alias.alias: alias for alias in view.aliases}
        for alias in self._configured:
            shown, now = self._shown.get(alias), found.get(alias)
            key = (now.digest, now.other.digest if now.other else None, now.share) if now is not None else (None, None, 0.0)
            if shown is None or (shown.digest, shown.other, shown.share) != key:
                self._shown[alias] = _Shown(key[0], key[1], key[2], view.version)

    def acknowledged(self, rollout: Rollout) -> bool:
        """Whether every router that lives acts on where the record says the alias is. A supervisor that has just started does not
        know yet which routers live."""
        if time.monotonic_ns() < self._knows_routers_ns:
            return False
        shown, serving = self._shown[rollout.alias], rollout.serving
        if shown.digest != (serving.digest if serving else None) or shown.share != rollout.share:
            return False
        return all(seen.report.view_version >= shown.version for seen in self._supervisor.sightings.routers.values())

    def _opinion(self, rollout: Rollout, now_ns: int) -> Opinion | None:
        if rollout.share == 0 or rollout.promoted or rollout.canary == 0 or rollout.blue is None or rollout.green is None:
            self._canaries.pop(rollout.id, None)
            return None
        reports = [seen.report for seen in self._supervisor.sightings.routers.values()]
        canary = self._canaries.get(rollout.id)
        if canary is None:
            if not self.acknowledged(rollout):
                return None
            config = self._fleet.config.rollout.canary
            canary = self._canaries[rollout.id] = Canary(config, rollout.blue.digest, rollout.green.digest, reports, now_ns)
        canary.see(reports)
        return canary.opinion(now_ns)

    def canary_words(self, rollout: Rollout) -> str | None:
        """How a canary is doing."""
        canary = self._canaries.get(rollout.id)
        return canary.opinion(time.monotonic_ns()).words if canary is not None else None

    # ---------------------------------------------------------------- going on
    def tick(self, now_ns: int) -> None:
        """Plan the next step of everything that is under way."""
        for alias, rollout in list(self.live.items()):
            if alias in self._busy:
                continue
            if rollout.state in (RolloutState.PENDING.name, RolloutState.VERIFYING.name):
                self._work(alias, self._examine(rollout))
                continue
            following = self._planner.decide(
                rollout, self.facts(rollout.boards, alias), self.acknowledged(rollout), self._opinion(rollout, now_ns), now_ns,
                time.time(),
            )  # fmt: skip
            if following is not None:
                self._work(alias, self.commit(rollout, following))

    def _work(self, alias: str, work: Awaitable[object]) -> None:
        self._busy.add(alias)

        async def run() -> None:
            try:
                await work
            except Exception as error:
                log.error("the next step of %s could not be saved, and is tried again: %s", alias, error)
                await asyncio.sleep(RETRY_S)
            finally:
                self._busy.discard(alias)
                self._supervisor.decide_soon()

        self._supervisor.begin(run())

    async def _examine(self, rollout: Rollout) -> None:
        supervisor = self._supervisor
        reports = {board: seen.report for board, seen in supervisor.sightings.boards.items()}
        context = Context(self._fleet, self.artifacts, reports, dict(supervisor.quarantined))
        async with self._disk:  # until the commit: what was just copied is nobody's yet
            await self.commit(rollout, await self._verdict(rollout, context))

    async def _verdict(self, rollout: Rollout, context: Context) -> Rollout:
        """Refused, or verified with what was found."""
        try:
            package, found = await asyncio.to_thread(examine, rollout, context)
        except Unfit as error:
            return refuse(rollout, time.time(), f"{error}. Nothing was changed")
        except Exception as error:
            log.exception("rollout %d: the examination failed", rollout.id)
            return refuse(rollout, time.time(), f"{type(error).__name__}: {error}. Nothing was changed")
        self._packages[package.digest] = package
        if found["blue"] is not None:
            self._read(found["blue"])
        limits = (rollout.floor, rollout.max_unavailable, rollout.allow_downtime)
        if (why := unfit(rollout.boards, self.facts(rollout.boards, rollout.alias), *limits)) is not None:
            return refuse(rollout, time.time(), f"{why}. Nothing was changed")
        avoid = self._supervisor.reconciler.attribution.failed_on(package.digest)
        return verified(rollout, time.time(), avoid=avoid, **found)

    async def commit(self, before: Rollout, following: Rollout, act: Act | None = None) -> bool:
        """Save what follows `before`; from here on it is what holds. False: somebody else was faster, and nothing was done."""
        async with self._locks[before.alias]:
            if self.live.get(before.alias) != before:
                return False
            version = await self._supervisor.store.save_rollout(following, self._version(before, following), act)
            self._took_effect(before, following, version)
            return True

    def _version(self, before: Rollout, following: Rollout) -> AliasVersion | None:
        """What the alias stands for from this step on; None: the same as before."""
        alias = following.alias
        if following.on_green == before.on_green:
            return None
        previous = before.serving
        if not following.on_green:  # back where it was: and so is what a rollback goes to
            others = [one for one in self.versions.get(alias, ()) if one.rollout != following.id]
            previous = others[-1].previous if others else None
        return AliasVersion(alias, following.serving, previous, self._configured[alias].digest, time.time(), following.id)

    def _took_effect(self, before: Rollout, following: Rollout, version: AliasVersion | None) -> None:
        alias = following.alias
        if version is not None:
            self.versions.setdefault(alias, []).append(version)
        if following.over:
            del self.live[alias]
            self._canaries.pop(following.id, None)
            self._supervisor.begin(self.keep())
        else:
            self.live[alias] = following
        for step in following.log[len(before.log) :] or following.log[-1:]:
            data = {"rollout": following.id, "alias": alias, "verb": following.verb, "state": following.state, "text": step.text}
            self._supervisor.note(Note(history.FLEET_ROLLOUT, following.failed_board or "-", data=data))
        self._supervisor.decide_soon()

    async def open(self, rollout: Rollout, act: Act) -> Rollout:
        """Begin one.

        Raises:
            sqlite3.IntegrityError: another of the same alias is under way.
        """
        rollout = await self._supervisor.store.open_rollout(rollout, act)
        self.live[rollout.alias] = rollout
        self._supervisor.decide_soon()
        return rollout

    async def go_back(self, alias: str, reason: str) -> None:
        """The supervisor's own rollback, for a reason."""
        config, facts = self._fleet.config, self.facts(boards := self.boards(alias), alias)
        floor = max(0, min(len(boards) // 2, sum(seen.serves for seen in facts.values()) - 1))
        rollout = Rollout(
            0, alias, "rollback", boards, green=self.previous(alias), blue=self.current(alias), floor=floor,
            max_unavailable=len(config.boards), allow_downtime=True, begun=time.time(),
        )  # fmt: skip
        text = f"rollback {alias} {rollout.green} (by itself): {reason}"
        await self.open(advance(rollout, time.time(), text, RolloutEvent.BEGIN), Act("rollback", detail=f"{alias}: {reason}"))

    def boards(self, alias: str) -> tuple[str, ...]:
        """Those that the alias is placed on."""
        config = self._fleet.config
        return boards_of(config, next(model for model in config.models if model.alias == alias))

    async def unload(self, alias: str, act: Act) -> None:
        """The alias stands for nothing from here on; its boards are drained and emptied."""
        async with self._locks[alias]:
            version = AliasVersion(alias, None, self.current(alias), self._configured[alias].digest, time.time())
            version = await self._supervisor.store.save_version(version, act)
        self.versions.setdefault(alias, []).append(version)
        self._supervisor.decide_soon()

    async def keep(self) -> None:
        """What is configured can be gone back to; what nobody can go back to any more is removed."""
        async with self._disk:
            previous = [self.previous(alias) for alias in self._configured]
            wanted = {artifact.digest for artifact in (*self._needed(), *previous) if artifact is not None}
            packages = list(self._configured.values())
            wanted |= {package.digest for package in packages}
            self._packages = {digest: package for digest, package in self._packages.items() if digest in wanted}

            known = list(self._packages.values())

            def tidy() -> None:
                remember(self._fleet, known)
                self.artifacts.sweep(wanted)
                for package in packages:
                    self.artifacts.keep(package)

            await asyncio.to_thread(tidy)
