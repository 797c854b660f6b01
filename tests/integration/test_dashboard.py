"""The dashboard: a page that needs nothing from elsewhere, and live data that show a killed board, a drain, a dead supervisor."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from builders_browser import Browser, Page, a_browser, chromium
from builders_fleet import Fleet, Packages, free_port, until
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from calculet_core.shell.files import FileLock, LockHeld
from calculet_core.shell.fleet import load_fleet


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
    assert re.findall(r"(?:src|href|action)=[\"'](?!data:|#)[^\"']*", text) == []
    assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_it_only_shows(fleet: Fleet) -> None:
    for path, method, status in (
        ("/", "POST", 405),
        ("/events", "DELETE", 405),
        ("/v1/models", "GET", 404),
        ("/metrics", "GET", 404),
    ):
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
def test_one_moment_of_it_can_be_kept_as_a_picture(fleet: Fleet, tmp_path: Path, width: int, height: int) -> None:
    program = chromium()
    if program is None:
        pytest.skip("no chromium here (apt install chromium)")
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", f"--window-size={width},{height}",
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


# ---------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("no chromium here (apt install chromium)")
    with a_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def page(fleet: Fleet, browser: Browser) -> Iterator[Page]:
    """The live page; whatever happened to it, it has nothing to complain of."""
    fleet.wait_ready(len(fleet.boards))
    page = browser.open(f"http://127.0.0.1:{fleet.admin}/")  # type: ignore[attr-defined]
    page.until("document.querySelectorAll('[data-board]').length === 2", "both boards are drawn")
    yield page
    assert page.complaints == []
    page.close()


def card(name: str) -> str:
    return f"document.querySelector('[data-board={name}]')"


@contextmanager
def held(fleet: Fleet, board: str) -> Iterator[None]:
    """Somebody has the board's lock, so that no worker is started for it and the page has the time to show that there is none."""
    path = load_fleet(fleet.config).board_lock(board)

    def taken() -> FileLock | None:
        with suppress(LockHeld):
            return FileLock(path)
        return None

    lock: FileLock = until(taken, "the dead worker's lock is free")
    try:
        yield
    finally:
        lock.release()


def test_a_killed_board_is_seen_in_the_page_and_comes_back(fleet: Fleet, page: Page) -> None:
    page.until(f"{card('board0')}.className === 'card '", "board0 is well")
    fleet.kill("worker", "board0")
    with held(fleet, "board0"):
        page.until(
            f"{card('board0')}.className === 'card bad' && {card('board0')}.innerText.includes('no worker')",
            "the dead board is red",
        )
        page.until(
            "document.getElementById('pill').textContent.startsWith('1 of 2 boards ready')", "and the head of the page says so"
        )
    page.until(f"{card('board0')}.className === 'card ' && document.title.startsWith('2/2')", "it comes back")
    page.until(
        "document.getElementById('events').innerText.includes('killed by signal 9; started again')",
        "what happened is told in words",
    )


def test_a_rollout_is_seen_with_its_progress(fleet: Fleet, page: Page, packages: Packages) -> None:
    green = packages.get("sim-b1", "--step-ms", "1", "--lanes", "16")
    seen, longs = threading.Event(), list[threading.Thread]()

    def feed() -> None:
        """Whichever board leaves next has just begun something that it finishes first, so that the page has seconds to show it."""
        while not seen.wait(0.3):
            long = threading.Thread(target=fleet.completion, kwargs={"prompt": "long", "max_tokens": 3000, "ignore_eos": True})
            longs.append(long)
            long.start()

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        until(lambda: all(fleet.active()), "both boards have something to finish")
        done: list[Any] = []
        load = threading.Thread(target=lambda: done.append(fleet.cli("load", "toy", str(green), "--yes")))
        load.start()
        bar = "document.querySelector('[data-rollout] [role=progressbar]')"
        page.until(
            f"{bar} && document.querySelectorAll('[data-rollout] .busy').length === 1 && {bar}.getAttribute('aria-valuenow') === '0'",
            "one board is moved",
        )
        assert "load toy: sim-b1 1.0.0" in page.text() and "from sim-batch 1.0.0" in page.text() and "verified: path" in page.text()
        page.until(f"{bar} && {bar}.getAttribute('aria-valuenow') === '1'", "the first board serves the new version")
    finally:
        seen.set()
        feeder.join()
    page.until("!document.querySelector('[data-rollout]')", "it is over")
    load.join()
    for long in longs:
        long.join()
    assert done[0].returncode == 0, done[0].stderr
    page.until("document.getElementById('models').innerText.includes('sim-b1 1.0.0')", "the model's artifact is the new one")
    assert fleet.cli("rollback", "toy", "--yes").returncode == 0


