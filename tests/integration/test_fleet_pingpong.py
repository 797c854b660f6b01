"""An operator's word on two jobs in flight, through CLI, supervisor and a real worker (scheduling §14)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import Fleet, Packages


def a_fleet(folder: Path, packages: Packages, max_inflight: int) -> Fleet:
    folder.mkdir()
    scheduler = folder / "scheduler.yaml"
    executor = {"max_inflight": max_inflight}
    text = {"schema": "calculet-scheduler/v1", "model_alias": "toy", "batch": {"profiles": [1, 4]}, "executor": executor}
    scheduler.write_text(json.dumps(text))
    trust = packages.key.with_suffix(".pub")
    return Fleet(folder, packages.get("sim-batch"), trust, boards=1, model={"scheduler": str(scheduler)}).start()


@pytest.fixture
def pair(tmp_path: Path, packages: Packages) -> Iterator[Fleet]:
    with_two = a_fleet(tmp_path / "two", packages, 2)
    yield with_two
    with_two.stop()


def row(fleet: Fleet) -> dict[str, Any]:
    return dict((fleet.status() or {})["boards"][0])


def test_an_operator_forbids_and_allows_the_second_job(pair: Fleet) -> None:
    assert (row(pair)["max_inflight"], row(pair)["pingpong_off"]) == (2, None)
    done = pair.cli("pingpong", "board0", "forbid")
    assert done.returncode == 0 and "1 in flight at most (operator" in done.stdout, done
    assert row(pair)["max_inflight"] == 1 and "operator" in row(pair)["pingpong_off"]
    assert pair.completion("still served", max_tokens=4).status == 200
    done = pair.cli("pingpong", "board0", "allow")
    assert done.returncode == 0 and "2 in flight at most" in done.stdout, done
    assert row(pair)["pingpong_off"] is None


def test_a_board_that_takes_one_job_anyway_says_so(tmp_path: Path, packages: Packages) -> None:
    fleet = a_fleet(tmp_path / "one", packages, 1)
    try:
        done = fleet.cli("pingpong", "board0", "allow")
        assert done.returncode == 1 and "max_inflight is 1" in done.stderr, done
    finally:
        fleet.stop()
