"""Whole characters, and stop strings over token boundaries."""

from __future__ import annotations

import pytest

from calculet_worker.output.text import TextStream

BYTES = [bytes([value]) for value in range(256)]


def shown(stream: TextStream, data: bytes) -> list[str]:
    return [stream.push(value) for value in data]


def a_stream(*stop: str, vocabulary: list[bytes] = BYTES) -> TextStream:
    return TextStream(vocabulary, stop)


def test_a_character_is_shown_when_its_last_byte_has_come() -> None:
    assert shown(a_stream(), "é€😀".encode()) == ["", "é", "", "", "€", "", "", "", "😀"]


def test_a_character_that_the_end_cuts_in_two_is_never_shown() -> None:
    stream = a_stream()
    assert shown(stream, "a€".encode()[:-1]) == ["a", "", ""]
    assert stream.flush() == ""


def test_a_byte_that_no_character_has_is_replaced_at_once() -> None:
    assert shown(a_stream(), b"a\xffb") == ["a", "�", "b"]


def test_a_special_token_shows_nothing_and_ends_no_character() -> None:
    stream = a_stream(vocabulary=[b"\xe2\x82", b"", b"\xac"])
    assert [stream.push(token) for token in (0, 1, 2)] == ["", "", "€"]


def test_a_stop_string_over_three_tokens_is_never_shown() -> None:
    stream = a_stream("STOP", vocabulary=[b"go S", b"TO", b"P on"])
    assert [stream.push(token) for token in (0, 1, 2)] == ["go ", "", ""]
    assert stream.stopped
    assert stream.flush() == ""


def test_nothing_is_shown_after_a_stop_string() -> None:
    stream = a_stream("b")
    assert shown(stream, b"abab") == ["a", "", "", ""]
    assert stream.flush() == ""


def test_text_that_only_looked_like_a_stop_string_is_released_as_soon_as_that_is_clear() -> None:
    assert shown(a_stream("abab!"), b"ababab?") == ["", "", "", "", "ab", "", "abab?"]


def test_only_the_longest_possible_beginning_is_held() -> None:
    stream = a_stream("\n\nUser:", vocabulary=[b"line\n", b"\n\n", b"User", b"s"])
    assert [stream.push(token) for token in (0, 1, 2, 3)] == ["line", "\n", "", "\n\nUsers"]


def test_held_text_comes_out_when_the_sequence_ends() -> None:
    stream = a_stream("STOP")
    assert "".join(shown(stream, b"a STO")) == "a "
    assert stream.flush() == "STO"
    assert not stream.stopped


def test_the_string_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    assert "".join(shown(a_stream("bcd", "c"), b"abcd")) == "ab"
    assert "".join(shown(a_stream("d", "bcd"), b"abcd")) == "a"


def test_a_stop_string_may_be_part_of_a_token_and_may_be_a_broken_character_s_replacement() -> None:
    stream = a_stream("world", vocabulary=[b"hello world!"])
    assert stream.push(0) == "hello "
    tail = a_stream("�")
    assert "".join(shown(tail, b"x\xe2\x82y")) == "x"
    assert tail.flush() == ""
    assert tail.stopped


@pytest.mark.parametrize("stop", [(), ("",)])
def test_without_a_stop_string_nothing_is_held(stop: tuple[str, ...]) -> None:
    assert shown(a_stream(*stop), b"abc") == ["a", "b", "c"]
