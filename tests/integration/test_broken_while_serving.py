"""What served is broken while it serves (the file, a package), and then a process dies: what serves goes on being managed."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import BIN, until
from builders_supervisor import a_package
from test_supervisor_process import StubFleet, stub_workers

from calculet_core.shell.control_client import ControlError
from calculet_core.shell.telemetry import fetch_metrics

__all__ = ["stub_workers"]


@pytest.fixture
def package(tmp_path: Path) -> tuple[Path, Path]:
    return a_package(tmp_path / "package")


@pytest.fixture
def fleet(tmp_path: Path, package: tuple[Path, Path]) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path / "f", package)
    yield fleet
    fleet.stop()


def unusable(fleet: StubFleet) -> dict[str, Any]:
    found: dict[str, Any] = (fleet.status() or {}).get("unusable") or {"configuration": None, "packages": {}}
    return found


def kill_supervisor(fleet: StubFleet) -> None:
    """And wait for the next one."""
    old = fleet.kill("supervisor")
    until(lambda: (fleet.status() or {"supervisor": {"pid": old}})["supervisor"]["pid"] != old, "another supervisor answers")


def breaks(fleet: StubFleet, how: str) -> Callable[[], None]:
    """Break the file; what mends it."""
    good = fleet.config.read_text()
    if how == "missing":
        fleet.config.rename(fleet.config.with_suffix(".away"))
        return lambda: fleet.config.with_suffix(".away").rename(fleet.config) and None
    fleet.config.write_text(good[:-40] if how == "cut off" else good.replace('"tokens', "").replace('"boards"', '"bords"'))
    return lambda: fleet.config.write_text(good) and None


@pytest.mark.parametrize("how", ["missing", "cut off", "misspelt"])
def test_a_supervisor_goes_on_with_what_was_in_force_while_the_file_is_broken(fleet: StubFleet, how: str) -> None:
    fleet.start()
    until(fleet.paths.standing.exists, "what is in force is left for a successor")
    before = fleet.pids()
    mend = breaks(fleet, how)
    kill_supervisor(fleet)
    until(lambda: unusable(fleet)["configuration"], "status says that the file cannot be used")
    assert str(fleet.config) in unusable(fleet)["configuration"]
    assert all(fleet.ready(board) for board in fleet.boards), "what serves is managed"
    assert {board: fleet.pid("worker", board) for board in fleet.boards} == {board: before[board] for board in fleet.boards}

    refused = fleet.cli("restart", "board0")
    if how != "missing":  # the CLI finds the run folder in what is left of the file
        assert refused.returncode == 1 and "a new worker could not" in refused.stderr
        shown = fleet.cli("status")
        assert shown.returncode == 0 and "what was in force goes on" in shown.stdout
    epoch = fleet.ready("board1")["epoch"]
    fleet.kill("worker", "board1")
    row = fleet.until_row("board1", lambda row: row["process"] == "QUARANTINED", "a worker does not start without its trust")
    assert "configuration" in str(row["why"]) or str(fleet.config) in str(row["why"])
    metrics = metrics_of(fleet)
    assert 'calculet_supervisor_unusable{what="configuration"} 1.0' in metrics

    mend()
    fleet.ready("board1", beyond_epoch=epoch)
    until(lambda: fleet.status() and unusable(fleet)["configuration"] is None, "the mended file is used by itself")
    found = [event.data["over"] for event in fleet.events("fleet.unusable")]
    assert found[0] is False and found[-1] is True
    assert "over" in str(fleet.events("fleet.unusable")[-1].data)
    assert "is mended" in fleet.cli("events").stdout


def metrics_of(fleet: StubFleet) -> str:
    return asyncio.run(fetch_metrics(fleet.paths.metrics_socket("supervisor"))).decode()


def test_a_board_that_serves_is_not_given_away_for_a_worker_that_could_not(fleet: StubFleet, package: tuple[Path, Path]) -> None:
    """A signer was taken out, or a package replaced: nobody has been restarted since, and the next one would not come back."""
    fleet.start()
    root, trust = package
    manifest = (root / "manifest.yaml").read_bytes()
    for path, wrong in ((trust, "dev.pub"), (root / "manifest.yaml", "manifest.yaml"), (fleet.config, "fleet.yaml")):
        path.rename(path.with_suffix(".away"))
        with pytest.raises(ControlError, match=rf"board0 serves, and a new worker could not: .*{wrong}"):
            fleet.do("restart", "board0")
        path.with_suffix(".away").rename(path)
    (root / "manifest.yaml").write_bytes(manifest.replace(b'"version": "1"', b'"version": "2"'))
    with pytest.raises(ControlError, match="holds another package"):
        fleet.do("restart", "board0")
    (root / "manifest.yaml").write_bytes(manifest)
    epoch = fleet.ready("board0")["epoch"]
    fleet.do("restart", "board0")
    fleet.ready("board0", beyond_epoch=epoch)
    trust.rename(trust.with_suffix(".away"))
    fleet.config.write_text(fleet.config.read_text().replace('"heartbeat_ms": 50', '"heartbeat_ms": 60'))
    done = subprocess.run([BIN / "calculet", "config", "apply", "--config", fleet.config, "--yes"], capture_output=True, text=True)
    assert done.returncode == 78 and "dev.pub" in done.stderr
    trust.with_suffix(".away").rename(trust)


def test_a_router_that_dies_while_the_file_is_broken_comes_back(fleet: StubFleet) -> None:
    fleet.start()
    until(fleet.paths.standing.exists, "what is in force is left for a successor")
    mend = breaks(fleet, "cut off")
    old = fleet.kill("router")
    until(lambda: fleet.pid("router") not in (None, old) and fleet.health() == 200, "a new router serves")
    mend()


@pytest.mark.parametrize("how", ["missing", "tampered"])
def test_a_supervisor_goes_on_while_a_package_that_serves_cannot_be_read(
    fleet: StubFleet, package: tuple[Path, Path], how: str
) -> None:
    fleet.start()
    until(fleet.paths.standing.exists, "what is in force is left for a successor")
    until(lambda: list((fleet.paths.state_dir / "artifacts").glob("[0-9a-f]*")), "the package is kept")
    root, before = package[0], fleet.pids()
    away = root.with_name("away")
    good = (root / "manifest.yaml").read_bytes()
    if how == "missing":
        root.rename(away)
    else:
        (root / "manifest.yaml").write_bytes(b"not a manifest")
    kill_supervisor(fleet)
    reason = until(lambda: unusable(fleet)["packages"].get("toy"), "status names the package")
    assert "manifest.yaml" in reason and str(root) in reason
    assert all(fleet.ready(board) for board in fleet.boards)
    assert fleet.pid("worker", "board0") == before["board0"]
    if how == "missing":
        away.rename(root)
    else:
        (root / "manifest.yaml").write_bytes(good)
    until(lambda: fleet.status() and not unusable(fleet)["packages"], "the mended package is used by itself")
    assert fleet.pid("worker", "board0") == before["board0"]


def test_a_first_start_refuses_what_is_broken(fleet: StubFleet, package: tuple[Path, Path]) -> None:
    fleet.start()
    until(fleet.paths.standing.exists, "what is in force is left for a successor")
    fleet.stop()
    assert not fleet.paths.standing.exists()
    package[0].rename(package[0].with_name("away"))
    done = fleet.cli("up")
    assert done.returncode == 78 and "package" in done.stderr


def test_a_supervisor_started_anew_with_a_broken_package_that_nobody_served_keeps_to_what_was_in_force(
    fleet: StubFleet, package: tuple[Path, Path]
) -> None:
    fleet.start()
    until(fleet.paths.standing.exists, "what is in force is left for a successor")
    good = fleet.config.read_text()
    fleet.config.write_text(good.replace(str(package[0]), "/nowhere").replace('"toy"', '"other"'))
    kill_supervisor(fleet)
    assert "/nowhere" in until(lambda: unusable(fleet)["configuration"], "status says that the file cannot be used")
    assert [row["alias"] for row in (fleet.status() or {})["boards"]] == ["toy", "toy"]
    fleet.config.write_text(good)
    until(lambda: fleet.status() and unusable(fleet)["configuration"] is None, "the mended file is used by itself")
