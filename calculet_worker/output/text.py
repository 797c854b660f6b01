"""From tokens to text that may be shown: whole characters only, and nothing that a stop string may yet take back.

Bytes go through an incremental UTF-8 decoder, characters through one matcher per stop string. A matcher (Knuth, Morris and
Pratt) knows how many characters at the end of the text could still become its string; the most that any of them may need is held
back, and no more. A string that is complete ends the text where it begins. As every character takes the same way, how the text
was cut into tokens cannot change it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one sequence. `vocabulary` maps a token id to its bytes; empty stop strings are no rules."""

    __slots__ = ("_decode", "_firsts", "_held", "_matchers", "_vocabulary", "stopped")

    def __init__(self, vocabulary: Sequence[bytes], stop_strings: tuple[str, ...]) -> None:
        self._vocabulary = vocabulary
        self._decode = _utf8_decoder("replace").decode
        self._matchers = [_Matcher(string) for string in stop_strings if string]
        self._firsts = {string[0] for string in stop_strings if string}
        self._held = ""
        self.stopped = False
        """A stop string came; the text ends before it."""

    @property
    def held(self) -> int:
        """Characters that a stop string may yet take back."""
        return len(self._held)

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; it may be empty, or longer than the token's own."""
        return self.push_text(self._decode(self._vocabulary[token_id]))

    def flush(self) -> str:
        """What was held for a stop string, when no token follows; a character that the end cut in two is not shown."""
        held, self._held = self._held, ""
        return held

    def push_text(self, text: str) -> str:
        """The same for text that is made already."""
        if not self._matchers:
            return text
        if self.stopped or not text:
            return ""
        if not self._held and not any(first in text for first in self._firsts):
            return text
        whole, waiting = self._held + text, 0
        for place, character in enumerate(text, len(self._held) + 1):
            lengths = [matcher.step(character) for matcher in self._matchers]
            matched = max(matcher.matched for matcher in self._matchers)
            if matched:
                self.stopped, self._held = True, ""
                return whole[: place - matched]
            waiting = max(lengths)
        self._held = whole[len(whole) - waiting :]
        return whole[: len(whole) - waiting]


class _Matcher:
    """How much of the end of the text is a beginning of `string`, character by character."""

    __slots__ = ("_borders", "_length", "_size", "_string")

    def __init__(self, string: str) -> None:
        self._string, self._size, self._length = string, len(string), 0
        self._borders = [0]
        border = 0
        for character in string[1:]:
            while border and character != string[border]:
                border = self._borders[border - 1]
            border += character == string[border]
            self._borders.append(border)

    def step(self, character: str) -> int:
        length = self._length
        if length == self._size:
            length = self._borders[length - 1]
        while length and character != self._string[length]:
            length = self._borders[length - 1]
        self._length = length + (character == self._string[length])
        return self._length

    @property
    def matched(self) -> int:
        """The string's length when the text ends with it, else 0."""
        return self._length if self._length == self._size else 0
