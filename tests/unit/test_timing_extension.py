"""The opt-in extension: tokens per chunk, the hash of all tokens, times. Ordinary clients never see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders_router import a_chat, a_text, events_of

from calculet_core.errors import InvalidValue
from calculet_core.shell.build import SOURCE, head_of
from calculet_core.wire import Piece, Usage
from calculet_router.openai import Call, parse_switch
from calculet_router.sse import make_answer

USAGE = Usage(3, 4, queue_ns=1_500_000, prefill_ns=2_000_000, decode_ns=None, device_ns=3_250_000, token_hash="abcd")
TIMES = {"token_hash": "abcd", "queue_ms": 1.5, "prefill_ms": 2.0, "decode_ms": None, "device_ms": 3.25}


def told(call: Call, *pieces: Piece) -> bytes:
    made = make_answer(call, "0" * 16, 1, "d")
    return b"".join(made.add(0, piece) for piece in pieces)


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"logprobs": True}])
def test_every_chunk_counts_its_tokens_and_the_last_has_the_times(more: dict[str, Any]) -> None:
    call = a_chat(stream=True, calculet={"timing": True}, **more)
    pieces = [Piece(1, 1, 1, "a}\n\n"), Piece(1, 1, 1, ""), Piece(1, 1, 1, "bc"), Piece(1, 1, 1, "d", "stop", usage=USAGE)]
    events = [event for event in events_of(told(call, *pieces)) if event != "[DONE]" and event["choices"]]
    assert [event["calculet"] for event in events] == [{"tokens": 1}, {"tokens": 2}, {"tokens": 1, **TIMES}]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "a}\n\nbcd"


def test_a_whole_answer_has_them_by_choice() -> None:
    call = a_text(n=2, calculet={"timing": True})
    made = make_answer(call, "0" * 16, 1, "d")
    made.add(1, Piece(2, 1, 4, "x", "stop", usage=USAGE))
    body = json.loads(made.add(0, Piece(1, 1, 4, "y", "length", usage=USAGE)))
    assert body["calculet"] == {"choices": [{"index": index, "tokens": 4, **TIMES} for index in range(2)]}
    assert [choice["text"] for choice in body["choices"]] == ["y", "x"] and body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("fields", [{}, {"calculet": None}, {"calculet": {}}, {"calculet": {"timing": False}}])
def test_it_is_off_for_everybody_else(fields: dict[str, Any]) -> None:
    for stream in (True, False):
        assert b"calculet" not in told(a_chat(stream=stream, **fields), Piece(1, 1, 1, "x", "stop", usage=USAGE))


def test_the_header_is_a_switch() -> None:
    assert parse_switch(b"1", "X-Calculet-Timing") and not parse_switch(b"0", "X-Calculet-Timing")
    with pytest.raises(InvalidValue) as caught:
        parse_switch(b"yes", "X-Calculet-Timing")
    assert caught.value.param == "X-Calculet-Timing"


# ---------------------------------------------------------------- what was built
def test_the_commit_is_read_from_a_checkout_however_git_keeps_it(tmp_path: Path) -> None:
    commit = "ab" * 20
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    assert head_of(git) is None
    (git / "HEAD").write_text(f"{commit}\n")
    assert head_of(git) == commit
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert head_of(git) is None
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert head_of(git) == commit
    (git / "refs" / "heads" / "main").write_text("cd" * 20 + "\n")
    assert head_of(git) == "cd" * 20
    tree = git / "worktrees" / "other"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / "commondir").write_text("../..\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".git").write_text(f"gitdir: {tree}\n")
    assert head_of(tmp_path / "other" / ".git") == "cd" * 20
    assert head_of(SOURCE / "nowhere") is None
