"""Log probabilities in step with the text: a token's are told when its text is, and never for text that a stop string took back.

A token begins and ends at a number of characters of the answer. While its text is held because it may become a stop string, so is
its entry; what ends the answer without being text (EOS, a stop id, the stop string's own tokens) has none.
"""

from __future__ import annotations

from calculet_core.wire import TokenLogprob


class Aligned:
    """Of one answer."""

    __slots__ = ("_made", "_pending", "_shown", "drawn")

    def __init__(self) -> None:
        self.drawn: TokenLogprob | None = None
        """Of the token that was drawn last."""
        self._pending: list[tuple[TokenLogprob, int, int]] = []
        """(entry, first character, character after the last)."""
        self._made = self._shown = 0

    def take(self, shown: int, held: int, stopped: bool) -> list[TokenLogprob]:
        """The drawn token is text: `shown` more characters may be seen, `held` may not yet. What may be told now."""
        drawn, self.drawn = self.drawn, None
        start = self._made
        self._shown += shown
        self._made = self._shown + held
        if drawn is not None:
            self._pending.append((drawn, start, self._made))
        if stopped:
            found = [entry for entry, first, _ in self._pending if first < self._shown]
            self._pending.clear()
            return found
        count = 0
        for _, _, end in self._pending:
            if end > self._shown:
                break
            count += 1
        found = [entry for entry, _, _ in self._pending[:count]]
        del self._pending[:count]
        return found

    def rest(self) -> list[TokenLogprob]:
        """No token follows, and what was held is shown."""
        found = [entry for entry, _, _ in self._pending]
        self._pending.clear()
        return found
