"""Identities, and the key that every data-plane message carries.

A request id is minted by a router and never by a client: the high 32 bits are the router's incarnation (fresh for every
start), the low 32 bits a counter. A client's own id is a label. An *attempt* counts the sends of one request; an *epoch*
counts the lives of one board's worker process. Together they make late messages harmless: what does not match is dropped.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

SUCCESSOR = "-b"
"""What the name of a router ends with that replaces another while that one still serves: it is the same router, with its keys."""

RequestId = NewType("RequestId", int)
GenerationId = NewType("GenerationId", int)
JobId = NewType("JobId", int)
Epoch = NewType("Epoch", int)
BoardName = NewType("BoardName", str)

_COUNTER_BITS = 32
_MASK = (1 << _COUNTER_BITS) - 1


class WireKey(NamedTuple):
    """(request id, attempt, worker epoch): what a data-plane message is about."""

    request_id: int
    attempt: int
    epoch: int


def make_request_id(incarnation: int, counter: int) -> RequestId:
    """Combine a router's incarnation and its counter; both wrap at 32 bits."""
    return RequestId(((incarnation & _MASK) << _COUNTER_BITS) | (counter & _MASK))


def request_id_text(request_id: int) -> str:
    """Sixteen hexadecimal digits, as logs, journals and `chatcmpl-` ids show it."""
    return f"{request_id:016x}"


def parse_request_id(text: str) -> RequestId:
    """Inverse of `request_id_text`; a `chatcmpl-` or `cmpl-` prefix and a `-N` choice suffix are accepted.

    Raises:
        ValueError: the text is no request id.
    """
    digits = text.removeprefix("chatcmpl-").removeprefix("cmpl-").split("-")[0]
    if len(digits) != 16:
        raise ValueError(f"not a request id: {text!r} (16 hexadecimal digits, with or without chatcmpl- or cmpl-)")
    return RequestId(int(digits, 16))
