"""What clients do with HTTP/1.1 beside plain requests: offers to upgrade, content codings, transfer codings, wrong places."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from builders_fleet import Fleet, Packages

BODY = b'{"model":"toy","prompt":"Hello","max_tokens":3,"temperature":0}'
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
"""What Java's HTTP client and `curl --http2` send with every request to a plain address."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "1")
    with Fleet(tmp_path_factory.mktemp("fleet"), package, packages.key.with_suffix(".pub")) as fleet:
        yield fleet
        assert fleet.completion().status == 200, "what served must still serve"


def post(headers: bytes = b"", body: bytes = BODY, path: bytes = b"/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n%b" % (path, len(body), headers, body)


class Client:
    """Bytes to the router, its answers as (status, head, body)."""

    def __init__(self, fleet: Fleet) -> None:
        self._sock = socket.create_connection(("127.0.0.1", fleet.port), timeout=60)
        self._file = self._sock.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._sock.close()

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def answer(self) -> tuple[int, str, bytes]:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self._file.readline()
            assert line, f"the connection ended within a head: {head!r}"
            head += line
        length = re.search(rb"content-length: (\d+)", head)
        body = self._file.read(int(length[1])) if length else b""
        return int(head.split()[1]), head.decode().lower(), body

    def closed(self) -> bool:
        return self._file.read(1) == b""


@pytest.mark.parametrize("cut", [0, 40, len(post(UPGRADE)) - len(BODY), len(post(UPGRADE)) - 9])
def test_an_offer_of_http_2_is_passed_over_with_its_body_kept(fleet: Fleet, cut: int) -> None:
    data = post(UPGRADE)
    with Client(fleet) as client:
        client.send(data[:cut])
        if cut:
            fleet.get("/livez")  # the router has seen the first part by then, or will see both as one: either must do
        client.send(data[cut:])
        status, head, body = client.answer()
        assert status == 200 and len(json.loads(body)["choices"][0]["text"]) == 3 and "connection: close" not in head
        client.send(post(UPGRADE) + post())
        assert [client.answer()[0] for _ in range(2)] == [200, 200], "the connection goes on as it was"


def test_an_offer_in_chunks_and_one_that_closes(fleet: Fleet) -> None:
    with Client(fleet) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n%b\r\n" % UPGRADE)
        client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert client.answer()[0] == 200
        client.send(post(b"connection: close, upgrade\r\nupgrade: websocket\r\n"))
        status, head, _ = client.answer()
        assert status == 200 and "connection: close" in head and client.closed()


def test_an_offer_of_a_websocket_is_an_ordinary_get(fleet: Fleet) -> None:
    with Client(fleet) as client:
        client.send(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n")
        assert client.answer()[0] == 200
        client.send(post())
        assert client.answer()[0] == 200


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/detokenize"])
def test_a_body_in_a_content_coding_is_refused_by_name(fleet: Fleet, path: bytes) -> None:
    with Client(fleet) as client:
        client.send(post(b"content-encoding: gzip\r\n", b"\x1f\x8b\x08\x00junk", path))
        status, head, body = client.answer()
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (415, "unsupported_media_type", "Content-Encoding"), error
        assert "gzip" in error["message"] and "accept-encoding: identity" in head
        client.send(post(b"content-encoding: Identity\r\n"))
        assert client.answer()[0] == 200, "identity is no coding, and the connection goes on"


def test_transfer_codings_beside_chunked_are_refused_and_the_connection_ends(fleet: Fleet) -> None:
    with Client(fleet) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        status, _, body = client.answer()
        assert (status, json.loads(body)["error"]["param"]) == (400, "Transfer-Encoding") and client.closed()


def test_http_1_0_is_not_told_to_continue(fleet: Fleet) -> None:
    with Client(fleet) as client:
        client.send(post(b"expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert client.answer()[0] == 200 and client.closed()


def test_connect_is_a_method_that_is_not_allowed(fleet: Fleet) -> None:
    with Client(fleet) as client:
        client.send(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n\x16\x03\x01")
        status, head, body = client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed") and "allow: " in head
        assert client.closed()


def test_http_2_without_an_offer_is_refused_by_name(fleet: Fleet) -> None:
    with Client(fleet) as client:
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        status, _, body = client.answer()
        assert status == 400 and "HTTP/2" in json.loads(body)["error"]["message"]
