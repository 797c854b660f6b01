"""A maintenance window on a fleet that serves: what is done, what is written down, what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import BIN, Fleet, Packages

PASS, CORRECTNESS, INVALID, INFRASTRUCTURE = 0, 1, 2, 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("maintenance")
    package = packages.get("sim-batch", "--step-ms", "1")
    scheduler = {"schema": "calculet-scheduler/v1", "model_alias": "toy", "recovery": {"max_resets_per_10min": 4}}
    (folder / "scheduler.yaml").write_text(json.dumps(scheduler))
    settings = {"recall": {"probation_s": 0.5}, "model": {"scheduler": str(folder / "scheduler.yaml")}}
    with Fleet(folder / "fleet", package, packages.key.with_suffix(".pub"), boards=2, **settings) as fleet:
        yield fleet


def window(fleet: Fleet, log: Path, *arguments: str, board: str = "board0", **said: str) -> subprocess.CompletedProcess[str]:
    words = {"operator": "kim", "authority": "ticket 7", "action": "device_reset", **said}
    options = [part for name, value in words.items() for part in (f"--{name}", value)]
    command = ["maintenance", "run", "--config", str(fleet.config), "--board", board, "--log", str(log), *options, *arguments]
    return subprocess.run([str(BIN / "calculet-perf"), *command], capture_output=True, text=True, timeout=100)


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_window_resets_a_board_and_leaves_a_whole_log(fleet: Fleet, tmp_path: Path) -> None:
    log, mark = tmp_path / "maintenance.jsonl", tmp_path / "touched"
    tool = [sys.executable, "-c", f"open({str(mark)!r}, 'w').write('x'); print('bus was reset')"]
    done = window(fleet, log, "--yes", "--run", shlex.join(tool), action="pcie_reset")
    assert done.returncode == PASS, done.stdout + done.stderr
    assert "board0 serves again" in done.stdout
    assert mark.read_text() == "x"
    lines = lines_of(log)
    assert [line["step"] for line in lines] == ["opened", "set_aside", "acted", "brought_back", "closed"]
    assert {(line["operator"], line["authority"], line["action"]) for line in lines} == {("kim", "ticket 7", "pcie_reset")}
    opened, acted, closed = lines[0], lines[2], lines[4]
    assert (opened["health"]["state"], opened["detail"]["other_boards"]) == ("READY", 1)
    assert opened["health"]["in_flight"] == 0 and opened["health"]["driver"] and opened["health"]["firmware"]
    assert (acted["detail"]["exit_code"], acted["detail"]["output"]) == (0, "bus was reset\n")
    assert closed["health"]["golden"] == opened["health"]["golden"] is not None
    assert closed["health"]["generation"] > opened["health"]["generation"], "nothing of before the reset is believed"
    findings = closed["detail"]["findings"]
    assert (findings["recovered"], findings["golden_same"], findings["reasons"]) == (True, True, [])
    assert findings["recovery_ms"] > 0
    assert closed["touched"]["errors"] == {}, "the other board served meanwhile"
    again = window(fleet, log, "--yes")
    assert again.returncode == PASS, again.stdout + again.stderr
    checked = subprocess.run([str(BIN / "calculet-perf"), "maintenance", "check", str(log)], capture_output=True, text=True)
    assert (checked.returncode, "10 lines, whole" in checked.stdout) == (PASS, True)


def test_a_command_that_fails_fails_the_window_and_the_board_is_brought_back_all_the_same(fleet: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "maintenance.jsonl"
    done = window(fleet, log, "--yes", "--run", "/bin/false", action="driver_reset")
    assert done.returncode == CORRECTNESS
    assert "the command ended with 1" in done.stdout
    fleet.wait_ready(2)
    assert lines_of(log)[-1]["detail"]["findings"]["recovered"] is True


def test_what_nobody_allowed_is_not_begun(fleet: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "maintenance.jsonl"
    for done, words in (
        (window(fleet, log, "--yes", authority=" "), "--authority is empty"),
        (window(fleet, log, "--yes", action="pcie_reset"), "pcie_reset needs --run"),
        (window(fleet, log, "--yes", board="board9"), "there is no board board9"),
    ):
        assert (done.returncode, words in done.stderr) == (INVALID, True), done.stderr
    seen = window(fleet, log, "--dry-run")
    assert seen.returncode == PASS
    assert "1 other boards serve" in seen.stderr and "on the word of ticket 7" in seen.stderr
    assert not log.exists(), "nothing was done and nothing is written"


def test_a_board_that_could_not_be_reset_again_is_not_set_aside(fleet: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "maintenance.jsonl"
    left = fleet.status()["boards"][0]["resets_left"]  # type: ignore[index]
    for _ in range(left):
        assert window(fleet, log, "--yes").returncode == PASS
    written = log.read_bytes() if left else b""
    done = window(fleet, log, "--yes")
    assert (done.returncode, "no reset left in its budget" in done.stderr) == (INVALID, True), done.stderr
    assert not left or log.read_bytes() == written
    assert fleet.status()["boards"][0]["condemned"] is None  # type: ignore[index]


def test_the_last_board_is_not_taken_from_its_users_by_accident(fleet: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "maintenance.jsonl"
    assert fleet.cli("condemn", "board1", "--reason", "a test").returncode == 0
    done = window(fleet, log, "--yes")
    assert done.returncode == INVALID
    assert "no board but board0 serves" in done.stderr and "--allow-downtime" in done.stderr
    assert not log.exists()


def test_a_fleet_that_is_not_there_is_infrastructure(tmp_path: Path, packages: Packages) -> None:
    gone = Fleet(tmp_path / "gone", packages.get("sim-batch", "--step-ms", "1"), packages.key.with_suffix(".pub"))
    done = window(gone, tmp_path / "maintenance.jsonl", "--yes")
    assert done.returncode == INFRASTRUCTURE
    assert "Traceback" not in done.stderr
