"""One lane of a real worker's board fails, on a package that proves isolation by lane and on one that does not (scheduling §7.4)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import Packages
from builders_worker import WorkerProcess, a_fleet, a_submit

from calculet_core import wire
from calculet_core.clock import S
from calculet_core.requests import Prompt

PROMPTS = [Prompt(text=f"Question {number}: why is the sky blue?") for number in range(8)]


def answers(worker: WorkerProcess, report: wire.WorkerReport, first: int) -> list[tuple[str, str | None]]:
    """What became of all prompts, asked at once: text, and the error's code."""
    router = worker.router(report.endpoint)
    ids = []
    for number, prompt in enumerate(PROMPTS):
        submit = a_submit(report, first + number, prompt, max_new_tokens=40)
        ids.append(submit.request_id)
        router.send(submit)
    texts, errors, ended = dict.fromkeys(ids, ""), dict[int, str | None](), set[int]()

    def all_ended(message: Any) -> bool:
        if isinstance(message, wire.Tick):
            router.send(wire.Lease(ids[0] >> 32, message.epoch, message.seq))
            for piece in message.pieces:
                texts[piece.request_id] += piece.text
                if piece.finish is not None or piece.error is not None:
                    ended.add(piece.request_id)
                    errors[piece.request_id] = piece.error.code if piece.error else None
        return len(ended) == len(ids)

    router.until(all_ended)
    return [(texts[number], errors[number]) for number in ids]


@pytest.mark.parametrize("recipe", ["sim-isolated", "sim-batch"])
def test_a_lane_that_fails_alone_is_one_requests_fault_only_where_that_is_proven(
    recipe: str, tmp_path: Path, packages: Packages
) -> None:
    package, arm = packages.get(recipe), tmp_path / "arm.json"
    fault = {"fault": "ccu_exception", "at": [20], "job": "decode", "row": 3}
    boards = [{"name": "board0", "device": "sim", "options": {"faults": [fault], "faults_arm": str(arm)}}]
    fleet = a_fleet(tmp_path, package, packages.key.with_suffix(".pub"), boards=boards, fault_injection=True)
    worker = WorkerProcess(fleet)
    try:
        report = worker.load()
        expected = answers(worker, report, 1)
        assert all(error is None and text for text, error in expected)
        arm.write_text(json.dumps({"until_ns": time.monotonic_ns() + 600 * S}))
        found = answers(worker, report, 101)
        failed = [number for number, (_, error) in enumerate(found) if error is not None]
        if recipe == "sim-batch":
            assert len(failed) == len(PROMPTS) and {error for _, error in found} == {"model_recovering"}
            assert worker.report(lambda report: report.state == "RECOVERING").lanes["UNKNOWN"] == len(PROMPTS)
            return
        (number,) = failed
        assert found[number][1] == "model_recovering" and expected[number][0].startswith(found[number][0])
        assert [one for one in found if one[1] is None] == [one for index, one in enumerate(expected) if index != number]
        after = worker.report(lambda report: report.active == 0 and report.lanes["UNKNOWN"] == 1)
        assert (after.state, after.generation, after.fault) == ("READY", report.generation, None)
        assert answers(worker, report, 201) == expected, "what is left of the lanes serves everything"
    finally:
        worker.close()
