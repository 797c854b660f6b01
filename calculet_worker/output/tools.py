"""Calls of tools in an answer's text, taken apart as it comes.

A constrained answer writes a call in exactly one way (`call_grammar` in `shell/constraints` makes it so):

    <tool_call>
    {"name": "NAME", "arguments": ARGUMENTS}
    </tool_call>

So no JSON is parsed here. The arguments end where `}`, a line end and `</tool_call>` follow: within them a bare line end can be no
part of a string, and the closing tag is no JSON. Only as much text is held back as may still become the next mark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, auto

from calculet_core.wire import ToolCallPart
from calculet_worker.output.text import TextStream

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD, MIDDLE = '\n{"name": "', '", "arguments": '
TAIL = "}\n" + CLOSE


class _At(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()


class ToolCalls:
    """The calls of one answer, and the text beside them; where a call is `required` there is none."""

    __slots__ = ("_arguments", "_at", "_held", "_required", "count")

    def __init__(self, required: bool = False) -> None:
        self._at, self._held, self._required = _At.TEXT, "", required
        self._arguments: list[str] = []
        self.count = 0
        """Calls that have begun."""

    def push(self, text: str) -> tuple[str, list[ToolCallPart]]:
        """(Text for the reader, parts of calls) that this text makes certain."""
        shown: list[str] = []
        parts: list[ToolCallPart] = []
        rest = self._held + text
        while True:
            mark = {_At.TEXT: OPEN, _At.HEAD: MIDDLE, _At.ARGUMENTS: TAIL}[self._at]
            before, found, after = rest.partition(mark)
            if not found:
                break
            self._before(before, shown, parts)
            self._next(before, parts)
            rest = after
        kept = len(rest) if self._at is _At.HEAD else overlap(rest, mark)
        self._held = rest[len(rest) - kept :]
        self._before(rest[: len(rest) - kept], shown, parts)
        return "".join(shown), parts

    def flush(self) -> tuple[str, list[ToolCallPart]]:
        """What was held, when nothing follows; a call whose name is not whole is none."""
        held, self._held = self._held, ""
        if self._at is _At.TEXT:
            return ("" if self.count or self._required else held), []
        if self._at is _At.ARGUMENTS and held == "}" and not _whole("".join(self._arguments)):
            return "", [ToolCallPart(self.count - 1, None, held)]
        return "", []

    def _before(self, text: str, shown: list[str], parts: list[ToolCallPart]) -> None:
        if self._at is _At.TEXT and text and not self.count:  # between calls there is a line end and nothing else
            shown.append(text)
        elif self._at is _At.ARGUMENTS and text:
            self._arguments.append(text)
            last = parts[-1] if parts else None
            if last is not None and last.index == self.count - 1:
                parts[-1] = ToolCallPart(last.index, last.name, last.arguments + text)
            else:
                parts.append(ToolCallPart(self.count - 1, None, text))

    def _next(self, before: str, parts: list[ToolCallPart]) -> None:
        if self._at is _At.TEXT:
            self._at = _At.HEAD
        elif self._at is _At.HEAD:
            self._at, self._arguments = _At.ARGUMENTS, []
            parts.append(ToolCallPart(self.count, before.removeprefix(HEAD), ""))
            self.count += 1
        else:
            self._at = _At.TEXT


class CallingText:
    """A `TextStream` for answers that may call: calls are taken out as parts, and stop strings are looked for beside them only."""

    __slots__ = ("_beside", "_calls", "_parts", "_raw")

    def __init__(self, vocabulary: Sequence[bytes], stop_strings: tuple[str, ...], required: bool = False) -> None:
        self._raw, self._beside = TextStream(vocabulary, ()), TextStream((), stop_strings)
        self._calls = ToolCalls(required)
        self._parts: list[ToolCallPart] = []

    @property
    def stopped(self) -> bool:
        """A stop string came; the text ends before it."""
        return self._beside.stopped

    @property
    def held(self) -> int:
        """Characters that a stop string may yet take back."""
        return self._beside.held

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._calls.count > 0

    def push(self, token_id: int) -> str:
        """The text beside calls that this token makes certain."""
        text, parts = self._calls.push(self._raw.push(token_id))
        self._parts += parts
        return self._beside.push_text(text)

    def flush(self) -> str:
        """What was held, when no token follows."""
        text, parts = self._calls.flush()
        self._parts += parts
        return self._beside.push_text(text) + self._beside.flush()

    def take(self) -> list[ToolCallPart]:
        """Parts of calls since the last time."""
        parts, self._parts = self._parts, []
        return parts


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` are a beginning of `mark`, but not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
