"""Who a router is, when it counts as lost, and what one loop pass sends it."""

from __future__ import annotations

from calculet_core import wire
from calculet_core.clock import S
from calculet_worker.actions import ToRouter
from calculet_worker.shell.routers import CREDIT_BYTES, FORGET_AFTER_NS, Routers

LOAD = wire.Load(0, 1, 0, 0, 0.0)
LEASE_NS = 3 * S


def known(routers: Routers, router: int, identity: bytes, now_ns: int = 0) -> None:
    routers.introduce(router, identity, now_ns)
    assert routers.heard(identity, now_ns) is not None


def a_piece(request_id: int, text: str = "x") -> wire.Piece:
    return wire.Piece(request_id, 0, 1, text)


def sent(routers: Routers) -> dict[int, wire.Tick]:
    ticks = {}
    for peer in routers.live():
        if peer.outbox is not None:
            message = wire.decode(*routers.tick(peer, 1, LOAD)[1:])
            assert isinstance(message, wire.Tick)
            ticks[peer.router] = message
    return ticks


def test_one_loop_pass_becomes_one_numbered_tick_for_each_router() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    known(routers, 2, b"b")
    routers.add(ToRouter(1, [a_piece(10)]))
    routers.add(ToRouter(1, [a_piece(11)], [wire.Acceptance(12, 0, 5, 6)]))
    routers.add(ToRouter(2, [a_piece(20)]))
    ticks = sent(routers)
    assert [piece.request_id for piece in ticks[1].pieces] == [10, 11]
    assert [one.request_id for one in ticks[1].accepted] == [12]
    assert (ticks[1].seq, ticks[2].seq) == (1, 1)
    assert sent(routers) == {}
    routers.add(ToRouter(1, [a_piece(10)]))
    assert sent(routers)[1].seq == 2


def test_a_message_from_somebody_who_never_said_hello_has_no_router() -> None:
    assert Routers(LEASE_NS).heard(b"stranger", 0) is None


def test_a_silent_router_is_lost_once_and_any_message_renews_its_lease() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    assert routers.lapsed(3 * S) == []
    assert routers.heard(b"a", 3 * S) is not None
    assert routers.lapsed(6 * S) == []
    assert [router for router, _ in routers.lapsed(7 * S)] == [1]
    assert routers.lapsed(8 * S) == []


def test_a_worker_that_stood_still_takes_its_own_silence_for_nobodys() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    routers.overslept(60 * S)
    assert routers.lapsed(60 * S + LEASE_NS) == []
    assert [router for router, _ in routers.lapsed(61 * S + LEASE_NS)] == [1]


def test_nothing_is_kept_for_a_lost_router_and_it_is_known_again_when_it_speaks() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    routers.lapsed(4 * S)
    routers.add(ToRouter(1, [a_piece(10)]))
    assert routers.live() == []
    assert routers.heard(b"a", 5 * S) is not None
    assert sent(routers) == {}
    routers.add(ToRouter(1, [a_piece(11)]))
    assert [piece.request_id for piece in sent(routers)[1].pieces] == [11]


def test_a_router_that_reconnects_keeps_its_numbering_under_its_new_identity() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    routers.add(ToRouter(1, [a_piece(10)]))
    sent(routers)
    known(routers, 1, b"b")
    assert routers.heard(b"a", 0) is None
    routers.add(ToRouter(1, [a_piece(11)]))
    (peer,) = routers.live()
    assert routers.tick(peer, 1, LOAD)[0] == b"b"
    assert peer.seq == 2


def test_a_router_that_acknowledges_nothing_is_lost_by_its_credit() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    (peer,) = routers.live()
    for _ in range(9):
        routers.add(ToRouter(1, [a_piece(10, "x" * (CREDIT_BYTES // 8))]))
        routers.tick(peer, 1, LOAD)
    ((router, reason),) = routers.lapsed(0)
    assert router == 1
    assert "credit" in reason


def test_an_acknowledgement_gives_credit_back() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    (peer,) = routers.live()
    for seq in range(1, 30):
        routers.add(ToRouter(1, [a_piece(10, "x" * (CREDIT_BYTES // 8))]))
        routers.tick(peer, 1, LOAD)
        peer.acknowledge(seq - 1)
    assert routers.lapsed(0) == []
    peer.acknowledge(29)
    assert peer.unacked_bytes == 0


def test_a_router_that_stays_away_is_forgotten() -> None:
    routers = Routers(LEASE_NS)
    known(routers, 1, b"a")
    routers.lapsed(4 * S)
    routers.lapsed(4 * S + FORGET_AFTER_NS)
    assert routers.heard(b"a", 5 * S + FORGET_AFTER_NS) is None
