"""Who really starts and signals worker processes: the development keeper, or systemd. The supervisor knows only this interface.

Everything but `list` returns at once; what came of it is told by `Events`, also for processes that somebody else ended.
"""

from __future__ import annotations

from typing import Any, Protocol

from calculet_supervisor.world import Exit


class Events(Protocol):
    """What a launcher tells the supervisor."""

    def started(self, board: str, pid: int) -> None:
        """The board's worker process exists."""
        ...

    def exited(self, board: str, how: Exit) -> None:
        """It is gone, or could not be started."""
        ...

    def router_stays(self, pid: int, reason: str) -> None:
        """No successor could take the place of the router `pid`, which goes on."""
        ...


class Launcher(Protocol):
    """Starts and signals the workers of boards."""

    async def list(self) -> dict[str, int]:
        """Pids of the workers that live now, by board; exits of these are told from now on."""
        ...

    def start(self, board: str) -> None:
        """Start the board's worker."""
        ...

    def stop(self, board: str) -> None:
        """SIGTERM."""
        ...

    def dump(self, board: str) -> None:
        """Ask it to write its stacks and go on (`calculet_core.shell.stacks.DUMP`)."""
        ...

    def abort(self, board: str) -> None:
        """SIGABRT: print the stack and die."""
        ...

    def kill(self, board: str) -> None:
        """SIGKILL, to all that belongs to the worker."""
        ...

    def tell(self, boards: dict[str, Any]) -> None:
        """How each board is, for whoever watches the start; dropped where nobody does."""
        ...

    def replace_router(self, pid: int) -> bool:
        """Start a successor beside the router `pid`, and end that after its drain once the successor serves. False: nobody can
        here; a router that ends is started again, and connections wait in its socket meanwhile."""
        ...

    def close(self) -> None:
        """Let go; workers live on."""
        ...
