"""Which artifact an alias stands for. Today: the configured package is loaded on each board that is empty, and nothing is swapped
under a living one.

A package that changes on disk while its predecessor still serves is not forced on anybody: boards keep what they have until they
are restarted, and the alias stands for what most ready boards serve. A swap in steps (`calculet_core.states.rollout`) will be
one more writer of the boards' placements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from calculet_core.states.model_generation import ModelState
from calculet_core.wire import AliasView, BoardView

READY = ModelState.READY.name


def choose_alias(configured: AliasView, previous: AliasView | None, boards: Iterable[BoardView]) -> AliasView:
    """What the alias stands for now: the configured artifact, or the previous one while more ready boards serve that."""
    if previous is None or previous.digest == configured.digest:
        return configured
    ready = Counter(board.digest for board in boards if board.alias == configured.alias and board.state == READY)
    return previous if ready[previous.digest] > ready[configured.digest] else configured