def test_keys_go_from_board_to_board_and_show_details(page: Page) -> None:
    focused = "(document.activeElement.dataset.board || '')"
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    page.press("Tab")
    assert page.value(focused) == "board0"
    page.press("ArrowRight")
    assert page.value(focused) == "board1"
    page.press("ArrowRight")
    assert page.value(focused) == "board1", "there is no board behind the last"
    page.press("Enter")
    assert page.value(f"{card('board1')}.getAttribute('aria-expanded')") == "true" and "pid " in page.value(
        f"{card('board1')}.innerText"
    )
    heard = page.value("latest.now_s")
    page.until(f"latest.now_s > {heard}", "a second later")
    assert page.value(focused) == "board1" and page.value(f"{card('board1')}.getAttribute('aria-expanded')") == "true", (
        "focus and details stay"
    )
    page.press("Home")
    assert page.value(focused) == "board0"
    page.press("Escape")
    assert page.value("document.querySelectorAll('[aria-expanded=true]').length") == 0
    page.press("Tab")
    assert page.value(focused) == "", "one stop for all boards"


def test_a_large_board_with_a_long_name_is_shown_as_it_is(page: Page) -> None:
    """Drawn by the page from a moment that is not this fleet's: what a bigger one would send."""
    page.value("""(() => {
      const now = structuredClone(latest), board = now.status.boards[0];
      Object.assign(board, {board: "rack07-host12-npu-slot-00-of-the-second-hall", alias: "a-model-" + "x".repeat(120), lanes_total: 128, lanes_used: 85});
      now.status.boards = [board, {...board, board: "all", lanes_used: 128}, {...board, board: "one", lanes_used: 1}, {...board, board: "most", lanes_used: 127}];
      const draw = render;
      window.render = () => {};
      draw(now);
      return 1;
    })()""")
    lit = "[...document.querySelectorAll('[data-board]')].map(card => card.querySelectorAll('.lanes .on').length)"
    assert page.value(lit) == [43, 64, 1, 63], "of 64 cells"
    for width in (1280, 400, 320):
        page.look(width, 900, phone=width < 600)
        hidden = "[...document.querySelectorAll('.name, .under')].filter(node => node.scrollWidth > node.clientWidth + 1).map(node => node.textContent)"
        assert page.value(hidden) == [], "no name is cut"
        assert page.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400, 320])
def test_it_fits_and_can_be_read(page: Page, width: int, dark: bool, tmp_path: Path) -> None:
    page.look(width, 900, dark=dark, phone=width < 600)
    assert page.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    contrast = """(() => {
      const parse = text => (text.match(/[0-9.]+/g) || []).map(Number);
      const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4).reduce((sum, v, at) => sum + v * [.2126, .7152, .0722][at], 0);
      const ground = node => { for (; node; node = node.parentElement) { const found = parse(getComputedStyle(node).backgroundColor); if (found.length === 3) return found; } return [255, 255, 255]; };
      const bad = [];
      for (const node of document.querySelectorAll('.name, .state, .under, .facts b, .facts, td, th, h1, h2, .pill, .where, .value')) {
        const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
        if (ratio < 4.5) bad.push(node.className + ' ' + node.textContent.slice(0, 20) + ' ' + ratio.toFixed(2));
      }
      return bad;
    })()"""
    assert page.value(contrast) == [], "WCAG AA: 4.5 to 1"
