"""What `calculet up` says never stands in its way: readers that do not read, have gone, or never were."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import IO

import pytest

from calculet_core.shell.logs import set_up_logs
from calculet_supervisor.shell import voice as voice_module
from calculet_supervisor.shell.voice import MAX_LINES, Voice

DEADLINE_S = 30.0


Pipe = tuple[IO[bytes], IO[str]]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w") as written:
        yield read, written


def a_voice(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> Voice:
    monkeypatch.setattr(sys, "stdout", pipe[1])
    monkeypatch.setattr(sys, "stderr", pipe[1])
    return Voice()


def test_lines_come_out_in_order_from_words_and_log(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = logging.getLogger().handlers[:]
    voice = a_voice(pipe, monkeypatch)
    try:
        set_up_logs("keeper", "WARNING", voice)
        voice.say("it serves äöü")
        voice.complain("the router ended")
        logging.getLogger("calculet.keeper").warning("no fork server")
    finally:
        logging.getLogger().handlers[:] = handlers
    voice.close()
    pipe[1].close()
    lines = pipe[0].read().decode().splitlines()
    assert lines[:2] == ["it serves äöü", "calculet: the router ended"]
    assert lines[2].endswith("W keeper no fork server") and len(lines) == 3


def test_a_reader_that_does_not_read_holds_nobody_up(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_module, "CLOSE_S", 0.05)
    voice = a_voice(pipe, monkeypatch)
    done = threading.Event()

    def speak() -> None:
        for _ in range(MAX_LINES * 3):
            voice.say("x" * 1000)  # far more than pipe and queue hold
        voice.close()
        done.set()

    threading.Thread(target=speak, daemon=True).start()
    assert done.wait(DEADLINE_S)
    pipe[0].close()  # its thread ends


def test_a_reader_that_has_gone_costs_the_lines_and_no_more(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    voice = a_voice(pipe, monkeypatch)
    pipe[0].close()
    for _ in range(3):
        voice.complain("the router ended")
    voice.close()
    assert not voice._thread.is_alive()


def test_without_streams_nothing_is_written_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    voice = Voice()
    voice.say("x")
    voice.complain("x")
    voice.write("x")
    assert voice._lines.empty()
    voice.close()
