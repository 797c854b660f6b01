"""TCP between routers and workers: with the fleet's keys, and for nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from calculet_core.errors import ConfigError
from calculet_core.shell import link as links
from calculet_core.shell.curve import CurveKeys, Gatekeeper, allowed_routers, make_curve_keys, make_router_keys, read_curve_keys
from calculet_core.shell.link import Frames, Link, bind_router, bind_router_tcp, connect_dealer


async def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


class Door:
    """A worker's side, and what it saw."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self.got: list[Frames] = []
        self.denied = self.strangers = 0
        keys = read_curve_keys(folder, "worker")
        self.keeper = Gatekeeper(context, lambda: allowed_routers(folder), self._denied)
        self.link: Link = bind_router_tcp(context, "127.0.0.1:0", keys, self.got.append, self._stranger)

    def _denied(self) -> None:
        self.denied += 1

    def _stranger(self) -> None:
        self.strangers += 1

    def close(self) -> None:
        self.link.close()
        self.keeper.close()


def test_a_router_with_its_key_comes_in_and_is_answered(tmp_path: Path) -> None:
    make_curve_keys(tmp_path / "curve")

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        door, answers = Door(context, tmp_path / "curve"), list[Frames]()
        assert door.link.endpoint.startswith("tcp://127.0.0.1:") and not door.link.endpoint.endswith(":0")
        router = connect_dealer(context, door.link.endpoint, answers.append, curve=lambda: read_curve_keys(tmp_path / "curve", "router"))
        await until(lambda: router.send([b"k", b"in"]))
        await until(lambda: door.got)
        assert door.link.send([door.got[0][0], b"k", b"back"])
        await until(lambda: answers == [[b"k", b"back"]])
        assert (door.denied, door.strangers) == (0, 0)
        router.close()
        door.close()
        context.term()

    asyncio.run(run())


def test_nobody_else_comes_in_and_is_counted(tmp_path: Path) -> None:
    make_curve_keys(tmp_path / "curve")
    make_curve_keys(tmp_path / "other")
    router = read_curve_keys(tmp_path / "curve", "router")
    other = read_curve_keys(tmp_path / "other", "router")

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        door = Door(context, tmp_path / "curve")
        stranger = CurveKeys(other.public, other.secret, router.peer)  # knows the worker's public key, and has one of its own
        wrong = [connect_dealer(context, door.link.endpoint, lambda frames: None, curve=lambda: stranger)]
        await until(lambda: door.denied)
        wrong[0].close()
        impostor = CurveKeys(router.public, router.secret, other.peer)  # a router that expects another worker
        wrong.append(connect_dealer(context, door.link.endpoint, lambda frames: None, curve=lambda: impostor))
        before = door.strangers
        await until(lambda: door.strangers > before)
        plain = context.socket(zmq.DEALER)  # no encryption at all
        plain.setsockopt(zmq.LINGER, 0)
        plain.setsockopt(zmq.IMMEDIATE, 1)
        before = door.strangers
        plain.connect(door.link.endpoint)
        await until(lambda: door.strangers > before)
        host, _, port = door.link.endpoint.removeprefix("tcp://").rpartition(":")
        before = door.strangers
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        writer.close()
        await until(lambda: door.strangers > before)
        assert door.got == []
        for link in wrong:
            link.close()
        plain.close()
        door.close()
        context.term()

    asyncio.run(run())


