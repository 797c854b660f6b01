"""What was in force last is found again when the file cannot be used, and only that of the same fleet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from calculet_core.errors import ConfigError
from calculet_core.shell.fleet import Fleet, load_fleet, make_folders, standing_of
from calculet_core.shell.standing import VARIABLE, VARIABLES, leave_standing, load_or_held

TEXT = """\
schema: calculet-fleet/v1
run_dir: of/sockets  # a comment
state_dir: state
log_dir: log
boards: [{name: b0, device: sim}]
models: [{alias: toy, package: p, scheduler: s.yaml}]
"""
SCHEDULER = "schema: calculet-scheduler/v1\nmodel_alias: toy\nbatch: {profiles: [1, 4]}\n"


@pytest.fixture(autouse=True)
def _no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "fleet.yaml").write_text(TEXT)
    (tmp_path / "s.yaml").write_text(SCHEDULER)
    fleet = load_fleet(tmp_path / "fleet.yaml")
    make_folders(fleet)
    leave_standing(fleet, standing_of(fleet))
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(str(fleet.metrics_socket("worker-b0")))
        worker.listen()
        yield fleet


@pytest.mark.parametrize("broken", [TEXT + "nonsense: [", TEXT.replace("boards:", "bords:"), TEXT + "[", '{"run_dir": "of/sockets", "x'])
def test_it_is_found_by_what_is_left_of_the_file(fleet: Fleet, broken: str) -> None:
    fleet.path.write_text(broken)
    found = load_or_held(fleet.path)
    assert found.held is not None and str(fleet.path) in found.held
    assert (found.config, found.run_dir, found.state_dir) == (fleet.config, fleet.run_dir, fleet.state_dir)


def test_without_any_file_it_is_found_by_who_started_the_process(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        load_or_held(fleet.path)
    assert load_or_held(fleet.path, fleet.run_dir).config == fleet.config
    monkeypatch.setenv(VARIABLE, str(fleet.run_dir))
    assert load_or_held(fleet.path).config == fleet.config


def test_scheduler_files_are_held_with_it(fleet: Fleet) -> None:
    before = fleet.scheduler_of("toy")
    (fleet.path.parent / "s.yaml").write_text("broken: [")
    found = load_or_held(fleet.path)
    assert found.held is not None and "s.yaml" in found.held
    assert found.scheduler_of("toy") == before is not None


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"path": 1}', b'{"path": "PATH", "standing": {"fleet": {}, "schedulers": {}}}'])
def test_what_is_damaged_or_of_another_fleet_is_not_believed(fleet: Fleet, content: bytes) -> None:
    fleet.standing.write_bytes(content.replace(b"PATH", str(fleet.path).encode()))
    fleet.path.write_text("[")
    with pytest.raises(ConfigError):
        load_or_held(fleet.path, fleet.run_dir)


def test_a_good_file_is_what_counts(fleet: Fleet) -> None:
    fleet.path.write_text(TEXT + "fault_injection: true\n")
    found = load_or_held(fleet.path)
    assert found.held is None and found.config.fault_injection


def test_a_first_start_knows_nothing_of_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody lives, and `calculet up` has started nobody: under systemd the run folder lasts until the boot."""
    fleet.path.write_text("[")
    fleet.metrics_socket("worker-b0").unlink()
    with pytest.raises(ConfigError):
        load_or_held(fleet.path)
    monkeypatch.setenv(VARIABLE, str(fleet.run_dir))
    assert load_or_held(fleet.path).config == fleet.config
