"""Clients that go on asking while a model is swapped under them, and looks at how the swap goes."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from builders_fleet import Fleet, until

from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import load_fleet

PROMPTS = [f"prompt {number}" for number in range(6)]
TOKENS = 40


def ask(fleet: Fleet, verb: str, **arguments: Any) -> dict[str, Any]:
    return call(load_fleet(fleet.config).control_socket, verb, arguments)


def rollout(fleet: Fleet, number: int | None = None) -> dict[str, Any]:
    """The newest, or the one with that number."""
    found: dict[str, Any] = ask(fleet, "rollouts", **({} if number is None else {"rollout": number}))["rollouts"][0]
    return found


def until_over(fleet: Fleet, number: int) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        try:
            found = rollout(fleet, number)
        except ControlError:
            return None
        return found if found["state"] in ("DONE", "ROLLED_BACK", "REFUSED") else None

    try:
        found: dict[str, Any] = until(over, f"the end of rollout {number}")
        return found
    except AssertionError as error:
        raise AssertionError(f"{error}\n{rollout(fleet, number)}\n{fleet.logs()}") from None


def held(fleet: Fleet) -> dict[str, str | None]:
    return {row["board"]: row["digest"] if row["state"] == "READY" else None for row in ask(fleet, "generations")["boards"]}


class Load:
    """Clients that ask again and again; what each answer was, and which artifact's it was."""

    def __init__(self, fleet: Fleet, clients: int = 12, streams: bool = True) -> None:
        self.fleet, self.answers, self.failed = fleet, list[tuple[str, str, str]](), list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._stream if streams and number % 2 == 0 else self._whole, args=(number,)) for number in range(clients)]
        self.fewest = len(fleet.boards)
        self._watch = threading.Thread(target=self._count)

    def __enter__(self) -> Load:
        for thread in (*self._threads, self._watch):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in (*self._threads, self._watch):
            thread.join(60)

    def more(self, count: int) -> None:
        goal = len(self.answers) + count
        until(lambda: len(self.answers) >= goal or self.failed, f"{count} more answers")

    def _whole(self, number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        while not self._stop.is_set():
            answer = self.fleet.completion(prompt, max_tokens=TOKENS)
            if answer.status == 200:
                self.answers.append((prompt, answer.json()["system_fingerprint"], answer.text))
            else:
                self.failed.append(f"{answer.status} {answer.body!r}")

    def _stream(self, number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        while not self._stop.is_set():
            try:
                events = list(self.fleet.stream({"prompt": prompt, "max_tokens": TOKENS}))
            except AssertionError as error:
                self.failed.append(str(error))
                continue
            parsed = [json.loads(event) for event in events if event != "[DONE]"]
            text = "".join(event["choices"][0]["text"] for event in parsed if event.get("choices"))
            marks = {event.get("system_fingerprint") for event in parsed}
            if events[-1:] == ["[DONE]"] and len(marks) == 1:
                self.answers.append((prompt, marks.pop(), text))
            else:
                self.failed.append(f"{marks} {events[-2:]}")

    def _count(self) -> None:
        """Boards that the published view offers for what the alias stands for."""
        path = load_fleet(self.fleet.config).fleet_view
        while not self._stop.is_set():
            view = json.loads(path.read_bytes())
            shown = {digest for alias in view["aliases"] for digest in (alias["digest"], (alias.get("other") or {}).get("digest"))}
            serving = [b for b in view["boards"] if b["state"] == "READY" and not b.get("draining") and b["digest"] in shown]
            self.fewest = min(self.fewest, len(serving))
            time.sleep(0.002)
