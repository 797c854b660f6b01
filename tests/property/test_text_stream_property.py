"""How a text is cut into tokens cannot change what is shown."""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from calculet_worker.output.text import TextStream


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def run(data: bytes, cuts: list[int], stop: tuple[str, ...]) -> tuple[list[str], str, bool]:
    pieces = pieces_of(data, cuts)
    stream = TextStream(pieces, stop)
    shown = [stream.push(token) for token in range(len(pieces))]
    return shown, stream.flush(), stream.stopped


def whole_characters(data: bytes) -> str:
    """All of it decoded at once, but for a character that its end cuts in two."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


CUTS = st.lists(st.integers(0, 500), max_size=40)
CLOSE = st.text(alphabet="ab\né😀", max_size=40)
"""Few letters: matches, near matches and overlaps are common."""


@given(st.text(), CUTS)
def test_any_split_gives_the_same_text(text: str, cuts: list[int]) -> None:
    shown, rest, _ = run(text.encode(errors="surrogatepass"), cuts, ())
    assert "".join(shown) + rest == whole_characters(text.encode(errors="surrogatepass"))


@given(st.binary(max_size=60), CUTS)
def test_any_bytes_give_what_decoding_them_whole_gives(data: bytes, cuts: list[int]) -> None:
    shown, rest, _ = run(data, cuts, ())
    assert "".join(shown) + rest == whole_characters(data)


@given(CLOSE, CUTS, st.text(alphabet="ab\né😀", min_size=1, max_size=5))
def test_a_stop_string_partitions_the_text(text: str, cuts: list[int], stop: str) -> None:
    shown, rest, stopped = run(text.encode(), cuts, (stop,))
    before, found, _ = text.partition(stop)
    assert "".join(shown) + rest == before
    assert stopped == bool(found)


@given(CLOSE, CUTS, st.lists(st.text(alphabet="ab\né😀", min_size=1, max_size=5), max_size=4))
def test_several_stop_strings_end_the_text_before_the_one_that_is_complete_first(text: str, cuts: list[int], stop: list[str]) -> None:
    shown, rest, stopped = run(text.encode(), cuts, tuple(stop))
    found = [(text.find(one) + len(one), -len(one)) for one in stop if one in text]
    end, size = min(found, default=(len(text), 0))
    assert "".join(shown) + rest == text[: end + size]
    assert stopped == bool(found)


@given(CLOSE, CUTS, st.lists(st.text(alphabet="ab\né😀", min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_than_may_still_become_a_stop_string(text: str, cuts: list[int], stop: list[str]) -> None:
    pieces = pieces_of(text.encode(), cuts)
    stream = TextStream(pieces, tuple(stop))
    seen = b""
    shown = ""
    for token, piece in enumerate(pieces):
        seen += piece
        shown += stream.push(token)
        if stream.stopped:
            break
        whole = seen.decode(errors="ignore")
        beginnings = [size for one in stop for size in range(1, len(one)) if whole.endswith(one[:size])]
        assert shown == whole[: len(whole) - max(beginnings, default=0)]
