"""Headless Chromium over its debugging pipe: no driver, no library, no port.

Messages are JSON that end with a zero byte: to the browser on its descriptor 3, from it on 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Home": 36,
    "End": 35,
}


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab; what it says on its console is kept."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def close(self) -> None:
        """A browser keeps at most six connections to a host, and a live page holds one."""
        self._browser.ask("Target.closeTarget", targetId=self._target)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives.

        Raises:
            AssertionError: it threw.
        """
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, what: str, deadline_s: float = DEADLINE_S) -> Any:
        """The expression's first true value."""
        end = time.monotonic() + deadline_s
        while not (value := self.value(f"(found => found instanceof Node ? true : found)({script})")):
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}\n{self.text()}\n{self.complaints}"
            time.sleep(0.02)
        return value

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=KEYS[key],
                text="\r" if key == "Enter" and kind == "keyDown" else "",
            )

    def look(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of scripts, policies and requests so far."""
        return [text for session, text in self._browser.complaints if session == self._session]


class Browser:
    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        script = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        command = [
            "bash", "-c", script, str(to_browser), str(from_browser), program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe",
            "about:blank",
        ]  # fmt: skip
        self._log = (profile.parent / "chromium.log").open("w")
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=self._log, stderr=self._log, start_new_session=True
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._id = b"", 0
        self.complaints: list[tuple[str, str]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._heard(answer)

    def _next(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, f"the browser does not answer {method} (exit {self._process.poll()})"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _heard(self, message: dict[str, Any]) -> None:
        session, of, what = message.get("sessionId", ""), message["method"], message["params"]
        if of == "Runtime.exceptionThrown":
            self.complaints.append((session, json.dumps(what["exceptionDetails"])))
        elif of == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.complaints.append((session, json.dumps(what["args"])))
        elif of == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.complaints.append((session, what["entry"]["text"]))

    def open(self, url: str, width: int = 1280, height: int = 900) -> Page:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, target, self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            page.ask(f"{domain}.enable")
        page.look(width, height)
        page.ask("Page.navigate", url=url)
        return page

    def close(self) -> None:
        for fd in (self._write, self._read):
            os.close(fd)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.close()


@contextmanager
def a_browser(folder: Path) -> Iterator[Browser]:
    folder.mkdir(parents=True, exist_ok=True)
    browser = Browser(folder / "profile")
    try:
        yield browser
    finally:
        browser.close()
