"""What routers are told: the boards as their workers report them, and what each alias stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from calculet_core import wire
from calculet_core.states.worker_process import ProcessState
from calculet_supervisor import rollout
from calculet_supervisor.life import Life
from calculet_supervisor.world import BoardWish, Desired, Observed


def fleet_view(
    desired: Desired, observed: Observed, lives: Mapping[str, Life], published: wire.FleetView
) -> tuple[tuple[wire.BoardView, ...], tuple[wire.AliasView, ...]]:
    """The view's content now; `published` is the last one that was committed."""
    boards = tuple(_boards(desired, observed, lives, published))
    return boards, tuple(_aliases(desired, boards, published))


def _boards(
    desired: Desired, observed: Observed, lives: Mapping[str, Life], published: wire.FleetView
) -> Iterator[wire.BoardView]:
    """A live worker as it reports itself; one that is being adopted as the last view had it; else nothing."""
    for board, seen in observed.boards.items():
        wish, report = desired.boards.get(board), seen.report
        if seen.pid is None:
            continue
        if report is None:
            yield from (view for view in published.boards if (view.board, view.pid) == (board, seen.pid))
            continue
        life = lives[board]
        sick = life.aborted_ns is not None
        leaving = sick or wish is None or not wish.up or report.epoch < wish.min_epoch or life.state is ProcessState.STOPPING
        yield wire.BoardView(
            board, report.epoch, report.pid, report.endpoint, report.state, report.generation, report.digest, report.alias,
            draining=report.draining or leaving or (wish is not None and (wish.draining or misplaced(wish, report))),
            weight=wish.weight if wish is not None else 1.0, pool=wish.pool if wish is not None else "",
        )  # fmt: skip


def _aliases(desired: Desired, boards: tuple[wire.BoardView, ...], published: wire.FleetView) -> Iterator[wire.AliasView]:
    before = {alias.alias: alias for alias in published.aliases}
    for alias in desired.aliases:
        decided = alias.alias in desired.decided
        yield alias if decided else rollout.choose_alias(alias, before.get(alias.alias), boards)


def misplaced(wish: BoardWish, report: wire.WorkerReport) -> bool:
    """Whether the board holds a generation that it shall not hold."""
    if report.generation == 0:
        return False
    placed = wish.placement
    return placed is None or (wish.swap and (report.digest, report.alias) != (placed.digest, placed.alias))
