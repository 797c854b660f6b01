"""Sockets of workers that died while no supervisor watched: under systemd nobody else would remove them.

Which lives had begun is read before the launcher tells who is alive: a worker that starts meanwhile is never taken for dead.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress

from calculet_core.shell.fleet import Fleet


def epochs_begun(fleet: Fleet) -> dict[str, int]:
    """The last life of each board's worker that had begun by now."""
    begun = {}
    for board in fleet.config.boards:
        with suppress(OSError, ValueError):
            begun[board.name] = int(fleet.board_epoch(board.name).read_text())
    return begun


def sweep_dead(fleet: Fleet, begun: dict[str, int], alive: Collection[str]) -> None:
    """Remove the sockets of lives that are over: all that had begun on boards without a process, all but the last on others."""
    for board, last in begun.items():
        over = last - 1 if board in alive else last
        socket_name = re.compile(rf"w-{re.escape(board)}-(\d+)\.sock")
        for path in fleet.run_dir.glob("w-*.sock"):
            if (match := socket_name.fullmatch(path.name)) and int(match[1]) <= over:
                path.unlink(missing_ok=True)
        if board not in alive:
            fleet.metrics_socket(f"worker-{board}").unlink(missing_ok=True)
