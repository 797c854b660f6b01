"""The supervisor's commands, and leaving: unload and stop drain first, bounded by a deadline (scheduling §12).

Commands carry a growing `seq`; one that was seen is ignored. `command_seq` and `command_error` in the report answer: a command is
answered when it is taken up or refused, and a load that fails later adds its reason. While leaving, waiting requests are refused
so that their router sends them elsewhere, and what runs may finish. At the deadline it is failed; a submitted job still drains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calculet_core import wire
from calculet_core.clock import MS
from calculet_core.errors import CalculetError, ExitCode, ModelDraining, ShuttingDown
from calculet_core.states.model_generation import ModelState
from calculet_worker.actions import Action, Announce, Exit
from calculet_worker.attempts import Attempts
from calculet_worker.generation import Lifecycle
from calculet_worker.jobs.pingpong import PingPong
from calculet_worker.scheduling.admission import RejectUnavailable


@dataclass(slots=True)
class Leaving:
    """A drain towards `stop` (the process ends) or an unload."""

    stop: bool
    deadline_ns: int
    expired: bool = False

    def error(self) -> CalculetError:
        """For requests that cannot be served here any more."""
        return ShuttingDown("the worker is stopping") if self.stop else ModelDraining("the model is being unloaded")


class Control:
    """What the supervisor last asked, and what came of it."""

    def __init__(self, life: Lifecycle, attempts: Attempts, pingpong: PingPong) -> None:
        self._life, self._attempts, self._pingpong = life, attempts, pingpong
        self.command_seq = 0
        self._error: str | None = None
        self.leaving: Leaving | None = None
        self._exited = False
        self._commands: dict[type[Any], Callable[[Any, int, list[Action]], str | None]] = {
            wire.LoadModel: self._load,
            wire.UnloadModel: self._unload,
            wire.DrainBoard: self._drain,
            wire.ResumeBoard: self._resume,
            wire.SetPingPong: self._set_pingpong,
            wire.GrantReset: self._grant,
            wire.DenyReset: self._life.deny,
            wire.StopWorker: self._stop,
        }

    @property
    def command_error(self) -> str | None:
        """Why the last command was refused, or why the last load failed."""
        return self._error or self._life.load_error

    @property
    def stopping(self) -> bool:
        """The process is about to end."""
        return self.leaving is not None and self.leaving.stop

    @property
    def jobs_may_start(self) -> bool:
        """No drain deadline has passed."""
        return self.leaving is None or not self.leaving.expired

    def refusal(self) -> RejectUnavailable | None:
        """Why no request may come in now (scheduling §5.2)."""
        error = self.leaving.error() if self.leaving is not None else self._life.refusal()
        return None if error is None else RejectUnavailable(error)

    def next_wakeup_ns(self) -> int | None:
        """When a drain expires."""
        return None if self.leaving is None or self.leaving.expired else self.leaving.deadline_ns

    def command(self, command: Any, now_ns: int, out: list[Action]) -> None:
        """Take up or refuse; a repeated command changes nothing."""
        if command.seq > self.command_seq:
            self.command_seq = command.seq
            self._error = self._commands[type(command)](command, now_ns, out)
            out.append(Announce())

    # ---------------------------------------------------------------- commands
    def _load(self, command: wire.LoadModel, now_ns: int, out: list[Action]) -> str | None:
        if self.leaving is not None:
            return "the board is being left"
        return self._life.load(command, self._unproven(), now_ns, out)

    def _unload(self, command: wire.UnloadModel, now_ns: int, out: list[Action]) -> str | None:
        life, state = self._life, self._life.state
        if state is ModelState.UNLOADED:
            return None
        if command.generation != life.generation:
            return f"generation {life.generation} is here, not {command.generation}"
        if state is ModelState.FAILED and not self._unproven():
            life.unload_failed(now_ns, out)
            return None
        if state is not ModelState.READY or self.leaving is not None:
            return f"generation {life.generation} is {state.name}: it cannot be unloaded now"
        life.drain(now_ns, out)
        self._leave(Leaving(False, now_ns + command.deadline_ms * MS), now_ns, out)
        return None

    def _drain(self, command: wire.DrainBoard, now_ns: int, out: list[Action]) -> str | None:
        self._life.draining = True
        self._attempts.fail_all(self._attempts.clients_waiting(), ModelDraining("the board is draining"), now_ns, out)
        return None

    def _resume(self, command: wire.ResumeBoard, now_ns: int, out: list[Action]) -> str | None:
        self._life.draining = False
        return None

    def _set_pingpong(self, command: wire.SetPingPong, now_ns: int, out: list[Action]) -> str | None:
        if not self._pingpong.wanted:
            return "executor.max_inflight is 1: there is no second job to allow or forbid"
        self._pingpong.set(command.allowed)
        return None

    def _grant(self, command: wire.GrantReset, now_ns: int, out: list[Action]) -> str | None:
        if self.stopping:
            return "the worker is stopping"
        self.leaving = None  # an unload whose drain ended in a fault is over
        return self._life.grant(command, now_ns, out)

    def _stop(self, command: wire.StopWorker, now_ns: int, out: list[Action]) -> str | None:
        self._leave(Leaving(True, now_ns + command.deadline_ms * MS), now_ns, out)
        return None

    def _leave(self, leaving: Leaving, now_ns: int, out: list[Action]) -> None:
        self.leaving = leaving
        self._attempts.fail_all(self._attempts.clients_waiting(), leaving.error(), now_ns, out)

    # ---------------------------------------------------------------- progress
    def expire(self, now_ns: int, out: list[Action]) -> None:
        """At the drain deadline what still runs is failed."""
        leaving = self.leaving
        if leaving is not None and not leaving.expired and now_ns >= leaving.deadline_ns:
            leaving.expired = True
            self._attempts.fail_all(self._attempts.registry.live(), leaving.error(), now_ns, out)

    def advance(self, now_ns: int, out: list[Action]) -> None:
        """Go on when nothing runs any more: unconfigure, or end the process."""
        leaving = self.leaving
        if leaving is None or not self._attempts.nothing_runs():
            return
        if leaving.stop:
            self.exit(ExitCode.OK, "stopped by command", out)
        elif self._life.state is ModelState.DRAINING:
            self._life.drained(now_ns, out)
        elif self._life.state is not ModelState.UNLOADING:
            self.leaving = None

    def exit(self, code: int, reason: str, out: list[Action]) -> None:
        """End the process; the first word counts."""
        if not self._exited:
            self._exited = True
            out.append(Exit(code, reason))

    def _unproven(self) -> bool:
        serving = self._attempts.serving
        return serving is not None and bool(len(serving.inflight) or serving.buffers.quarantined)
