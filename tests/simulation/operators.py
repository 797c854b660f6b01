"""Operators: what they ask for through the real verbs, until they are answered; and a night watch that looks after dead boards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calculet_core.applying import digest_of, leaves_of
from calculet_core.clock import MS, S
from calculet_core.shell.fleet import standing_of
from calculet_supervisor.shell.store import Wanted
from simulation.scenario import Act

if TYPE_CHECKING:
    from simulation.world import World

CLI_NS = 300 * MS
TIMEOUT_NS = 5 * S
WATCH_NS = 5 * S
PATIENCE_NS = 45 * S
"""How long a board may look hopeless before it is restarted by hand."""
SWAPS = ("load", "rollback", "promote")
APPLY_AGAIN_NS = 2 * S
PATIENT_TRIES = 3
"""So often an apply is asked for before downtime is allowed for it."""
BACK = {"drain": "resume", "stop": "start"}


class Operators:
    """They act one after the other."""

    def __init__(self, world: World) -> None:
        self._world, self._timeline = world, world.timeline
        self._hopeless_ns: dict[str, int] = {}
        self.busy = 0
        for act in world.scenario.acts:
            self._timeline.after(act.at_ns, self._begin, act)
        self._timeline.after(WATCH_NS, self._watch)

    def _begin(self, act: Act) -> None:
        world = self._world
        if act.target >= len(world.boards):
            return
        board = world.boards[act.target]
        if act.verb == "apply":
            world.edit(restart=act.back_after_ms % 3 > 0)
            self.busy += 1
            self._apply(0)
            return
        if act.verb in SWAPS:
            self.swap(act)
            return
        self.ask(act.verb, board)
        if act.verb in BACK:
            self.busy += 1
            self._timeline.after(act.back_after_ms * MS, self._back, BACK[act.verb], board)

    def _back(self, verb: str, board: str) -> None:
        self.busy -= 1
        self.ask(verb, board)

    def ask(self, verb: str, board: str) -> None:
        """Until it was done or refused for good."""
        self.busy += 1
        self._world.checker.asked(board)
        self._ask(verb, board)

    def _ask(self, verb: str, board: str) -> None:
        supervisor = self._world.keeper.supervisor
        if supervisor is None or not supervisor.serving or supervisor.stopped:
            self._timeline.after(CLI_NS, self._ask, verb, board)
            return
        waiting = [True]

        def done(answer: Any, error: BaseException | None) -> None:
            if not waiting[0]:
                return
            waiting[0] = False
            self.busy -= 1
            self._world.note(f"operator: {verb}", f"{board}: {answer or error!r}")
            if error is None:
                self._world.saw(f"operator: {verb}")
                self._world.checker.acknowledged(board, answer["up"], answer["draining"])
                if verb in ("restart", "probation"):
                    self._world.checker.operator_restarted(board)
            else:
                self._world.saw("an act was refused")
                self._world.checker.refused(board)
                if verb in BACK.values():
                    self.busy += 1
                    self._timeline.after(2 * S, self._back, verb, board)

        def expired() -> None:
            if waiting[0]:
                waiting[0] = False
                self._world.saw("an act was not answered")
                self._ask(verb, board)

        supervisor.call(supervisor.operate, verb, {"board": board}, done)
        self._timeline.after(TIMEOUT_NS, expired)

    def _apply(self, tries: int) -> None:
        """`calculet config apply` of what the file says, until it is done."""
        supervisor = self._world.keeper.supervisor
        if supervisor is None or not supervisor.serving or supervisor.stopped:
            self._timeline.after(CLI_NS, self._apply, tries)
            return
        waiting = [True]

        def done(answer: Any, error: BaseException | None) -> None:
            if not waiting[0]:
                return
            waiting[0] = False
            self._world.note("operator: apply", f"{answer['version'] if error is None else repr(error)}")
            if error is None:
                self.busy -= 1
                self._world.saw("operator: apply")
                self._world.checker.applied(answer["version"], answer["digest"])
            else:
                self._world.saw("an act was refused")
                self._timeline.after(APPLY_AGAIN_NS, self._apply, tries + 1)

        def expired() -> None:
            if waiting[0]:
                waiting[0] = False
                self._world.saw("an act was not answered")
                self._apply(tries)

        digest = digest_of(leaves_of(standing_of(self._world.fleet)))
        allow = len(self._world.boards) == 1 or tries >= PATIENT_TRIES
        supervisor.call(supervisor.operate, "config apply", {"digest": digest, "allow_downtime": allow}, done)
        self._timeline.after(TIMEOUT_NS, expired)

    def swap(self, act: Act) -> None:
        """Move the alias to another package, or back."""
        arguments: dict[str, Any] = {"alias": self._world.alias}
        if act.verb == "load":
            packages = list(self._world.packages.values())
            canary = 0.4 if act.back_after_ms % 2 else 0.0
            package = packages[(act.target + act.back_after_ms) % len(packages)]
            arguments |= {"package": str(package.root), "canary": canary, "allow_downtime": True, "max_unavailable": 4}
        self._once(act.verb, arguments)

    def _once(self, verb: str, arguments: dict[str, Any]) -> None:
        """An act that is not insisted on."""
        supervisor = self._world.keeper.supervisor
        if supervisor is None or not supervisor.serving or supervisor.stopped:
            return

        def done(answer: Any, error: BaseException | None) -> None:
            self._world.note(f"operator: {verb}", f"{answer or error!r}")
            self._world.saw(f"operator: {verb}" if error is None else "an act was refused")
            if error is None and "rollout" in answer:
                self._world.checker.begun(answer["rollout"])

        supervisor.call(supervisor.operate, verb, arguments, done)

    def _watch(self) -> None:
        """What `calculet status` would make a person do."""
        self._timeline.after(WATCH_NS, self._watch)
        supervisor, now = self._world.keeper.supervisor, self._timeline.now
        if supervisor is None or not supervisor.serving or supervisor.stopped:
            return
        if supervisor.recovery.breaker.reason is not None and self._since("breaker", now) >= PATIENCE_NS:
            self._once("breaker", {"close": True})
        for digest in list(supervisor.quarantined):
            if self._since(f"quarantine {digest}", now) >= PATIENCE_NS:
                self._once("release", {"digest": digest})
        for rollout in supervisor.rollouts.live.values():
            if rollout.canary and not rollout.promoted and self._since(f"canary {rollout.id}", now) >= PATIENCE_NS:
                self._once("promote", {"alias": rollout.alias})
        for board in self._world.boards:
            if supervisor.wanted.get(board, Wanted()).condemned is not None:
                if self._since(f"condemned {board}", now) >= PATIENCE_NS:
                    self.ask("probation", board)
                continue
            if self._looks_hopeless(supervisor, board):
                since = self._hopeless_ns.setdefault(board, now)
                if now - since >= PATIENCE_NS:
                    del self._hopeless_ns[board]
                    self._world.saw("the night watch restarted a board")
                    self.ask("restart", board)
            else:
                self._hopeless_ns.pop(board, None)

    def _since(self, what: str, now: int) -> int:
        """For how long somebody has been looking at it; then he acts, and looks again."""
        waited_ns = now - self._hopeless_ns.setdefault(what, now)
        if waited_ns >= PATIENCE_NS or waited_ns < 0:
            self._hopeless_ns.pop(what)
        return waited_ns

    def _looks_hopeless(self, supervisor: Any, board: str) -> bool:
        """Condemned for something that only a person may overrule, or a failed load; a spent budget is left to the window."""
        _, report = supervisor.outlook(board)
        if report is None or report.state != "FAILED":
            return False
        return report.condemned is None or "resets" not in report.condemned
