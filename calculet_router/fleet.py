"""The workers as this router knows them: what the supervisor's view says, and what each link itself has heard.

Views only grow in version; an older one is ignored. A board that leaves the view gets nothing new, but its link stays while it
still answers for what it has, so that a supervisor that wakes up empty interrupts nobody. Another epoch on a board proves the old
worker dead. A worker is eligible when the view and its own hello agree: Ready, this generation, this digest, not draining.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import TYPE_CHECKING

from calculet_core.states.model_generation import ModelState
from calculet_core.wire import BoardView, FleetView, WorkerHello

if TYPE_CHECKING:
    from calculet_router.flights import Flight

READY = ModelState.READY.name
COMING = (ModelState.VALIDATING.name, ModelState.CONFIGURING.name, ModelState.WARMING.name)
"""What a worker was when it said its last word, of which the view says READY already."""


class LinkState(StrEnum):
    """`CONNECTING` until the first hello; `SUSPECT` after silence, until the next message; `LOST` for good."""

    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    LOST = "lost"


class Worker:
    """One life of a board's worker. A hot record: written by `fleet` and `dispatch` only.

    Its outstanding cost in tokens is `settled` (its last report, corrected by what was accepted and ended since) plus `unanswered`
    (sent by this router, and not in any report yet).
    """

    __slots__ = (
        "board", "epoch", "flights", "heard_ns", "hello", "key", "link", "listed", "seq", "settled", "unanswered", "view", "weight",
    )  # fmt: skip

    def __init__(self, view: BoardView, now_ns: int) -> None:
        self.board, self.epoch, self.key = view.board, view.epoch, (view.board, view.epoch)
        self.view, self.weight, self.listed = view, view.weight, True
        self.link, self.heard_ns = LinkState.CONNECTING, now_ns
        self.seq: int | None = None
        self.hello: WorkerHello | None = None
        self.settled = self.unanswered = 0.0
        self.flights: dict[int, Flight] = {}
        """Attempts on this worker by request id."""

    def serves(self, alias: str, digest: str) -> bool:
        """Whether it may get a new request."""
        view, hello = self.view, self.hello
        return (
            self.link is LinkState.UP
            and self.listed
            and hello is not None
            and not view.draining
            and view.state == READY == hello.state
            and view.alias == alias
            and view.digest == digest == hello.digest
            and view.generation == hello.generation
        )


    def is_near(self, alias: str, digests: Collection[str]) -> bool:
        """Whether it may get requests in a moment: either the view or its own word says that it is ready for one of the artifacts,
        and the other one is still on its way; or it has fallen silent and is still listed."""
        view, hello = self.view, self.hello
        if self.link is LinkState.LOST or not self.listed or view.draining or view.alias != alias:
            return False
        if view.state != READY:
            return hello is not None and hello.state == READY and hello.alias == alias and hello.digest in digests
        if view.digest not in digests or self.serves(alias, view.digest):
            return False
        return self.link is not LinkState.UP or hello is None or hello.state == READY or hello.state in COMING


class Roster:
    """All workers by board, and the view's version."""

    def __init__(self) -> None:
        self.version = -1
        self.view = FleetView(-1)
        self.changes = 0
        """Counts whatever may have changed who is eligible."""
        self.workers: dict[str, Worker] = {}
        self._eligible: dict[tuple[str, str], list[Worker]] = {}
        self._pools: dict[tuple[str, str, str], tuple[list[Worker], list[Worker]]] = {}

    def find(self, board: str, epoch: int) -> Worker | None:
        """That life of the board's worker, unless it is over."""
        worker = self.workers.get(board)
        return worker if worker is not None and worker.epoch == epoch and worker.link is not LinkState.LOST else None

    def eligible(self, alias: str, digest: str) -> list[Worker]:
        """Who may get a request for it; kept until something changes."""
        found = self._eligible.get((alias, digest))
        if found is None:
            found = [worker for worker in self.workers.values() if worker.serves(alias, digest)]
            self._eligible[alias, digest] = found
        return found

    def pools(self, alias: str, digest: str, traffic_class: str) -> tuple[list[Worker], list[Worker]]:
        """(who of the eligible is asked first, who is asked when none of those is left): pools of boards (scheduling §8)."""
        found = self._pools.get((alias, digest, traffic_class))
        if found is None:
            eligible = self.eligible(alias, digest)
            own = [worker for worker in eligible if worker.view.pool == traffic_class]
            found = self._pools[alias, digest, traffic_class] = (own, [worker for worker in eligible if worker not in own])
        return found

    def reached(self) -> dict[str, int]:
        """Board -> the generation that would get a request; for the supervisor."""
        return {
            worker.board: worker.view.generation for worker in self.workers.values()
            if worker.serves(worker.view.alias, worker.view.digest)
        }  # fmt: skip

    def near(self, alias: str, digests: Collection[str], refused: Collection[tuple[str, int]]) -> bool:
        """Whether somebody who has not refused may be able to take a request in a moment."""
        return any(worker.is_near(alias, digests) and worker.key not in refused for worker in self.workers.values())

    def changed(self) -> None:
        """A link, a hello or the view changed: eligibility is worked out again."""
        self.changes += 1
        self._eligible.clear()
        self._pools.clear()

    def take(self, view: FleetView, now_ns: int) -> tuple[list[Worker], list[Worker]] | None:
        """A published view: (workers to connect, workers whose life is over); None when it is not newer."""
        if view.version <= self.version:
            return None
        self.version, self.view = view.version, view
        self.changed()
        opened, ended = [], []
        listed = {board.board: board for board in view.boards}
        for worker in list(self.workers.values()):
            worker.listed = worker.board in listed
            if not worker.listed and not worker.flights:
                ended.append(self.workers.pop(worker.board))
        for name, board in listed.items():
            known = self.workers.get(name)
            if known is not None and board.epoch <= known.epoch:
                if board.epoch == known.epoch:
                    known.view, known.weight = board, board.weight
                continue
            if known is not None:
                ended.append(known)
            self.workers[name] = Worker(board, now_ns)
            opened.append(self.workers[name])
        return opened, ended

    def silent(self, now_ns: int, limit_ns: int) -> list[Worker]:
        """Workers that were up and have said nothing for longer than `limit_ns`; they become suspect."""
        found = [
            worker
            for worker in self.workers.values()
            if worker.link is LinkState.UP and now_ns - worker.heard_ns > limit_ns
        ]
        for worker in found:
            worker.link = LinkState.SUSPECT
        if found:
            self.changed()
        return found

    def overslept(self, by_ns: int) -> None:
        """Nobody listened for so long."""
        for worker in self.workers.values():
            worker.heard_ns += by_ns

    def unlisted(self) -> list[Worker]:
        """Workers that left the view and have nothing left to do; they are forgotten."""
        gone = [worker for worker in self.workers.values() if not worker.listed and not worker.flights]
        for worker in gone:
            del self.workers[worker.board]
        return gone

    def links(self) -> dict[str, str]:
        """Board -> state of its link, for the supervisor and the metrics."""
        return {board: worker.link.value for board, worker in self.workers.items()}
