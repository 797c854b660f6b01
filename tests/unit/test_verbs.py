"""Two words about one board at the same moment: none undoes the other in silence."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from calculet_supervisor.shell.control import Caller, Refused
from calculet_supervisor.shell.store import Wanted
from calculet_supervisor.shell.verbs import Verbs

CALLER = Caller(1000, 4242)


def a_supervisor(saved: asyncio.Event) -> Any:
    async def want(board: str, wanted: Wanted, act: Any) -> Wanted:
        await saved.wait()
        return wanted

    config = SimpleNamespace(boards=[SimpleNamespace(name="board0"), SimpleNamespace(name="board1")])
    return SimpleNamespace(
        fleet=SimpleNamespace(config=config), wanted={}, store=SimpleNamespace(want=want), note=lambda note: None,
        decide_soon=lambda: None,
    )  # fmt: skip


def test_a_word_that_comes_while_another_is_being_saved_is_refused_and_undoes_nothing() -> None:
    async def scene() -> None:
        saved = asyncio.Event()
        supervisor = a_supervisor(saved)
        verbs = Verbs(supervisor)
        drain = asyncio.create_task(verbs.drain({"board": "board0"}, CALLER))
        other = asyncio.create_task(verbs.drain({"board": "board1"}, CALLER))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="board0"):
            await verbs.stop({"board": "board0"}, CALLER)
        saved.set()
        assert (await drain)["draining"] and (await other)["draining"]
        assert await verbs.stop({"board": "board0"}, CALLER) == {"board": "board0", "up": False, "draining": True, "already": False}

    asyncio.run(scene())
