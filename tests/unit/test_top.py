"""`calculet top`: rates between two looks, and a screen that tells what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from calculet_supervisor.commands.top import lanes_bar, render, spark


def a_board(name: str = "board0", **fields: Any) -> dict[str, Any]:
    return {
        "board": name, "state": "READY", "process": "RUNNING", "draining": False, "up": True, "lanes_used": 3, "lanes_total": 4,
        "queues": {"decode": 2, "short": 0}, "waiting": 1, "kv_tokens_reserved": 50, "kv_tokens_total": 200, "tokens": 1000, "steps": 10,
        "chips": [{"temperature_c": 55.4}, {"temperature_c": None}], "alias": "qwen3", "why": None, **fields,
    }  # fmt: skip


def a_status(*boards: dict[str, Any], **fields: Any) -> dict[str, Any]:
    router = {"router": "0a0b0c0d", "url": "http://x", "inflight": 4, "requests": fields.pop("requests", 100), "failed": 0, "resent": 0}
    return {"boards": list(boards), "routers": [router], "rollouts": [], "breaker": None, **fields}


def shown(now: dict[str, Any], before: dict[str, Any], seconds: float = 2.0, rates: list[float] | None = None) -> str:
    console = Console(width=140, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(render(now, before, seconds, [] if rates is None else rates))
    return capture.get()


@pytest.mark.parametrize(
    ("used", "total", "lit", "cells"),
    [
        (0, 0, 0, 0), (0, 1, 0, 1), (1, 1, 1, 1), (3, 16, 3, 16), (31, 32, 31, 32), (32, 32, 32, 32),
        (0, 128, 0, 32), (1, 128, 1, 32), (85, 128, 21, 32), (127, 128, 31, 32), (128, 128, 32, 32),
    ],
)  # fmt: skip
def test_many_lanes_share_cells_in_proportion(used: int, total: int, lit: int, cells: int) -> None:
    assert lanes_bar(used, total) == "▮" * lit + "▯" * (cells - lit)


def test_rates_are_between_the_two_looks() -> None:
    before = a_status(a_board(), a_board("board1"), requests=100)
    now = a_status(a_board(tokens=1600, steps=110), a_board("board1", tokens=1000), requests=110)
    text = shown(now, before)
    assert "2 of 2 boards ready" in text and "300 tokens/s" in text
    row = next(line for line in text.splitlines() if line.startswith("board0"))
    assert "▮▮▮▯" in row and "3/4" in row and "d2" in row and "25%" in row and "300" in row and "50" in row and "55°" in row
    assert "5.0" in next(line for line in text.splitlines() if line.startswith("0a0b0c0d"))


def test_a_new_life_has_no_rate_and_a_missing_worker_no_numbers() -> None:
    gone = a_board(
        "board1", state=None, process="BACKOFF", lanes_used=None, lanes_total=None, queues=None, waiting=None, tokens=None, steps=None,
        kv_tokens_reserved=None, kv_tokens_total=None, chips=[], why="killed by signal 9",
    )  # fmt: skip
    text = shown(a_status(a_board(tokens=5), gone), a_status(a_board(tokens=1000), a_board("board1")))
    assert "1 of 2 boards ready" in text and "0 tokens/s" in text
    assert "backoff" in text and "board1: killed by signal 9" in text


def test_drains_breakers_and_rollouts_are_told() -> None:
    text = shown(
        a_status(a_board(draining=True), breaker="half of the boards went bad", rollouts=[{"id": "r1", "text": "staging 1 of 2"}]),
        a_status(a_board()),
    )
    assert "0 of 1 boards ready" in text and "draining" in text and "half of the boards" in text and "rollout r1: staging 1 of 2" in text


def test_the_curve_is_as_long_as_it_was_watched_and_never_longer_than_a_minute() -> None:
    rates: list[float] = []
    for tokens in range(0, 100_000, 1000):
        shown(a_status(a_board(tokens=tokens + 1000)), a_status(a_board(tokens=tokens)), 1.0, rates)
    assert len(rates) == 60
    assert spark([0.0, 5.0, 10.0]) == "▁▅█" and spark([0.0]) == "▁" and spark([]) == ""


def test_markup_in_words_is_only_text() -> None:
    assert "[red]boo[/]" in shown(a_status(a_board(why="[red]boo[/]")), a_status(a_board()))
