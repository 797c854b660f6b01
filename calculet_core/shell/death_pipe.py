"""Dying with the keeper: children hold the read end of a pipe whose only write end the keeper holds.

However the keeper ends, the kernel closes the write end, and its children see end-of-file. The number of the descriptor is in
`CALCULET_DEATH_FD`; without it (under systemd) nothing is watched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

VARIABLE = "CALCULET_DEATH_FD"
STARTED = "CALCULET_STARTED"
"""Names the keeper's life: a person started it."""


def watch_death_pipe(on_death: Callable[[], None]) -> bool:
    """Call `on_death` from the running loop once the keeper is gone; False when there is no pipe to watch."""
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return False
    fd = int(number)
    os.set_inheritable(fd, False)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        on_death()

    loop.add_reader(fd, readable)
    return True