def test_a_router_of_its_own_key_is_let_in_and_shut_out_by_a_file_while_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "curve"
    make_curve_keys(folder)

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        door = Door(context, folder)
        (secret, public) = make_router_keys(folder, "router2")  # while the worker runs
        own, common = read_curve_keys(folder, "router", "router2"), read_curve_keys(folder, "router", "router")
        assert own.public != common.public and own.peer == common.peer
        assert read_curve_keys(folder, "router", "router2-b") == own, "its successor, while one replaces the other"
        assert read_curve_keys(folder, "router", "router-b") == common
        for number, keys in enumerate((own, common), 1):
            link = connect_dealer(context, door.link.endpoint, lambda frames: None, curve=lambda keys=keys: keys)  # type: ignore[misc]
            await until(lambda link=link: link.send([b"k", b"in"]))  # type: ignore[misc]
            await until(lambda number=number: len(door.got) == number)  # type: ignore[misc]
            link.close()
        assert door.denied == 0
        public.unlink()
        link = connect_dealer(context, door.link.endpoint, lambda frames: None, curve=lambda: own)
        await until(lambda: door.denied)
        link.close()
        for name in ("router.public", "router.secret"):
            (folder / name).unlink()
        make_router_keys(folder, "router2")
        renewed = read_curve_keys(folder, "router", "router2")
        link = connect_dealer(context, door.link.endpoint, lambda frames: None, curve=lambda: renewed)
        await until(lambda: link.send([b"k", b"again"]))
        await until(lambda: len(door.got) == 3)
        assert read_curve_keys(folder, "worker").public, "routers' own keys are enough"
        link.close()
        door.close()
        context.term()
        assert secret.stat().st_mode & 0o077 == 0

    asyncio.run(run())


def test_a_routers_own_keys_need_the_workers_and_a_plain_name(tmp_path: Path) -> None:
    folder = tmp_path / "curve"
    with pytest.raises(ConfigError, match="worker.public is missing"):
        make_router_keys(folder, "router2")
    make_curve_keys(folder)
    for name in ("../router", "", "a b", "x" * 65):
        with pytest.raises(ConfigError, match="no name of a router"):
            make_router_keys(folder, name)
    (_, public) = make_router_keys(folder, "router2")
    public.write_text("not a key")
    with pytest.raises(ConfigError, match=r"router2.public: not a CURVE key"):
        read_curve_keys(folder, "worker")


def test_tcp_without_keys_is_refused() -> None:
    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with pytest.raises(ConfigError, match="only with CURVE"):
            connect_dealer(context, "tcp://127.0.0.1:1", lambda frames: None)
        context.term()

    asyncio.run(run())


def test_keys_are_for_their_owner_and_belong_together(tmp_path: Path) -> None:
    folder = tmp_path / "curve"
    with pytest.raises(ConfigError, match="worker.secret is missing.*calculet keys curve"):
        read_curve_keys(folder, "worker")
    written = make_curve_keys(folder)
    assert {path.name for path in written} == {"worker.secret", "worker.public", "router.secret", "router.public"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in written if path.suffix == ".secret")
    keys = read_curve_keys(folder, "worker")
    router = read_curve_keys(folder, "router")
    assert router.peer == keys.public and allowed_routers(folder) == {router.public} and keys.secret.decode() not in repr(keys)
    (folder / "worker.secret").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644 lets others at it"):
        read_curve_keys(folder, "worker")
    (folder / "worker.secret").chmod(0o600)
    (folder / "worker.public").write_bytes(router.public)
    with pytest.raises(ConfigError, match="does not belong to worker.public"):
        read_curve_keys(folder, "worker")
    (folder / "worker.public").write_bytes(keys.public)
    (folder / "router.public").write_text("not a key")
    with pytest.raises(ConfigError, match="not a CURVE key"):
        read_curve_keys(folder, "worker")


def test_a_message_above_the_limit_is_dropped_and_counted_and_the_next_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_MESSAGE_BYTES", 1000)

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        got: list[Frames] = []
        dropped = [0, 0]

        def count(side: int) -> Callable[[], None]:
            return lambda: dropped.__setitem__(side, dropped[side] + 1)

        server = bind_router(context, tmp_path / "s.sock", got.append, None, count(0))
        client = connect_dealer(context, str(tmp_path / "s.sock"), lambda frames: None, on_oversize=count(1))
        await until(lambda: client.send([b"k", b"x" * 1001]))
        client.send([b"k", b"x" * 1000])
        await until(lambda: got)
        assert dropped == [1, 0] and len(got) == 1
        server.send([got[0][0], b"k", b"x" * 1001])
        await until(lambda: dropped[1] == 1)
        client.close()
        server.close()
        context.term()

    asyncio.run(run())
