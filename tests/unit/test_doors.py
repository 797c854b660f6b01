"""Sockets whose files are deleted while their processes listen come back by themselves, the folder with them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from calculet_core.shell import doors
from calculet_core.shell.link import Frames, bind_router, connect_dealer
from calculet_core.shell.telemetry import fetch_metrics, serve_metrics

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "LOOK_S", 0.02)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def exists(path: Path) -> bool:
    return path.exists()


def test_a_server_whose_socket_and_folder_were_deleted_answers_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "m.sock"
    path.parent.mkdir()

    async def scenario() -> None:
        server = await serve_metrics(path, lambda: b"told")
        for victim in (path, path.parent):
            shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
            await until(lambda: _equals(fetch_metrics(path), b"told"))
            assert path.stat().st_mode & 0o777 == 0o600
        server.close()
        await until(_nobody_else_works)  # one that is closed looks no more

    asyncio.run(scenario())


async def _nobody_else_works() -> bool:
    return len(asyncio.all_tasks()) == 1


async def _equals(found: Awaitable[bytes], wanted: bytes) -> bool:
    return await found == wanted


def test_a_link_whose_socket_was_deleted_keeps_its_peers_and_takes_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"

    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heard: list[Frames] = []
        link = bind_router(context, path, heard.append)
        old = connect_dealer(context, str(path), lambda frames: None, b"old")

        async def says(peer_link: object, name: bytes) -> bool:
            peer_link.send([b"kind", name])  # type: ignore[attr-defined]
            return any(frames[0] == name for frames in heard)

        await until(lambda: says(old, b"old"))
        path.unlink()
        await until(lambda: exists(path))
        assert path.stat().st_mode & 0o777 == 0o600
        heard.clear()
        new = connect_dealer(context, str(path), lambda frames: None, b"new")
        await until(lambda: says(new, b"new"))
        await until(lambda: says(old, b"old"))
        for each in (old, new, link):
            each.close()
        context.destroy(linger=0)

    asyncio.run(scenario())


def test_a_path_that_cannot_be_opened_is_tried_until_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run" / "m.sock"
    path.parent.mkdir()

    async def complained() -> bool:
        return "cannot be opened again" in caplog.text

    async def scenario() -> None:
        server = await serve_metrics(path, lambda: b"told")
        shutil.rmtree(path.parent)
        path.parent.write_text("in the way")
        await until(complained)
        path.parent.unlink()
        await until(lambda: exists(path))
        server.close()
        assert caplog.text.count("cannot be opened again") == 1

    asyncio.run(scenario())
