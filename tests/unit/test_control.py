"""The operators' channel: whatever a verb does wrong is its answer, never the end of the supervisor."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from calculet_core import wire
from calculet_core.shell.control_client import ControlError, call, pack, unpacker
from calculet_supervisor.shell.control import Caller, Refused, serve_control
from calculet_supervisor.shell.sightings import RouterSeen
from calculet_supervisor.shell.status import router_status


async def good(arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    return {"said": arguments["what"]}


async def refuses(arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    raise Refused("no", "ask tomorrow")


async def raises(arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    raise KeyError("what")


async def lacks(arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    raise OSError(errno.EMFILE, "Too many open files", "/some/file")


async def unpackable(arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    return {"row": object()}


def conversation(path: Path, *verbs: str) -> list[Any]:
    """What each verb was answered; an error's message where it was refused."""

    def ask(verb: str) -> Any:
        try:
            return call(path, verb, {"what": "this"})
        except ControlError as error:
            return error.message, error.hint

    async def run() -> list[Any]:
        table = {"good": good, "refuses": refuses, "raises": raises, "lacks": lacks, "unpackable": unpackable}
        server = await serve_control(path, table)
        try:
            return [await asyncio.to_thread(ask, verb) for verb in verbs]
        finally:
            server.close()

    return asyncio.run(run())


def test_every_mistake_of_a_verb_is_answered_and_the_next_one_is_served(tmp_path: Path) -> None:
    found = conversation(tmp_path / "control.sock", "refuses", "raises", "unpackable", "nonsense", "good")
    assert found[0] == ("no", "ask tomorrow")
    assert found[1][0] == "KeyError: 'what'" and "bug" in found[1][1]
    assert found[2][0].startswith("TypeError") and "bug" in found[2][1]
    assert "unknown verb 'nonsense'" in found[3][0] and "refuses" in found[3][1]
    assert found[4]["said"] == "this"


def test_what_the_machine_lacks_is_called_no_bug(tmp_path: Path) -> None:
    message, hint = conversation(tmp_path / "control.sock", "lacks")[0]
    assert message == "the supervisor cannot do it now: /some/file: Too many open files"
    assert "doctor" in hint and "bug" not in hint


@pytest.mark.parametrize("versions", [[], [wire.VersionReport("d" * 64, 3, 1, {40: 2}, {30: 1})]])
def test_a_routers_row_can_be_sent_while_a_canary_runs(versions: list[wire.VersionReport]) -> None:
    row = router_status(RouterSeen(wire.RouterReport(1, 2, 1, 3, versions=versions), 0))
    incoming = unpacker()
    incoming.feed(pack(row))
    assert next(iter(incoming))["router"] == "00000001"
