"""Messages survive the wire, strict about what they need and tolerant of what they do not know."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calculet_core import wire
from calculet_core.chaos import KillWorker, Phase
from calculet_core.requests import Prompt, SamplingParams, StopRules


def a_submit() -> wire.Submit:
    return wire.Submit(
        request_id=1 << 63, attempt=2, epoch=3, generation=4, digest="d", alias="qwen3", tenant="default", weight=1.0,
        prompt=Prompt(text="hé"), max_new_tokens=5, sampling=SamplingParams(temperature=0.0, logit_bias={5: -1.0}),
        stop=StopRules(strings=("a", "b")), deadline_ns=9, deadline_asked=False, accepted_ns=8,
    )  # fmt: skip


MESSAGES = [
    wire.RouterHello(router=7, pid=8),
    a_submit(),
    wire.Cancel(1, 2, 3, "client left"),
    wire.Lease(1, 2, 3),
    wire.Lookup(1, 2, "d", Prompt(text="x"), want_pieces=True),
    wire.LookupAnswer(1, 2, [3], [b"\xff"], None, wire.ErrorInfo("stale_view", "gone")),
    wire.WorkerHello("board0", 1, 2, 3, "d", "qwen3", "READY"),
    wire.Tick(
        1, 2,
        [wire.Piece(1, 2, 3, "x", "stop", None, wire.Usage(1, 2), [4], [wire.TokenLogprob(4, b"\xff", -0.5, [(4, b"x", -0.5)])])],
        [wire.Acceptance(1, 2, 3, 4)], [wire.Refusal(1, 2, wire.ErrorInfo("over_capacity", "full"), True)], wire.Load(1, 2, 3, 4, 5.0),
    ),
    wire.WorkerReport("board0", 1, 2, 1, "ipc://x", "READY", chips=[wire.ChipReport(temperature_c=40.0)]),
    wire.LoadModel(1, 2, "qwen3", "/p", "d"),
    wire.UnloadModel(1, 2, 3),
    wire.DrainBoard(1),
    wire.ResumeBoard(1),
    wire.SetPingPong(1, False),
    wire.GrantReset(1, 2),
    wire.DenyReset(1, "spent"),
    wire.StopWorker(1, 2),
    wire.Disturb("o1", KillWorker(phase=Phase.DECODING), 3),
    wire.TakeConfiguration(4, "d1ge57"),
    wire.RetireRouter(),
    wire.RouterReport(1, 2, 1, 3, links={"board0": "up"}),
    wire.FleetView(1, [wire.BoardView("board0", 1, 2, "ipc://x", "READY", 3, "d", "qwen3")], [wire.AliasView("qwen3", "d", 40960, 1)]),
]  # fmt: skip


def test_every_kind_is_tried_below() -> None:
    assert {type(message) for message in MESSAGES} == set(wire.KINDS.values())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: wire.Message) -> None:
    kind, body = wire.encode(message)
    assert wire.decode(kind, body) == message


def test_fields_of_a_newer_peer_are_ignored() -> None:
    body = msgspec.msgpack.encode({"router": 1, "pid": 2, "protocol": 1, "colour": "red"})
    assert wire.decode(b"rh", body) == wire.RouterHello(1, 2, 1)
    longer = msgspec.msgpack.encode([1, 2, 3, "why", "new"])
    assert wire.decode(b"ca", longer) == wire.Cancel(1, 2, 3, "why")


@pytest.mark.parametrize(
    ("kind", "body"),
    [(b"??", b""), (b"rh", b""), (b"rh", b"\xc1"), (b"ca", msgspec.msgpack.encode([1, 2])), (b"le", msgspec.msgpack.encode(["x", 1, 1]))],
)
def test_what_is_no_message_is_refused(kind: bytes, body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(kind, body)


@given(kind=st.one_of(st.sampled_from(sorted(wire.KINDS)), st.binary(max_size=4)), body=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_wire_error(kind: bytes, body: bytes) -> None:
    try:
        wire.decode(kind, body)
    except wire.WireError:
        pass
