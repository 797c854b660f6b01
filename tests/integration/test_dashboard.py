"""The dashboard: a page that needs nothing from elsewhere, and live data that show a killed board, a drain, a dead supervisor."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from builders_fleet import Fleet, Packages, free_port, until
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "1")
    admin = free_port()
    router = {"admin_listen": f"127.0.0.1:{admin}"}
    with Fleet(tmp_path_factory.mktemp("fleet"), package, packages.key.with_suffix(".pub"), router=router) as fleet:
        fleet.admin = admin  # type: ignore[attr-defined]
        yield fleet
        assert fleet.completion().status == 200


def ask(fleet: Fleet, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", fleet.admin, timeout=30)  # type: ignore[attr-defined]
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def seen(fleet: Fleet, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first live snapshot that fulfils the condition, over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.admin, timeout=60)  # type: ignore[attr-defined]
    try:
        connection.request("GET", "/events")
        response = connection.getresponse()
        assert response.status == 200 and response.getheader("content-type", "").startswith("text/event-stream")
        for _ in range(60):
            line = response.readline()
            while not line.startswith(b"data: "):
                line = response.readline()
            snapshot: dict[str, Any] = json.loads(line[6:])
            if condition(snapshot):
                return snapshot
        raise AssertionError("a minute of snapshots never showed it")
    finally:
        connection.close()


def board(snapshot: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in snapshot["status"]["boards"] if one["board"] == name)


def test_the_page_needs_nothing_from_elsewhere_and_says_so(fleet: Fleet) -> None:
    status, headers, body = ask(fleet, "/")
    text = body.decode()
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["content-security-policy"] and headers["x-frame-options"] == "DENY"
    assert re.findall(r"(?:src|href|action)=[\"'](?!data:)[^\"']*", text) == []
    assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_it_only_shows(fleet: Fleet) -> None:
    for path, method, status in (("/", "POST", 405), ("/events", "DELETE", 405), ("/v1/models", "GET", 404), ("/metrics", "GET", 404)):
        got, _, body = ask(fleet, path, method)
        assert got == status and set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert fleet.get("/events").status == 404, "clients' address has no dashboard"


def test_a_killed_board_is_seen_from_the_page_and_comes_back(fleet: Fleet) -> None:
    whole = seen(fleet, lambda snapshot: all(board(snapshot, name)["state"] == "READY" for name in fleet.boards))
    assert board(whole, "board0")["lanes_total"] > 0 and whole["links"] == dict.fromkeys(fleet.boards, "up")
    pid = board(whole, "board0")["pid"]
    fleet.kill("worker", "board0")
    again = seen(fleet, lambda snapshot: board(snapshot, "board0")["state"] == "READY" and board(snapshot, "board0")["pid"] != pid)
    told = {event["event"] for event in again["events"] if event["board"] == "board0"}
    assert {"fleet.worker_exited", "fleet.worker_started"} <= told and "fleet.view_published" not in told


def test_its_document_describes_every_path_and_its_answers_keep_to_it(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.admin}"  # type: ignore[attr-defined]
    document = json.loads(ask(fleet, "/openapi.json")[2])
    assert set(document["paths"]) == {"/", "/snapshot.json", "/events", "/openapi.json"}
    assert document["components"]["schemas"]["Snapshot"]["properties"]["points"], "made from what it is built of"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    answers: dict[str, list[int]] = {"/": [], "/snapshot.json": [], "/openapi.json": []}
    for path in answers:

        @hypothesis.settings(
            max_examples=10, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(
            case=schema[path]["GET"].as_strategy(),
            query=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
            header=st.text("abc;=/*,", max_size=20),
        )
        def check(case: Any, query: dict[str, str], header: str) -> None:
            response = case.call(params=query, headers={"Accept": header}, timeout=60)
            answers[path].append(response.status_code)  # noqa: B023
            case.validate_response(response, checks=checks)

        check()
        assert set(answers[path]) == {200}, path
    with_stream = seen(fleet, lambda snapshot: True)
    assert set(with_stream) == set(document["components"]["schemas"]["Snapshot"]["required"])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_whatever_else_is_sent_is_an_error_of_the_document(fleet: Fleet, method: str) -> None:
    for path in ("/", "/snapshot.json", "/events", "/openapi.json", "/../etc/passwd", "/%00", "/snapshot.json/", "//"):
        status, headers, body = ask(fleet, path, method)
        assert status == 405 and headers["allow"] == "GET, HEAD", (path, body)
        assert json.loads(body)["error"]["code"] == "method_not_allowed"
    assert ask(fleet, "/%2e%2e/openapi.json")[0] == 404


def test_load_shows_as_points_of_the_charts(fleet: Fleet) -> None:
    before = len(json.loads(ask(fleet, "/snapshot.json")[2])["points"])

    def busy(snapshot: dict[str, Any]) -> bool:
        assert fleet.completion(max_tokens=20).status == 200
        return bool(snapshot["points"] and snapshot["points"][-1]["tokens_per_s"] > 0 and snapshot["points"][-1]["first_p50_ms"])

    point = seen(fleet, busy)["points"][-1]
    assert point["requests_per_s"] > 0 and point["failed_per_s"] == 0
    assert len(json.loads(ask(fleet, "/snapshot.json")[2])["points"]) > before


def test_without_a_supervisor_it_shows_what_the_router_knows(fleet: Fleet) -> None:
    dead = fleet.kill("supervisor")
    alone = seen(fleet, lambda snapshot: snapshot["status"] is None or fleet.pid("supervisor") not in (dead, None))
    assert {one["board"] for one in alone["view"]["boards"]} == set(fleet.boards)
    until(lambda: fleet.pid("supervisor") not in (dead, None), "the keeper starts it again")
    fleet.wait_ready(2)
    seen(fleet, lambda snapshot: snapshot["status"] is not None)


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (400, 900)], ids=["desk", "phone"])
def test_a_browser_draws_it_without_an_error(fleet: Fleet, tmp_path: Path, width: int, height: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here")
    command = [
        chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", f"--window-size={width},{height}",
        "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", f"http://127.0.0.1:{fleet.admin}/#still",  # type: ignore[attr-defined]
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert f"of {len(fleet.boards)} boards ready" in done.stdout, done.stderr[-2000:]
    for name in fleet.boards:
        assert f'data-board="{name}"' in done.stdout
    assert "CONSOLE" not in done.stderr or "Error" not in done.stderr.split("CONSOLE", 1)[1], done.stderr[-2000:]


def test_top_shows_the_same_fleet_at_a_terminal(fleet: Fleet) -> None:
    done = fleet.cli("top", "--once", "--interval", "0.3")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 boards ready" in done.stdout and "board1" in done.stdout and f"http://127.0.0.1:{fleet.port}" in done.stdout
